"""Slot attention: prompts concatenated in rows, rows cut into slots; a slot attends to itself, block-diagonally.

Letters: N tokens of all rows, concatenated, S slots, T tokens of a slot, H query heads, K key/value heads,
G = H / K, D head_dim.

Source: TCB (ICPP 2022), equations 5, 6 and 8. A token attends to its own prompt, which is in one slot; the rest
of the slot is masked, and other slots are never read. One slot a row is pure ConcatBatching.

Operations: 4 * D * H for each of the S * T * T pairs of a slot, masked ones included, so that slots save what the
paper says. `ragged_attention` reads no other prompt's keys, and serves batches that are not packed. Bytes: at least
(2 * H + 2 * K) * N * D elements.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from exeplan.kernels.attention.online_softmax import BiasArguments, DistanceBias, attend, distance_bias
from exeplan.kernels.attention.ragged_attention import CONFIGS
from exeplan.kernels.kernel import MODEL_DTYPES, Kernel
from exeplan.kernels.language import heads_are_adjacent, jit, next_power_of_2, tl, upcast
from exeplan.kernels.to_device import to_device
from exeplan.kernels.tuning import Config, best_config


class Slots:
    """The range that each token of packed rows attends to, on a device; built once a batch and shared by all layers."""

    def __init__(
        self, num_tokens: int, slot_tokens: int, prompts: Iterable[tuple[int, int]], device: torch.device
    ) -> None:
        """`prompts` are first and, exclusive, last tokens among `num_tokens` of whole slots; the rest is padding."""
        assert num_tokens % slot_tokens == 0, "rows have a whole number of slots"
        self.num_tokens, self.slot_tokens = num_tokens, slot_tokens
        seen_N2 = np.zeros((num_tokens, 2), dtype=np.int32)
        for first, end in prompts:
            assert first // slot_tokens == (end - 1) // slot_tokens, "a prompt lies in one slot"
            seen_N2[first:end] = first, end
        self.seen_N2 = to_device(seen_N2, device)
        """The first and, exclusive, the last token that each attends to; (0, 0) for padding."""


def slot_attention(
    q_NHD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    slots: Slots,
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    bias: DistanceBias | None = None,
    config: Config | None = None,
) -> Tensor:
    """The attention of every token to its own prompt, `[N, H, D]`; zeros for padding.

    With `causal` a token attends to no later one, and with `window` to that many, including itself. The heads of a
    token must be adjacent; tokens may be strided, as in views of one product.
    """
    assert all(heads_are_adjacent(x) for x in (q_NHD, k_NKD, v_NKD))
    assert causal or window is None, "a window looks backwards"
    heads, head_dim = q_NHD.shape[1:]
    out_NHD = torch.empty(q_NHD.shape, dtype=q_NHD.dtype, device=q_NHD.device)
    if slots.num_tokens == 0:
        return out_NHD
    tensors = (q_NHD, q_NHD.stride(0), k_NKD, k_NKD.stride(0), v_NKD, v_NKD.stride(0), slots.seen_N2)
    arguments = _Arguments(*tensors, *(bias.arguments() if bias else BiasArguments()), scale, out_NHD)
    block_d = max(16, next_power_of_2(head_dim))
    constants = _Constants(
        heads, heads // k_NKD.shape[1], head_dim, block_d, bias is not None, causal, window, upcast(q_NHD.dtype)
    )

    def launch(config: Config) -> None:
        tiles = -(-slots.slot_tokens // config.rows)
        _slot[(slots.num_tokens // slots.slot_tokens * tiles, heads)](
            arguments,
            tiles,
            slots.slot_tokens,
            C=constants,
            ROWS=config.rows,
            COLUMNS=config.columns,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )

    key = (q_NHD.dtype, head_dim, causal, bias is not None, slots.slot_tokens <= 128)
    configs = CONFIGS.of(q_NHD.dtype, head_dim)
    launch(config or best_config("slot_attention", key, configs, launch, q_NHD.device))
    return out_NHD


def slot_attention_reference(
    q_NHD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    slots: Slots,
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    bias: DistanceBias | None = None,
) -> Tensor:
    """The same in plain PyTorch, slot by slot, in float32."""
    out_NHD = torch.zeros(q_NHD.shape, dtype=q_NHD.dtype, device=q_NHD.device)
    group = q_NHD.shape[1] // k_NKD.shape[1]
    for start in range(0, slots.num_tokens, slots.slot_tokens):
        here = slice(start, start + slots.slot_tokens)
        token_T = torch.arange(here.start, here.stop, device=q_NHD.device)
        first_T1, end_T1 = slots.seen_N2[here].split(1, 1)
        seen_TT = (token_T >= first_T1) & (token_T < end_T1)
        distance_TT = token_T - token_T[:, None]
        if causal:
            seen_TT &= distance_TT <= 0
        if window is not None:
            seen_TT &= distance_TT > -window
        real_T = (first_T1 < end_T1)[:, :, None]
        k_HTD, v_HTD = (
            torch.where(real_T, x[here].float(), 0).repeat_interleave(group, 1).transpose(0, 1) for x in (k_NKD, v_NKD)
        )
        score_HTT = torch.einsum("thd,hcd->htc", q_NHD[here].float(), k_HTD) * scale
        if bias is not None:
            score_HTT += bias.at(distance_TT)
        weight_HTT = score_HTT.masked_fill(~seen_TT, -torch.inf).softmax(-1).nan_to_num()
        out_NHD[here] = torch.einsum("htc,hcd->thd", weight_HTT, v_HTD).to(q_NHD.dtype)
    return out_NHD


class _Arguments(NamedTuple):
    """Arguments of the programs; None for an absent tensor."""

    q: Tensor
    q_stride: int
    k: Tensor
    k_stride: int
    v: Tensor
    v_stride: int
    seen: Tensor
    bias: Tensor | None
    bias_width: int | None
    bias_zero: int | None
    scale: float
    out: Tensor


class _Constants(NamedTuple):
    """Compile-time constants of the programs."""

    HEADS: int
    GROUP: int
    HEAD_DIM: int
    BLOCK_D: int
    BIASED: bool
    CAUSAL: bool
    WINDOW: int | None
    UPCAST: bool


@jit(do_not_specialize=["tiles", "slot_tokens"])
def _slot(a, tiles, slot_tokens, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """One tile of the queries of one slot, for one query head, over all keys of the slot."""
    head = tl.program_id(1)
    slot_start = (tl.program_id(0) // tiles) * slot_tokens
    slot_end = slot_start + slot_tokens
    kv_head = head // C.GROUP

    BLOCK_D: tl.constexpr = C.BLOCK_D
    m, d = slot_start + (tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    inside = m < slot_end
    first, end = tl.load(a.seen + m * 2, mask=inside, other=0), tl.load(a.seen + m * 2 + 1, mask=inside, other=0)
    real = (first < end)[:, None] & (d < C.HEAD_DIM)[None, :]
    query_row = m.to(tl.int64)[:, None]
    q = tl.load(a.q + query_row * a.q_stride + head * C.HEAD_DIM + d[None, :], mask=real, other=0.0)
    acc = tl.zeros([ROWS, BLOCK_D], dtype=tl.float32)
    top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)

    for start in range(slot_start, slot_end, COLUMNS):
        n = start + tl.arange(0, COLUMNS)
        there = n < slot_end
        # Padding behind a prompt is computed like any token, and may be anything: a weight of zero would not hide it.
        key_first = tl.load(a.seen + n * 2, mask=there, other=0)
        key_end = tl.load(a.seen + n * 2 + 1, mask=there, other=0)
        distance = n[None, :] - m[:, None]
        seen = (n[None, :] >= first[:, None]) & (n[None, :] < end[:, None])
        if C.CAUSAL:
            seen = seen & (distance <= 0)
            if C.WINDOW is not None:
                seen = seen & (distance > -C.WINDOW)
        wanted = (key_first < key_end)[:, None] & (d < C.HEAD_DIM)[None, :]
        key_row = n.to(tl.int64)[:, None]
        offset = kv_head * C.HEAD_DIM + d[None, :]
        k = tl.load(a.k + key_row * a.k_stride + offset, mask=wanted, other=0.0)
        v = tl.load(a.v + key_row * a.v_stride + offset, mask=wanted, other=0.0)
        bias = 0.0
        if C.BIASED:
            bias = distance_bias(a, head, distance, seen)
        acc, top, total = attend(acc, top, total, q, k, v, bias, seen, a.scale, C.UPCAST)

    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    ours = inside[:, None] & (d < C.HEAD_DIM)[None, :]
    tl.store(a.out + (query_row * C.HEADS + head) * C.HEAD_DIM + d[None, :], out, mask=ours)


KERNELS = (
    Kernel("slot_attention", slot_attention, "cuda", MODEL_DTYPES),
    Kernel("slot_attention", slot_attention_reference),
)
