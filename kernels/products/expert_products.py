"""Routed experts of a mixture: both products of every touched expert over the tokens that go to it, in one launch each.

Letters: N tokens, E hidden size, X experts held, k experts of a token, M = N * k pairs of token and expert, I inner
width of an expert, F = 2 * I, P rows of all experts with padding, B blocks of rows, O outputs.

Pairs are sorted by expert on the device, and the rows of each expert padded to whole blocks, of which a program has
one: it reads one expert's weight and nothing else, and blocks that no pair needs end at once. No shape depends on the
routes, so the passes can be captured in a CUDA graph, and no count goes to the host. The second product writes to the
place of its pair; each token then adds up its k rows.

Bytes: the weights of the touched experts, once a block of rows; inputs of k rows a token and k rows of float32 outputs.
Operations: 6 * M * E * I, and those of padding. Source: the sorting of blocks is that of vLLM's fused experts and
MegaBlocks (Gale et al. 2022). Not here: biases, quantized weights.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from typing import NamedTuple

import torch
from torch import Tensor

from exeplan.kernels.activation import gated_activation, gated_activation_reference
from exeplan.kernels.kernel import MODEL_DTYPES, Kernel
from exeplan.kernels.language import jit, tl, upcast

_FEW_ROWS, _MANY_ROWS = 16, 64
"""Of a block, for experts with few tokens each and with many."""
_COLUMNS, _INNER = 64, 64
_TOKENS = 2048
"""Tokens that are computed at a time: each has k rows of float32 outputs."""


class ExpertRows(NamedTuple):
    """Pairs sorted by expert."""

    pairs: Tensor
    """`[P]`, the pair of each row; M for padding."""
    experts: Tensor
    """`[B]`, the expert of each block of rows; X for blocks without any."""


def expert_mlp(
    x_NE: Tensor, weight_Nk: Tensor, expert_Nk: Tensor, up_XFE: Tensor, down_XEI: Tensor, kind: str, *, first: int = 0
) -> Tensor:
    """The sum of each token's gated blocks by weight, `[N, E]`: `down(activation(gate) * up)`, gate before up.

    Held are the experts from `first` on; what goes to others is left out. Weights are in float32.
    """
    parts = [slice(start, start + _TOKENS) for start in range(0, max(len(x_NE), 1), _TOKENS)]
    found = [_of_some(x_NE[p], weight_Nk[p], expert_Nk[p], up_XFE, down_XEI, kind, first) for p in parts]
    return found[0] if len(found) == 1 else torch.cat(found)


def expert_mlp_reference(
    x_NE: Tensor, weight_Nk: Tensor, expert_Nk: Tensor, up_XFE: Tensor, down_XEI: Tensor, kind: str, *, first: int = 0
) -> Tensor:
    out_NE = torch.zeros_like(x_NE, dtype=torch.float32)
    for number, (up_FE, down_EI) in enumerate(zip(up_XFE, down_XEI, strict=True), start=first):
        weight_N1 = (weight_Nk * (expert_Nk == number)).sum(1, keepdim=True)
        out_NE += weight_N1 * (gated_activation_reference(x_NE @ up_FE.t(), kind) @ down_EI.t()).float()
    return out_NE.to(x_NE.dtype)


def _of_some(
    x_NE: Tensor, weight_Nk: Tensor, expert_Nk: Tensor, up_XFE: Tensor, down_XEI: Tensor, kind: str, first: int
) -> Tensor:
    (tokens, hidden), num_pairs, num_experts = x_NE.shape, expert_Nk.numel(), len(up_XFE)
    block = _FEW_ROWS if num_pairs <= _FEW_ROWS * num_experts else _MANY_ROWS
    rows = rows_by_expert(expert_Nk, first=first, num_experts=num_experts, block=block)
    wide_PF = x_NE.new_zeros(len(rows.pairs), up_XFE.shape[1])
    _product(x_NE, up_XFE, wide_PF, rows, per_token=expert_Nk.shape[1], num_pairs=num_pairs)
    inner_PI = gated_activation(wide_PF, kind)
    out_ME = torch.zeros(num_pairs, hidden, dtype=torch.float32, device=x_NE.device)
    _product(inner_PI, down_XEI, out_ME, rows, weight_M=weight_Nk.flatten(), num_pairs=num_pairs)
    return out_ME.view(tokens, expert_Nk.shape[1], hidden).sum(1).to(x_NE.dtype)


def rows_by_expert(expert_Nk: Tensor, *, first: int, num_experts: int, block: int) -> ExpertRows:
    """Sorts pairs by expert, without waiting for the device; as many blocks as any routes may need."""
    num_pairs, device = expert_Nk.numel(), expert_Nk.device
    expert_M = expert_Nk.flatten() - first
    expert_M = torch.where((expert_M >= 0) & (expert_M < num_experts), expert_M, num_experts)  # Elsewhere: the last.
    order_M = expert_M.argsort(stable=True)
    sorted_M = expert_M[order_M]
    count_X = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
    count_X.scatter_add_(0, expert_M, torch.ones_like(expert_M))
    padded_X = (count_X[:-1] + block - 1) // block * block
    end_X = padded_X.cumsum(0)
    num_blocks = (num_pairs + min(num_pairs, num_experts) * (block - 1)) // block
    size = num_blocks * block
    start_X = torch.cat([end_X - padded_X, end_X.new_full((1,), size)])  # Pairs elsewhere go behind all rows.
    place_M = start_X[sorted_M] + torch.arange(num_pairs, device=device) - (count_X.cumsum(0) - count_X)[sorted_M]
    pair_P = torch.full((size + num_pairs,), num_pairs, dtype=torch.int64, device=device)
    pair_P[place_M] = order_M
    begin_B = torch.arange(0, size, block, device=device)
    return ExpertRows(pair_P[:size], torch.searchsorted(end_X, begin_B, right=True))


def _product(
    x: Tensor,
    weight_XOI: Tensor,
    out: Tensor,
    rows: ExpertRows,
    *,
    num_pairs: int,
    per_token: int = 0,
    weight_M: Tensor | None = None,
) -> None:
    """Of rows of `x`: those of the pairs' tokens, to the rows' places; or, by weight, from there to the pairs'."""
    num_experts, outputs, inputs = weight_XOI.shape
    if not len(rows.experts) or not outputs:
        return
    assert weight_XOI.is_contiguous()
    assert x.stride(1) == 1, "the elements of a row must be adjacent"
    block = len(rows.pairs) // len(rows.experts)
    _expert_product[(len(rows.experts), -(-outputs // _COLUMNS))](
        x,
        x.stride(0),
        weight_XOI,
        out,
        out if weight_M is None else weight_M,
        rows.pairs,
        rows.experts,
        num_pairs,
        num_experts,
        outputs,
        inputs,
        PER_TOKEN=per_token,
        UPCAST=upcast(x.dtype),
        ROWS=block,
        COLUMNS=_COLUMNS,
        INNER=_INNER if x.dtype != torch.float32 else _INNER // 2,
        num_warps=4,
    )


@jit(do_not_specialize=["num_pairs"])
def _expert_product(
    x,
    stride,
    weight,
    out,
    scale,
    pair,
    expert,
    num_pairs,
    num_experts,
    outputs,
    inputs,
    PER_TOKEN: tl.constexpr,
    UPCAST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    own = tl.load(expert + tl.program_id(0)).to(tl.int64)
    if own < num_experts:
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        number = tl.load(pair + row)
        there = number < num_pairs
        o = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
        if PER_TOKEN:
            source, target = number // PER_TOKEN, row
        else:
            source, target = row, number
        acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for begin in range(0, inputs, INNER):
            i = begin + tl.arange(0, INNER)
            part = (i < inputs)[None, :]
            a = tl.load(x + source[:, None] * stride + i[None, :], mask=there[:, None] & part, other=0.0)
            b = tl.load(
                weight + (own * outputs + o[:, None]) * inputs + i[None, :],
                mask=(o < outputs)[:, None] & part,
                other=0.0,
            )
            if UPCAST:
                a, b = a.to(tl.float32), b.to(tl.float32)
            acc += tl.dot(a, tl.trans(b), input_precision="ieee")
        if not PER_TOKEN:
            acc = acc * tl.load(scale + number, mask=there, other=0.0)[:, None]
        result = out + target[:, None] * outputs + o[None, :]
        tl.store(result, acc.to(out.dtype.element_ty), mask=there[:, None] & (o < outputs)[None, :])


KERNELS = (Kernel("expert_mlp", expert_mlp, "cuda", MODEL_DTYPES), Kernel("expert_mlp", expert_mlp_reference))
