"""Encoder: the prompts of an encoder-decoder model's batch as tensors, and what such a model has beside its decoder.

Letters: N tokens of all prompts, T of one of them, M = 3H heads of queries, keys and values, E hidden
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
from exeplan.runner.compute.layers import AttentionShape, Layer, Model, PositionBias


class EncoderDecoderModel(Model, Protocol):
    """What a family of encoder-decoder models builds; `layers` are its decoder's."""

    encoder_layers: list[Layer]

    def encoded(self, hidden_NE: Tensor) -> Tensor:
        """The encoder's output, `[N, E]`, of what leaves its last layer."""

    def cross_keys_values(self, encoded_NE: Tensor) -> Iterator[Tensor]:
        """For each decoder layer of this shard the keys and values `[N, 2K, D]` of its cross attention."""


class EncoderStep:
    """One pass of prompts over encoder layers, one behind the other and without padding (`packed.py` has rows)."""

    def __init__(
        self, prompts: Sequence[Sequence[int]], *, device: torch.device, kernels: Kernels | None = None
    ) -> None:
        """With `kernels`, all prompts attend in one launch."""
        self._counts = [len(prompt) for prompt in prompts]
        self._biases: dict[PositionBias, Tensor] = {}
        self.num_tokens = sum(self._counts)
        self.token_N = sent(np.array([*chain(*prompts)], dtype=np.int64), device)
        self.position_N = sent(np.array([*chain(*map(range, self._counts))], dtype=np.int64), device)
        self._kernels = kernels
        if kernels:
            self._spans = Spans([Span(count) for count in self._counts], device)

    def attend(self, shape: AttentionShape, qkv_NMD: Tensor) -> Tensor:
        """Every prompt over itself: `[N, H * D]`."""
        heads, outputs = shape.num_heads, []
        if self._kernels:
            bias = shape.bias and shape.bias.by_distance
            parts = torch.split_with_sizes(qkv_NMD, (heads, heads, heads), 1)
            return self._kernels.ragged_attention(
                *parts, self._spans, scale=shape.scale, causal=False, bias=bias
            ).flatten(1)
        for qkv_TMD in torch.split_with_sizes(qkv_NMD, self._counts):
            q, k, v = torch.split_with_sizes(qkv_TMD[None], (heads, heads, heads), 2)
            bias_HX = None if shape.bias is None else self._bias(shape.bias, len(qkv_TMD))
            outputs.append(full_attention(q, k, v, scale=shape.scale, bias_HX=bias_HX).reshape(len(qkv_TMD), -1))
        return torch.cat(outputs)

    def _bias(self, bias: PositionBias, tokens: int) -> Tensor:
        """Of one prompt; worked out once, for the longest, and used by every layer."""
        longest = max(self._counts)
        if bias not in self._biases:
            self._biases[bias] = bias(1 - longest, longest - 1)
        return self._biases[bias][:, longest - tokens : longest - 1 + tokens]

    def without_padding(self, hidden_NE: Tensor) -> Tensor:
        """The rows of real tokens: all."""
        return hidden_NE
