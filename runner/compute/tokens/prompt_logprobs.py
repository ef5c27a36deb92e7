"""Log-probabilities of prompts: what the model says of each token of a prompt, given those before it.

A pass that prefills reports the tokens that follow the positions which it computes. The output head runs over these
positions in blocks, and of their logits only the tokens' own and the largest few are kept, so that the memory does not
grow with the prompt. What is sampled has logits of its own: no other request of the pass gets different ones.

Letters: N tokens of the flat batch, T reported positions, V vocabulary, K most likely tokens, E hidden size.
Not here: the parts of a prompt that several passes compute (`runner/engine/reported_prompts.py`), and encoder-decoder
models, which do not predict their prompts.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from exeplan.kernels.to_device import to_device

_BLOCK_ROWS, _BLOCK_LOGITS = 256, 1 << 24
"""The most positions, and logits, of one block: 64 MiB in float32."""


class ReportedSpan(NamedTuple):
    """Positions of one prompt in a pass."""

    request_id: str
    start: int
    """The first position, in the prompt."""
    first_row: int
    """Its row of the flat batch; the others follow."""
    following: Sequence[int]
    """The token after each position; one fewer than positions where these reach the end of the prompt."""
    num_top: int
    """Most likely tokens to report for each position."""


class PromptPart(NamedTuple):
    """What one pass reports of a prompt, on the host or being copied to it."""

    start: int
    """The position before the first token that it reports."""
    logprobs: Tensor
    """float32 `[T]`."""
    ranks: Tensor
    """int32 `[T]`: 1 where no token is more likely."""
    top_token_ids: Tensor
    """int32 `[T, K]`, the most likely first."""
    top_logprobs: Tensor
    """float32 `[T, K]`."""


def report_prompts(
    hidden_NE: Tensor, spans: Sequence[ReportedSpan], head: Callable[[Tensor], Tensor], *, vocab_size: int
) -> dict[str, PromptPart]:
    """By request id. `head` returns logits `[T, V]` in float32; all ranks of a stage call it alike."""
    device, lengths = hidden_NE.device, [len(span.following) for span in spans]
    rows = [np.arange(span.first_row, span.first_row + len(span.following)) for span in spans]
    row_T = to_device(np.concatenate(rows).astype(np.int64), device)
    token_T = to_device(np.array([token for span in spans for token in span.following], dtype=np.int64), device)
    count = min(max(span.num_top for span in spans), vocab_size)
    size = max(min(_BLOCK_ROWS, _BLOCK_LOGITS // vocab_size), 1)
    blocks = zip(torch.split(row_T, size), torch.split(token_T, size), strict=True)
    found = [_most_likely(head(hidden_NE[row_T]), token_T, count) for row_T, token_T in blocks if len(row_T)]
    found = found or [_nothing(count, device)]
    joined = [torch.cat(parts).to("cpu", non_blocking=True) for parts in zip(*found, strict=True)]
    pieces = zip(*(torch.split(tensor, lengths) for tensor in joined), strict=True)
    return {
        span.request_id: PromptPart(span.start, own_T, rank_T, top_TK[:, : span.num_top], value_TK[:, : span.num_top])
        for span, (own_T, rank_T, top_TK, value_TK) in zip(spans, pieces, strict=True)
    }


def _most_likely(logits_TV: Tensor, token_T: Tensor, count: int) -> tuple[Tensor, ...]:
    """The fields of a `PromptPart`. A token among the most likely has the same log-probability, to the bit, there."""
    total_T1 = logits_TV.logsumexp(-1, keepdim=True)
    chosen_T1 = logits_TV.gather(1, token_T[:, None])
    rank_T = (logits_TV > chosen_T1).sum(-1, dtype=torch.int32) + 1
    top = logits_TV.topk(count)
    return (chosen_T1 - total_T1)[:, 0], rank_T, top.indices.int(), top.values - total_T1


def _nothing(count: int, device: torch.device) -> tuple[Tensor, ...]:
    """Of no positions."""
    logits_TV = torch.zeros(0, max(count, 1), device=device)
    return _most_likely(logits_TV, torch.zeros(0, dtype=torch.int64, device=device), count)
