"""Step: one pass over the layers as tensors, with all that the layers share computed once.

Letters: N tokens of the flat batch (sequences with several new tokens first, then those with one), R sequences that
need logits, M = H + 2K heads of queries, keys and values, T new tokens and C context tokens of a sequence, D head_dim.

Every matrix product runs over the flat batch; only `attend` knows where a sequence begins. Here are the layers that
cache keys and values; `encoder.py` has the prompts of an encoder.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from exeplan.kernels.attention.plain import CachedRows, decode_attention, full_attention, prefill_attention
from exeplan.runner.compute.blocks.layers import AttentionShape, LatentVectors, PositionBias
from exeplan.runner.compute.passes.kv_cache import KVCache


class StepSequence(NamedTuple):
    """One sequence in a step: its tokens `start .. end` are computed; those before are cached."""

    request_id: str
    start: int
    end: int
    num_prompt_tokens: int
    num_encoded: int = 0
    """Tokens at its beginning that went through an encoder: only cross attention reads their slots, and positions are
    counted from their end."""

    @property
    def is_single(self) -> bool:
        return self.end - self.start == 1

    def seen(self, shape: AttentionShape) -> tuple[int, int]:
        """The first and, exclusive, the last token that its new tokens attend to."""
        if shape.cross:
            return 0, self.num_encoded
        first = self.num_encoded if shape.window is None else max(self.num_encoded, self.start + 1 - shape.window)
        return first, self.end


class Step:
    """Built once for a batch and passed through all layers."""

    def __init__(
        self,
        cache: KVCache,
        spans: Sequence[StepSequence],
        singles: Sequence[StepSequence],
        *,
        token_ids: Mapping[str, Sequence[int]],
        wanted: Sequence[int] | None = None,
        pad_to: int = 0,
    ) -> None:
        """Every sequence must already have its blocks; `singles` compute one token each, `spans` any number.

        `wanted` are the sequences, by their index in `[*spans, *singles]`, whose last token needs logits; None for all.
        `pad_to` > 0 pads spans on the right to that length.
        """
        self._cache, self._spans, self._singles = cache, spans, singles
        self._padded = [max(sequence.end - sequence.start, pad_to) for sequence in spans]
        self._cached: dict[tuple[int, int | None, bool, PositionBias | None], CachedRows] = {}
        self.num_span_tokens = sum(self._padded)
        self.num_tokens = self.num_span_tokens + len(singles)
        starts = np.cumsum([0, *self._padded], dtype=np.int64)
        self.first_rows: Sequence[int] | NDArray[np.int64] = starts[:-1]
        """Of each span: the row of the flat batch with its first token."""

        tokens, positions, lengths, slots = ([_NO_INTEGERS] for _ in range(4))
        for sequence, padded in zip(spans, self._padded, strict=True):
            tokens.append(_padded_tokens(token_ids[sequence.request_id][sequence.start : sequence.end], padded))
            positions.append(np.arange(sequence.start, sequence.start + padded) - sequence.num_encoded)
            lengths.append(np.maximum(positions[-1] + 1, sequence.num_prompt_tokens))
            slots.append(cache.slots(sequence.request_id, sequence.start, sequence.end))
        tokens.append(
            np.array([token_ids[sequence.request_id][sequence.start] for sequence in singles], dtype=np.int64)
        )
        slots.append(
            cache.slots_of_all(
                [sequence.request_id for sequence in singles], [(sequence.start, sequence.end) for sequence in singles]
            )
        )
        last_B = np.array([sequence.end - sequence.num_encoded for sequence in singles], dtype=np.int64)

        self.token_N = self._tensor(np.concatenate(tokens))
        self.position_N = self._tensor(np.concatenate([*positions, last_B - 1]))
        self.length_N = self._tensor(np.concatenate([*lengths, last_B]))
        """Length of each token's sequence when the token was first computed."""
        counts = np.array([sequence.end - sequence.start for sequence in spans], dtype=np.int64)
        last_R = np.concatenate([starts[:-1] + counts - 1, starts[-1] + np.arange(len(singles))])
        self.logit_R = self._tensor(last_R if wanted is None else last_R[wanted])
        """Rows of the flat batch that need logits."""
        self._stored_rows = cache.store_rows(np.concatenate(slots))
        self._stored = self._tensor(self._not_padding(starts)) if pad_to else None

    def attend(self, shape: AttentionShape, qkv_NMD: Tensor) -> Tensor:
        """Stores the keys and values of one layer and attends: `[N, H * D]`. Cross attention passes queries only."""
        if not shape.cross:
            kv_NMD = shape.latent.split(qkv_NMD)[1] if shape.latent else qkv_NMD[:, shape.num_heads :]
            self._cache.store(shape.layer, self._stored_rows, kv_NMD if self._stored is None else kv_NMD[self._stored])
        split = torch.split_with_sizes(qkv_NMD[: self.num_span_tokens], self._padded)
        outputs = [
            self._attend_span(shape, sequence, qkv_TMD) for sequence, qkv_TMD in zip(self._spans, split, strict=True)
        ]
        if self._singles:
            outputs.append(self._attend_singles(shape, qkv_NMD[self.num_span_tokens :]))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_span(self, shape: AttentionShape, sequence: StepSequence, qkv_TMD: Tensor) -> Tensor:
        """Over the new keys and values, or over the cache, which holds both, where earlier ones are cached."""
        if shape.latent:
            return self._attend_latent_span(shape, shape.latent, sequence, qkv_TMD)
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        q = qkv_TMD[None, :, :heads]
        if sequence.start > 0:
            k, v = self._read(shape, sequence)
        else:
            k, v = torch.split_with_sizes(qkv_TMD[None, :, heads:], (kv_heads, kv_heads), 2)
        if shape.cross:
            out = full_attention(q, k, v, scale=shape.scale)
        elif shape.bias is not None:
            bias_HX = shape.bias(1 - k.shape[1], q.shape[1] - 1)
            bias_HX[:, k.shape[1] :] = -torch.inf  # Keys after their query.
            out = full_attention(q, k, v, scale=shape.scale, bias_HX=bias_HX)
        else:
            out = prefill_attention(q, k, v, scale=shape.scale, window=shape.window, sink_H=shape.sinks)
        return out.reshape(len(qkv_TMD), -1)

    def _attend_latent_span(
        self, shape: AttentionShape, latent: LatentVectors, sequence: StepSequence, qkv_TF: Tensor
    ) -> Tensor:
        """The same with the keys and values that latent vectors expand to."""
        q_THQ, kept_T1L = latent.split(qkv_TF)
        kept_CL = self._read(shape, sequence)[0][0, :, 0] if sequence.start > 0 else kept_T1L[:, 0]
        k_CHQ, v_CHQ = latent.expand(kept_CL)
        return latent.narrow(prefill_attention(q_THQ[None], k_CHQ[None], v_CHQ[None], scale=shape.scale)[0])

    def _read(self, shape: AttentionShape, sequence: StepSequence) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values that a sequence attends to, `[1, C, K, D]` each."""
        rows_KC = self._cache.rows(self._cache.slots(sequence.request_id, *sequence.seen(shape)))
        rows_CK = self._tensor(np.ascontiguousarray(rows_KC.T))
        keys_RD, values_RD = self._cache.table(shape.layer)
        keys = keys_RD[rows_CK][None]
        return keys, keys if shape.latent else values_RD[rows_CK][None]

    def _attend_singles(self, shape: AttentionShape, qkv_BMD: Tensor) -> Tensor:
        if shape.latent:
            q_BHL = shape.latent.absorb(shape.latent.split(qkv_BMD)[0])
            return shape.latent.release(self._decode(shape, q_BHL))
        return self._decode(shape, qkv_BMD[:, : shape.num_heads]).flatten(1)

    def _decode(self, shape: AttentionShape, q_BHD: Tensor) -> Tensor:
        keys_RD, values_RD = self._cache.table(shape.layer)
        kind = (shape.num_heads, shape.window, shape.cross, shape.bias)
        if kind not in self._cached:
            seen = [sequence.seen(shape) for sequence in self._singles]
            contexts = [end - first for first, end in seen]
            self._cached[kind] = CachedRows(
                self._cache.slots_of_all([sequence.request_id for sequence in self._singles], seen),
                contexts,
                num_heads=shape.num_heads,
                num_kv_heads=shape.num_kv_heads,
                num_slots=self._cache.num_slots,
                like=keys_RD,
                biases=None if shape.bias is None else _last_biases(shape.bias, contexts),
                shared=shape.latent is not None,
            )
        return decode_attention(q_BHD, keys_RD, values_RD, self._cached[kind], scale=shape.scale, sink_H=shape.sinks)

    def _not_padding(self, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows of the flat batch that are real tokens."""
        real = [
            start + np.arange(sequence.end - sequence.start)
            for sequence, start in zip(self._spans, starts, strict=False)
        ]
        return np.concatenate([*real, starts[-1] + np.arange(len(self._singles))])

    def _tensor(self, values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(self._cache.device)


_NO_INTEGERS = np.zeros(0, dtype=np.int64)


def _padded_tokens(token_ids: Sequence[int], length: int) -> NDArray[np.int64]:
    padded = np.zeros(length, dtype=np.int64)
    padded[: len(token_ids)] = token_ids
    return padded


def _last_biases(bias: PositionBias, contexts: Sequence[int]) -> list[Tensor]:
    """For the last token of contexts of these lengths, `[H, C]` each."""
    longest = max(contexts)
    bias_HC = bias(1 - longest, 0)
    return [bias_HC[:, longest - context :] for context in contexts]
