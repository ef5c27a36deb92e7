"""What goes into an engine and what comes out: requests, outputs, and the row that a request is in between."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from exeplan.core.batch import SequenceState
from exeplan.runner.compute.sampling import SampledToken, SamplingParams
from exeplan.runner.engine.text_stream import TextStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to continue, and how. `arrival` and `deadline` are in seconds on the engine's clock.

    One that has not begun by its deadline expires; `weight` is what it counts beside others of its length.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    arrival: float = 0.0
    deadline: float | None = None
    weight: float = 1.0


class Output(NamedTuple):
    """What one step brought a request; times in seconds on the engine's clock."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    """Lags behind the tokens while a character is incomplete or a stop string possible; empty without a tokenizer."""
    logprobs: tuple[SampledToken, ...]
    """One entry a token where the request asked for log-probabilities."""
    finish_reason: str | None
    """'stop', 'length', 'error', 'lost' where workers died under it too often, 'expired' where it had not begun by
    its deadline, or None while it goes on."""
    first: bool
    """Whether this holds the first token."""
    start: float
    """When its first prefill began, or when it expired."""
    time: float
    num_prompt_tokens: int
    num_output_tokens: int
    """Tokens of the output so far, these included."""


@dataclass(eq=False, slots=True, kw_only=True)
class Row(SequenceState):
    """A request in the engine; what `sampling.Row` asks for, and what the scheduler does."""

    sampling: SamplingParams
    plain: bool
    seed: int
    prompt_token_ids: list[int]
    """What the decoder sees before the output; the prompt, or an encoder-decoder model's start token."""
    token_ids: list[int]
    """Prompt and output, the start token of an encoder-decoder model between them."""
    banned_token_ids: tuple[int, ...]
    end_token_ids: frozenset[int]
    stream: TextStream | None
    arrival: float
    start: float | None = None
    """When its first prefill began."""
    ended: bool = False
    """Its last token has been delivered; it is `finished` as soon as that one is under way."""
    crashes: int = 0
    """How often workers failed while it was running."""

    @property
    def num_delivered(self) -> int:
        """Tokens of the output that are known; `num_output_tokens` counts those under way, too."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]


def as_rows(sequences: tuple[SequenceState, ...]) -> tuple[Row, ...]:
    """The sequences of a batch as what they are in an engine and its workers."""
    return cast(tuple[Row, ...], sequences)
