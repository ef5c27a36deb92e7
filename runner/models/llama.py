"""Llama, and the families that differ from it by a row of a table: Mistral, Qwen2 and Qwen3, with and without experts.

RMSNorm before attention and before a gated feed-forward block, rotary positions, grouped key/value heads, an output
head that may be tied to the embedding. A family with the same layer is added as a row of `VARIANTS`; one with another
layer is a file of its own.

Tensors of a layer: self_attn.{q,k,v,o}_proj, mlp.{gate,up,down}_proj, its norms, and with `qk_norm`
self_attn.{q,k}_norm; a layer with experts has those of `Variant.experts` instead of mlp's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from exeplan.core.models.model import ModelSpec
from exeplan.runner.compute.blocks.experts import ExpertNames, Routing, expert_block
from exeplan.runner.compute.blocks.layers import (
    Block,
    RMSNorm,
    SelfAttention,
    attention_shape,
    gated_mlp,
    projections,
)
from exeplan.runner.compute.blocks.prenorm_decoder import EPS, LAYER, PREFIX, PreNormDecoder, PreNormLayer
from exeplan.runner.compute.blocks.rotary import Rotary
from exeplan.runner.compute.weights.checkpoint import Weights
from exeplan.runner.compute.weights.shard import Shard

__all__ = ["PREFIX", "VARIANTS", "Model"]

Config = Mapping[str, Any]
Flag = bool | str
"""A constant of the family, or the key of the Hugging Face config that holds it (False where the key is missing)."""
_MIXTRAL = ExpertNames(router="block_sparse_moe.gate", experts="block_sparse_moe.experts", products=("w1", "w3", "w2"))
_QWEN2_MOE = ExpertNames(shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate")
_QWEN3_MOE = ExpertNames()


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What distinguishes a family of this layer."""

    qkv_bias: Flag = False
    output_bias: Flag = False
    """Of the attention's output product."""
    qk_norm: bool = False
    """RMSNorm over each query head and each key head, before rotation."""
    mlp_bias: Flag = False
    experts: ExpertNames = _QWEN3_MOE
    """Where a mixture has its experts."""
    normalized_routes: Flag = False
    """The weights of a token's experts add up to 1."""


VARIANTS = {
    "llama": Variant(qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": Variant(),
    "mixtral": Variant(experts=_MIXTRAL, normalized_routes=True),
    "qwen2": Variant(qkv_bias=True),
    "qwen2_moe": Variant(qkv_bias="qkv_bias", experts=_QWEN2_MOE, normalized_routes="norm_topk_prob"),
    "qwen3": Variant(qkv_bias="attention_bias", output_bias="attention_bias", qk_norm=True),
    "qwen3_moe": Variant(
        qkv_bias="attention_bias", output_bias="attention_bias", qk_norm=True, normalized_routes="norm_topk_prob"
    ),
}
"""By Hugging Face `model_type`."""
_TRUE = ("qkv_bias",)
"""Keys that are true where a config has them not."""


class Model(PreNormDecoder):
    def __init__(self, spec: ModelSpec, weights: Weights, shard: Shard) -> None:
        rotary = Rotary(spec, dtype=weights.dtype, device=weights.device, kernels=weights.kernels)
        super().__init__(spec, weights, shard, rotary, partial(_layer, spec, weights, shard))


def _layer(spec: ModelSpec, weights: Weights, shard: Shard, index: int) -> PreNormLayer:
    variant = VARIANTS[spec.family]
    attention = _attention(spec, weights, shard, index, variant)
    return PreNormLayer(
        spec, weights, LAYER.format(index), attention, _feed_forward(spec, weights, shard, index, variant)
    )


def _feed_forward(spec: ModelSpec, weights: Weights, shard: Shard, index: int, variant: Variant) -> Block:
    config, name = spec.config, LAYER.format(index)
    if not spec.has_experts(index):
        return gated_mlp(weights, spec, shard.group, f"{name}.mlp", bias=_flag(variant.mlp_bias, config))
    assert spec.experts is not None
    routing = Routing(per_token=spec.experts.per_token, normalized=_flag(variant.normalized_routes, config))
    return expert_block(weights, spec, shard, name, names=variant.experts, routing=routing)


def _attention(spec: ModelSpec, weights: Weights, shard: Shard, index: int, variant: Variant) -> SelfAttention:
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
        eps = config.get("rms_norm_eps", EPS)
        queries, keys = (RMSNorm(weights, f"{name}.{part}_norm", spec.head_dim, eps) for part in "qk")
        norms = (queries, keys)
    shape = attention_shape(spec, shard, index, window=spec.attention_window(index))
    return SelfAttention(shape, qkv, output, norms=norms)


def _flag(flag: Flag, config: Config) -> bool:
    return bool(config.get(flag, flag in _TRUE)) if isinstance(flag, str) else flag
