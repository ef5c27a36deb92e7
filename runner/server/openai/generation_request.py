"""What completions and chat completions have in common, strictly: no coercion, no field accepted and then ignored.

The models are the one source of every limit: they check requests, and `/openapi.json` describes them. Limits that the
engine also checks come from `sampling`; `SamplingParams` adds what two fields must satisfy together.
Source: the OpenAI API reference (completions, chat completions), with vLLM's names for what OpenAI lacks. Every number
has a minimum and a maximum.

Two fields are exeplan's own: `deadline`, seconds after which the output is of no use, and `weight`, the value of the
request relative to others of its length. A request that has not begun by its deadline costs nothing and is answered
408 with the code `deadline_exceeded`; one of which any sequence has begun is finished. The plan's `order` says how both
change the queue.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, model_validator

from exeplan.errors import InputError
from exeplan.runner.compute.tokens.sampling import (
    BIAS_LIMITS,
    FLOAT_LIMITS,
    INT_LIMITS,
    MAX_BIASES,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    MAX_STOPS,
    SamplingParams,
)
from exeplan.runner.server.openai.check import check
from exeplan.runner.server.openai.errors import RequestError
from exeplan.runner.server.openai.fields import Lenient, Only, Schema, ServedModel, Strict, Text, TokenId
from exeplan.runner.server.openai.json_body import read_object

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 1 << 18
"""In an answer: of the tokens of all its prompts, and of the most likely tokens in their places."""
MAX_SCHEMA_CHARS = 64 * 1024
"""Of a schema as JSON text, or of the schemas of all functions."""
MAX_REGEX_CHARS = 16_384
MAX_OUTPUT_CHOICES = 1024
MAX_DEADLINE = 86_400.0
MAX_WEIGHT = 1e6
_NO_DEFAULTS: Mapping[str, float] = MappingProxyType({})
_SAMPLING_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}


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
    include_reasoning: Annotated[Any, Only(True)] = None
    include_stop_str_in_output: Annotated[Any, Only(False)] = None
    length_penalty: Annotated[Any, Only(1.0, 1)] = None
    modalities: Annotated[Any, Only(["text"])] = None
    prediction: Annotated[Any, Only()] = None
    priority: Annotated[Any, Only(0)] = None
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
    request_id: str | None = None
    metadata: dict[str, Any] | None = None


def limited(name: str) -> Any:
    """A number of `SamplingParams`, with the default and the limits that it has there."""
    low, high = {**INT_LIMITS, **FLOAT_LIMITS}[name]
    return Field(_SAMPLING_DEFAULTS[name], ge=low, le=high)


_StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
_TokenKey = Annotated[str, Field(pattern="^[0-9]{1,10}$")]
_Bias = Annotated[float, Field(ge=BIAS_LIMITS[0], le=BIAS_LIMITS[1])]


class Sampling(Strict):
    """The fields of `SamplingParams` as a request states them."""

    temperature: float = limited("temperature")
    top_k: int = limited("top_k")
    top_p: float = limited("top_p")
    min_p: float = limited("min_p")
    repetition_penalty: float = limited("repetition_penalty")
    presence_penalty: float = limited("presence_penalty")
    frequency_penalty: float = limited("frequency_penalty")
    seed: int | None = limited("seed")
    stop: _StopText | Annotated[list[_StopText], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stop_token_ids: list[TokenId] = Field([], max_length=MAX_STOP_IDS, fail_fast=True)
    max_tokens: int | None = limited("max_tokens")
    min_tokens: int = limited("min_tokens")
    ignore_eos: bool = False
    logit_bias: dict[_TokenKey, _Bias] = Field(
        {}, max_length=MAX_BIASES, json_schema_extra={"additionalProperties": False}
    )
    """By token id; JSON has only strings as keys."""


class StreamOptions(Lenient):
    """Taken only with stream=true."""

    include_usage: bool = False
    """A last chunk has the usage, and no choices."""
    continuous_usage_stats: bool = False
    """With include_usage, every chunk has the usage so far; vLLM's name."""
    include_obfuscation: bool = False
    """Padding against traffic analysis; accepted because clients send it, and never added."""


_Regex = Annotated[str, Field(min_length=1, max_length=MAX_REGEX_CHARS)]
_Choices = Annotated[list[Text], Field(min_length=1, max_length=MAX_OUTPUT_CHOICES, fail_fast=True)]
_SchemaText = Annotated[str, Field(max_length=MAX_SCHEMA_CHARS)]


class JsonSchema(Lenient):
    """OpenAI's; the output is constrained whether or not it says `strict`."""

    name: str | None = None
    description: str | None = None
    json_schema: Schema | None = Field(None, alias="schema")
    """None for any object."""
    strict: bool = False


class ResponseFormat(Lenient):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    """Only of the type `json_schema`, which needs it."""


class StructuredOutputs(Lenient):
    """vLLM's; one of these."""

    json_schema: Schema | _SchemaText | None = Field(None, alias="json")
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
    guided_json: Schema | _SchemaText | None = None
    """As `structured_outputs.json`; this and the next two are vLLM's older names."""
    guided_regex: _Regex | None = None
    guided_choice: _Choices | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """Report what the model says of each token of the prompt, and of this many most likely ones; vLLM's name. Not taken
    with stream=true."""
    return_token_ids: bool = False
    """The answer has `token_ids` and `prompt_token_ids`, as vLLM's; without a tokenizer it always has `token_ids`."""
    return_tokens_as_token_ids: bool = False
    """Log-probabilities name tokens `token_id:7` in place of their texts, as vLLM's; without a tokenizer they always
    do."""

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
    def limit_is_default(self) -> bool:
        """Whether `output_limit` is not the client's, and is lowered to what fits."""
        return False

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

    def sampling_params(self, defaults: Mapping[str, float] = _NO_DEFAULTS) -> SamplingParams:
        """`defaults` are of fields that are left out. Raises RequestError where two fields contradict each other."""
        given = self.model_dump(include=set(Sampling.model_fields))
        given |= {name: value for name, value in defaults.items() if name not in self.model_fields_set}
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


Request = TypeVar("Request", bound=GenerationRequest)


def parse(
    kind: type[Request], body: bytes, defaults: Mapping[str, float] = _NO_DEFAULTS
) -> tuple[Request, SamplingParams]:
    """The request in this body, and how to sample, with the model's own `defaults` of fields that are left out.

    Raises RequestError that names field, value and limit.
    """
    request = check(kind, read_object(body))
    request.check_together()
    return request, request.sampling_params(defaults)
