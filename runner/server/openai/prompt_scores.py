"""What the model says of the tokens of a prompt, as answers have it: OpenAI's entries, and vLLM's `prompt_logprobs`.

An answer may have hundreds of thousands of log-probabilities, and encoding it as a whole, in whatever thread, would
hold up the event loop for as long. So they are read and encoded piece by piece.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar, cast

import msgspec
import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypedDict

from exeplan.runner.ipc.messages import Logprob, PromptLogprobs

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have; OpenAI's value."""
_PIECE = 64
"""Tokens that are read or encoded at a time."""
T = TypeVar("T")


class PromptToken(TypedDict):
    """vLLM's: `rank` is 1 where no token is more likely."""

    logprob: float
    rank: int
    decoded_token: str


PromptScores = list[dict[str, PromptToken] | None]
"""A token of the prompt each, by token id: its own, then the most likely ones; null for the first."""


def finite(logprob: float) -> float:
    """As JSON can hold it."""
    return max(logprob, MIN_LOGPROB)


def entries(token_ids: Sequence[int], found: PromptLogprobs, count: int) -> Iterator[Logprob]:
    """Of all tokens of a prompt but the first, with this many of the most likely ones."""
    logprobs, top_ids, top_logprobs = _arrays(found, count)
    for start in range(0, len(logprobs), _PIECE):
        end = start + _PIECE
        columns = (array[start:end].tolist() for array in (logprobs, top_ids, top_logprobs))
        for token_id, logprob, ids, values in zip(token_ids[start + 1 : end + 1], *columns, strict=True):
            yield Logprob(token_id, logprob, tuple(zip(ids, values, strict=True)))


def encoded(values: Iterable[T]) -> list[T]:
    """A list that goes into an answer as it is, encoded piece by piece."""
    values, pieces = iter(values), []
    while piece := list(islice(values, _PIECE)):
        pieces.append(msgspec.json.encode(piece)[1:-1])
    return cast(list[T], msgspec.Raw(b"[" + b",".join(pieces) + b"]"))


def prompt_scores(
    token_ids: Sequence[int], found: PromptLogprobs, count: int, token_text: Callable[[int], str]
) -> PromptScores:
    """Of all tokens of a prompt, with this many of the most likely ones; encoded."""

    def token(token_id: int, logprob: float, rank: int) -> PromptToken:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": token_text(token_id)}

    def scores() -> Iterator[dict[str, PromptToken] | None]:
        yield None
        ranks = np.frombuffer(found.ranks, "<i4")
        for entry, rank in zip(entries(token_ids, found, count), ranks, strict=True):
            tops = {str(top): token(top, value, place) for place, (top, value) in enumerate(entry.top, start=1)}
            yield {str(entry.token_id): token(entry.token_id, entry.logprob, int(rank))} | tops

    return encoded(scores())


def _arrays(found: PromptLogprobs, count: int) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]:
    shape = len(found.ranks) // 4, found.num_top
    ids, values = np.frombuffer(found.top_token_ids, "<i4"), np.frombuffer(found.top_logprobs, "<f4")
    return np.frombuffer(found.logprobs, "<f4"), ids.reshape(shape)[:, :count], values.reshape(shape)[:, :count]
