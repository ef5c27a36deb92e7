"""Packed rows: a batch's prompts concatenated in rows and slots, as tensors; naive padding is one prompt a row.

Letters: N tokens of all rows, concatenated, S slots, T tokens of a slot, B prompts, M = H + 2K heads of
queries, keys and values, D head_dim, X distances.

Source: TCB (ICPP 2022), section 4. Whole rows go through the matrix products, padding included. Positions begin at 0
with every prompt (separate positional encoding). Attention runs over every slot as a square, masked to the blocks of
its prompts, so one slot a row is pure ConcatBatching. A naive batch is the special case of one prompt a row: the
schemes differ only in the layout.

Decoding: in the paper the decoder recomputes the concatenated rows for every token. With a KV cache a decode iteration
has one query a request in the flat products, and each query reads its own keys and values, block by block: the diagonal
of the paper's mask, without the rest. So decoding is the same code for every scheme (`step.py`). The schemes differ in
how many requests decode together and when they leave: in a padded batch and a pure row when the last request is done,
in a slot when the slot's requests are.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from exeplan.core.batch import PackedPrompt, Packing
from exeplan.kernels.attention.plain import slot_attention
from exeplan.kernels.attention.slot_attention import Slots
from exeplan.kernels.select import Kernels
from exeplan.kernels.to_device import to_device
from exeplan.runner.compute.blocks.layers import AttentionShape, LatentVectors, PositionBias
from exeplan.runner.compute.passes.kv_cache import KVCache
from exeplan.runner.compute.passes.paged_step import PagedStep
from exeplan.runner.compute.passes.step import Step, StepSequence


def one_a_row(num_rows: int, row_tokens: int) -> Packing:
    """Naive batching: each prompt in its own row, padded to the same length."""
    return Packing(row_tokens, row_tokens, tuple(PackedPrompt(row, 0) for row in range(num_rows)))


class PackedRows:
    """The prompts of a batch in packed rows; built once and passed through all layers."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        packing: Packing,
        *,
        device: torch.device,
        kernels: Kernels | None = None,
        causal: bool = False,
    ) -> None:
        """A `causal` prompt's token attends to those before it, an encoder's to the whole prompt.

        With `kernels` all slots attend in one launch; without, by the CPU's attention.
        """
        self._kernels, self._causal, self._slot_tokens = kernels, causal, packing.slot_tokens
        self.num_tokens = packing.num_tokens
        self.first_rows = [place.row * packing.row_tokens + place.start for place in packing.places]
        """Index of each prompt's first token."""
        index_of = [np.arange(first, first + len(ids)) for first, ids in zip(self.first_rows, prompts, strict=True)]
        real = np.concatenate(index_of)
        tokens, positions, owners = (np.zeros(self.num_tokens, dtype=np.int64) for _ in range(3))
        tokens[real] = [*chain(*prompts)]
        positions[real] = np.concatenate([np.arange(len(ids)) for ids in prompts])
        owners[real] = np.repeat(np.arange(len(prompts)) + 1, [len(ids) for ids in prompts])
        self.token_N, self.position_N = to_device(tokens, device), to_device(positions, device)
        self.real = to_device(real, device)
        """Indices of the prompts' tokens, in the prompts' order."""
        self.last_B = to_device(np.array([index[-1] for index in index_of]), device)
        """Index of each prompt's last token."""
        self._masks: dict[int | None, Tensor] = {}
        self._biases: dict[PositionBias, Tensor] = {}
        if kernels:
            spans = [(int(index[0]), int(index[-1]) + 1) for index in index_of]
            self._slots = Slots(self.num_tokens, packing.slot_tokens, spans, device)
        else:
            self._owner_ST = torch.from_numpy(owners).to(device).view(-1, packing.slot_tokens)

    def attend(self, shape: AttentionShape, qkv_NMD: Tensor) -> Tensor:
        """Every prompt over itself: `[N, H * D]`."""
        if shape.latent:
            return self._attend_latent(shape, shape.latent, qkv_NMD)
        heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        q_NHD, k_NKD, v_NKD = torch.split_with_sizes(qkv_NMD, heads, 1)
        if self._kernels:
            bias = shape.bias and shape.bias.by_distance
            options = {"scale": shape.scale, "causal": self._causal, "window": shape.window, "bias": bias}
            return self._kernels.slot_attention(q_NHD, k_NKD, v_NKD, self._slots, **options).flatten(1)
        bias_HX = None if shape.bias is None else self._bias(shape.bias)
        tokens = self._slot_tokens
        q, k, v = (x_NHD.view(-1, tokens, *x_NHD.shape[1:]) for x_NHD in (q_NHD, k_NKD, v_NKD))
        mask_STT = self._mask(shape.window, qkv_NMD.dtype)
        out_STHD = slot_attention(q, k, v, mask_STT, scale=shape.scale, bias_HX=bias_HX, sink_H=shape.sinks)
        return out_STHD.reshape(self.num_tokens, -1)

    def _attend_latent(self, shape: AttentionShape, latent: LatentVectors, qkv_NF: Tensor) -> Tensor:
        """The same with the keys and values that latent vectors expand to."""
        q_NHQ, kept_N1L = latent.split(qkv_NF)
        qkv_NMQ = torch.cat([q_NHQ, *latent.expand(kept_N1L[:, 0])], 1)
        out_NX = self.attend(replace(shape, latent=None, num_kv_heads=shape.num_heads), qkv_NMQ)
        return latent.narrow(out_NX.view(len(qkv_NF), shape.num_heads, -1))

    def without_padding(self, hidden_NE: Tensor) -> Tensor:
        """The tokens of the prompts, in the prompts' order."""
        return hidden_NE[self.real]

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """`[S, T, T]`, added to scores: 0 within a prompt, -inf elsewhere. Padding attends to padding, to avoid NaN."""
        if window not in self._masks:
            seen_STT = self._owner_ST[:, :, None] == self._owner_ST[:, None, :]
            if self._causal:
                token_T = torch.arange(self._slot_tokens, device=seen_STT.device)
                distance_TT = token_T - token_T[:, None]
                seen_STT &= (distance_TT <= 0) & (distance_TT > -(window or self._slot_tokens))
            mask_STT = torch.zeros(seen_STT.shape, dtype=dtype, device=seen_STT.device)
            self._masks[window] = mask_STT.masked_fill_(~seen_STT, -torch.inf)
        return self._masks[window]

    def _bias(self, bias: PositionBias) -> Tensor:
        """`[H, X]` of all distances within a slot, which are those of positions within a prompt."""
        if bias not in self._biases:
            self._biases[bias] = bias(1 - self._slot_tokens, self._slot_tokens - 1)
        return self._biases[bias]


class PackedStep:
    """One pass of a decoder-only model: packed prompts, whose keys and values are cached, then decoding sequences."""

    def __init__(
        self, cache: KVCache, prompts: Sequence[StepSequence], rows: PackedRows, singles: Step | PagedStep | None
    ) -> None:
        """`prompts` are whole, in the order of the packing; `singles` is a step of decoding sequences only."""
        self._cache, self._rows, self._singles = cache, rows, singles
        length_N = rows.position_N + 1
        prompt_N = np.repeat([prompt.num_prompt_tokens for prompt in prompts], [prompt.end for prompt in prompts])
        length_N[rows.real] = length_N[rows.real].maximum(to_device(prompt_N, length_N.device))
        self.token_N, self.position_N, self.first_rows = rows.token_N, rows.position_N, rows.first_rows
        self.length_N, self.logit_R = length_N, rows.last_B
        if singles:
            self.token_N = torch.cat([self.token_N, singles.token_N])
            self.position_N = torch.cat([self.position_N, singles.position_N])
            self.length_N = torch.cat([self.length_N, singles.length_N])
            self.logit_R = torch.cat([self.logit_R, singles.logit_R + rows.num_tokens])
        self._stored_rows = cache.store_rows(
            np.concatenate([cache.slots(prompt.request_id, 0, prompt.end) for prompt in prompts])
        )

    def attend(self, shape: AttentionShape, qkv_NMD: Tensor) -> Tensor:
        """Stores the keys and values of one layer and attends: `[N, H * D]`."""
        packed_NMD = qkv_NMD[: self._rows.num_tokens]
        kv_NMD = shape.latent.split(packed_NMD)[1] if shape.latent else packed_NMD[:, shape.num_heads :]
        self._cache.store(shape.layer, self._stored_rows, kv_NMD[self._rows.real])
        out = self._rows.attend(shape, packed_NMD)
        if not self._singles:
            return out
        return torch.cat([out, self._singles.attend(shape, qkv_NMD[self._rows.num_tokens :])])
