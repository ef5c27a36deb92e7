"""Building blocks of model families: norms, linear layers by checkpoint name, feed-forward blocks, self-attention.

Letters: N tokens of the flat batch, E hidden size, M = H + 2K heads of queries, keys and values together, D head_dim.
H and K are the heads of this rank. What is specific to a family is in `runner/models`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - the name the whole field uses
from torch import Tensor

from exeplan.core.models.model import ModelSpec
from exeplan.errors import InputError
from exeplan.kernels.attention.online_softmax import DistanceBias
from exeplan.kernels.products.linear import Linear
from exeplan.kernels.select import Kernels
from exeplan.runner.compute.blocks.rotary import Angles
from exeplan.runner.compute.weights.checkpoint import Weights
from exeplan.runner.compute.weights.products import Product, merged
from exeplan.runner.compute.weights.shard import Group, Shard, ShardRange, head_ranges, inner_range

_ROWS = 512
"""Tokens that a feed-forward block computes at a time: its intermediate then stays in the CPU's cache."""


class PositionBias(Protocol):
    """A bias on attention scores by the position of the key minus the query's."""

    def __call__(self, first: int, last: int) -> Tensor:
        """`[H, X]`, for all distances from `first` to `last`."""

    @property
    def by_distance(self) -> DistanceBias:
        """All distances, as the kernels take them; beyond its ends the bias is constant."""


class LatentVectors(Protocol):
    """How queries meet the latent vectors of tokens; the letters are those of `latent_attention.py`."""

    def split(self, qkv_NF: Tensor) -> tuple[Tensor, Tensor]: ...

    def expand(self, kept_CL: Tensor) -> tuple[Tensor, Tensor]: ...

    def narrow(self, out_NHQ: Tensor) -> Tensor: ...

    def absorb(self, q_NHQ: Tensor) -> Tensor: ...

    def release(self, out_NHL: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """The attention of one layer besides its tensors; heads are those of this rank."""

    layer: int
    """Its index in the KV cache, which holds only the layers of this rank's shard."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    """Sliding window: a token attends to this many tokens, including itself; None for all."""
    bias: PositionBias | None = None
    cross: bool = False
    """Attends to the encoder's tokens, whose keys and values are already stored."""
    sinks: Tensor | None = None
    """`[H]` in float32: scores that take a share of every softmax and add nothing to its sum."""
    latent: "LatentVectors | None" = None
    """Keys and values are made of one vector a token, which is what is stored; `Attend` is then given queries and
    those vectors, and returns `[N, H * V]`."""


Block = Callable[[Tensor], Tensor]
"""A function of the rows of a matrix: a product, an activation, a feed-forward block."""
Attend = Callable[[AttentionShape, Tensor], Tensor]
"""Stores keys and values and attends: from `[N, M, D]`, in the order queries, keys, values, to `[N, H * D]`."""


class Layer(Protocol):
    """One transformer layer; `attend` is an argument, so that a profiler can time attention and the rest separately."""

    def __call__(self, hidden_NE: Tensor, angles: Angles | None, attend: Attend) -> Tensor: ...


class LastLayer(Layer, Protocol):
    """A layer of a decoder-only model. Of the last one the output for tokens inside a prompt is not used."""

    def __call__(
        self, hidden_NE: Tensor, angles: Angles | None, attend: Attend, wanted_R: Tensor | None = None
    ) -> Tensor:
        """The output of the rows `wanted_R`, `[R, E]`; None for all. Of the others keys and values are stored."""


class Model(Protocol):
    """What a family's file builds from a spec, weights and a shard."""

    layers: list[Layer]
    """The layers of the shard."""

    def embed(self, token_N: Tensor, position_N: Tensor) -> Tensor:
        """The hidden states `[N, E]` that enter the first layer; only on the first shard."""

    def angles(self, position_N: Tensor, length_N: Tensor) -> Angles | None:
        """The rotary angles, which all layers share; None for a family without rotary embedding."""

    def head(self, hidden_RE: Tensor) -> Tensor:
        """Logits `[R, V]` of the rows that need them, final norm included; only on the last shard."""


class RMSNorm:
    def __init__(self, weights: Weights, name: str, size: int, eps: float) -> None:
        self.weight, self.eps, self.kernels = weights.take(f"{name}.weight", size), eps, weights.kernels

    def __call__(self, x_NE: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Over the last dimension; `out` may be `x` itself."""
        return self.kernels.rms_norm(x_NE, self.weight, self.eps, out=out)

    def of_sum(self, x_NE: Tensor, residual_NE: Tensor) -> Tensor:
        """Adds `x` to the residual, in place, and returns the norm of the sum."""
        return self.kernels.add_rms_norm(x_NE, residual_NE, self.weight, self.eps)


class LayerNorm:
    """`affine` is False where there is neither weight nor bias."""

    def __init__(self, weights: Weights, name: str, size: int, *, eps: float = 1e-5, affine: bool = True) -> None:
        self.weight = weights.take(f"{name}.weight", size) if affine else None
        self.bias = weights.take(f"{name}.bias", size) if affine else None
        self.eps, self.kernels = eps, weights.kernels

    def __call__(self, x_NE: Tensor) -> Tensor:
        return self.kernels.layer_norm(x_NE, self.weight, self.bias, self.eps)

    def of_sum(self, x_NE: Tensor, residual_NE: Tensor) -> Tensor:
        """Adds `x` to the residual, in place, and returns the norm of the sum."""
        return self.kernels.add_layer_norm(x_NE, residual_NE, self.weight, self.bias, self.eps)


def linear(
    weights: Weights, outputs: Mapping[str, int | ShardRange], inputs: int | ShardRange, *, bias: bool
) -> Product:
    """The named layers merged into one product, whose outputs are concatenated in that order."""
    parts = [weights.matrix(name, part, inputs) for name, part in outputs.items()]
    biases = [weights.take(f"{name}.bias", part) for name, part in outputs.items()] if bias else None
    return merged(weights, parts, biases)


def partial_linear(
    weights: Weights, name: str, num_outputs: int, inputs: ShardRange, group: Group, *, bias: bool
) -> Product:
    """The product over this rank's inputs, to be summed over the group; only rank 0 adds the bias."""
    return linear(weights, {name: num_outputs}, inputs, bias=bias and group.rank == 0)


def summed(block: Block, group: Group) -> Block:
    """Sums the block's output over the group; the block itself for a group of one rank."""
    return block if group.size == 1 else _Summed(block, group)


class _Summed:
    def __init__(self, block: Block, group: Group) -> None:
        self.block, self.group = block, group

    def __call__(self, x_NE: Tensor) -> Tensor:
        return self.group.all_reduce(self.block(x_NE))


class SelfAttention:
    """The merged product of queries, keys and values, rotation, attention, and the output product."""

    def __init__(
        self,
        shape: AttentionShape,
        qkv: Product,
        output: Block,
        *,
        norms: tuple[RMSNorm, RMSNorm] | None = None,
    ) -> None:
        self.shape, self.qkv, self.output, self.norms = shape, qkv, output, norms

    def __call__(self, x_NE: Tensor, angles: Angles | None, attend: Attend) -> Tensor:
        shape = self.shape
        qkv_NMD = self.qkv(x_NE).view(x_NE.shape[0], -1, shape.head_dim)
        if self.norms is not None:
            queries, keys = self.norms
            heads, last = shape.num_heads, shape.num_heads + shape.num_kv_heads
            queries(qkv_NMD[:, :heads], out=qkv_NMD[:, :heads])
            keys(qkv_NMD[:, heads:last], out=qkv_NMD[:, heads:last])
        if angles is not None:
            angles.rotate(qkv_NMD[:, : shape.num_heads + shape.num_kv_heads])
        return self.output(attend(shape, qkv_NMD))


def wanted_rows(hidden_NE: Tensor, attend: Attend, wanted_R: Tensor | None) -> tuple[Tensor, Attend]:
    """The residual behind a layer's attention, and the attention, of these rows alone; None for all."""
    if wanted_R is None:
        return hidden_NE, attend
    return hidden_NE[wanted_R], lambda shape, qkv_NMD: attend(shape, qkv_NMD)[wanted_R]


def attention_shape(
    spec: ModelSpec,
    shard: Shard,
    layer: int,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> AttentionShape:
    """The attention of a layer; `scale` is `head_dim ** -0.5` by default."""
    heads, kv_heads = head_ranges(spec, shard.group)
    return AttentionShape(
        layer=layer - shard.layers[0],
        num_heads=len(heads),
        num_kv_heads=len(kv_heads),
        head_dim=spec.head_dim,
        scale=spec.head_dim**-0.5 if scale is None else scale,
        window=window,
        sinks=sinks,
    )


def projections(
    weights: Weights,
    spec: ModelSpec,
    group: Group,
    name: str,
    *,
    qkv_bias: bool,
    output_bias: bool,
    output: str = "o_proj",
) -> tuple[Product, Block]:
    """Of the attention with that name: `q_proj`, `k_proj` and `v_proj` merged, and the output product."""
    queries, keys = (part.times(spec.head_dim) for part in head_ranges(spec, group))
    outputs = {f"{name}.q_proj": queries, f"{name}.k_proj": keys, f"{name}.v_proj": keys}
    qkv = linear(weights, outputs, spec.hidden_size, bias=qkv_bias)
    product = partial_linear(weights, f"{name}.{output}", spec.hidden_size, queries, group, bias=output_bias)
    return qkv, summed(product, group)


class MLP:
    """`down(activation(up(x)))`; on a group, this rank's partial sum.

    Gated, it is `down(activation(gate(x)) * up(x))`, with gate and up in one product.
    """

    def __init__(self, up: Product, down: Product, activation: Block) -> None:
        self.up, self.down, self.activation = up, down, activation

    def __call__(self, x_NE: Tensor) -> Tensor:
        return over_rows(self._rows, x_NE)

    def _rows(self, x_NE: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x_NE)))

    def added_to(self, residual_NE: Tensor, x_NE: Tensor) -> Tensor:
        """The sum of the block's output and the residual, fused into the last product where it can add."""
        if isinstance(self.down, Linear) and (len(x_NE) <= _ROWS or not x_NE.is_cpu):
            return self.down.added_to(residual_NE, self.activation(self.up(x_NE)))
        return self(x_NE).add_(residual_NE)


def added(block: Block, x_NE: Tensor, residual_NE: Tensor) -> Tensor:
    """The sum of the residual and the block's output for `x`; the residual may be overwritten."""
    return block.added_to(residual_NE, x_NE) if isinstance(block, MLP) else block(x_NE).add_(residual_NE)


def gated_mlp(weights: Weights, spec: ModelSpec, group: Group, name: str, *, bias: bool = False) -> Block:
    """The block of `gate_proj`, `up_proj` and `down_proj` below that name."""
    inner = inner_range(spec, group, integer(spec.config, "intermediate_size", 4 * spec.hidden_size))
    outputs = {f"{name}.gate_proj": inner, f"{name}.up_proj": inner}
    mlp = MLP(
        linear(weights, outputs, spec.hidden_size, bias=bias),
        partial_linear(weights, f"{name}.down_proj", spec.hidden_size, inner, group, bias=bias),
        gated_activation(weights.kernels, spec.config.get("hidden_act", "silu")),
    )
    return summed(mlp, group)


def over_rows(block: Block, x_NE: Tensor) -> Tensor:
    """Applies the block, on a CPU to a limited number of rows at a time."""
    if x_NE.shape[0] <= _ROWS or not x_NE.is_cpu:
        return block(x_NE)
    return torch.cat([block(x_NE[start : start + _ROWS]) for start in range(0, x_NE.shape[0], _ROWS)])


def activation(kernels: Kernels, name: str) -> Block:
    """The activation by its Hugging Face name. Raises InputError that lists the known names."""
    if kind := FUSED_ACTIVATIONS.get(name):
        return partial(kernels.plain_activation, kind=kind)
    if name not in _ACTIVATIONS:
        raise InputError(f"no activation '{name}'; there are {', '.join(sorted((*FUSED_ACTIVATIONS, *_ACTIVATIONS)))}")
    return _ACTIVATIONS[name]


def gated_activation(kernels: Kernels, name: str) -> Block:
    """`activation(gate) * up` of `[N, 2F]`, gate before up. Raises InputError that lists the known names."""
    if kind := FUSED_ACTIVATIONS.get(name):
        return partial(kernels.gated_activation, kind=kind)
    plain = activation(kernels, name)

    def gated(gate_up_NF: Tensor) -> Tensor:
        gate_NF, up_NF = gate_up_NF.chunk(2, -1)
        return plain(gate_NF).mul_(up_NF)

    return gated


FUSED_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_python": "gelu",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""Activations that have kernels: the kernel's name by the Hugging Face name."""
_ACTIVATIONS: dict[str, Block] = {
    "hardswish": F.hardswish,
    "leaky_relu": F.leaky_relu,
    "linear": torch.clone,
    "mish": F.mish,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu2": lambda x: torch.relu(x).square(),
    "relu6": F.relu6,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def integer(config: Mapping[str, Any], name: str, default: int) -> int:
    """A positive integer of the config. Raises InputError naming it."""
    value = config.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"config: {name} must be a positive integer, found {value!r}")
    return value
