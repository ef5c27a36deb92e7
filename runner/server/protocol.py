"""What the OpenAI-compatible endpoints accept, strictly: no coercion, no field that is accepted and ignored.

Source: the OpenAI API reference (completions, chat completions), with vLLM's names for what OpenAI lacks. A field that
OpenAI documents and this server does not offer is accepted at its harmless value only (`best_of=1`, `tools=[]`).
A field that is null counts as absent. Every number has a least and a greatest value.

Of our own there are `deadline`, seconds from now after which the answer is of no use, and `weight`, what it counts
beside others of its length. A request that has not begun by its deadline costs nothing and is answered 408 with the
code `deadline_exceeded`; one that has begun is finished. The plan's `order` says what they change for who goes first.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from exeplan.errors import InputError
from exeplan.runner.compute.sampling import SamplingParams

MAX_CHOICES = 128
MAX_PROMPTS = 1024
MAX_LOGPROBS = 20
MAX_DEADLINE = 86_400.0
MAX_WEIGHT = 1e6
_SAMPLING_FIELDS = {field.name for field in fields(SamplingParams)} - {"logprobs"}


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

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


# Fields that OpenAI documents, we do not offer, and clients send all the same: the values that change nothing.
HARMLESS: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
# Labels of a request that change nothing whatever they say.
LABELS = {"user": str, "safety_identifier": str, "prompt_cache_key": str, "metadata": dict}


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool = False
    """Padding against traffic analysis; accepted because clients send it, and never added."""


class GenerationRequest(_Strict, ABC):
    """What completions and chat completions have in common, apart from `SamplingParams`."""

    model: str | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    deadline: float | None = Field(None, gt=0, le=MAX_DEADLINE)
    """Seconds from now; None for any time."""
    weight: float = Field(1.0, gt=0, le=MAX_WEIGHT)

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Alternatives wanted beside each token; None for no log-probabilities at all."""

    @property
    @abstractmethod
    def default_max_tokens(self) -> int | None:
        """The most output tokens where `max_tokens` is not given; None for as many as fit into the context."""


class CompletionRequest(GenerationRequest):
    prompt: list[str] | list[list[int]]
    """Always a batch: a single prompt is a batch of one. Ids are checked against the vocabulary by the server."""
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @field_validator("prompt", mode="plain")
    @classmethod
    def _check_prompt(cls, value: Any) -> list[str] | list[list[int]]:
        prompts = [value] if isinstance(value, str) or _are_token_ids(value) else value
        if not isinstance(prompts, list):
            raise ValueError("must be a string, a list of token ids, or a list of strings or of lists of token ids")
        if not prompts or not all(prompt or prompt == 0 for prompt in prompts):
            raise ValueError("must not be empty")
        if len(prompts) > MAX_PROMPTS:
            raise ValueError(f"is a batch of {len(prompts)}, at most {MAX_PROMPTS} are taken")
        if not all(isinstance(p, str) for p in prompts) and not all(_are_token_ids(p) for p in prompts):
            raise ValueError("must be a string, a list of token ids, or a list of strings or of lists of token ids")
        return prompts

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def default_max_tokens(self) -> int | None:
        return 16  # OpenAI's default for completions.


def _are_token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(entry) is int for entry in value)


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """As a chat template sees it: text parts joined by line breaks, `developer` under its older name."""
        content = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatRequest(GenerationRequest):
    messages: list[Message] = Field(min_length=1, max_length=4096)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def default_max_tokens(self) -> int | None:
        return None


Request = TypeVar("Request", bound=GenerationRequest)


def parse(kind: type[Request], body: bytes) -> tuple[Request, SamplingParams]:
    """The request in this body, and how to sample. Raises RequestError that names field, value and limit."""
    given = {name: value for name, value in read_object(body).items() if value is not None}
    _drop_harmless(given)
    sampling = {name: given.pop(name) for name in _SAMPLING_FIELDS & set(given)}
    if kind is ChatRequest and "max_completion_tokens" in given:
        if "max_tokens" in sampling:
            raise RequestError("max_tokens and max_completion_tokens are the same thing; give one", param="max_tokens")
        sampling["max_tokens"] = given.pop("max_completion_tokens")
    try:
        request = kind.model_validate(given)
    except ValidationError as error:
        raise _readable(error) from None
    _check_together(request)
    return request, _sampling_params(request, sampling)


def _sampling_params(request: GenerationRequest, given: dict[str, Any]) -> SamplingParams:
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    if isinstance(bias := given.get("logit_bias"), dict):  # JSON knows only strings as keys.
        given["logit_bias"] = {int(key) if key.isdecimal() else key: value for key, value in bias.items()}
    given.setdefault("max_tokens", request.default_max_tokens)
    try:
        return SamplingParams(**given, logprobs=request.num_logprobs)
    except InputError as error:
        param = next((name for name in given if name in str(error).split()), None)
        raise RequestError(str(error), param=param) from None


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body: strict JSON, no field twice. Raises RequestError saying what is wrong."""
    try:
        value = json.loads(body.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
        if b"\\u" in body:  # The only way a lone surrogate gets through the decoder.
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise RequestError(
            f"the body is not valid JSON: {error.msg} at line {error.lineno} column {error.colno}"
        ) from None
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not valid UTF-8 (byte {error.start})") from None
    except UnicodeEncodeError:
        raise RequestError("the body holds half of a surrogate pair, which is not a character") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    except RequestError:
        raise
    except ValueError:  # Python refuses to convert integers of thousands of digits.
        raise RequestError("the body holds a number that is too long") from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RequestError(f"the body has the field '{_short(twice, quoted=False)}' twice", param=twice)
    return found


def _no_constant(name: str) -> float:
    raise RequestError(f"the body holds {name}, which is not a JSON number")


def _drop_harmless(given: dict[str, Any]) -> None:
    for name in sorted(set(given) & set(HARMLESS)):
        value = given.pop(name)
        if not any(type(value) is type(allowed) and value == allowed for allowed in HARMLESS[name]):
            raise RequestError(f"{name}={_short(value)} is not offered by this server; leave it out", param=name)
    for name in sorted(set(given) & set(LABELS)):
        if not isinstance(given.pop(name), LABELS[name]):
            raise RequestError(f"{name} must be {'an object' if LABELS[name] is dict else 'a string'}", param=name)


def _check_together(request: GenerationRequest) -> None:
    """What no field shows alone."""
    if request.stream_options and not request.stream:
        raise RequestError("stream_options is taken only with stream=true", param="stream_options")
    if isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None:
        raise RequestError("logprobs of an echoed prompt are not offered; leave out echo or logprobs", param="logprobs")
    if isinstance(request, ChatRequest) and request.top_logprobs is not None and not request.logprobs:
        raise RequestError("top_logprobs is taken only with logprobs=true", param="top_logprobs")


_REASONS = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
    "finite_number": "must be a finite number",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "list_type": "must be a list",
    "too_long": "holds {actual_length} entries, at most {max_length} are taken",
    "too_short": "must not be empty",
    "literal_error": "must be {expected}",
    "value_error": "{error}",
}


def _readable(error: ValidationError) -> RequestError:
    """The most precise finding as one sentence."""
    finding = max(error.errors(include_url=False), key=lambda found: len(found["loc"]))
    where = [part for part in finding["loc"] if part != "str" and not str(part).startswith("list[")]
    name = _short(".".join(str(part) for part in where), quoted=False)
    if finding["type"] == "extra_forbidden":
        return RequestError(f"unknown field '{name}'", param=name)
    if finding["type"] == "missing":
        return RequestError(f"'{name}' is missing", param=name)
    reason = _REASONS.get(finding["type"], finding["msg"]).format(**finding.get("ctx", {}))
    found = "" if finding["type"] == "value_error" else f", found {_short(finding['input'])}"
    return RequestError(f"{name} {reason}{found}", param=name)


def _short(value: Any, *, quoted: bool = True) -> str:
    text = json.dumps(value) if quoted and not isinstance(value, Mapping) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
