"""Mixture of experts: a router sends each token to a few gated feed-forward blocks, whose outputs are summed by weight.

Letters: N tokens, E hidden size, X experts, k experts of a token, P rows of all experts' inputs, padding included.

Tokens are sorted by expert, so that each touched expert is one product over the tokens that go to it; experts to which
none goes are not read. Rows of an expert are padded to the bucket that its product takes anyway (`kernels/linear.py`)
in the gather of its tokens; each token then sums its k rows by weight. The loop over experts is the host's, so it
must know the counts: while a CUDA graph is captured, when nothing can be read, every expert computes every token
instead, with weight 0 where it was not chosen. That reads what a large batch reads anyway, and computes X / k times as
much.

On a tensor-parallel group every rank has its part of the inner width of all experts, and routes all tokens alike.
Source: Shazeer et al. 2017; the order of tokens is that of MegaBlocks (Gale et al. 2022). Not here: experts divided
over ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name the whole field uses
from torch import Tensor

from exeplan.core.model import ModelSpec
from exeplan.kernels.linear import Linear, row_bucket
from exeplan.runner.compute.checkpoint import Weights
from exeplan.runner.compute.layers import MLP, Block, gated_activation, linear, partial_linear, summed
from exeplan.runner.compute.shard import Group, inner_range


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
    weights: Weights, spec: ModelSpec, group: Group, name: str, *, names: ExpertNames, routing: Routing
) -> Block:
    """The mixture of experts of the layer with that name, this rank's part summed over the group.

    Raises InputError where the experts cannot be split evenly over the group.
    """
    assert spec.experts is not None
    router = Router(
        Linear(weights.take(f"{name}.{names.router}.weight", spec.experts.count, spec.hidden_size)), routing
    )
    experts = [
        _gated_mlp(weights, spec, group, f"{name}.{names.experts}.{number}", names.products, spec.experts.width)
        for number in range(spec.experts.count)
    ]
    block: Block = Experts(router, experts, padded=router.product.packed or experts[0].up.packed)
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

    def __init__(self, router: Router, experts: Sequence[Block], *, padded: bool) -> None:
        """`padded`: each expert's rows are padded to a bucket, as packed products want them."""
        self.router, self.experts, self.padded = router, experts, padded

    def __call__(self, x_NE: Tensor) -> Tensor:
        weight_Nk, expert_Nk = self.router(x_NE)
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
        group = grouped(expert_Nk, len(self.experts), padded=self.padded)
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
        weight_NX = weight_Nk.new_zeros(len(x_NE), len(self.experts)).scatter_(1, expert_Nk, weight_Nk)
        out_NE = torch.zeros_like(x_NE, dtype=torch.float32)
        for number, expert in enumerate(self.experts):
            out_NE += expert(x_NE) * weight_NX[:, number, None]
        return out_NE.to(x_NE.dtype)


class Grouped(NamedTuple):
    """Tokens sorted by expert."""

    experts: list[int]
    """Those to which a token goes, in order."""
    rows: list[int]
    """Of each, padding included; P together."""
    tokens: Tensor
    """`[P]`, the token of each row; that of padding is any."""
    places: Tensor
    """`[N, k]`, the rows of each token."""


def grouped(expert_Nk: Tensor, num_experts: int, *, padded: bool) -> Grouped:
    """Sorts tokens by expert, on the host; `padded` rounds the rows of each expert up to a bucket."""
    per_token = expert_Nk.shape[1]
    chosen_P = expert_Nk.flatten().to("cpu", torch.int16 if num_experts < 1 << 15 else torch.int64).numpy()
    order_P = chosen_P.argsort(kind="stable")  # By radix: of 16 bits.
    count_X = np.bincount(chosen_P, minlength=num_experts)
    experts = count_X.nonzero()[0]
    counts = count_X[experts]
    rows = [row_bucket(count) for count in counts.tolist()] if padded else counts.tolist()
    ends = np.cumsum(rows)
    shift = ends - rows - (counts.cumsum() - counts)
    place_P = np.arange(len(chosen_P)) + np.repeat(shift, counts)
    token_P = np.zeros(ends[-1], dtype=np.int64)
    token_P[place_P] = order_P // per_token
    row_P = np.empty(len(chosen_P), dtype=np.int64)
    row_P[order_P] = place_P
    return Grouped(experts.tolist(), rows, torch.from_numpy(token_P), torch.from_numpy(row_P).view(expert_Nk.shape))


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
