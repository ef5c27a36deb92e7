"""GPT-2: LayerNorm, learned positions, a plain feed-forward block, queries, keys and values in one product.

The checkpoint has every weight transposed (`Conv1D`). `scale_attn_by_inverse_layer_idx` divides the scores by the layer
number from 1, `scale_attn_weights` False omits the division by sqrt(head_dim).
"""

import torch
from torch import Tensor

from exeplan.core.models.model import ModelSpec
from exeplan.errors import InputError
from exeplan.runner.compute.blocks.layers import (
    MLP,
    Attend,
    LayerNorm,
    SelfAttention,
    activation,
    added,
    attention_shape,
    integer,
    summed,
    wanted_rows,
)
from exeplan.runner.compute.blocks.rotary import Angles
from exeplan.runner.compute.weights.checkpoint import Weights
from exeplan.runner.compute.weights.products import Product, product
from exeplan.runner.compute.weights.shard import Shard, ShardRange, head_ranges, inner_range
from exeplan.runner.compute.weights.vocabulary import Vocabulary

PREFIX = "transformer."
EMBEDDING, POSITIONS, NORM = "transformer.wte.weight", "transformer.wpe.weight", "transformer.ln_f"
HEAD, LAYER = "lm_head.weight", "transformer.h.{}"
"""Within a layer: attn.c_attn, attn.c_proj, mlp.c_fc, mlp.c_proj, ln_1, ln_2."""


class Model:
    def __init__(self, spec: ModelSpec, weights: Weights, shard: Shard) -> None:
        config, size = spec.config, spec.hidden_size
        if config.get("add_cross_attention"):
            raise InputError(f"{spec.name}: add_cross_attention is set, but gpt2 runs as a decoder only")
        head = EMBEDDING if config.get("tie_word_embeddings", True) else HEAD
        self.vocabulary = Vocabulary(weights, shard, EMBEDDING, head, spec.vocab_size, size)
        self.layers = [Layer(spec, weights, shard, index) for index in range(*shard.layers)]
        if shard.first:
            self.positions_PE = weights.take(POSITIONS, spec.max_context, size)
        if shard.last:
            self.norm = LayerNorm(weights, NORM, size, eps=config.get("layer_norm_epsilon") or 1e-5)

    def embed(self, token_N: Tensor, position_N: Tensor) -> Tensor:
        return self.vocabulary.embed(token_N).add_(self.positions_PE[position_N])

    def angles(self, _position_N: Tensor, _length_N: Tensor) -> None:
        return None

    def head(self, hidden_RE: Tensor) -> Tensor:
        return self.vocabulary.logits(self.norm(hidden_RE))


class Layer:
    def __init__(self, spec: ModelSpec, weights: Weights, shard: Shard, index: int) -> None:
        config, name, size, group = spec.config, LAYER.format(index), spec.hidden_size, shard.group
        eps, biased = config.get("layer_norm_epsilon") or 1e-5, group.rank == 0
        heads = head_ranges(spec, group)[0].times(spec.head_dim)
        inner = inner_range(spec, group, integer(config, "n_inner", 4 * size))
        self.attention_norm = LayerNorm(weights, f"{name}.ln_1", size, eps=eps)
        self.attention = SelfAttention(
            attention_shape(spec, shard, index, scale=_scale(spec, index)),
            _transposed(weights, f"{name}.attn.c_attn", size, *_fused(heads)),
            summed(_transposed(weights, f"{name}.attn.c_proj", heads, size, bias=biased), group),
        )
        self.mlp_norm = LayerNorm(weights, f"{name}.ln_2", size, eps=eps)
        mlp = MLP(
            _transposed(weights, f"{name}.mlp.c_fc", size, inner),
            _transposed(weights, f"{name}.mlp.c_proj", inner, size, bias=biased),
            activation(weights.kernels, config.get("activation_function", "gelu_new")),
        )
        self.mlp = summed(mlp, group)

    def __call__(
        self, hidden_NE: Tensor, angles: Angles | None, attend: Attend, wanted_R: Tensor | None = None
    ) -> Tensor:
        residual_RE, attend = wanted_rows(hidden_NE, attend, wanted_R)
        attended_RE = self.attention(self.attention_norm(hidden_NE), angles, attend)
        return added(self.mlp, self.mlp_norm.of_sum(attended_RE, residual_RE), residual_RE)


def _fused(heads: ShardRange) -> list[ShardRange]:
    """The outputs of the merged product that are queries, keys and values of this rank's heads."""
    size = heads.size
    if heads.is_whole:
        return [ShardRange(3 * size, 0, 3 * size)]
    return [ShardRange(3 * size, start + heads.start, start + heads.stop) for start in (0, size, 2 * size)]


def _transposed(
    weights: Weights, name: str, inputs: int | ShardRange, *outputs: int | ShardRange, bias: bool = True
) -> Product:
    weight_OI = torch.cat([weights.take(f"{name}.weight", inputs, part).t() for part in outputs]).contiguous()
    bias_O = torch.cat([weights.take(f"{name}.bias", part) for part in outputs]) if bias else None
    return product(weights, weight_OI, bias_O)


def _scale(spec: ModelSpec, index: int) -> float:
    scale = spec.head_dim**-0.5 if spec.config.get("scale_attn_weights", True) else 1.0
    return scale / (index + 1) if spec.config.get("scale_attn_by_inverse_layer_idx", False) else scale
