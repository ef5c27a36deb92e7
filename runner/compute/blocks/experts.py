"""Mixture of experts: a router sends each token to a few gated feed-forward blocks, whose outputs are summed by weight.

Letters: N tokens, E hidden size, X experts, k experts of a token, P rows of all experts' inputs, padding included.

Tokens are sorted by expert, so that each touched expert is one product over the tokens that go to it; experts to which
none goes are not read. Rows of an expert are padded to the bucket that its product takes anyway
(`kernels/products/linear.py`) in the gather of its tokens; each token then sums its k rows by weight. The loop over
experts is the host's, so it must know the counts.

On a GPU plain weights of all experts lie in one tensor for each product, and a kernel takes them together
(`kernels/products/expert_products.py`), without the host. Experts in 8 or 4 bits are a loop there, too; while a CUDA
graph is captured, when nothing can be read, every expert computes every token instead, with weight 0 where it was not
chosen. That reads what a large batch reads anyway, and computes X / k times as much.

On a tensor-parallel group every rank routes all tokens alike. It has its part of the inner width of all experts, or, by
expert parallelism, some experts whole, and leaves out what goes to the others; what ranks add up is the same.
Source: Shazeer et al. 2017; the order of tokens is that of MegaBlocks (Gale et al. 2022). Not here: ranks that attend
for requests of their own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name the whole field uses
from torch import Tensor

from exeplan.core.models.model import ModelSpec
from exeplan.kernels.products.linear import Linear, row_bucket
from exeplan.kernels.select import kernels_are_fused
from exeplan.runner.compute.blocks.layers import (
    FUSED_ACTIVATIONS,
    MLP,
    Block,
    gated_activation,
    linear,
    partial_linear,
    summed,
)
from exeplan.runner.compute.weights.checkpoint import Weights
from exeplan.runner.compute.weights.products import Product
from exeplan.runner.compute.weights.shard import Group, Shard, ShardRange, expert_group, expert_range, inner_range


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a router chooses the experts of a token from its logits."""

    per_token: int
    normalized: bool
    """The weights of a token's experts add up to 1; otherwise they are their shares of all experts."""
    scale: float = 1.0
    """Of all weights."""
    num_groups: int = 1
    num_chosen_groups: int = 1
    """Of as many groups of adjacent experts, those with the best expert, from which a token's experts are chosen."""


_TOKENS = 2048
"""Tokens that are computed at a time."""
_PRODUCTS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Where a family's checkpoints have the tensors of a layer's experts."""

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    products: tuple[str, str, str] = _PRODUCTS
    """Of an expert: gate, up and down."""
    shared: str | None = None
    """The block that all tokens go through, with the usual names below it."""
    shared_gate: str | None = None


def expert_block(
    weights: Weights, spec: ModelSpec, shard: Shard, name: str, *, names: ExpertNames, routing: Routing
) -> Block:
    """The mixture of experts of the layer with that name, this rank's part summed over the group.

    Raises InputError where the experts cannot be split evenly over the group.
    """
    assert spec.experts is not None
    held, group = expert_range(spec, shard), shard.group
    router = Router(
        Linear(weights.take(f"{name}.{names.router}.weight", spec.experts.count, spec.hidden_size)), routing
    )
    experts = [
        _gated_mlp(
            weights, spec, expert_group(shard), f"{name}.{names.experts}.{number}", names.products, spec.experts.width
        )
        for number in range(held.start, held.stop)
    ]
    padded = router.product.packed or experts[0].up.packed
    kind, kernels = FUSED_ACTIVATIONS.get(spec.config.get("hidden_act", "silu")), weights.kernels
    together = Together.of(experts, kernels.expert_mlp, kind, held) if kind and kernels_are_fused(kernels) else None
    block: Block = Experts(router, experts, padded=padded, held=held, together=together)
    if names.shared and spec.experts.shared_width:
        width = spec.experts.shared_width
        shared: Block = _gated_mlp(weights, spec, group, f"{name}.{names.shared}", _PRODUCTS, width)
        if names.shared_gate:
            gate_1E = weights.take(f"{name}.{names.shared_gate}.weight", 1, spec.hidden_size)
            shared = GatedBlock(shared, Linear(gate_1E))
        block = WithShared(block, shared)
    return summed(block, group)


def _gated_mlp(
    weights: Weights, spec: ModelSpec, group: Group, name: str, products: tuple[str, str, str], width: int
) -> MLP:
    gate, up, down = (f"{name}.{product}" for product in products)
    inner = inner_range(spec, group, width)
    return MLP(
        linear(weights, {gate: inner, up: inner}, spec.hidden_size, bias=False),
        partial_linear(weights, down, spec.hidden_size, inner, group, bias=False),
        gated_activation(weights.kernels, spec.config.get("hidden_act", "silu")),
    )


class Router:
    """The product of tokens and experts, and the choice."""

    def __init__(self, product: Linear, routing: Routing) -> None:
        self.product, self.routing = product, routing

    def __call__(self, x_NE: Tensor) -> tuple[Tensor, Tensor]:
        """Weights in float32 and indices of each token's experts, `[N, k]` both."""
        share_NX = torch.softmax(self.product(x_NE), -1, dtype=torch.float32)
        routing = self.routing
        if routing.num_groups > routing.num_chosen_groups:
            share_NX = _in_best_groups(share_NX, routing)
        weight_Nk, expert_Nk = share_NX.topk(routing.per_token, -1)
        if routing.normalized:
            weight_Nk = weight_Nk / weight_Nk.sum(-1, keepdim=True)
        return weight_Nk * routing.scale, expert_Nk


def _in_best_groups(share_NX: Tensor, routing: Routing) -> Tensor:
    """0 for experts of the other groups."""
    share_NGX = share_NX.view(len(share_NX), routing.num_groups, -1)
    best_Ng = share_NGX.amax(-1).topk(routing.num_chosen_groups, -1).indices
    other_NG = torch.ones_like(share_NGX[..., 0], dtype=torch.bool).scatter_(1, best_Ng, False)
    return share_NGX.masked_fill(other_NG[..., None], 0.0).flatten(1)


class Experts:
    """A router and its experts; on a group, this rank's partial sum."""

    def __init__(
        self,
        router: Callable[[Tensor], tuple[Tensor, Tensor]],
        experts: Sequence[Block],
        *,
        padded: bool,
        held: ShardRange | None = None,
        together: "Together | None" = None,
    ) -> None:
        """`padded`: each expert's rows are padded to a bucket, as packed products want them. `experts` are those `held`
        of the router's, by default all; `together` computes all of them at once."""
        self.router, self.experts, self.padded, self.together = router, experts, padded, together
        self.held = held or ShardRange(len(experts), 0, len(experts))

    def __call__(self, x_NE: Tensor) -> Tensor:
        weight_Nk, expert_Nk = self.router(x_NE)
        if self.together is not None:
            return self.together(x_NE, weight_Nk, expert_Nk)
        if x_NE.is_cuda and torch.cuda.is_current_stream_capturing():
            return self.of_all(x_NE, weight_Nk, expert_Nk)
        return self.of_touched(x_NE, weight_Nk, expert_Nk)

    def of_touched(self, x_NE: Tensor, weight_Nk: Tensor, expert_Nk: Tensor) -> Tensor:
        """`[N, E]`, by one product a touched expert; some tokens at a time, as each has k rows of outputs."""
        if len(x_NE) <= _TOKENS:
            return self._of_some(x_NE, weight_Nk, expert_Nk)
        parts = [slice(start, start + _TOKENS) for start in range(0, len(x_NE), _TOKENS)]
        return torch.cat([self._of_some(x_NE[part], weight_Nk[part], expert_Nk[part]) for part in parts])

    def _of_some(self, x_NE: Tensor, weight_Nk: Tensor, expert_Nk: Tensor) -> Tensor:
        group = grouped(expert_Nk, self.held, padded=self.padded)
        if not group.experts:
            return torch.zeros_like(x_NE)
        if group.held is not None:
            weight_Nk = weight_Nk * group.held.to(weight_Nk.device)
        token_P, row_Nk = group.tokens.to(x_NE.device), group.places.to(x_NE.device)
        out_PE = x_NE.new_empty(len(token_P), x_NE.shape[1])
        parts = zip(token_P.split_with_sizes(group.rows), out_PE.split_with_sizes(group.rows), strict=True)
        for number, (token_R, out_RE) in zip(group.experts, parts, strict=True):
            out_RE.copy_(self.experts[number](x_NE.index_select(0, token_R)))
        if out_PE.dtype == torch.float32:
            return F.embedding_bag(row_Nk, out_PE, mode="sum", per_sample_weights=weight_Nk)
        return (out_PE[row_Nk] * weight_Nk[..., None]).sum(1).to(x_NE.dtype)

    def of_all(self, x_NE: Tensor, weight_Nk: Tensor, expert_Nk: Tensor) -> Tensor:
        """The same, by the product of every expert and every token: no shape depends on the routes."""
        weight_NX = weight_Nk.new_zeros(len(x_NE), self.held.size).scatter_(1, expert_Nk, weight_Nk)
        weight_NX = weight_NX[:, self.held.start : self.held.stop]
        out_NE = torch.zeros_like(x_NE, dtype=torch.float32)
        for number, expert in enumerate(self.experts):
            out_NE += expert(x_NE) * weight_NX[:, number, None]
        return out_NE.to(x_NE.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """The weights of all experts held, in one tensor for each product, and the kernel that takes them."""

    mlp: Callable[..., Tensor]
    kind: str
    up: Tensor
    """`[X, F, E]`, gate before up."""
    down: Tensor
    """`[X, E, I]`."""
    first: int
    """The number of the first expert held."""

    @classmethod
    def of(cls, experts: Sequence[MLP], mlp: Callable[..., Tensor], kind: str, held: ShardRange) -> "Together | None":
        """None where they are not plain weights. The experts keep views of the same tensors."""
        ups = [expert.up for expert in experts if _is_plain(expert.up)]
        downs = [expert.down for expert in experts if _is_plain(expert.down)]
        if min(len(ups), len(downs)) < len(experts):
            return None
        up_XFE, down_XEI = _together(ups), _together(downs)
        return cls(mlp=mlp, kind=kind, up=up_XFE, down=down_XEI, first=held.start)

    def __call__(self, x_NE: Tensor, weight_Nk: Tensor, expert_Nk: Tensor) -> Tensor:
        return self.mlp(x_NE, weight_Nk, expert_Nk, self.up, self.down, self.kind, first=self.first)


def _is_plain(product: Product) -> TypeGuard[Linear]:
    return isinstance(product, Linear) and product.bias_O is None


def _together(products: Sequence[Linear]) -> Tensor:
    """`[X, O, I]`; the products keep views of it."""
    weight_XOI = torch.stack([one.dense() for one in products])
    for product, weight_OI in zip(products, weight_XOI, strict=True):
        if not product.packed:
            product.weight = weight_OI
    return weight_XOI


class Grouped(NamedTuple):
    """Tokens sorted by expert."""

    experts: list[int]
    """Those held to which a token goes, in order, counted from the first one held."""
    rows: list[int]
    """Of each, padding included; P together."""
    tokens: Tensor
    """`[P]`, the token of each row; that of padding is any."""
    places: Tensor
    """`[N, k]`, the rows of each token; any for experts that are not held."""
    held: Tensor | None
    """`[N, k]`, whether the expert is held; None where all are."""


def grouped(expert_Nk: Tensor, held: ShardRange, *, padded: bool) -> Grouped:
    """Sorts tokens by expert, on the host; `padded` rounds the rows of each expert up to a bucket."""
    per_token, num_held = expert_Nk.shape[1], len(held)
    chosen_P = expert_Nk.flatten().to("cpu", torch.int16 if held.size < 1 << 15 else torch.int64).numpy()
    here_P = None
    if not held.is_whole:
        chosen_P = chosen_P - chosen_P.dtype.type(held.start)
        here_P = (chosen_P >= 0) & (chosen_P < num_held)
        chosen_P = np.where(here_P, chosen_P, chosen_P.dtype.type(num_held))  # Behind all that are held.
    order_P = chosen_P.argsort(kind="stable")  # By radix: of 16 bits.
    count_X = np.bincount(chosen_P, minlength=num_held)[:num_held]
    experts = count_X.nonzero()[0]
    counts = count_X[experts]
    order_P = order_P[: counts.sum()]
    rows = [row_bucket(count) for count in counts.tolist()] if padded else counts.tolist()
    row_X = np.array(rows, dtype=np.int64)
    shift = row_X.cumsum() - row_X - (counts.cumsum() - counts)
    place_P = np.arange(len(order_P)) + np.repeat(shift, counts)
    token_P = np.zeros(sum(rows), dtype=np.int64)
    token_P[place_P] = order_P // per_token
    row_P = np.zeros(len(chosen_P), dtype=np.int64)
    row_P[order_P] = place_P
    token_R, row_Nk = torch.from_numpy(token_P), torch.from_numpy(row_P).view(expert_Nk.shape)
    here_Nk = None if here_P is None else torch.from_numpy(here_P).view(expert_Nk.shape)
    return Grouped(experts.tolist(), rows, token_R, row_Nk, here_Nk)


class GatedBlock:
    """A block whose output each token scales by a sigmoid of its own (Qwen2-MoE's shared expert)."""

    def __init__(self, block: Block, gate: Linear) -> None:
        self.block, self.gate = block, gate

    def __call__(self, x_NE: Tensor) -> Tensor:
        return self.block(x_NE).mul_(torch.sigmoid(self.gate(x_NE)))


class WithShared:
    """The sum of the experts and of a block that every token goes through."""

    def __init__(self, experts: Block, shared: Block) -> None:
        self.experts, self.shared = experts, shared

    def __call__(self, x_NE: Tensor) -> Tensor:
        return self.experts(x_NE).add_(self.shared(x_NE))
