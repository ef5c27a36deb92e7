"""gpt-oss: Llama's order of a layer, with sinks in its attention, windows in every other layer, experts with biases.

A sink is a learned score of each head that takes a share of the softmax and adds nothing. The router normalizes over
the chosen experts; their gate and up products are clamped, and lie interleaved in a checkpoint. Not here: weights in
MXFP4.

Tensors of a layer: self_attn.{q,k,v,o}_proj, self_attn.sinks, mlp.router, mlp.experts.{gate_up,down}_proj of all
experts together with inputs before outputs, and their biases, and its norms.
"""

from functools import partial

import torch
from torch import Tensor

from exeplan.core.models.model import ModelSpec
from exeplan.kernels.products.linear import Linear
from exeplan.runner.compute.blocks.experts import Experts, Router, Routing
from exeplan.runner.compute.blocks.layers import (
    MLP,
    Block,
    SelfAttention,
    attention_shape,
    projections,
    summed,
)
from exeplan.runner.compute.blocks.prenorm_decoder import LAYER, PREFIX, PreNormDecoder, PreNormLayer
from exeplan.runner.compute.blocks.rotary import Rotary
from exeplan.runner.compute.weights.checkpoint import Weights
from exeplan.runner.compute.weights.products import product
from exeplan.runner.compute.weights.shard import Shard, expert_group, expert_range, head_ranges, inner_range

__all__ = ["PREFIX", "Model"]
_THETA, _EPS = 150000.0, 1e-5


class Model(PreNormDecoder):
    def __init__(self, spec: ModelSpec, weights: Weights, shard: Shard) -> None:
        rotary = Rotary(spec, dtype=weights.dtype, device=weights.device, kernels=weights.kernels, theta=_THETA)
        super().__init__(spec, weights, shard, rotary, partial(_layer, spec, weights, shard), eps=_EPS)


def _layer(spec: ModelSpec, weights: Weights, shard: Shard, index: int) -> PreNormLayer:
    name = LAYER.format(index)
    mlp = _experts(spec, weights, shard, f"{name}.mlp")
    return PreNormLayer(spec, weights, name, _attention(spec, weights, shard, index), mlp, eps=_EPS)


def _attention(spec: ModelSpec, weights: Weights, shard: Shard, index: int) -> SelfAttention:
    name, bias = f"{LAYER.format(index)}.self_attn", bool(spec.config.get("attention_bias", True))
    qkv, output = projections(weights, spec, shard.group, name, qkv_bias=bias, output_bias=bias)
    sinks_H = weights.take(f"{name}.sinks", head_ranges(spec, shard.group)[0]).float()
    shape = attention_shape(spec, shard, index, window=spec.attention_window(index), sinks=sinks_H)
    return SelfAttention(shape, qkv, output)


def _experts(spec: ModelSpec, weights: Weights, shard: Shard, name: str) -> Block:
    assert spec.experts is not None
    count, size, held, group = spec.experts.count, spec.hidden_size, expert_range(spec, shard), expert_group(shard)
    inner = inner_range(spec, group, spec.experts.width)
    gate_up_XEO = weights.take(f"{name}.experts.gate_up_proj", held, size, inner.times(2))
    gate_up_XO = weights.take(f"{name}.experts.gate_up_proj_bias", held, inner.times(2))
    down_XIE = weights.take(f"{name}.experts.down_proj", held, inner, size)
    down_XE = weights.take(f"{name}.experts.down_proj_bias", held, size)
    limits = {name: float(spec.config.get(name, usual)) for name, usual in _LIMITS.items()}
    experts = [
        MLP(
            product(weights, _apart(gate_up_XEO[number].t()), _apart(gate_up_XO[number])),
            product(weights, down_XIE[number].t().contiguous(), down_XE[number] if group.rank == 0 else None),
            partial(clamped_swiglu, alpha=limits["swiglu_alpha"], limit=limits["swiglu_limit"]),
        )
        for number in range(len(held))
    ]
    router = Linear(weights.take(f"{name}.router.weight", count, size), weights.take(f"{name}.router.bias", count))
    routing = Routing(per_token=spec.experts.per_token, normalized=True)
    return summed(Experts(Router(router, routing), experts, padded=router.packed, held=held), shard.group)


def _apart(interleaved: Tensor) -> Tensor:
    """Gate before up."""
    return torch.cat([interleaved[::2], interleaved[1::2]])


def clamped_swiglu(gate_up_NF: Tensor, *, alpha: float, limit: float) -> Tensor:
    """`(up + 1) * gate * sigmoid(alpha * gate)`, both within the limit, of gate before up."""
    gate_NF, up_NF = gate_up_NF.chunk(2, -1)
    gate_NF, up_NF = gate_NF.clamp(max=limit), up_NF.clamp(-limit, limit)
    return torch.sigmoid(gate_NF * alpha).mul_(gate_NF).mul_(up_NF.add_(1.0))


_LIMITS = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
"""Where a config has none."""
