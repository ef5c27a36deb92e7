"""The most likely token of each row of logits, and whether its logit is finite.

Letters: R rows, V tokens of the vocabulary, P parts of a row.

Bytes: 4 * V a row, read once; the only operations are comparisons. A row is cut into parts, so that a few rows fill the
device, and a second launch takes the best of the parts.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

import torch
from torch import Tensor

from exeplan.kernels.kernel import MODEL_DTYPES, Kernel
from exeplan.kernels.language import jit, next_power_of_2, tl

_PART = 16384
"""Tokens of a row that one program reads."""


def most_likely(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    """For each row the token of the largest logit, the first of equal ones (int64), and whether that logit is finite.

    A NaN anywhere in a row counts as the largest.
    """
    rows, size = logits_RV.shape
    assert logits_RV.is_contiguous()
    token_R = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    sound_R = torch.empty(rows, dtype=torch.bool, device=logits_RV.device)
    if not rows:
        return token_R, sound_R
    parts = -(-size // _PART)
    best_RP = torch.empty(rows, parts, dtype=torch.float32, device=logits_RV.device)
    place_RP = torch.empty(rows, parts, dtype=torch.int64, device=logits_RV.device)
    _best_of_part[(rows, parts)](logits_RV, size, best_RP, place_RP, PART=_PART, BLOCK=2048, num_warps=8)
    _best_of_row[(rows,)](best_RP, place_RP, token_R, sound_R, PARTS=parts, BLOCK=next_power_of_2(parts), num_warps=1)
    return token_R, sound_R


def most_likely_reference(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    top = logits_RV.max(dim=-1)
    return top.indices, top.values.isfinite()


@jit
def load_logits(row, i, size):
    """Logits, with NaN as the largest there is, and minus infinity behind the end."""
    value = tl.load(row + i, mask=i < size, other=float("-inf"))
    return tl.where(value != value, float("inf"), value)


@jit
def first_best(value, place):
    """The largest value and the first of its places."""
    best = tl.max(value, 0)
    return best, tl.min(tl.where(value == best, place, 0x7FFFFFFF), 0)


@jit
def best_in(row, low, high, size, BLOCK: tl.constexpr):
    """The largest of a row's logits from `low` to `high`, and its place."""
    best = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    place = low + tl.arange(0, BLOCK)
    for start in range(low, high, BLOCK):
        i = start + tl.arange(0, BLOCK)
        value = load_logits(row, i, size)
        place = tl.where(value > best, i, place)
        best = tl.maximum(best, value)
    return first_best(best, place)


@jit
def _best_of_part(logits, size, best, place, PART: tl.constexpr, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    low = part * PART
    value, where = best_in(logits + row * size, low, tl.minimum(low + PART, size), size, BLOCK)
    number = row * tl.num_programs(1) + part
    tl.store(best + number, value)
    tl.store(place + number, where)


@jit
def _best_of_row(best, place, token, sound, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    row, p = tl.program_id(0), tl.arange(0, BLOCK)
    value = tl.load(best + row * PARTS + p, mask=p < PARTS, other=float("-inf"))
    where = tl.load(place + row * PARTS + p, mask=p < PARTS, other=0x7FFFFFFF)
    value, where = first_best(value, where)
    tl.store(token + row, where)
    tl.store(sound + row, (value < float("inf")) & (value > float("-inf")))


KERNELS = (
    Kernel("most_likely", most_likely, "cuda", MODEL_DTYPES),
    Kernel("most_likely", most_likely_reference),
)
