"""Encoder: the prompts of an encoder-decoder model's batch as tensors, and what such a model has beside its decoder.

Letters: N tokens of all prompts, T of one of them, padding included, M = 3H heads of queries, keys and values, E hidden
size, D head_dim, K key/value heads.

Every token of a prompt attends to all of it, so a prompt is computed at once, and its keys and values are not kept.
What it leaves is the encoder's output, from which each decoder layer works out those of its cross attention.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from exeplan.kernels.attention import full_attention
from exeplan.kernels.select import Kernels
from exeplan.kernels.sending import sent
from exeplan.kernels.spans import Span, Spans
from exeplan.runner.layers import AttentionShape, Layer, Model, PositionBias


class EncoderDecoderModel(Model, Protocol):
    """What a family of encoder-decoder models builds; `layers` are its decoder's."""

    encoder_layers: list[Layer]

    def encoded(self, hidden_NE: Tensor) -> Tensor:
        """The encoder's output, `[N, E]`, of what leaves its last layer."""

    def cross_keys_values(self, encoded_NE: Tensor) -> Iterator[Tensor]:
        """For each decoder layer of this shard the keys and values `[N, 2K, D]` of its cross attention."""


class EncoderStep:
    """One pass of prompts over encoder layers."""

    def __init__(
        self, prompts: Sequence[Sequence[int]], *, pad_to: int, device: torch.device, kernels: Kernels | None = None
    ) -> None:
        """`pad_to` > 0 pads every prompt on the right to that many tokens, which are computed and never attended to.

        With `kernels`, all prompts attend in one launch.
        """
        self._counts = [len(prompt) for prompt in prompts]
        self._padded = [max(count, pad_to) for count in self._counts]
        self._biases: dict[PositionBias, Tensor] = {}
        self.num_tokens = sum(self._padded)
        sizes = list(zip(prompts, self._padded, strict=True))
        tokens = [[*prompt, *[0] * (padded - len(prompt))] for prompt, padded in sizes]
        self.token_N = sent(np.array([*chain(*tokens)], dtype=np.int64), device)
        self.position_N = sent(np.array([*chain(*map(range, self._padded))], dtype=np.int64), device)
        self._kernels = kernels
        if kernels:
            self._spans = Spans([Span(*sizes) for sizes in zip(self._padded, self._counts, strict=True)], device)

    def attend(self, shape: AttentionShape, qkv_NMD: Tensor) -> Tensor:
        """Every prompt over itself: `[N, H * D]`."""
        heads, outputs = shape.num_heads, []
        if self._kernels:
            bias = shape.bias and shape.bias.by_distance
            parts = torch.split_with_sizes(qkv_NMD, (heads, heads, heads), 1)
            return self._kernels.ragged_attention(
                *parts, self._spans, scale=shape.scale, causal=False, bias=bias
            ).flatten(1)
        for qkv_TMD, count in zip(torch.split_with_sizes(qkv_NMD, self._padded), self._counts, strict=True):
            q, k, v = torch.split_with_sizes(qkv_TMD[None], (heads, heads, heads), 2)
            bias_HX = None if shape.bias is None else self._bias(shape.bias, len(qkv_TMD), count)
            out = full_attention(q, k[:, :count], v[:, :count], scale=shape.scale, bias_HX=bias_HX)
            outputs.append(out.reshape(len(qkv_TMD), -1))
        return torch.cat(outputs)

    def _bias(self, bias: PositionBias, queries: int, keys: int) -> Tensor:
        """Of one prompt; worked out once, for the longest, and used by every layer."""
        longest = max(self._padded)
        if bias not in self._biases:
            self._biases[bias] = bias(1 - longest, longest - 1)
        return self._biases[bias][:, longest - queries : longest - 1 + keys]

    def without_padding(self, hidden_NE: Tensor) -> Tensor:
        """The rows of real tokens."""
        parts = torch.split_with_sizes(hidden_NE, self._padded)
        return torch.cat([part_TE[:count] for part_TE, count in zip(parts, self._counts, strict=True)])
