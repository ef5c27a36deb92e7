"""T5 and Flan-T5: an encoder-decoder model with positions only as a bias on the scores.

The bias depends on the bucketed distance of key and query: one bidirectional table for the encoder, one backward table
for the decoder, each stored with the first layer of its stack and shared by all. Scores are not scaled. RMSNorm before
every block, no biases in the products. The feed-forward block is plain (v1.0) or gated (v1.1, Flan). A tied head takes
the hidden state scaled by hidden_size ** -0.5 (v1.0); later versions have an untied head.

Source: Raffel et al. 2020, section 2.1; the buckets are Mesh TensorFlow's. Not here: mT5 and UMT5.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from exeplan.core.models.model import ModelSpec
from exeplan.errors import InputError
from exeplan.kernels.attention.online_softmax import DistanceBias
from exeplan.runner.compute.blocks.cross_attention import CrossAttention
from exeplan.runner.compute.blocks.layers import (
    MLP,
    Attend,
    AttentionShape,
    Block,
    Layer,
    RMSNorm,
    SelfAttention,
    activation,
    added,
    gated_activation,
    integer,
    linear,
    partial_linear,
    summed,
)
from exeplan.runner.compute.blocks.rotary import Angles
from exeplan.runner.compute.weights.checkpoint import Weights
from exeplan.runner.compute.weights.shard import Group, Shard, head_ranges, inner_range
from exeplan.runner.compute.weights.vocabulary import Vocabulary

PREFIX = ""
EMBEDDING, HEAD, NORM, BLOCK = "shared.weight", "lm_head.weight", "{}.final_layer_norm", "{}.block.{}.layer.{}"
"""Within a block, layer 0: SelfAttention.{q,k,v,o}; the decoder's 1: EncDecAttention.{q,k,v,o}; the last:
DenseReluDense.{wi,wo}, or {wi_0,wi_1,wo}. Each has a layer_norm."""
TABLE = "{}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
_BUCKETS, _MAX_DISTANCE = 32, 128


class Model:
    """`layers` are the decoder's, `encoder_layers` the encoder's; a shard may have none of either."""

    def __init__(self, spec: ModelSpec, weights: Weights, shard: Shard) -> None:
        if weights.dtype == torch.float16:
            raise InputError(f"'{spec.name}' overflows in float16, as T5 models do; use bfloat16 or float32")
        head = HEAD if not spec.tied_head and weights.holds(HEAD) else EMBEDDING
        self.scale = spec.hidden_size**-0.5 if spec.tied_head else 1.0
        # The last stage of those that run the encoder only computes no logits.
        around = replace(shard, last=shard.last and shard.num_layers > 0)
        self.vocabulary = Vocabulary(weights, around, EMBEDDING, head, spec.vocab_size, spec.hidden_size)
        self.encoder_layers: list[Layer] = []
        if shard.encoder_layers[0] < shard.encoder_layers[1]:
            bias = RelativeBias(spec, weights, shard.group, "encoder", both_ways=True)
            self.encoder_layers += [EncoderLayer(spec, weights, shard, i, bias) for i in range(*shard.encoder_layers)]
        self.layers: list[Layer] = []
        if shard.num_layers:
            bias = RelativeBias(spec, weights, shard.group, "decoder", both_ways=False)
            self.layers += [DecoderLayer(spec, weights, shard, i, bias) for i in range(*shard.layers)]
        if shard.last:
            self.encoder_norm = _norm(spec, weights, NORM.format("encoder"))
        if around.last:
            self.norm = _norm(spec, weights, NORM.format("decoder"))

    def embed(self, token_N: Tensor, _position_N: Tensor) -> Tensor:
        return self.vocabulary.embed(token_N)

    def angles(self, _position_N: Tensor, _length_N: Tensor) -> None:
        return None

    def encoded(self, hidden_NE: Tensor) -> Tensor:
        return self.encoder_norm(hidden_NE)

    def cross_keys_values(self, encoded_NE: Tensor) -> Iterator[Tensor]:
        return (layer.cross.keys_values(encoded_NE) for layer in cast(list[DecoderLayer], self.layers))

    def head(self, hidden_RE: Tensor) -> Tensor:
        return self.vocabulary.logits(self.norm(hidden_RE).mul_(self.scale))


class RelativeBias:
    """A stack's table, `[buckets, H]` of this rank's heads, indexed by the position of the key minus the query's."""

    def __init__(self, spec: ModelSpec, weights: Weights, group: Group, stack: str, *, both_ways: bool) -> None:
        buckets = integer(spec.config, "relative_attention_num_buckets", _BUCKETS)
        self.table_XH = weights.take(TABLE.format(stack), buckets, head_ranges(spec, group)[0])
        self.max_distance = integer(spec.config, "relative_attention_max_distance", _MAX_DISTANCE)
        self.both_ways, self.num_buckets = both_ways, buckets // 2 if both_ways else buckets

    @cached_property
    def by_distance(self) -> DistanceBias:
        """Distances up to the beginning of the last buckets."""
        return DistanceBias(self(-self.max_distance, self.max_distance), self.max_distance)

    def __call__(self, first: int, last: int) -> Tensor:
        relative_X = torch.arange(first, last + 1, device=self.table_XH.device)
        return self.table_XH[self._buckets(relative_X)].t().contiguous()

    def _buckets(self, relative_X: Tensor) -> Tensor:
        """Half of the buckets have one distance each, the others grow logarithmically; later keys have their own."""
        distance_X = relative_X.abs() if self.both_ways else relative_X.neg().clamp_(min=0)
        exact = self.num_buckets // 2
        share_X = torch.log(distance_X.clamp(min=1) / exact) / math.log(self.max_distance / exact)
        far_X = exact + (share_X * (self.num_buckets - exact)).long()
        bucket_X = torch.where(distance_X < exact, distance_X, far_X.clamp_(max=self.num_buckets - 1))
        return bucket_X + self.num_buckets * (relative_X > 0) if self.both_ways else bucket_X


class EncoderLayer:
    def __init__(self, spec: ModelSpec, weights: Weights, shard: Shard, index: int, bias: RelativeBias) -> None:
        self.attention_norm, self.attention = _self_attention(spec, weights, shard, "encoder", index, bias)
        self.mlp_norm, self.mlp = _feed_forward(spec, weights, shard.group, BLOCK.format("encoder", index, 1))

    def __call__(self, hidden_NE: Tensor, angles: Angles | None, attend: Attend) -> Tensor:
        attended_NE = self.attention(self.attention_norm(hidden_NE), None, attend)
        return added(self.mlp, self.mlp_norm.of_sum(attended_NE, hidden_NE), hidden_NE)


class DecoderLayer:
    def __init__(self, spec: ModelSpec, weights: Weights, shard: Shard, index: int, bias: RelativeBias) -> None:
        self.attention_norm, self.attention = _self_attention(spec, weights, shard, "decoder", index, bias)
        self.cross_norm = _norm(spec, weights, f"{BLOCK.format('decoder', index, 1)}.layer_norm")
        self.cross = _cross_attention(spec, weights, shard, index)
        self.mlp_norm, self.mlp = _feed_forward(spec, weights, shard.group, BLOCK.format("decoder", index, 2))

    def __call__(self, hidden_NE: Tensor, angles: Angles | None, attend: Attend) -> Tensor:
        attended_NE = self.attention(self.attention_norm(hidden_NE), None, attend)
        attended_NE = self.cross(self.cross_norm.of_sum(attended_NE, hidden_NE), attend)
        return added(self.mlp, self.mlp_norm.of_sum(attended_NE, hidden_NE), hidden_NE)


def _cross_attention(spec: ModelSpec, weights: Weights, shard: Shard, index: int) -> CrossAttention:
    name = f"{BLOCK.format('decoder', index, 1)}.EncDecAttention"
    width = head_ranges(spec, shard.group)[0].times(spec.head_dim)
    return CrossAttention(
        replace(_shape(spec, shard, index - shard.layers[0]), cross=True),
        linear(weights, {f"{name}.q": width}, spec.hidden_size, bias=False),
        linear(weights, {f"{name}.k": width, f"{name}.v": width}, spec.hidden_size, bias=False),
        _output(spec, weights, shard.group, name),
    )


def _self_attention(
    spec: ModelSpec, weights: Weights, shard: Shard, stack: str, index: int, bias: RelativeBias
) -> tuple[RMSNorm, SelfAttention]:
    name = BLOCK.format(stack, index, 0)
    width = head_ranges(spec, shard.group)[0].times(spec.head_dim)
    outputs = {f"{name}.SelfAttention.{part}": width for part in "qkv"}
    qkv = linear(weights, outputs, spec.hidden_size, bias=False)
    # An encoder layer caches nothing, so its index in the cache is unused.
    shape = replace(_shape(spec, shard, index - shard.layers[0] if stack == "decoder" else 0), bias=bias)
    output = _output(spec, weights, shard.group, f"{name}.SelfAttention")
    return _norm(spec, weights, f"{name}.layer_norm"), SelfAttention(shape, qkv, output)


def _feed_forward(spec: ModelSpec, weights: Weights, group: Group, name: str) -> tuple[RMSNorm, Block]:
    inner, block = inner_range(spec, group, spec.intermediate_size), f"{name}.DenseReluDense"
    gate, _, kind = (spec.config.get("feed_forward_proj") or "relu").rpartition("-")
    function = (gated_activation if gate else activation)(
        weights.kernels, "gelu_new" if gate and kind == "gelu" else kind
    )
    down = partial_linear(weights, f"{block}.wo", spec.hidden_size, inner, group, bias=False)
    names = ("wi_0", "wi_1") if gate else ("wi",)
    up = linear(weights, {f"{block}.{part}": inner for part in names}, spec.hidden_size, bias=False)
    return _norm(spec, weights, f"{name}.layer_norm"), summed(MLP(up, down, function), group)


def _output(spec: ModelSpec, weights: Weights, group: Group, name: str) -> Block:
    width = head_ranges(spec, group)[0].times(spec.head_dim)
    return summed(partial_linear(weights, f"{name}.o", spec.hidden_size, width, group, bias=False), group)


def _shape(spec: ModelSpec, shard: Shard, layer: int) -> AttentionShape:
    heads, kv_heads = map(len, head_ranges(spec, shard.group))
    return AttentionShape(layer=layer, num_heads=heads, num_kv_heads=kv_heads, head_dim=spec.head_dim, scale=1.0)


def _norm(spec: ModelSpec, weights: Weights, name: str) -> RMSNorm:
    return RMSNorm(weights, name, spec.hidden_size, spec.config.get("layer_norm_epsilon", 1e-6))
