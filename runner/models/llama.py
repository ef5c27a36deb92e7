"""Llama, and the families that differ from it by a row of a table: Mistral, Qwen2 and Qwen3.

RMSNorm before attention and before a gated feed-forward block, rotary positions, grouped key/value heads, an output
head that may be tied to the embedding. A family with the same layer is added as a row of `VARIANTS`; one with another
layer is a file of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from exeplan.core.model import ModelSpec
from exeplan.runner.compute.checkpoint import Weights
from exeplan.runner.compute.layers import Attend, RMSNorm, SelfAttention, added, attention_shape, gated_mlp, projections
from exeplan.runner.compute.rotary import Angles, Rotary
from exeplan.runner.compute.shard import Shard
from exeplan.runner.compute.vocabulary import Vocabulary

PREFIX = "model."
EMBEDDING, NORM, HEAD, LAYER = "model.embed_tokens.weight", "model.norm", "lm_head.weight", "model.layers.{}"
"""Within a layer: self_attn.{q,k,v,o}_proj, mlp.{gate,up,down}_proj, input_layernorm, post_attention_layernorm, and
with `qk_norm` self_attn.{q,k}_norm."""

Config = Mapping[str, Any]
Flag = bool | str
"""A constant of the family, or the key of the Hugging Face config that holds it (False where the key is missing)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What distinguishes a family of this layer."""

    qkv_bias: Flag = False
    output_bias: Flag = False
    """Of the attention's output product."""
    qk_norm: bool = False
    """RMSNorm over each query head and each key head, before rotation."""
    mlp_bias: Flag = False


VARIANTS = {
    "llama": Variant(qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": Variant(),
    "qwen2": Variant(qkv_bias=True),
    "qwen3": Variant(qkv_bias="attention_bias", output_bias="attention_bias", qk_norm=True),
}
"""By Hugging Face `model_type`."""


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
        variant, name = VARIANTS[spec.family], LAYER.format(index)
        eps, bias = spec.config.get("rms_norm_eps", 1e-6), _flag(variant.mlp_bias, spec.config)
        self.input_norm = RMSNorm(weights, f"{name}.input_layernorm", spec.hidden_size, eps)
        self.attention = _attention(spec, weights, shard, index, variant, eps)
        self.post_norm = RMSNorm(weights, f"{name}.post_attention_layernorm", spec.hidden_size, eps)
        self.mlp = gated_mlp(weights, spec, shard.group, f"{name}.mlp", bias=bias)

    def __call__(self, hidden_NE: Tensor, angles: Angles | None, attend: Attend) -> Tensor:
        attended_NE = self.attention(self.input_norm(hidden_NE), angles, attend)
        return added(self.mlp, self.post_norm.of_sum(attended_NE, hidden_NE), hidden_NE)


def _attention(
    spec: ModelSpec, weights: Weights, shard: Shard, index: int, variant: Variant, eps: float
) -> SelfAttention:
    config, name = spec.config, f"{LAYER.format(index)}.self_attn"
    qkv, output = projections(
        weights,
        spec,
        shard.group,
        name,
        qkv_bias=_flag(variant.qkv_bias, config),
        output_bias=_flag(variant.output_bias, config),
    )
    norms = None
    if variant.qk_norm:
        queries, keys = (RMSNorm(weights, f"{name}.{part}_norm", spec.head_dim, eps) for part in "qk")
        norms = (queries, keys)
    shape = attention_shape(spec, shard, index, window=spec.attention_window(index))
    return SelfAttention(shape, qkv, output, norms=norms)


def _flag(flag: Flag, config: Config) -> bool:
    return bool(config.get(flag)) if isinstance(flag, str) else flag
