"""What the model says of the tokens of a prompt, as answers have it: OpenAI's entries, and vLLM's `prompt_logprobs`."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from typing_extensions import TypedDict

from exeplan.runner.ipc.messages import Logprob, PromptLogprobs

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have; OpenAI's value."""


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
    logprobs, (top_ids, top_logprobs) = np.frombuffer(found.logprobs, "<f4").tolist(), _tops(found, count)
    for token_id, logprob, ids, values in zip(token_ids[1:], logprobs, top_ids, top_logprobs, strict=True):
        yield Logprob(token_id, logprob, tuple(zip(ids, values, strict=True)))


def prompt_scores(
    token_ids: Sequence[int], found: PromptLogprobs, count: int, token_text: Callable[[int], str]
) -> PromptScores:
    """Of all tokens of a prompt, with this many of the most likely ones."""

    def token(token_id: int, logprob: float, rank: int) -> PromptToken:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": token_text(token_id)}

    scores: PromptScores = [None]
    ranks = np.frombuffer(found.ranks, "<i4").tolist()
    for entry, rank in zip(entries(token_ids, found, count), ranks, strict=True):
        tops = {str(top): token(top, value, place) for place, (top, value) in enumerate(entry.top, start=1)}
        scores.append({str(entry.token_id): token(entry.token_id, entry.logprob, rank)} | tops)
    return scores


def _tops(found: PromptLogprobs, count: int) -> tuple[list[list[int]], list[list[float]]]:
    shape = len(found.ranks) // 4, found.num_top
    ids, values = (np.frombuffer(found.top_token_ids, "<i4"), np.frombuffer(found.top_logprobs, "<f4"))
    return ids.reshape(shape)[:, :count].tolist(), values.reshape(shape)[:, :count].tolist()
