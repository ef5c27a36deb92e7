"""What goes into an engine and what comes out: requests, outputs, and the state of a request in between."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, cast

from exeplan.core.batch import SequenceState
from exeplan.runner.compute.tokens.sampling import SampledToken, SamplingParams
from exeplan.runner.compute.tokens.structures import Matcher
from exeplan.runner.engine.text_stream import TextStream
from exeplan.runner.ipc.messages import PromptLogprobs
from exeplan.scheduling.fair_queue import ClientSequence

if TYPE_CHECKING:
    from exeplan.runner.compute.tokens.prompt_logprobs import PromptPart

MAX_CRASHES = 2
"""A request that was running at this many crashes, of workers or of a whole engine, is not tried again: it may be the
cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt and how to continue it. `arrival` and `deadline` are in seconds on the engine's clock.

    A request that has not started by its deadline expires, unless it `may_begin_late`; `weight` is its utility relative
    to requests of its length.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    arrival: float = 0.0
    deadline: float | None = None
    may_begin_late: bool = False
    weight: float = 1.0
    client: str = ""
    """Requests of one client share what is due to it; see `exeplan.scheduling.fair_queue`."""
    client_weight: float = 1.0
    output_token_ids: Sequence[int] = ()
    """What another engine has delivered of it; the output goes on behind that, with the same draws by the same seed."""
    start: float | None = None
    """When its first prefill began there."""
    crashes: int = 0


class Output(NamedTuple):
    """What one step produced for a request; times in seconds on the engine's clock."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    """Lags behind the tokens while a character is incomplete or a stop string possible; empty without a tokenizer."""
    logprobs: tuple[SampledToken, ...]
    """One entry a token where the request asked for log-probabilities."""
    finish_reason: str | None
    """'stop', 'length', 'error', 'structure' (no token with a finite logit is allowed by its grammar), 'lost' (its
    workers died repeatedly), 'expired' (it had not started by its deadline), or None while it continues."""
    first: bool
    """Whether this output holds the first token."""
    start: float
    """When its first prefill started, or when it expired."""
    time: float
    num_prompt_tokens: int
    num_output_tokens: int
    """Output tokens so far, including these."""
    prompt_logprobs: PromptLogprobs | None = None
    """With the first token, where the request asked for them."""


@dataclass(eq=False, slots=True, kw_only=True)
class RequestState(ClientSequence):
    """A request in the engine: what the scheduler and sampling (`sampling.SamplingInput`) need to know of it."""

    sampling: SamplingParams
    plain: bool
    seed: int
    prompt_token_ids: list[int]
    """What precedes the output in the decoder: the prompt, or an encoder-decoder model's start token."""
    token_ids: list[int]
    """Prompt and output, with an encoder-decoder model's start token between them."""
    banned_token_ids: tuple[int, ...]
    end_token_ids: frozenset[int]
    stream: TextStream | None
    arrival: float
    matcher: Matcher | None = None
    """Its place in its grammar, in the process that samples; None until its first token."""
    prompt_parts: "list[PromptPart]" = field(default_factory=list)
    """Log-probabilities of its prompt as far as it is computed, in the process that samples."""
    start: float | None = None
    """When its first prefill started."""
    ended: bool = False
    """Its last token has been delivered; it is `finished` already when that token is launched."""
    crashes: int = 0
    """How many times workers failed while it was running."""

    @property
    def num_delivered(self) -> int:
        """Output tokens that are known; `num_output_tokens` also counts those that have been launched."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_unknown(self) -> int:
        """Output tokens that have been launched and are not known yet."""
        return self.num_output_tokens - self.num_delivered

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]


def as_requests(sequences: Iterable[SequenceState]) -> tuple[RequestState, ...]:
    """The sequences of a scheduler or a batch, which are `RequestState`s in an engine and its workers."""
    return cast(tuple[RequestState, ...], tuple(sequences))


def output_of(
    request: RequestState, now: float, *, token: SampledToken | None = None, text: str = "", reason: str | None = None
) -> Output:
    """The output of one step for a started request, whose token is appended already; `now` by the engine's clock."""
    assert request.start is not None
    return Output(
        request_id=request.request_id,
        token_ids=(token.token_id,) if token else (),
        text=text,
        logprobs=(token,) if token and token.logprob is not None else (),
        finish_reason=reason,
        first=token is not None and request.num_delivered == 1,
        start=request.start,
        time=now,
        num_prompt_tokens=request.num_prompt_tokens - request.num_begin_tokens,
        num_output_tokens=request.num_delivered,
        prompt_logprobs=token.prompt if token else None,
    )
