"""Attention in plain PyTorch: over the fresh keys of a prompt, and over cached keys for one query token a sequence.

Letters: B sequences, T query tokens, H query heads, K key/value heads, G = H / K, D head_dim, C context tokens, R
rows of the cache (one head of one token each), P pairs of a query head and a cached row.

Query head h reads key/value head h // G. Bytes of decode: 2 * C * K * D elements a sequence, read once.

On a CPU one decode iteration of all sequences is three operations however long and ragged they are: the scores are
a product sampled at the wanted pairs, the softmax is dense per length, the weighted sum of values is a weighted
embedding bag. Against a batched product per sequence that halves the time, because neither operation copies, pads
or transposes. Not here: where keys and values lie (`runner/kv_cache.py`).
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

_WINDOW_CHUNK = 256


def prefill_attention(
    q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, *, scale: float, window: int | None = None
) -> Tensor:
    """Causal attention of whole sequences, `[B, T, H, D]`; token i sees the `window` tokens up to and with itself."""
    q_BHTD, k_BHTD, v_BHTD = q_BTHD.transpose(1, 2), k_BTKD.transpose(1, 2), v_BTKD.transpose(1, 2)
    group = q_BHTD.shape[1] // k_BHTD.shape[1]
    if group > 1:
        k_BHTD, v_BHTD = k_BHTD.repeat_interleave(group, 1), v_BHTD.repeat_interleave(group, 1)
    if window is None or window >= q_BHTD.shape[2]:
        return F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True, scale=scale).transpose(1, 2)
    chunks = [
        _windowed_chunk(q_BHTD, k_BHTD, v_BHTD, scale=scale, window=window, start=start)
        for start in range(0, q_BHTD.shape[2], _WINDOW_CHUNK)
    ]
    return torch.cat(chunks, 2).transpose(1, 2)


def _windowed_chunk(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, *, scale: float, window: int, start: int) -> Tensor:
    """The queries `start .. start + _WINDOW_CHUNK`, against the keys that any of them sees."""
    stop = min(start + _WINDOW_CHUNK, q_BHTD.shape[2])
    first = max(0, start - window + 1)
    query_T1 = torch.arange(start, stop, device=q_BHTD.device)[:, None]
    key_C = torch.arange(first, stop, device=q_BHTD.device)
    seen_TC = (key_C <= query_T1) & (key_C > query_T1 - window)
    return F.scaled_dot_product_attention(
        q_BHTD[:, :, start:stop], k_BHTD[:, :, first:stop], v_BHTD[:, :, first:stop], attn_mask=seen_TC, scale=scale
    )


class CachedRows:
    """Which rows of the cache each sequence of a decode batch reads; worked out once and used by every layer."""

    def __init__(self, rows: Sequence[NDArray[np.int64]], num_heads: int, num_rows: int, like: Tensor) -> None:
        """`rows[b]` are a sequence's rows `[K, C]` in a cache of `num_rows` rows, of the dtype and device of `like`."""
        self.num_heads = num_heads
        self.sampled = like.device.type == "cpu" and like.dtype == torch.float32
        if not self.sampled:
            self.rows = [torch.from_numpy(rows_KC).to(like.device) for rows_KC in rows]
            return
        group = num_heads // rows[0].shape[0]
        contexts = [rows_KC.shape[1] for rows_KC in rows]
        row_P = np.concatenate([np.repeat(rows_KC, group, 0).ravel() for rows_KC in rows])
        ends = np.concatenate(([0], np.repeat(contexts, num_heads).cumsum()))
        self.row_P = torch.from_numpy(row_P.astype(np.int32))
        self.ends = torch.from_numpy(ends.astype(np.int32))
        shape = (len(rows) * num_heads, num_rows)
        self.pairs = _sparse(self.ends, self.row_P, shape)
        self.scores = _sparse(self.ends, self.row_P, shape)
        self.weight_P = torch.empty(len(row_P))
        self.softmaxes = _views(contexts, num_heads, self.scores.values(), self.weight_P)


def decode_attention(q_BHD: Tensor, keys_RD: Tensor, values_RD: Tensor, cached: CachedRows, *, scale: float) -> Tensor:
    """One query token a sequence over its cached keys and values, `[B, H, D]`."""
    if not cached.sampled:
        return _decode_gathered(q_BHD, keys_RD, values_RD, cached.rows, scale)
    batch, heads, head_dim = q_BHD.shape
    torch.sparse.sampled_addmm(
        cached.pairs, q_BHD.reshape(-1, head_dim), keys_RD.t(), beta=0.0, alpha=scale, out=cached.scores
    )
    for scores, weights in cached.softmaxes:
        torch.softmax(scores, -1, out=weights)
    out = F.embedding_bag(
        cached.row_P, values_RD, cached.ends, mode="sum", per_sample_weights=cached.weight_P, include_last_offset=True
    )
    return out.view(batch, heads, head_dim)


def _decode_gathered(q_BHD: Tensor, keys_RD: Tensor, values_RD: Tensor, rows: list[Tensor], scale: float) -> Tensor:
    """Sequence by sequence over copies of its keys and values: for devices and dtypes without sampled products."""
    heads, head_dim = q_BHD.shape[1:]
    outputs = []
    for q_HD, rows_KC in zip(q_BHD, rows, strict=True):
        q_KGD = q_HD.reshape(rows_KC.shape[0], -1, head_dim)
        outputs.append(F.scaled_dot_product_attention(q_KGD, keys_RD[rows_KC], values_RD[rows_KC], scale=scale))
    return torch.stack(outputs).view(-1, heads, head_dim)


def _views(contexts: Sequence[int], heads: int, scores_P: Tensor, weight_P: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Scores and weights as matrices, one for every run of sequences of equal length."""
    runs = [(length, heads * len(list(run))) for length, run in itertools.groupby(contexts)]
    sizes = [length * rows for length, rows in runs]
    pairs = zip(torch.split_with_sizes(scores_P, sizes), torch.split_with_sizes(weight_P, sizes), runs, strict=True)
    return [(scores.view(rows, length), weights.view(rows, length)) for scores, weights, (length, rows) in pairs]


def _sparse(ends: Tensor, columns: Tensor, shape: tuple[int, int]) -> Tensor:
    _accept_beta_notice()
    return torch.sparse_csr_tensor(ends, columns, torch.zeros(len(columns)), size=shape, check_invariants=False)


@functools.cache
def _accept_beta_notice() -> None:
    """torch says once per process that sparse CSR is in beta; a user of ours can do nothing about it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.sparse_csr_tensor([0, 0], [], [], size=(1, 1))
