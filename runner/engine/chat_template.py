"""ChatTemplate: messages to a prompt, by the Jinja template that a checkpoint brings.

The template is somebody else's program: it runs in Jinja's sandbox and sees messages and special tokens, nothing else.
Source: Hugging Face's convention (tokenizer_config.json `chat_template`, or a file chat_template.jinja).
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from exeplan.errors import InputError
from exeplan.files import read_text


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template. Raises InputError when it is not valid Jinja.

    `special_tokens` are the names that it may use, such as `bos_token`.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        # Templates ask `tools is none` of what transformers always passes.
        self._variables = {"tools": None, "documents": None, **(special_tokens or {})}
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise InputError(f"the model's chat template is not valid: {error}") from None

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt, up to where the assistant's answer begins. Raises InputError when the template refuses."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._variables)
        except InputError:
            raise
        except Exception as error:  # A template can fail in any way that an expression can.
            raise InputError(f"the model's chat template does not take these messages: {error}") from None


def find_chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """The template's source: chat_template.jinja, else the tokenizer's config (of several with names, 'default')."""
    if (directory / "chat_template.jinja").is_file():
        return read_text(directory / "chat_template.jinja")
    found = config.get("chat_template")
    if isinstance(found, list):
        by_name = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, Mapping)}
        found = by_name.get("default", next(iter(by_name.values()), None))
    return found if isinstance(found, str) else None


def _refuse(message: str) -> NoReturn:
    raise InputError(f"the model's chat template does not take these messages: {message}")


def _tojson(value: Any, ensure_ascii: bool = False, **style: Any) -> str:
    # Jinja's own filter escapes for HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, **style)
