"""ChatTemplate: messages to a prompt, by the Jinja template of a checkpoint.

The template is untrusted code: it runs in Jinja's sandbox and sees messages, tools and special tokens only.
Source: Hugging Face's convention (tokenizer_config.json `chat_template`, or a file chat_template.jinja).
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from jinja2 import TemplateError, meta
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from exeplan.errors import InputError
from exeplan.files import read_text

UNKNOWN_TOOL_FORMAT = (
    "calls of functions that this model makes by itself cannot be read, as its chat template does not say their "
    "format; use tool_choice=required, or name a function"
)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is replaced by its content."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Computes powers and products when a template is rendered, not when it is compiled: 9**10**9 takes hours."""

    intercepted_binops = frozenset({"**", "*"})


class ChatTemplate:
    """A compiled template. Raises InputError when it is not valid Jinja.

    `special_tokens` are the variables that it may use, such as `bos_token`; conversations with tools are rendered by
    the template `tool_source`, where there is one.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, *, tool_source: str | None = None
    ) -> None:
        self.source = source
        self._for_tools = None if tool_source is None else ChatTemplate(tool_source, special_tokens)
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _today
        # transformers always passes these, so templates test them with `is none`.
        self._variables = {"tools": None, "documents": None, "add_generation_prompt": True, **(special_tokens or {})}
        self._reserved = {"messages", *self._variables, *environment.globals}
        try:
            self._template = environment.from_string(source)
            used = meta.find_undeclared_variables(environment.parse(source))
        except (TemplateError, SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
            raise InputError(f"the model's chat template is not valid: {error}") from None
        takes_tools = "tools" in used
        own_format = tool_format(source) if takes_tools else None
        self.takes_tools: bool = self._for_tools.takes_tools if self._for_tools else takes_tools
        self.tool_format: str | None = self._for_tools.tool_format if self._for_tools else own_format
        """Of the calls that it asks the model for; None where it is not known."""
        self.variables: set[str] = used | (self._for_tools.variables if self._for_tools else set())
        """Those that it, or the one for tools, uses and does not always set itself."""
        self.has_channels = own_format == "harmony"
        """Whether every output is in that format, also without a call."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt, up to the beginning of the assistant's answer. Raises InputError when the template fails.

        `variables` are the client's own, such as `enable_thinking`; `tools` are functions in OpenAI's form.
        """
        about_tools = any(message.get("role") == "tool" or message.get("tool_calls") for message in messages)
        if self._for_tools and (tools or about_tools):
            return self._for_tools.render(messages, variables, tools=tools)
        given = variables or {}
        if taken := self._reserved.intersection(given):
            raise InputError(f"chat_template_kwargs must not set '{min(taken)}', which the server or the template has")
        try:
            variables = {**given, **self._variables, "messages": messages, "tools": tools or None}
            return self._template.render(variables)
        except InputError:
            raise
        except Exception as error:  # A template may raise anything.
            raise InputError(f"the model's chat template does not take these messages: {error}") from None


_TOOL_WORDS = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("glm45", ("<tool_call>", "<arg_key>")),
    ("mistral_v11", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("deepseek_v3", ("<｜tool▁call▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁call▁begin｜>",)),
    ("hermes", ("<tool_call>",)),
    ("llama3_json", ('"parameters": dictionary',)),
)
"""Of each format, the words that its templates have and those of the formats after it lack."""


def tool_format(source: str) -> str | None:
    """How a template asks for calls of functions, by the words that its model was trained with; None for other ways.

    `hermes` (Hermes, Qwen 2.5, Qwen 3), `qwen3_coder`, `glm45` (GLM 4.5 to 4.7), `mistral` (a list, as up to Mistral
    Small 3.1), `mistral_v11` (a name before its arguments, as from Mistral Small 3.2), `deepseek_v3` (V3, R1),
    `deepseek_v31`, `harmony` (gpt-oss), and `llama3_json` (Llama 3.1 to 3.3):
    `runner/server/openai/tool_calls.py` says how each is written.
    """
    return next((name for name, words in _TOOL_WORDS if all(word in source for word in words)), None)


class ChatTemplates(NamedTuple):
    """The sources of a model's templates."""

    source: str
    tool_source: str | None
    """Of the one named `tool_use`."""


def find_chat_templates(directory: Path, config: Mapping[str, Any]) -> ChatTemplates | None:
    """Those of the tokenizer's config, or in their places chat_template.jinja (which is named `default`) and
    additional_chat_templates/tool_use.jinja; None for none. Without a default the first is taken for it.
    """
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, Mapping)}
    else:
        named = {"default": found}
    files = {
        "default": directory / "chat_template.jinja",
        "tool_use": directory / "additional_chat_templates" / "tool_use.jinja",
    }
    named |= {name: read_text(path) for name, path in files.items() if path.is_file()}
    sources = {name: source for name, source in named.items() if isinstance(source, str) and source}
    if not sources:
        return None
    return ChatTemplates(sources.get("default", next(iter(sources.values()))), sources.get("tool_use"))


def _refuse(message: str) -> NoReturn:
    raise InputError(f"the model's chat template does not take these messages: {message}")


def _today(form: str) -> str:
    """The date, which the system prompts of Llama 3.2 and Mistral Small tell the model."""
    return datetime.now().strftime(form)  # Local time, as transformers gives it.


def _tojson(value: Any, ensure_ascii: bool = False, **style: Any) -> str:
    # Jinja's own filter escapes HTML characters, which training data did not.
    return json.dumps(value, ensure_ascii=ensure_ascii, **style)
