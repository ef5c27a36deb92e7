"""DeepSeek-V2: latent attention, and experts chosen within groups, with shared ones, after the first dense layers.

Weights of chosen experts are their shares of all, times `routed_scaling_factor`; with `group_limited_greedy` only the
groups with the best expert are chosen from. Norms and order of a layer are Llama's. Source: DeepSeek-V2 (2024). Not
here: DeepSeek-V3, whose router has a correction bias.

Tensors of a layer: self_attn.{q_proj or q_a_proj and q_b_proj, kv_a_proj_with_mqa, kv_b_proj, o_proj}, the norms
between them, mlp.{gate,up,down}_proj or mlp.{gate,experts,shared_experts}, and its norms.
"""

import math
from functools import partial

from exeplan.core.models.model import ModelSpec
from exeplan.errors import InputError, shown
from exeplan.runner.compute.blocks.experts import ExpertNames, Routing, expert_block
from exeplan.runner.compute.blocks.latent_attention import latent_attention
from exeplan.runner.compute.blocks.layers import Block, gated_mlp, integer
from exeplan.runner.compute.blocks.prenorm_decoder import LAYER, PREFIX, PreNormDecoder, PreNormLayer
from exeplan.runner.compute.blocks.rotary import Rotary, rope_parameters, scaling_factor
from exeplan.runner.compute.weights.checkpoint import Weights
from exeplan.runner.compute.weights.shard import Shard

__all__ = ["PREFIX", "Model"]
_EXPERTS = ExpertNames(shared="mlp.shared_experts")
_THETA = 10000.0


class Model(PreNormDecoder):
    def __init__(self, spec: ModelSpec, weights: Weights, shard: Shard) -> None:
        if spec.latent is None:
            raise InputError(f"'{spec.name}' is of the family deepseek_v2 and its config has no kv_lora_rank")
        rotary = Rotary(
            spec,
            dtype=weights.dtype,
            device=weights.device,
            kernels=weights.kernels,
            dim=spec.latent.rope_dim,
            theta=_THETA,
        )
        super().__init__(spec, weights, shard, rotary, partial(_layer, spec, weights, shard))


def _layer(spec: ModelSpec, weights: Weights, shard: Shard, index: int) -> PreNormLayer:
    name = LAYER.format(index)
    attention = latent_attention(weights, spec, shard, index, f"{name}.self_attn", scale=_scale(spec))
    return PreNormLayer(spec, weights, name, attention, _feed_forward(spec, weights, shard, index))


def _feed_forward(spec: ModelSpec, weights: Weights, shard: Shard, index: int) -> Block:
    name = LAYER.format(index)
    if not spec.has_experts(index):
        return gated_mlp(weights, spec, shard.group, f"{name}.mlp", bias=bool(spec.config.get("mlp_bias")))
    return expert_block(weights, spec, shard, name, names=_EXPERTS, routing=_routing(spec))


def _routing(spec: ModelSpec) -> Routing:
    config = spec.config
    assert spec.experts is not None
    method, groups = config.get("topk_method", "greedy"), integer(config, "n_group", 1)
    if method not in ("greedy", "group_limited_greedy") or config.get("norm_topk_prob"):
        raise InputError(
            f"'{spec.name}' chooses experts by topk_method={shown(method)} and norm_topk_prob="
            f"{shown(config.get('norm_topk_prob'))}; deepseek_v2 is run with greedy or group_limited_greedy, and false"
        )
    if spec.experts.count % groups:
        raise InputError(f"'{spec.name}': {spec.experts.count} experts cannot be divided into {groups} groups")
    limited = method != "greedy"
    return Routing(
        per_token=spec.experts.per_token,
        normalized=False,
        scale=float(config.get("routed_scaling_factor") or 1.0),
        num_groups=groups if limited else 1,
        num_chosen_groups=integer(config, "topk_group", 1) if limited else 1,
    )


def _scale(spec: ModelSpec) -> float:
    """With YaRN the temperature of the scores grows by `mscale_all_dim`, which the rotation then leaves out."""
    rope = rope_parameters(spec, _THETA)
    scale: float = spec.head_dim**-0.5
    if rope["rope_type"] != "default" and rope.get("mscale_all_dim"):
        factor = scaling_factor(rope, spec.num_positions)
        if factor > 1:
            scale *= (0.1 * rope["mscale_all_dim"] * math.log(factor) + 1.0) ** 2
    return scale
