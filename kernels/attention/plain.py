"""Attention in plain PyTorch: prompts, chunks, packed slots, and decode (one query token a sequence over cached keys).

Letters: B sequences, T query tokens, H query heads, K key/value heads, G = H / K, D head_dim, C context tokens, R
rows of the cache (one head of one token each), P pairs of a query head and a cached row, X = T + C - 1 distances, S
slots of packed rows.

Query head h reads key/value head h // G. Bytes of decode: 2 * C * K * D elements a sequence, read once.

On a CPU one decode iteration of all sequences is one compiled kernel (`native`). Without it, in float32, it is three
operations, whatever their lengths: the scores are a matrix product sampled at the pairs of query and key, the softmax
is dense per length, the weighted sum of values is a weighted embedding bag. That takes half the time of a batched
product per sequence, because no operation copies, pads or transposes. Not here: the location of keys and values
(`runner/compute/passes/kv_cache.py`).
"""

import functools
import itertools
import warnings
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name the whole field uses
from numpy.typing import NDArray
from torch import Tensor

from exeplan.kernels import native

_QUERIES = 256
"""Queries of a causal prompt that run at a time, against the keys that any of them attends to."""

_ADDED = 1 << 18
"""Elements of a bias that are expanded to a matrix at a time."""


def prefill_attention(
    q_BTHD: Tensor,
    k_BCKD: Tensor,
    v_BCKD: Tensor,
    *,
    scale: float,
    window: int | None = None,
    sink_H: Tensor | None = None,
) -> Tensor:
    """Causal attention of the last T of C tokens, `[B, T, H, D]`; each attends to `window` tokens, including itself.

    `sink_H` (float32) are scores that take a share of every softmax and add nothing.
    """
    q_BHTD, k_BHCD, v_BHCD = _by_head(q_BTHD, k_BCKD, v_BCKD)
    queries, context = q_BHTD.shape[2], k_BHCD.shape[2]
    if queries == context and (window is None or window >= context):
        return _attend(q_BHTD, k_BHCD, v_BHCD, scale=scale, sink_HT=_by_query(sink_H), causal=True).transpose(1, 2)
    parts = [
        _causal_part(
            q_BHTD[:, :, start : start + _QUERIES],
            k_BHCD,
            v_BHCD,
            context - queries + start,
            scale=scale,
            window=window,
            sink_H=sink_H,
        )
        for start in range(0, queries, _QUERIES)
    ]
    return torch.cat(parts, 2).transpose(1, 2)


def _causal_part(
    q_BHTD: Tensor,
    k_BHCD: Tensor,
    v_BHCD: Tensor,
    position: int,
    *,
    scale: float,
    window: int | None,
    sink_H: Tensor | None,
) -> Tensor:
    """The queries of the tokens from `position` on, against the keys that any of them attends to."""
    stop = position + q_BHTD.shape[2]
    first = 0 if window is None else max(0, position - window + 1)
    query_T1 = torch.arange(position, stop, device=q_BHTD.device)[:, None]
    key_C = torch.arange(first, stop, device=q_BHTD.device)
    seen_TC = key_C <= query_T1
    if window is not None:
        seen_TC &= key_C > query_T1 - window
    k_BHCD, v_BHCD = k_BHCD[:, :, first:stop], v_BHCD[:, :, first:stop]
    return _attend(q_BHTD, k_BHCD, v_BHCD, scale=scale, sink_HT=_by_query(sink_H), mask=seen_TC)


def _attend(
    q_BHTD: Tensor,
    k_BHCD: Tensor,
    v_BHCD: Tensor,
    *,
    scale: float,
    sink_HT: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """`[B, H, T, D]`; a mask is of what is seen, or added to scores."""
    if sink_HT is None:
        return F.scaled_dot_product_attention(q_BHTD, k_BHCD, v_BHCD, attn_mask=mask, is_causal=causal, scale=scale)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=q_BHTD.dtype).masked_fill_(~mask, -torch.inf)
    out_BHTD, log_sum_BHT = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_BHTD, k_BHCD, v_BHCD, 0.0, causal, attn_mask=mask, scale=scale
    )
    return _with_sinks(out_BHTD, log_sum_BHT, sink_HT)


def _by_query(sink_H: Tensor | None) -> Tensor | None:
    """`[H, 1]`, the same for all queries of a head."""
    return None if sink_H is None else sink_H[:, None]


def _with_sinks(out: Tensor, log_sum: Tensor, sink: Tensor) -> Tensor:
    """The output of a softmax in whose sum, known by its logarithm, the sinks take part."""
    return out.mul_(torch.sigmoid(log_sum - sink)[..., None].to(out.dtype))


def full_attention(
    q_BTHD: Tensor, k_BCKD: Tensor, v_BCKD: Tensor, *, scale: float, bias_HX: Tensor | None = None
) -> Tensor:
    """Attention of every query to every key, `[B, T, H, D]`.

    `bias_HX[:, T - 1 + j - i]` is added to the score of query i and key j. It depends only on their distance, so it is
    an overlapping view of one row a head, without a matrix.
    """
    q_BHTD, k_BHCD, v_BHCD = _by_head(q_BTHD, k_BCKD, v_BCKD)
    if bias_HX is None:
        return F.scaled_dot_product_attention(q_BHTD, k_BHCD, v_BHCD, scale=scale).transpose(1, 2)
    # The view of each query starts one element after that of the next query.
    bias_HTC = bias_HX.unfold(1, k_BHCD.shape[2], 1)
    out = F.scaled_dot_product_attention(q_BHTD.flip(2), k_BHCD, v_BHCD, attn_mask=bias_HTC[None], scale=scale)
    return out.flip(2).transpose(1, 2)


def slot_attention(
    q_STHD: Tensor,
    k_STKD: Tensor,
    v_STKD: Tensor,
    mask_STT: Tensor,
    *,
    scale: float,
    bias_HX: Tensor | None = None,
    sink_H: Tensor | None = None,
) -> Tensor:
    """Attention of every slot to itself, `[S, T, H, D]`, with the mask added to its scores, and a bias by distance.

    `bias_HX[:, T - 1 + j - i]` is that of query i and key j. A few slots run at a time, so that mask and bias stay in
    the CPU's cache.
    """
    q_SHTD, k_SHTD, v_SHTD = _by_head(q_STHD, k_STKD, v_STKD)
    slots, heads, tokens = q_SHTD.shape[:3]
    if bias_HX is None:
        mask_S1TT = mask_STT[:, None]
        return _attend(q_SHTD, k_SHTD, v_SHTD, scale=scale, sink_HT=_by_query(sink_H), mask=mask_S1TT).transpose(1, 2)
    bias_HTT = bias_HX.unfold(1, tokens, 1).flip(1)
    part = max(1, _ADDED // (heads * tokens * tokens))
    outputs = []
    for start in range(0, slots, part):
        some = slice(start, start + part)
        added_SHTT = mask_STT[some, None] + bias_HTT
        outputs.append(
            F.scaled_dot_product_attention(q_SHTD[some], k_SHTD[some], v_SHTD[some], attn_mask=added_SHTT, scale=scale)
        )
    return torch.cat(outputs).transpose(1, 2)


def _by_head(q_BTHD: Tensor, k_BCKD: Tensor, v_BCKD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Heads before tokens, with a key and value head for every query head."""
    q_BHTD, k_BHCD, v_BHCD = q_BTHD.transpose(1, 2), k_BCKD.transpose(1, 2), v_BCKD.transpose(1, 2)
    group = q_BHTD.shape[1] // k_BHCD.shape[1]
    if group > 1:
        k_BHCD, v_BHCD = k_BHCD.repeat_interleave(group, 1), v_BHCD.repeat_interleave(group, 1)
    return q_BHTD, k_BHCD, v_BHCD


class CachedRows:
    """The rows of the cache that each sequence of a decode batch reads; computed once and shared by all layers."""

    def __init__(
        self,
        slot_X: NDArray[np.int64],
        contexts: Sequence[int],
        *,
        num_heads: int,
        num_kv_heads: int,
        num_slots: int,
        like: Tensor,
        biases: Sequence[Tensor] | None = None,
        shared: bool = False,
    ) -> None:
        """`slot_X` are the slots of all sequences, concatenated, `contexts[b]` of them of sequence b.

        Slot s of head k is row `k * num_slots + s` of tables of the dtype and device of `like`. `biases[b]`, `[H, C]`,
        are added to a sequence's scores. `shared`: all heads read one row a token, which is key and value; a product
        over a copy of them is then faster than samples, which would read it once a head.
        """
        self.num_heads, self.biases, self.shared = num_heads, biases, shared
        self.num_kv_heads = num_kv_heads
        self.native = not shared and self._takes_native(like, contexts)
        if self.native:
            self.slot_X, self.context_B = torch.from_numpy(slot_X), torch.tensor(contexts)
            self.longest = max(contexts)
            self.bias = None if biases is None else torch.cat([bias_HC.flatten().float() for bias_HC in biases])
            return
        self.sampled = like.device.type == "cpu" and like.dtype == torch.float32 and not shared
        if not self.sampled:
            heads_K1 = np.arange(num_kv_heads, dtype=np.int64)[:, None] * num_slots
            parts = np.split(slot_X, np.cumsum(contexts)[:-1])
            self.rows = [torch.from_numpy(heads_K1 + slot_C).to(like.device) for slot_C in parts]
            return
        count_BH = np.repeat(np.asarray(contexts, dtype=np.int64), num_heads)
        ends = np.concatenate(([0], count_BH.cumsum()))
        first_BH = np.repeat(np.cumsum(contexts) - contexts, num_heads)
        head_BH = np.tile(np.arange(num_heads) // (num_heads // num_kv_heads) * num_slots, len(contexts))
        slot_P = slot_X[np.arange(ends[-1]) + np.repeat(first_BH - ends[:-1], count_BH)]
        self.row_P = torch.from_numpy((slot_P + np.repeat(head_BH, count_BH)).astype(np.int32))
        self.ends = torch.from_numpy(ends.astype(np.int32))
        shape = (len(contexts) * num_heads, num_kv_heads * num_slots)
        bias_P = torch.zeros(len(slot_P)) if biases is None else torch.cat([bias_HC.flatten() for bias_HC in biases])
        self.pairs = _sparse(self.ends, self.row_P, bias_P, shape)
        self.scores = _sparse(self.ends, self.row_P, torch.zeros(len(slot_P)), shape)
        self.weight_P = torch.empty(len(slot_P))
        self.softmaxes = _views(contexts, num_heads, self.scores.values(), self.weight_P)

    def _takes_native(self, like: Tensor, contexts: Sequence[int]) -> bool:
        return native.attends(like) and all(contexts)


def decode_attention(
    q_BHD: Tensor,
    keys_RD: Tensor,
    values_RD: Tensor,
    cached: CachedRows,
    *,
    scale: float,
    sink_H: Tensor | None = None,
) -> Tensor:
    """One query token a sequence over its cached keys and values, `[B, H, D]`; sinks as in `prefill_attention`."""
    if cached.native:
        return native.decode(
            q_BHD,
            keys_RD,
            values_RD,
            cached.slot_X,
            cached.context_B,
            longest=cached.longest,
            kv_heads=cached.num_kv_heads,
            scale=scale,
            bias=cached.bias,
            sink_H=sink_H,
        )
    if not cached.sampled:
        return _decode_gathered(q_BHD, keys_RD, values_RD, cached, scale, sink_H)
    batch, heads, head_dim = q_BHD.shape
    beta = 0.0 if cached.biases is None else 1.0
    torch.sparse.sampled_addmm(
        cached.pairs, q_BHD.reshape(-1, head_dim), keys_RD.t(), beta=beta, alpha=scale, out=cached.scores
    )
    for scores, weights in cached.softmaxes:
        torch.softmax(scores, -1, out=weights)
    out = F.embedding_bag(
        cached.row_P, values_RD, cached.ends, mode="sum", per_sample_weights=cached.weight_P, include_last_offset=True
    )
    out_BHD = out.view(batch, heads, head_dim)
    if sink_H is None:
        return out_BHD
    log_sum_BH = torch.cat([scores.logsumexp(-1) for scores, _ in cached.softmaxes]).view(batch, heads)
    return _with_sinks(out_BHD, log_sum_BH, sink_H)


def _decode_gathered(
    q_BHD: Tensor, keys_RD: Tensor, values_RD: Tensor, cached: CachedRows, scale: float, sink_H: Tensor | None
) -> Tensor:
    """Each sequence over copies of its keys and values, for devices and dtypes without sampled products."""
    heads, head_dim = q_BHD.shape[1:]
    outputs = []
    biases: Sequence[Tensor | None] = cached.biases or [None] * len(q_BHD)
    for q_HD, rows_KC, bias_HC in zip(q_BHD, cached.rows, biases, strict=True):
        kv_heads, context = rows_KC.shape
        q_KGD = q_HD.reshape(kv_heads, -1, head_dim)
        bias = None if bias_HC is None else bias_HC.reshape(kv_heads, -1, context)
        keys_KCD = keys_RD[rows_KC]
        values_KCD = keys_KCD if cached.shared else values_RD[rows_KC]
        sink_KG = None if sink_H is None else sink_H.view(kv_heads, -1)
        inputs = (q_KGD[None], keys_KCD[None], values_KCD[None])
        outputs.append(_attend(*inputs, scale=scale, sink_HT=sink_KG, mask=bias)[0])
    return torch.stack(outputs).view(-1, heads, head_dim)


def _views(contexts: Sequence[int], heads: int, scores_P: Tensor, weight_P: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Scores and weights as matrices, one for every run of sequences of equal length."""
    runs = [(length, heads * len(list(run))) for length, run in itertools.groupby(contexts)]
    sizes = [length * rows for length, rows in runs]
    pairs = zip(torch.split_with_sizes(scores_P, sizes), torch.split_with_sizes(weight_P, sizes), runs, strict=True)
    return [(scores.view(rows, length), weights.view(rows, length)) for scores, weights, (length, rows) in pairs]


def _sparse(ends: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    _accept_beta_notice()
    return torch.sparse_csr_tensor(ends, columns, values, size=shape, check_invariants=False)


@functools.cache
def _accept_beta_notice() -> None:
    """Suppresses torch's warning, once per process, that sparse CSR is in beta."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.sparse_csr_tensor([0, 0], [], [], size=(1, 1))
