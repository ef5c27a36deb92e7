"""What the OpenAI-compatible endpoints accept, strictly: no coercion, and no field that is accepted and then ignored.

The models are the one source of every limit: they check requests, and `/openapi.json` describes them. Limits that the
engine also checks come from `sampling`; `SamplingParams` adds what two fields must satisfy together.
Source: the OpenAI API reference (completions, chat completions), with vLLM's names for what OpenAI lacks. A field that
OpenAI documents and this server does not offer is accepted only at values that change nothing (`best_of=1`). A field
that is null counts as absent. Every number has a minimum and a maximum.

Two fields are exeplan's own: `deadline`, seconds after which the output is of no use, and `weight`, the value of the
request relative to others of its length. A request that has not begun by its deadline costs nothing and is answered
408 with the code `deadline_exceeded`; one that has begun is finished. The plan's `order` says how both
change the queue.
"""

import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import islice
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainValidator,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
    with_config,
)
from typing_extensions import TypedDict

from exeplan.errors import InputError
from exeplan.runner.compute.sampling import (
    BIAS_LIMITS,
    FLOAT_LIMITS,
    INT_LIMITS,
    MAX_BIASES,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    MAX_STOPS,
    SamplingParams,
)

MAX_CHOICES = 128
MAX_PROMPTS = 1024
MAX_MESSAGES = 4096
MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 1 << 18
"""In an answer: of the tokens of all its prompts, and of the most likely tokens in their places."""
MAX_TEMPLATE_VARIABLES = 64
MAX_TOOLS = 128
MAX_TOOL_CALLS = 128
"""In a message."""
MAX_SCHEMA_CHARS = 64 * 1024
"""Of a schema as JSON text, or of the schemas of all functions."""
MAX_REGEX_CHARS = 16_384
MAX_OUTPUT_CHOICES = 1024
MAX_DEADLINE = 86_400.0
MAX_WEIGHT = 1e6
MAX_OBJECT_FIELDS = 4096
"""Of any object in a body: bounds the work of saying what is wrong with it."""
MAX_OBJECTS = 32_768
"""Lists and objects in a body."""
MAX_DEPTH = 64
"""Of lists and objects in each other: far below what any later step could fail at."""
TOKEN_ID_FORMAT, MODEL_NAME_FORMAT = "token-id", "model-name"
"""Formats in the JSON schemas, whose limits only a server of one model knows."""
_SAMPLING_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}


@with_config(extra="forbid")
class Error(TypedDict):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """The body of every answer with a status of 400 or above, apart from the probes'."""

    error: Error


class RequestError(InputError):
    """A request that is answered with an error: HTTP status, and the fields of OpenAI's error object."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after

    def body(self) -> ErrorBody:
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class Strict(BaseModel):
    """Fields are taken as they are or refused, and no other fields are taken."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class _NotOfferedError(ValueError):
    """A value of a field that is taken only where it changes nothing."""


class Only:
    """A field that OpenAI documents and this server does not offer: null and `values` change nothing, and are taken."""

    def __init__(self, *values: Any) -> None:
        self._values = values

    def _check(self, value: Any) -> Any:
        # 1, 1.0 and true are equal in Python.
        if not any(type(value) is type(allowed) and value == allowed for allowed in self._values):
            raise _NotOfferedError("is not offered by this server; leave it out")
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return PlainValidator(self._check).__get_pydantic_core_schema__(source, handler)

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [*self._values]} if self._values else {"type": "null"}


ServedModel = Annotated[str, Field(json_schema_extra={"format": MODEL_NAME_FORMAT})]
"""The model's name, of which there is one."""


class NotOffered(Strict):
    """Fields that clients send although this server does not offer what they ask for."""

    add_generation_prompt: Annotated[Any, Only(True)] = None
    allowed_token_ids: Annotated[Any, Only()] = None
    audio: Annotated[Any, Only()] = None
    bad_words: Annotated[Any, Only([])] = None
    best_of: Annotated[Any, Only(1)] = None
    continue_final_message: Annotated[Any, Only(False)] = None
    early_stopping: Annotated[Any, Only(False)] = None
    function_call: Annotated[Any, Only("none", "auto")] = None
    functions: Annotated[Any, Only([])] = None
    guided_decoding_backend: Annotated[Any, Only("auto")] = None
    guided_grammar: Annotated[Any, Only()] = None
    guided_whitespace_pattern: Annotated[Any, Only()] = None
    include_stop_str_in_output: Annotated[Any, Only(False)] = None
    length_penalty: Annotated[Any, Only(1.0, 1)] = None
    modalities: Annotated[Any, Only(["text"])] = None
    prediction: Annotated[Any, Only()] = None
    priority: Annotated[Any, Only(0)] = None
    reasoning_effort: Annotated[Any, Only("none")] = None
    return_token_ids: Annotated[Any, Only(False)] = None
    return_tokens_as_token_ids: Annotated[Any, Only(False)] = None
    service_tier: Annotated[Any, Only("auto", "default")] = None
    skip_special_tokens: Annotated[Any, Only(True)] = None
    spaces_between_special_tokens: Annotated[Any, Only(True, False)] = None
    store: Annotated[Any, Only(False)] = None
    suffix: Annotated[Any, Only("")] = None
    truncate_prompt_tokens: Annotated[Any, Only()] = None
    use_beam_search: Annotated[Any, Only(False)] = None
    verbosity: Annotated[Any, Only("medium")] = None
    web_search_options: Annotated[Any, Only()] = None


class Labels(Strict):
    """Labels of a request, which change nothing."""

    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, Any] | None = None


def _limited(name: str) -> Any:
    """A number of `SamplingParams`, with the default and the limits that it has there."""
    low, high = {**INT_LIMITS, **FLOAT_LIMITS}[name]
    return Field(_SAMPLING_DEFAULTS[name], ge=low, le=high)


TokenId = Annotated[int, Field(json_schema_extra={"format": TOKEN_ID_FORMAT})]
_StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
_TokenKey = Annotated[str, Field(pattern="^[0-9]{1,10}$")]
_Text = Annotated[str, Field(min_length=1)]
_Bias = Annotated[float, Field(ge=BIAS_LIMITS[0], le=BIAS_LIMITS[1])]


class Sampling(Strict):
    """The fields of `SamplingParams` as a request states them."""

    temperature: float = _limited("temperature")
    top_k: int = _limited("top_k")
    top_p: float = _limited("top_p")
    min_p: float = _limited("min_p")
    repetition_penalty: float = _limited("repetition_penalty")
    presence_penalty: float = _limited("presence_penalty")
    frequency_penalty: float = _limited("frequency_penalty")
    seed: int | None = _limited("seed")
    stop: _StopText | Annotated[list[_StopText], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stop_token_ids: list[TokenId] = Field([], max_length=MAX_STOP_IDS, fail_fast=True)
    max_tokens: int | None = _limited("max_tokens")
    min_tokens: int = _limited("min_tokens")
    ignore_eos: bool = False
    logit_bias: dict[_TokenKey, _Bias] = Field(
        {}, max_length=MAX_BIASES, json_schema_extra={"additionalProperties": False}
    )
    """By token id; JSON has only strings as keys."""


def _without_nulls(given: Any) -> Any:
    """A field that is null counts as absent."""
    return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


def _nullable(schema: dict[str, Any]) -> None:
    """Says in a JSON schema what `Lenient` does."""
    for name in set(schema["properties"]) - set(schema.get("required", ())):
        described = schema["properties"][name]
        if not any(branch.get("type") == "null" for branch in (described, *described.get("anyOf", ()))):
            schema["properties"][name] = {"anyOf": [described, {"type": "null"}]}


class Lenient(Strict):
    """An object whose fields clients may write as null where they mean nothing by them, unknown ones too."""

    model_config = ConfigDict(json_schema_extra=_nullable)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, given: Any) -> Any:
        return _without_nulls(given)


class StreamOptions(Lenient):
    """Taken only with stream=true."""

    include_usage: bool = False
    """A last chunk has the usage, and no choices."""
    continuous_usage_stats: bool = False
    """With include_usage, every chunk has the usage so far; vLLM's name."""
    include_obfuscation: bool = False
    """Padding against traffic analysis; accepted because clients send it, and never added."""


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
_Regex = Annotated[str, Field(min_length=1, max_length=MAX_REGEX_CHARS)]
_Choices = Annotated[list[_Text], Field(min_length=1, max_length=MAX_OUTPUT_CHOICES, fail_fast=True)]
_Schema = dict[str, Any]
_SchemaText = Annotated[str, Field(max_length=MAX_SCHEMA_CHARS)]


class JsonSchema(Lenient):
    """OpenAI's; the output is constrained whether or not it says `strict`."""

    name: str | None = None
    description: str | None = None
    json_schema: _Schema | None = Field(None, alias="schema")
    """None for any object."""
    strict: bool = False


class ResponseFormat(Lenient):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    """Only of the type `json_schema`, which needs it."""


class StructuredOutputs(Lenient):
    """vLLM's; one of these."""

    json_schema: _Schema | _SchemaText | None = Field(None, alias="json")
    regex: _Regex | None = None
    choice: _Choices | None = None
    json_object: bool = False
    disable_additional_properties: Annotated[Any, Only(False)] = None
    disable_any_whitespace: Annotated[Any, Only(False)] = None
    grammar: Annotated[Any, Only()] = None
    structural_tag: Annotated[Any, Only()] = None
    whitespace_pattern: Annotated[Any, Only()] = None


@dataclass(frozen=True, slots=True)
class Structure:
    """What an output must be, as a request states it."""

    param: str
    """The field that states it."""
    kind: Literal["json", "regex", "choice"]
    value: Any
    """A schema, or None for any object; a regex; or a list of texts."""


class GenerationRequest(NotOffered, Labels, Sampling, Lenient, ABC):
    """What completions and chat completions have in common."""

    model: ServedModel | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    deadline: float | None = Field(None, gt=0, le=MAX_DEADLINE)
    """Seconds from now; None for no deadline."""
    weight: float = Field(1.0, gt=0, le=MAX_WEIGHT)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    """vLLM's name."""
    guided_json: _Schema | _SchemaText | None = None
    """As `structured_outputs.json`; this and the next two are vLLM's older names."""
    guided_regex: _Regex | None = None
    guided_choice: _Choices | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """Report what the model says of each token of the prompt, and of this many most likely ones; vLLM's name. Not taken
    with stream=true."""

    @model_validator(mode="before")
    @classmethod
    def _all_are_the_best(cls, given: Any) -> Any:
        """The best of as many answers as are asked for are all of them."""
        if isinstance(given, dict) and type(given.get("best_of")) is int and given["best_of"] == given.get("n"):
            return {name: value for name, value in given.items() if name != "best_of"}
        return given

    @property
    def structure(self) -> Structure | None:
        """What the output must be; None for any text. Raises RequestError for what is stated twice."""
        stated = self._stated()
        if len(stated) > 1:
            both = f"{stated[0].param} and {stated[1].param}"
            raise RequestError(f"{both} both say what the output must be; give one", param=stated[1].param)
        return stated[0] if stated else None

    def _stated(self) -> list[Structure]:
        found = []
        if (given := self.response_format) and given.type != "text":
            schema = given.json_schema.json_schema if given.json_schema else None
            found.append(Structure("response_format", "json", schema))
        guided = StructuredOutputs(json=self.guided_json, regex=self.guided_regex, choice=self.guided_choice)
        for prefix, outputs in (("structured_outputs.", self.structured_outputs), ("guided_", guided)):
            if outputs is None:
                continue
            if outputs.json_schema is not None:
                name = f"{prefix}json"
                found.append(Structure(name, "json", _as_schema(outputs.json_schema, name)))
            if outputs.regex is not None:
                found.append(Structure(f"{prefix}regex", "regex", outputs.regex))
            if outputs.choice is not None:
                found.append(Structure(f"{prefix}choice", "choice", outputs.choice))
            if outputs.json_object:
                found.append(Structure(f"{prefix}json_object", "json", None))
        return found

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Alternatives wanted for each token; None for no log-probabilities at all."""

    @property
    @abstractmethod
    def output_limit(self) -> int | None:
        """The most output tokens; None for as many as fit into the context."""

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives wanted for each token of the prompt; None for no log-probabilities of it."""
        return self.prompt_logprobs

    @property
    def scores_only(self) -> bool:
        """Whether the answer is about the prompt, and continues it by no token."""
        return False

    def check_together(self) -> None:
        """Raises RequestError where two fields exclude each other."""
        if self.prompt_logprobs is not None and self.stream:
            message = "prompt_logprobs is not taken with stream=true; a stream has them by echo and logprobs"
            raise RequestError(message, param="prompt_logprobs")
        if self.stream_options and not self.stream:
            raise RequestError("stream_options is taken only with stream=true", param="stream_options")
        stated = self.response_format
        if stated and (stated.type == "json_schema") != (stated.json_schema is not None):
            message = "response_format has json_schema where its type is json_schema, and only there"
            raise RequestError(message, param="response_format")
        if self.structure and self.ignore_eos:
            message = f"{self.structure.param} ends an output when it is complete, which ignore_eos excludes"
            raise RequestError(message, param="ignore_eos")

    def sampling_params(self) -> SamplingParams:
        """Raises RequestError where two fields contradict each other."""
        given = self.model_dump(include=set(Sampling.model_fields))
        given["stop"] = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        given["logit_bias"] = _by_token_id(self.logit_bias)
        given["max_tokens"] = self.output_limit
        try:
            return SamplingParams(**given, logprobs=self.num_logprobs, prompt_logprobs=self.num_prompt_logprobs)
        except InputError as error:
            param = next((name for name in given if name in str(error).split()), None)
            raise RequestError(str(error), param=param) from None


def _as_schema(given: dict[str, Any] | str, name: str) -> dict[str, Any]:
    """A schema that may be given as JSON text."""
    if isinstance(given, dict):
        return given
    try:
        return read_object(given.encode())
    except RequestError as error:
        raise RequestError(str(error).replace("the body", name, 1), param=name) from None


def _by_token_id(biases: Mapping[str, float]) -> dict[int, float]:
    """Raises RequestError for a token id that is given twice, as "7" and "07"."""
    found: dict[int, float] = {}
    for text, bias in biases.items():
        if found.setdefault(token := int(text), bias) is not bias:
            raise RequestError(f"logit_bias has the token id {token} twice", param="logit_bias")
    return found


_TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
_Texts = Annotated[list[_Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
_TokenIdLists = Annotated[list[_TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]


class CompletionRequest(GenerationRequest):
    prompt: _Text | _TokenIds | _Texts | _TokenIdLists
    """Token ids are checked against the vocabulary by the engine."""
    echo: bool = False
    """The answer begins with the prompt, and with logprobs its tokens have theirs."""
    max_tokens: int | None = Field(None, ge=0, le=INT_LIMITS["max_tokens"][1])
    """16 by default; 0 only with echo: the answer is the prompt."""
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    parallel_tool_calls: Annotated[Any, Only(True, False)] = None
    tool_choice: Annotated[Any, Only("none", "auto")] = None
    tools: Annotated[Any, Only([])] = None

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _say_what_is_wrong(cls, value: Any, check: ValidatorFunctionWrapHandler) -> Any:
        try:
            return check(value)
        except ValidationError:
            raise ValueError(_fault_of_prompt(value)) from None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Always a batch: a single prompt is a batch of one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def output_limit(self) -> int | None:
        if self.max_tokens == 0:
            return 1  # The engine samples a token with the prompt's last one, and the answer leaves it out.
        return 16 if self.max_tokens is None else self.max_tokens  # OpenAI's default for completions.

    @property
    def num_prompt_logprobs(self) -> int | None:
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in wanted if count is not None), default=None)

    @property
    def scores_only(self) -> bool:
        return self.max_tokens == 0

    def check_together(self) -> None:
        super().check_together()
        if self.max_tokens == 0 and not self.echo:
            raise RequestError(
                "max_tokens must be at least 1, found 0, which is taken only with echo", param="max_tokens"
            )
        if self.max_tokens == 0 and self.min_tokens:
            raise RequestError(f"min_tokens {self.min_tokens} is above max_tokens 0", param="min_tokens")


def _fault_of_prompt(value: Any) -> str:
    if value in ("", []) or (isinstance(value, list) and ("" in value or [] in value)):
        return "must not be empty"
    if isinstance(value, list) and len(value) > MAX_PROMPTS and not isinstance(value[0], int):
        return f"is a batch of {len(value)}, at most {MAX_PROMPTS} are taken"
    return "must be a string, a list of token ids, or a list of strings or of lists of token ids"


class TextPart(Lenient):
    type: Literal["text"]
    text: str


class Called(Lenient):
    name: FunctionName
    arguments: str
    """A JSON object."""


class ToolCallMade(Lenient):
    """A call that an earlier answer asked for."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: Called
    index: int | None = None

    def plain(self) -> dict[str, Any]:
        """As Hugging Face's templates see it, with the arguments as an object. Raises RequestError for other ones."""
        try:
            arguments = read_object(self.function.arguments.encode()) if self.function.arguments else {}
        except RequestError as error:
            message = str(error).replace("the body", f"arguments of a call of {self.function.name}", 1)
            raise RequestError(message, param="messages") from None
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
    tool_calls: Annotated[list[ToolCallMade], Field(max_length=MAX_TOOL_CALLS, fail_fast=True)] = []
    """Of an assistant's message."""
    annotations: Annotated[Any, Only([])] = None
    audio: Annotated[Any, Only()] = None
    function_call: Annotated[Any, Only()] = None
    refusal: Annotated[Any, Only()] = None

    @model_validator(mode="before")
    @classmethod
    def _as_sent_back(cls, given: Any) -> Any:
        """An answer without what the client's library has added to it, and with empty content where it only calls."""
        if not isinstance(given, dict) or given.get("role") != "assistant":
            return given
        known = {name: value for name, value in given.items() if name in cls.model_fields}
        return known | ({"content": ""} if given.get("tool_calls") and given.get("content") is None else {})

    @model_validator(mode="after")
    def _only_the_assistant_calls(self) -> "Message":
        if self.tool_calls and self.role != "assistant":
            raise ValueError("has tool_calls, which only a message of the role 'assistant' may have")
        return self

    @property
    def is_about_tools(self) -> bool:
        return self.role == "tool" or bool(self.tool_calls)

    def plain(self) -> dict[str, Any]:
        """As a chat template sees it: text parts joined by line breaks, `developer` under its older name."""
        content = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        found: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.tool_calls:
            found["tool_calls"] = [call.plain() for call in self.tool_calls]
        if self.role == "tool":
            given = {"tool_call_id": self.tool_call_id, "name": self.name}
            found |= {name: value for name, value in given.items() if value is not None}
        return found


class Function(Lenient):
    """`strict` changes nothing: calls that tool_choice asks for are constrained, others are not."""

    name: FunctionName
    description: str | None = None
    parameters: _Schema | None = None
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
    max_completion_tokens: int | None = _limited("max_tokens")
    """OpenAI's newer name of max_tokens; where both are given they must be equal."""
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_VARIABLES)] = {}
    """Further variables of the model's chat template, such as `enable_thinking`; vLLM's name."""
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] = []
    tool_choice: Literal["none", "auto", "required"] | ToolChosen = "auto"
    parallel_tool_calls: bool = True
    """False: an answer has at most one call."""

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


class TokenizeRequest(Lenient):
    """Either a prompt or messages; vLLM's fields."""

    model: ServedModel | None = None
    prompt: _Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    """By default of a prompt, and not of messages, whose template has them."""
    add_generation_prompt: Annotated[Any, Only(True)] = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_VARIABLES)] = {}
    continue_final_message: Annotated[Any, Only(False)] = None
    return_token_strs: bool = False
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] = []
    """Only with messages."""

    def check_together(self) -> None:
        """Raises RequestError unless exactly one of the two is given."""
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("give either prompt or messages", param="prompt")
        if self.tools and self.messages is None:
            raise RequestError("tools are taken only with messages", param="tools")


class DetokenizeRequest(Lenient):
    model: ServedModel | None = None
    tokens: list[TokenId] = Field(fail_fast=True)


Model = TypeVar("Model", bound=BaseModel)
Request = TypeVar("Request", bound=GenerationRequest)


def parse(kind: type[Request], body: bytes) -> tuple[Request, SamplingParams]:
    """The request in this body, and how to sample. Raises RequestError that names field, value and limit."""
    request = check(kind, read_object(body))
    request.check_together()
    return request, request.sampling_params()


def unknown_model(name: str | None, served: str) -> RequestError:
    """404, for every name but that of the served model."""
    message = f"no model '{name:.80}'; this server has '{served}'"
    return RequestError(message, status=404, param="model", code="model_not_found")


def check(kind: type[Model], given: Mapping[str, Any]) -> Model:
    """A JSON object as a declared model. Raises RequestError with the most precise finding."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _readable(error, given) from None


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body: strict JSON, no field twice. Raises RequestError saying what is wrong.

    The time is linear in the bytes, and nothing that is returned is deeper than `MAX_DEPTH`.
    """
    try:
        _check_count(body)
        value = json.loads(body.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise RequestError(
            f"the body is not valid JSON: {error.msg} at line {error.lineno} column {error.colno}"
        ) from None
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not valid UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise _too_deep() from None
    except RequestError:
        raise
    except ValueError:  # Python refuses to convert integers of thousands of digits.
        raise RequestError("the body holds a number that is too long") from None
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        _check_depth(value)
    if b"\\u" in body:  # The only way a lone surrogate gets through the decoder.
        _check_text(value)
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    return value


def _check_count(body: bytes) -> None:
    """Before anything is made of it: the memory of small things is many times that of their bytes."""
    if body.count(b"[") + body.count(b"{") <= MAX_OBJECTS:
        return
    bare = _STRING.sub(b"", body)
    if bare.count(b"[") + bare.count(b"{") > MAX_OBJECTS:
        raise RequestError(f"the body has more than {MAX_OBJECTS} lists and objects")


_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""It matches at every quotation mark, so that each byte is looked at once."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_OBJECT_FIELDS:
        message = f"an object of the body has {len(pairs)} fields, at most {MAX_OBJECT_FIELDS} are taken"
        raise RequestError(message)
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = _short(Counter(name for name, _ in pairs).most_common(1)[0][0], quoted=False)
        raise RequestError(f"the body has the field '{twice}' twice", param=twice)
    return found


def _check_depth(value: Any) -> None:
    """Level by level, as a recursion would fail where the call stack is deep already."""
    level = [value]
    for _ in range(MAX_DEPTH):
        members = (each.values() if isinstance(each, dict) else each for each in level)
        level = [member for each in members for member in each if isinstance(member, (dict, list))]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> RequestError:
    return RequestError(f"the body is nested too deeply; at most {MAX_DEPTH} levels are taken")


def _check_text(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError("the body holds half of a surrogate pair, which is not a character") from None


def _no_constant(name: str) -> float:
    raise RequestError(f"the body holds {name}, which is not a JSON number")


_REASONS = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
    "finite_number": "must be a finite number",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must not be empty",
    "string_pattern_mismatch": "must be a token id",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "too_long": "holds {num_entries} entries, at most {max_length} are taken",
    "too_short": "must not be empty",
    "literal_error": "must be {expected}",
    "value_error": "{error}",
}
_WITHOUT_VALUE = ("value_error", "too_long")


def _readable(error: ValidationError, given: Mapping[str, Any]) -> RequestError:
    """The most precise finding as one sentence: the deepest, and of a union the branch whose type fits."""
    findings = [(_path(found, given), found) for found in error.errors(include_url=False)]
    path, finding = max(findings, key=lambda entry: (len(entry[0]), not entry[1]["type"].endswith("_type")))
    kind, name = finding["type"], _short(".".join(path), quoted=False)
    if kind == "extra_forbidden":
        return RequestError(f"unknown field '{name}'", param=name)
    if kind == "missing":
        return RequestError(f"'{name}' is missing", param=name)
    reasons = [_reason(finding)]
    if kind.endswith("_type"):
        others = [_reason(other) for where, other in findings if where == path and other is not finding]
        reasons += [reason.removeprefix("must be ") for reason in others]
    value = _short(finding["input"])
    if finding["type"] == "value_error" and isinstance(finding["ctx"]["error"], _NotOfferedError):
        return RequestError(f"{name}={value} {reasons[0]}", param=name)
    shown = "" if kind in _WITHOUT_VALUE else f", found {value}"
    return RequestError(f"{name} {' or '.join(reasons)}{shown}", param=name)


def _reason(finding: Mapping[str, Any]) -> str:
    found = finding["input"]
    more = {"num_entries": len(found)} if isinstance(found, (list, dict)) else {}
    return _REASONS.get(finding["type"], finding["msg"]).format(**finding.get("ctx", {}), **more)


def _path(finding: Mapping[str, Any], given: Any) -> list[str]:
    """The place of a finding in the body. pydantic also names the branches of unions, which are no part of it."""
    where = finding["loc"]
    missing = [where[-1]] if finding["type"] == "missing" else []
    path, at = [], given
    for part in where[: len(where) - len(missing)]:
        if part in at if isinstance(at, dict) else isinstance(at, list) and isinstance(part, int):
            path.append(part)
            at = at[part]
    return [str(part) for part in (*path, *missing)]


def _short(value: Any, *, quoted: bool = True) -> str:
    """The first characters of a value; of a long one no more is written than is shown."""
    if isinstance(value, str):
        text = json.dumps(value[:61]) if quoted else value[:61]
    else:
        text = "".join(islice(_PIECES.iterencode(value), 61))
    return text if len(text) <= 60 else text[:57] + "..."


_PIECES = json.JSONEncoder()
