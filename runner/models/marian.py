"""Marian: the original Transformer, encoder and decoder, as in OPUS-MT: sinusoidal positions, norms after sums.

One table embeds both sides and is also the output head, with a bias on the logits. Sines fill the first half of a
position's vector and cosines the second, not interleaved as in the paper; the decoder counts positions from its start
token. Products have biases. LayerNorm follows each residual sum, and there is no final norm.

Source: Vaswani et al. 2017; Junczys-Dowmunt et al. 2018 (Marian). TCB measures this model with 3 + 3 layers
(`plans/models/tcb-transformer.yaml`). Not here: two vocabularies, and Marian's variants with norms before the blocks.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from exeplan.core.models.generation_config import generation_setting
from exeplan.core.models.model import ModelSpec
from exeplan.errors import InputError, shown
from exeplan.runner.compute.blocks.cross_attention import CrossAttention
from exeplan.runner.compute.blocks.layers import (
    MLP,
    Attend,
    Block,
    Layer,
    LayerNorm,
    SelfAttention,
    activation,
    attention_shape,
    integer,
    linear,
    partial_linear,
    projections,
    summed,
)
from exeplan.runner.compute.blocks.rotary import Angles
from exeplan.runner.compute.weights.checkpoint import Weights
from exeplan.runner.compute.weights.shard import Shard, head_ranges, inner_range
from exeplan.runner.compute.weights.vocabulary import Vocabulary

PREFIX = "model."
EMBEDDING, HEAD, HEAD_BIAS, LAYER = "model.shared.weight", "lm_head.weight", "final_logits_bias", "model.{}.layers.{}"
"""Within a layer: self_attn.{q,k,v,out}_proj, fc1, fc2, self_attn_layer_norm, final_layer_norm; in the decoder's also
encoder_attn.{q,k,v,out}_proj and encoder_attn_layer_norm."""
_WAVELENGTH = 10000.0
log = logging.getLogger(__name__)


class Model:
    """`layers` are the decoder's, `encoder_layers` the encoder's; a shard may have none of either."""

    def __init__(self, spec: ModelSpec, weights: Weights, shard: Shard) -> None:
        _check(spec)
        # The last stage of those that run the encoder only computes no logits.
        around = replace(shard, last=shard.last and shard.num_layers > 0)
        head = EMBEDDING if spec.tied_head else HEAD
        self.vocabulary = Vocabulary(weights, around, EMBEDDING, head, spec.vocab_size, spec.hidden_size)
        self.scale = spec.hidden_size**0.5 if spec.config.get("scale_embedding") else 1.0
        self.encoder_layers: list[Layer] = [
            EncoderLayer(spec, weights, shard, index) for index in range(*shard.encoder_layers)
        ]
        self.layers: list[Layer] = [DecoderLayer(spec, weights, shard, index) for index in range(*shard.layers)]
        if shard.first:
            self.positions_PE = sinusoids(spec.max_context, spec.hidden_size).to(weights.device, weights.dtype)
        if around.last:
            self.head_bias_V = weights.take(HEAD_BIAS, 1, spec.vocab_size)[0]
            self.head_bias_V[_bad_tokens(spec)] = -torch.inf

    def embed(self, token_N: Tensor, position_N: Tensor) -> Tensor:
        return self.vocabulary.embed(token_N).mul(self.scale).add_(self.positions_PE[position_N])

    def angles(self, _position_N: Tensor, _length_N: Tensor) -> None:
        return None

    def encoded(self, hidden_NE: Tensor) -> Tensor:
        return hidden_NE

    def cross_keys_values(self, encoded_NE: Tensor) -> Iterator[Tensor]:
        return (layer.cross.keys_values(encoded_NE) for layer in cast(list[DecoderLayer], self.layers))

    def head(self, hidden_RE: Tensor) -> Tensor:
        return self.vocabulary.logits(hidden_RE).add_(self.head_bias_V)


def sinusoids(num_positions: int, size: int) -> Tensor:
    """`[P, E]` in float32: sines of all wavelengths, then cosines."""
    exponent_X = torch.arange(0, size, 2, dtype=torch.float64) / size
    angle_PX = torch.arange(num_positions, dtype=torch.float64)[:, None] / _WAVELENGTH**exponent_X
    return torch.cat([angle_PX.sin(), angle_PX[:, : size // 2].cos()], 1).float()


class EncoderLayer:
    def __init__(self, spec: ModelSpec, weights: Weights, shard: Shard, index: int) -> None:
        name = LAYER.format("encoder", index)
        # An encoder layer caches nothing, so its index in the cache is unused.
        self.attention = _self_attention(spec, weights, shard, name, shard.layers[0])
        self.attention_norm = LayerNorm(weights, f"{name}.self_attn_layer_norm", spec.hidden_size)
        self.mlp, self.mlp_norm = _feed_forward(spec, weights, shard, name, "encoder_ffn_dim")

    def __call__(self, hidden_NE: Tensor, angles: Angles | None, attend: Attend) -> Tensor:
        hidden_NE = self.attention_norm.of_sum(self.attention(hidden_NE, None, attend), hidden_NE)
        return self.mlp_norm.of_sum(self.mlp(hidden_NE), hidden_NE)


class DecoderLayer:
    def __init__(self, spec: ModelSpec, weights: Weights, shard: Shard, index: int) -> None:
        name = LAYER.format("decoder", index)
        self.attention = _self_attention(spec, weights, shard, name, index)
        self.attention_norm = LayerNorm(weights, f"{name}.self_attn_layer_norm", spec.hidden_size)
        self.cross = _cross_attention(spec, weights, shard, name, index)
        self.cross_norm = LayerNorm(weights, f"{name}.encoder_attn_layer_norm", spec.hidden_size)
        self.mlp, self.mlp_norm = _feed_forward(spec, weights, shard, name, "decoder_ffn_dim")

    def __call__(self, hidden_NE: Tensor, angles: Angles | None, attend: Attend) -> Tensor:
        hidden_NE = self.attention_norm.of_sum(self.attention(hidden_NE, None, attend), hidden_NE)
        hidden_NE = self.cross_norm.of_sum(self.cross(hidden_NE, attend), hidden_NE)
        return self.mlp_norm.of_sum(self.mlp(hidden_NE), hidden_NE)


def _self_attention(spec: ModelSpec, weights: Weights, shard: Shard, name: str, index: int) -> SelfAttention:
    qkv, output = projections(
        weights, spec, shard.group, f"{name}.self_attn", qkv_bias=True, output_bias=True, output="out_proj"
    )
    return SelfAttention(attention_shape(spec, shard, index), qkv, output)


def _cross_attention(spec: ModelSpec, weights: Weights, shard: Shard, name: str, index: int) -> CrossAttention:
    name, size = f"{name}.encoder_attn", spec.hidden_size
    width = head_ranges(spec, shard.group)[0].times(spec.head_dim)
    output = partial_linear(weights, f"{name}.out_proj", size, width, shard.group, bias=True)
    return CrossAttention(
        replace(attention_shape(spec, shard, index), cross=True),
        linear(weights, {f"{name}.q_proj": width}, size, bias=True),
        linear(weights, {f"{name}.k_proj": width, f"{name}.v_proj": width}, size, bias=True),
        summed(output, shard.group),
    )


def _feed_forward(spec: ModelSpec, weights: Weights, shard: Shard, name: str, width: str) -> tuple[Block, LayerNorm]:
    size, group = spec.hidden_size, shard.group
    inner = inner_range(spec, group, integer(spec.config, width, spec.intermediate_size))
    up = linear(weights, {f"{name}.fc1": inner}, size, bias=True)
    down = partial_linear(weights, f"{name}.fc2", size, inner, group, bias=True)
    mlp = MLP(up, down, activation(weights.kernels, spec.config.get("activation_function", "gelu")))
    return summed(mlp, group), LayerNorm(weights, f"{name}.final_layer_norm", size)


def _bad_tokens(spec: ModelSpec) -> list[int]:
    """Tokens that no output has, as with transformers: `bad_words_ids` of one token, but for ends of a sequence."""
    words, ends = generation_setting(spec, "bad_words_ids") or [], generation_setting(spec, "eos_token_id")
    if not isinstance(words, list) or not all(isinstance(word, list) for word in words):
        raise InputError(f"'{spec.name}': bad_words_ids must be lists of token ids in a list, found {shown(words)}")
    if any(len(word) > 1 for word in words):
        log.warning("'%s': bad_words_ids of several tokens are not kept out of outputs", spec.name)
    bad = {word[0] for word in words if len(word) == 1 and type(word[0]) is int and 0 <= word[0] < spec.vocab_size}
    return [token for token in sorted(bad) if token not in (ends if isinstance(ends, list) else [ends])]


def _check(spec: ModelSpec) -> None:
    """Raises InputError for settings that this file does not implement."""
    config = spec.config
    if config.get("share_encoder_decoder_embeddings") is False:
        raise InputError(
            f"'{spec.name}' has two vocabularies (share_encoder_decoder_embeddings is false); one is supported"
        )
    for flag in ("normalize_before", "add_final_layer_norm", "normalize_embedding"):
        if config.get(flag):
            raise InputError(f"'{spec.name}' sets {flag}, which is not supported; OPUS-MT's models leave it false")
    heads = config.get("encoder_attention_heads", spec.num_heads)
    if heads != spec.num_heads:
        raise InputError(
            f"'{spec.name}' has {heads} heads in its encoder and {spec.num_heads} in its decoder; they must be equal"
        )
