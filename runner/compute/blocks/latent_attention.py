"""Multi-head latent attention: a token keeps one vector that all heads share, from which each makes its key and value.

Letters: N tokens, E hidden size, H heads of this rank, C cached tokens, R rank of the latent vector, P rotated values
of a key, Q = nope + P values of a head's query and key, V values of a head's value, L = R + P values kept of a token,
F = H * Q + L.

Two ways give the same. Prompts expand the latent vectors to the keys and values of all heads, which costs a product a
token and attends over Q and V values of a head. Decodes absorb that product instead: each query goes through its head's
part for keys and meets the latent vectors themselves, and what they sum up to goes through the part for values; the
context is then read once for all heads. Every rank of a tensor-parallel group keeps the latent vectors whole and has
its own heads of all else.

Checkpoints rotate neighbouring dimensions; their rows are reordered so that dimension i pairs with i + P / 2, in
queries and keys alike, which no score sees. Source: DeepSeek-V2 (2024), section 2.1 and appendix C. Not here:
attention over blocks, as a GPU needs it.
"""

import torch
import torch.nn.functional as F  # noqa: N812 - the name the whole field uses
from torch import Tensor

from exeplan.core.models.model import ModelSpec
from exeplan.core.models.sparse_layers import LatentAttention
from exeplan.errors import InputError
from exeplan.kernels.products.linear import Linear
from exeplan.runner.compute.blocks.layers import Attend, AttentionShape, Block, RMSNorm, partial_linear, summed
from exeplan.runner.compute.blocks.rotary import Angles
from exeplan.runner.compute.weights.checkpoint import Weights
from exeplan.runner.compute.weights.products import product
from exeplan.runner.compute.weights.shard import Shard, ShardRange, head_ranges

_EPS = 1e-6
"""Of the norms of latent vectors, whatever the config's."""


class Expansion:
    """What makes keys and values of latent vectors, `[H, nope + V, R]`, and how wide its parts are."""

    def __init__(self, weight_HXR: Tensor, sizes: LatentAttention) -> None:
        self.weight_HXR, self.sizes = weight_HXR, sizes

    def split(self, qkv_NF: Tensor) -> tuple[Tensor, Tensor]:
        """Queries `[N, H, Q]` and what is kept `[N, 1, L]`."""
        heads, kept = len(self.weight_HXR), self.sizes.kept
        q_NHQ = qkv_NF[:, :-kept].view(len(qkv_NF), heads, -1)
        return q_NHQ, qkv_NF[:, None, -kept:]

    def expand(self, kept_CL: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all heads, `[C, H, Q]` both: values are padded by zeros to the width of keys."""
        sizes, (heads, width, rank) = self.sizes, self.weight_HXR.shape
        both_CHX = F.linear(kept_CL[:, :rank], self.weight_HXR.view(-1, rank)).view(-1, heads, width)
        rotated_CHP = kept_CL[:, None, rank:].expand(-1, heads, -1)
        key_CHQ = torch.cat([both_CHX[..., : sizes.nope_dim], rotated_CHP], -1)
        value_CHV = both_CHX[..., sizes.nope_dim :]
        return key_CHQ, F.pad(value_CHV, (0, key_CHQ.shape[-1] - sizes.value_dim))

    def narrow(self, out_NHQ: Tensor) -> Tensor:
        """`[N, H * V]`: the padding of values left out."""
        return out_NHQ[..., : self.sizes.value_dim].flatten(1)

    def absorb(self, q_NHQ: Tensor) -> Tensor:
        """Queries that meet latent vectors, `[N, H, L]`."""
        nope = self.sizes.nope_dim
        q_HNR = torch.bmm(q_NHQ[..., :nope].transpose(0, 1), self.weight_HXR[:, :nope])
        return torch.cat([q_HNR.transpose(0, 1), q_NHQ[..., nope:]], -1)

    def release(self, out_NHL: Tensor) -> Tensor:
        """The values `[N, H * V]` of sums of latent vectors."""
        nope, rank = self.sizes.nope_dim, self.sizes.kv_rank
        out_HNV = torch.bmm(out_NHL[..., :rank].transpose(0, 1), self.weight_HXR[:, nope:].transpose(1, 2))
        return out_HNV.transpose(0, 1).flatten(1)


class LatentSelfAttention:
    """The product of queries and latent vectors, norms, rotation, attention, and the output product."""

    def __init__(
        self,
        shape: AttentionShape,
        expansion: Expansion,
        latent: Linear,
        norm: RMSNorm,
        output: Block,
        *,
        queries: Block | None,
    ) -> None:
        """`queries` is None where they are in one product with the latent vectors, before them."""
        self.shape, self.expansion, self.latent, self.norm = shape, expansion, latent, norm
        self.output, self.queries = output, queries

    def __call__(self, x_NE: Tensor, angles: Angles | None, attend: Attend) -> Tensor:
        assert angles is not None
        sizes, qkv_NF = self.expansion.sizes, self.latent(x_NE)
        if self.queries is not None:
            qkv_NF = torch.cat([self.queries(x_NE), qkv_NF], -1)
        q_NHQ, kept_N1L = self.expansion.split(qkv_NF)
        latent_N1R = kept_N1L[..., : sizes.kv_rank]
        self.norm(latent_N1R, out=latent_N1R)
        angles.rotate(q_NHQ[..., sizes.nope_dim :])
        angles.rotate(kept_N1L[..., sizes.kv_rank :])
        return self.output(attend(self.shape, qkv_NF))


class LowRankQueries:
    """Queries of a latent vector of their own."""

    def __init__(self, down: Block, norm: RMSNorm, up: Block) -> None:
        self.down, self.norm, self.up = down, norm, up

    def __call__(self, x_NE: Tensor) -> Tensor:
        return self.up(self.norm(self.down(x_NE)))


def latent_attention(
    weights: Weights, spec: ModelSpec, shard: Shard, layer: int, name: str, *, scale: float
) -> LatentSelfAttention:
    """The attention below that name in a checkpoint of DeepSeek's; biases where `attention_bias` says so."""
    sizes, bias = spec.latent, bool(spec.config.get("attention_bias"))
    assert sizes is not None
    if sizes.value_dim > spec.head_dim:
        raise InputError(
            f"'{spec.name}' has values of {sizes.value_dim} numbers and keys of {spec.head_dim}; latent attention runs "
            "where values are no wider"
        )
    heads, group = head_ranges(spec, shard.group)[0], shard.group
    low, wanted = sizes.query_rank, heads.times(spec.head_dim)
    kept_LE, bias_L = _rotated(weights, f"{name}.kv_a_proj_with_mqa", sizes, 1, (sizes.kept, spec.hidden_size), bias)
    queries = None
    if low is None:
        q_OE, _ = _rotated(weights, f"{name}.q_proj", sizes, len(heads), (wanted, spec.hidden_size), bias=False)
        kept_LE = torch.cat([q_OE, kept_LE])
        bias_L = None if bias_L is None else torch.cat([bias_L.new_zeros(len(q_OE)), bias_L])
    else:
        up, _ = _rotated(weights, f"{name}.q_b_proj", sizes, len(heads), (wanted, low), bias=False)
        down_bias = weights.take(f"{name}.q_a_proj.bias", low) if bias else None
        down = product(weights, weights.take(f"{name}.q_a_proj.weight", low, spec.hidden_size), down_bias)
        queries = LowRankQueries(down, RMSNorm(weights, f"{name}.q_a_layernorm", low, _EPS), product(weights, up))
    expansion = _expansion(weights, f"{name}.kv_b_proj", sizes, heads)
    shape = AttentionShape(
        layer=layer - shard.layers[0],
        num_heads=len(heads),
        num_kv_heads=1,
        head_dim=spec.head_dim,
        scale=scale,
        latent=expansion,
    )
    output = partial_linear(weights, f"{name}.o_proj", spec.hidden_size, heads.times(sizes.value_dim), group, bias=bias)
    norm = RMSNorm(weights, f"{name}.kv_a_layernorm", sizes.kv_rank, _EPS)
    latent = Linear(kept_LE, bias_L)
    return LatentSelfAttention(shape, expansion, latent, norm, summed(output, group), queries=queries)


def _expansion(weights: Weights, name: str, sizes: LatentAttention, heads: ShardRange) -> Expansion:
    width = sizes.nope_dim + sizes.value_dim
    weight_OR = weights.take(f"{name}.weight", heads.times(width), sizes.kv_rank)
    return Expansion(weight_OR.view(len(heads), width, sizes.kv_rank), sizes)


def _rotated(
    weights: Weights, name: str, sizes: LatentAttention, heads: int, shape: tuple[int | ShardRange, int], bias: bool
) -> tuple[Tensor, Tensor | None]:
    """Weight and bias with the rotated rows, the last of each head, reordered from neighbours to halves."""
    found = [weights.take(f"{name}.weight", *shape), *([weights.take(f"{name}.bias", shape[0])] if bias else [])]
    width = len(found[0]) // heads
    within = torch.arange(width, device=weights.device)
    last = within[-sizes.rope_dim :]
    order = torch.cat([within[: -sizes.rope_dim], last[::2], last[1::2]])
    moved = [part.view(heads, width, *part.shape[1:])[:, order].flatten(0, 1) for part in found]
    return moved[0], moved[1] if bias else None
