"""Encoder: the prompts of an encoder-decoder model's batch as tensors, and the interface of such a model.

Letters: N tokens of all prompts, T of one of them, M = 3H heads of queries, keys and values, E hidden
size, D head_dim, K key/value heads.

Every token of a prompt attends to the whole prompt, so a prompt is computed in one pass, and its keys and values are
not cached. From the encoder's output each decoder layer computes the keys and values of its cross attention.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from exeplan.core.batch import SequenceState
from exeplan.kernels.attention.plain import full_attention
from exeplan.kernels.attention.spans import Span, Spans
from exeplan.kernels.select import Kernels
from exeplan.kernels.to_device import to_device
from exeplan.runner.compute.blocks.layers import AttentionShape, Layer, Model, PositionBias


class EncoderDecoderModel(Model, Protocol):
    """An encoder-decoder model; `layers` are its decoder's."""

    encoder_layers: list[Layer]

    def encoded(self, hidden_NE: Tensor) -> Tensor:
        """The encoder's output, `[N, E]`, from that of its last layer."""

    def cross_keys_values(self, encoded_NE: Tensor) -> Iterator[Tensor]:
        """The keys and values `[N, 2K, D]` of the cross attention of each decoder layer of this shard."""


class EncoderStep:
    """One pass of prompts over encoder layers, concatenated without padding (`packed_step.py` has packed rows)."""

    def __init__(
        self, prompts: Sequence[Sequence[int]], *, device: torch.device, kernels: Kernels | None = None
    ) -> None:
        """With `kernels`, all prompts attend in one launch."""
        self._counts = [len(prompt) for prompt in prompts]
        self._biases: dict[PositionBias, Tensor] = {}
        self.num_tokens = sum(self._counts)
        self.token_N = to_device(np.array([*chain(*prompts)], dtype=np.int64), device)
        self.position_N = to_device(np.array([*chain(*map(range, self._counts))], dtype=np.int64), device)
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
        """Of one prompt; computed once, for the longest, and shared by all layers."""
        longest = max(self._counts)
        if bias not in self._biases:
            self._biases[bias] = bias(1 - longest, longest - 1)
        return self._biases[bias][:, longest - tokens : longest - 1 + tokens]

    def without_padding(self, hidden_NE: Tensor) -> Tensor:
        """The rows of real tokens, which are all."""
        return hidden_NE


def num_encoder_tokens(sequence: SequenceState) -> int:
    """Tokens that go through the encoder: the prompt without the decoder's start token."""
    return sequence.num_prompt_tokens - 1
