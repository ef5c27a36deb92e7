"""Qwen3: Llama with an RMSNorm over every query and key head before rotation, and Qwen2's sliding window.

`head_dim` is free of `hidden_size / num_heads`.
"""

from torch import Tensor

from exeplan.core.model import ModelSpec
from exeplan.runner.compute.checkpoint import Weights
from exeplan.runner.compute.layers import (
    Attend,
    RMSNorm,
    SelfAttention,
    added,
    attention_shape,
    gated_mlp,
    projections,
    sliding_window,
)
from exeplan.runner.compute.rotary import Angles, Rotary
from exeplan.runner.compute.shard import Shard
from exeplan.runner.compute.vocabulary import Vocabulary

PREFIX = "model."
EMBEDDING, NORM, HEAD, LAYER = "model.embed_tokens.weight", "model.norm", "lm_head.weight", "model.layers.{}"
"""Within a layer: Llama's and self_attn.{q,k}_norm."""


class Model:
    def __init__(self, spec: ModelSpec, weights: Weights, shard: Shard) -> None:
        config, size = spec.config, spec.hidden_size
        head = EMBEDDING if config.get("tie_word_embeddings", False) else HEAD
        self.vocabulary = Vocabulary(weights, shard, EMBEDDING, head, spec.vocab_size, size)
        self.angles = Rotary(spec, dtype=weights.dtype, device=weights.device, kernels=weights.kernels)
        self.layers = [Layer(spec, weights, shard, index) for index in range(*shard.layers)]
        if shard.last:
            self.norm = RMSNorm(weights, NORM, size, config.get("rms_norm_eps", 1e-6))

    def embed(self, token_N: Tensor, _position_N: Tensor) -> Tensor:
        return self.vocabulary.embed(token_N)

    def head(self, hidden_RE: Tensor) -> Tensor:
        return self.vocabulary.logits(self.norm(hidden_RE))


class Layer:
    def __init__(self, spec: ModelSpec, weights: Weights, shard: Shard, index: int) -> None:
        config, name = spec.config, LAYER.format(index)
        size, eps = spec.hidden_size, config.get("rms_norm_eps", 1e-6)
        self.input_norm = RMSNorm(weights, f"{name}.input_layernorm", size, eps)
        bias = config.get("attention_bias", False)
        qkv, output = projections(weights, spec, shard.group, f"{name}.self_attn", qkv_bias=bias, output_bias=bias)
        queries, keys = (RMSNorm(weights, f"{name}.self_attn.{part}_norm", spec.head_dim, eps) for part in "qk")
        shape = attention_shape(spec, shard, index, window=sliding_window(config, index))
        self.attention = SelfAttention(shape, qkv, output, norms=(queries, keys))
        self.post_norm = RMSNorm(weights, f"{name}.post_attention_layernorm", size, eps)
        self.mlp = gated_mlp(weights, spec, shard.group, f"{name}.mlp")

    def __call__(self, hidden_NE: Tensor, angles: Angles | None, attend: Attend) -> Tensor:
        attended_NE = self.attention(self.input_norm(hidden_NE), angles, attend)
        return added(self.mlp, self.post_norm.of_sum(attended_NE, hidden_NE), hidden_NE)
