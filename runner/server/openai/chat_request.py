"""What the endpoint for chat completions accepts: `/v1/chat/completions`, with messages, functions and their calls."""

import contextlib
import re
from collections import Counter
from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from exeplan.runner.server.openai.errors import RequestError
from exeplan.runner.server.openai.fields import Lenient, Only, Schema
from exeplan.runner.server.openai.generation_request import MAX_LOGPROBS, GenerationRequest, limited
from exeplan.runner.server.openai.json_body import read_object

MAX_MESSAGES = 4096
MAX_TEMPLATE_VARIABLES = 64
MAX_TOOLS = 128
MAX_TOOL_CALLS = 128
"""In a message."""


def _check_function_name(name: str) -> str:
    if not _FUNCTION_NAME.fullmatch(name):
        raise ValueError("must have 1 to 64 letters, digits, underscores, dots or hyphens")
    return name


_FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
FunctionName = Annotated[
    str,
    AfterValidator(_check_function_name),
    Field(json_schema_extra={"pattern": f"^{_FUNCTION_NAME.pattern}$"}),
]


class TextPart(Lenient):
    type: Literal["text"]
    text: str


class Called(Lenient):
    name: FunctionName
    arguments: str
    """A JSON object, but as the model wrote it."""


class ToolCallMade(Lenient):
    """A call that an earlier answer asked for."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: Called
    index: int | None = None

    def plain(self) -> dict[str, Any]:
        """As Hugging Face's templates see it: the arguments are an object, or the text of a model that wrote none."""
        arguments: dict[str, Any] | str = self.function.arguments
        with contextlib.suppress(RequestError):
            arguments = read_object(self.function.arguments.encode()) if self.function.arguments else {}
        called = {"name": self.function.name, "arguments": arguments}
        return {"type": "function", "function": called} | ({"id": self.id} if self.id is not None else {})


class Message(Lenient):
    """Clients send an answer back as they got it, with what it lacks written as null or as an empty list."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]
    """May be left out of an assistant's message with calls."""
    name: str | None = None
    tool_call_id: str | None = None
    """Of a message of the role `tool`: the call that it answers."""
    tool_calls: list[ToolCallMade] = Field([], max_length=MAX_TOOL_CALLS, fail_fast=True)
    """Of an assistant's message."""
    annotations: Annotated[Any, Only([])] = None
    audio: Annotated[Any, Only()] = None
    function_call: Annotated[Any, Only()] = None
    refusal: Annotated[Any, Only()] = None
    reasoning_content: str | None = None
    """Of an assistant's message; there `reasoning`, vLLM's newer name, is the same."""

    @model_validator(mode="before")
    @classmethod
    def _as_sent_back(cls, given: Any) -> Any:
        """An answer without what the client's library has added to it, and with empty content where it only calls."""
        if not isinstance(given, dict) or given.get("role") != "assistant":
            return given
        known = {name: value for name, value in given.items() if name in cls.model_fields}
        if known.get("reasoning_content") is None and isinstance(given.get("reasoning"), str):
            known["reasoning_content"] = given["reasoning"]
        return known | ({"content": ""} if given.get("tool_calls") and given.get("content") is None else {})

    @model_validator(mode="after")
    def _only_the_assistant_calls_and_reasons(self) -> "Message":
        for name in ("tool_calls", "reasoning_content"):
            if getattr(self, name) and self.role != "assistant":
                raise ValueError(f"has {name}, which only a message of the role 'assistant' may have")
        return self

    @property
    def is_about_tools(self) -> bool:
        return self.role == "tool" or bool(self.tool_calls)

    def plain(self) -> dict[str, Any]:
        """As a chat template sees it: text parts joined by line breaks, `developer` under its older name, and reasoning
        as `reasoning_content` (Qwen 3, GLM) and `thinking` (gpt-oss)."""
        content = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        found: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.tool_calls:
            found["tool_calls"] = [call.plain() for call in self.tool_calls]
        if self.reasoning_content:
            found["reasoning_content"] = self.reasoning_content
            if not (self.tool_calls and content):  # gpt-oss's template refuses a message with all three.
                found["thinking"] = self.reasoning_content
        if self.role == "tool":
            given = {"tool_call_id": self.tool_call_id, "name": self.name}
            found |= {name: value for name, value in given.items() if value is not None}
        return found


class Function(Lenient):
    """`strict` changes nothing: calls that tool_choice asks for are constrained, others are not."""

    name: FunctionName
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(Lenient):
    type: Literal["function"]
    function: Function


class FunctionChosen(Lenient):
    name: str


class ToolChosen(Lenient):
    type: Literal["function"]
    function: FunctionChosen


class ChatRequest(GenerationRequest):
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """Taken only with logprobs=true."""
    max_completion_tokens: int | None = limited("max_tokens")
    """OpenAI's newer name of max_tokens; where both are given they must be equal."""
    chat_template_kwargs: dict[str, Any] = Field({}, max_length=MAX_TEMPLATE_VARIABLES)
    """Further variables of the model's chat template, such as `enable_thinking`; vLLM's name."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """Goes to the model's chat template, whose words they are; "none" also as `enable_thinking`: false."""
    tools: list[Tool] = Field([], max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: Literal["none", "auto", "required"] | ToolChosen = "auto"
    parallel_tool_calls: bool = True
    """False: an answer has at most one call."""
    add_special_tokens: Annotated[Any, Only(False)] = None
    echo: Annotated[Any, Only(False)] = None

    @property
    def told_functions(self) -> list[Function]:
        """Those that the model is told of; none for tool_choice=none."""
        return [] if self.tool_choice == "none" else [tool.function for tool in self.tools]

    @property
    def forced_functions(self) -> list[Function]:
        """Those of which the answer must be a call; none where the model is free to answer otherwise."""
        if isinstance(self.tool_choice, ToolChosen):
            return [function for function in self.told_functions if function.name == self.tool_choice.function.name]
        return self.told_functions if self.tool_choice == "required" else []

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def template_variables(self, used: Collection[str]) -> dict[str, Any]:
        """Those for a chat template that uses `used`; what `chat_template_kwargs` states counts.

        Raises RequestError for a reasoning_effort that the template has no place for.
        """
        effort, found = self.reasoning_effort, dict[str, Any]()
        if effort is not None and "reasoning_effort" in used:
            found["reasoning_effort"] = effort
        if effort == "none" and "enable_thinking" in used:
            found["enable_thinking"] = False
        if effort not in (None, "none") and not found:
            message = f"reasoning_effort='{effort}' has no place in this model's chat template; leave it out"
            raise RequestError(message, param="reasoning_effort")
        return found | self.chat_template_kwargs

    def check_together(self) -> None:
        super().check_together()
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            message = (
                f"max_tokens {self.max_tokens} and max_completion_tokens {self.max_completion_tokens} are the same "
            )
            raise RequestError(message + "limit; give one", param="max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs is taken only with logprobs=true", param="top_logprobs")
        self._check_tools()

    def _check_tools(self) -> None:
        names = Counter(tool.function.name for tool in self.tools)
        if names and (most := names.most_common(1)[0])[1] > 1:
            raise RequestError(f"tools has the function '{most[0]}' twice", param="tools")
        if self.tool_choice not in ("none", "auto") and not self.forced_functions:
            known = f"; there are {', '.join(sorted(names))}"[:200] if names else ", of which there are none"
            raise RequestError(f"tool_choice asks for a function of tools{known}", param="tool_choice")
        if self.told_functions and self.structure:
            message = f"tools and {self.structure.param} exclude each other; give one, or tool_choice=none"
            raise RequestError(message, param="tools")
