"""Packed rows: a batch's prompts concatenated in rows and slots, as tensors; naive padding is one prompt a row.

Letters: N tokens of all rows, one row behind the other, S slots, T tokens of a slot, B prompts, M = H + 2K heads of
queries, keys and values, D head_dim, X distances.

Source: TCB (ICPP 2022), section 4. All of the rows goes through the matrix products, padding included; positions begin
at 0 with every prompt (separate positional encoding); attention runs over every slot as a square, masked to the blocks
of its prompts, so that one slot a row is pure ConcatBatching. A naive batch is the special case of one prompt a row, so
that the schemes differ in nothing but what lies where.

What decodes: in the paper the decoder computes the concatenated rows again for every token. With a KV cache the row
of a decode iteration is one query a request, side by side in the same flat products, and each reads the keys and
values that are its own, block by block: that is the diagonal of the paper's mask, and what lies beside it is never
computed. So decoding is the same code for every scheme (`step.py`), and what differs is how many requests decode
together, and when they leave: a padded batch and a pure row when the last of them is done, a slot when its own are.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from exeplan.core.batch import PackedPrompt, Packing
from exeplan.kernels.attention import slot_attention
from exeplan.kernels.select import Kernels
from exeplan.kernels.sending import sent
from exeplan.kernels.slot_attention import Slots
from exeplan.runner.compute.kv_cache import KVCache
from exeplan.runner.compute.layers import AttentionShape, PositionBias
from exeplan.runner.compute.paged_step import PagedStep
from exeplan.runner.compute.step import Row, Step


def one_a_row(num_rows: int, row_tokens: int) -> Packing:
    """Naive batching: every prompt in a row of its own, padded to the same length."""
    return Packing(row_tokens, row_tokens, tuple(PackedPrompt(row, 0) for row in range(num_rows)))


class PackedRows:
    """The prompts of a batch in their places; built once and passed through all layers."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        packing: Packing,
        *,
        device: torch.device,
        kernels: Kernels | None = None,
        causal: bool = False,
    ) -> None:
        """`causal` prompts see no token behind themselves, those of an encoder all of theirs.

        With `kernels` all slots attend in one launch; without them the CPU's own attention serves.
        """
        self._kernels, self._causal, self._slot_tokens = kernels, causal, packing.slot_tokens
        self.num_tokens = packing.num_tokens
        first_B = [place.row * packing.row_tokens + place.start for place in packing.places]
        index_of = [np.arange(first, first + len(ids)) for first, ids in zip(first_B, prompts, strict=True)]
        real = np.concatenate(index_of)
        tokens, positions, owners = (np.zeros(self.num_tokens, dtype=np.int64) for _ in range(3))
        tokens[real] = [*chain(*prompts)]
        positions[real] = np.concatenate([np.arange(len(ids)) for ids in prompts])
        owners[real] = np.repeat(np.arange(len(prompts)) + 1, [len(ids) for ids in prompts])
        self.token_N, self.position_N = sent(tokens, device), sent(positions, device)
        self.real = sent(real, device)
        """Where the tokens of the prompts are, in the prompts' order."""
        self.last_B = sent(np.array([index[-1] for index in index_of]), device)
        """Where each prompt's last token is."""
        self._masks: dict[int | None, Tensor] = {}
        self._biases: dict[PositionBias, Tensor] = {}
        if kernels:
            spans = [(int(index[0]), int(index[-1]) + 1) for index in index_of]
            self._slots = Slots(self.num_tokens, packing.slot_tokens, spans, device)
        else:
            self._owner_ST = torch.from_numpy(owners).to(device).view(-1, packing.slot_tokens)

    def attend(self, shape: AttentionShape, qkv_NMD: Tensor) -> Tensor:
        """Every prompt over itself: `[N, H * D]`."""
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
        out_STHD = slot_attention(q, k, v, mask_STT, scale=shape.scale, bias_HX=bias_HX)
        return out_STHD.reshape(self.num_tokens, -1)

    def without_padding(self, hidden_NE: Tensor) -> Tensor:
        """The tokens of the prompts, in the prompts' order."""
        return hidden_NE[self.real]

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """`[S, T, T]`, added to scores: 0 within a prompt, -inf elsewhere. Padding sees padding, so nothing is NaN."""
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
    """One pass of a decoder-only model: packed prompts, whose keys and values are kept, before rows that decode."""

    def __init__(
        self, cache: KVCache, prompts: Sequence[Row], rows: PackedRows, singles: Step | PagedStep | None
    ) -> None:
        """`prompts` are whole, in the order of the rows' places; `singles` is a step of decoded rows alone."""
        self._cache, self._rows, self._singles = cache, rows, singles
        length_N = rows.position_N + 1
        prompt_N = [length for row in prompts for length in [row.num_prompt_tokens] * row.end]
        length_N[rows.real] = length_N[rows.real].maximum(torch.tensor(prompt_N, device=length_N.device))
        self.token_N, self.position_N = rows.token_N, rows.position_N
        self.length_N, self.logit_R = length_N, rows.last_B
        if singles:
            self.token_N = torch.cat([self.token_N, singles.token_N])
            self.position_N = torch.cat([self.position_N, singles.position_N])
            self.length_N = torch.cat([self.length_N, singles.length_N])
            self.logit_R = torch.cat([self.logit_R, singles.logit_R + rows.num_tokens])
        self._stored_rows = cache.store_rows(
            np.concatenate([cache.slots(row.request_id, 0, row.end) for row in prompts])
        )

    def attend(self, shape: AttentionShape, qkv_NMD: Tensor) -> Tensor:
        """Stores the keys and values of one layer and attends: `[N, H * D]`."""
        packed_NMD = qkv_NMD[: self._rows.num_tokens]
        self._cache.store(shape.layer, self._stored_rows, packed_NMD[self._rows.real, shape.num_heads :])
        out = self._rows.attend(shape, packed_NMD)
        if not self._singles:
            return out
        return torch.cat([out, self._singles.attend(shape, qkv_NMD[self._rows.num_tokens :])])
