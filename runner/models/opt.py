"""OPT: LayerNorm instead of RMSNorm, learned positions, a plain feed-forward block, no rotary embedding.

Positions start at 2 in the table. `do_layer_norm_before` False puts the norms after the residual sums and omits the
final one. `word_embed_proj_dim` other than the hidden size adds a projection after the embedding and one before the
tied head.
"""

from torch import Tensor

from exeplan.core.models.model import ModelSpec
from exeplan.runner.compute.blocks.layers import (
    MLP,
    Attend,
    LayerNorm,
    SelfAttention,
    activation,
    added,
    attention_shape,
    integer,
    linear,
    partial_linear,
    projections,
    summed,
    wanted_rows,
)
from exeplan.runner.compute.blocks.rotary import Angles
from exeplan.runner.compute.weights.checkpoint import Weights
from exeplan.runner.compute.weights.shard import Shard, inner_range
from exeplan.runner.compute.weights.vocabulary import Vocabulary

PREFIX = "model."
DECODER, EMBEDDING, HEAD = "model.decoder", "model.decoder.embed_tokens.weight", "lm_head.weight"
LAYER = "model.decoder.layers.{}"
"""Within a layer: self_attn.{q,k,v,out}_proj, fc1, fc2, self_attn_layer_norm, final_layer_norm."""
_POSITION_OFFSET = 2


class Model:
    def __init__(self, spec: ModelSpec, weights: Weights, shard: Shard) -> None:
        config, size = spec.config, spec.hidden_size
        width = integer(config, "word_embed_proj_dim", size)
        head = EMBEDDING if config.get("tie_word_embeddings", True) else HEAD
        self.vocabulary = Vocabulary(weights, shard, EMBEDDING, head, spec.vocab_size, width)
        self.layers = [Layer(spec, weights, shard, index) for index in range(*shard.layers)]
        self.project_in = self.project_out = self.norm = None
        if shard.first:
            positions = spec.max_context + _POSITION_OFFSET
            self.positions_PE = weights.take(f"{DECODER}.embed_positions.weight", positions, size)
            if width != size:
                self.project_in = linear(weights, {f"{DECODER}.project_in": size}, width, bias=False)
        if shard.last:
            if width != size:
                self.project_out = linear(weights, {f"{DECODER}.project_out": width}, size, bias=False)
            if config.get("do_layer_norm_before", True) and not config.get("_remove_final_layer_norm", False):
                affine = config.get("layer_norm_elementwise_affine", True)
                self.norm = LayerNorm(weights, f"{DECODER}.final_layer_norm", size, affine=affine)

    def embed(self, token_N: Tensor, position_N: Tensor) -> Tensor:
        hidden = self.vocabulary.embed(token_N)
        if self.project_in is not None:
            hidden = self.project_in(hidden)
        return hidden.add_(self.positions_PE[position_N + _POSITION_OFFSET])

    def angles(self, _position_N: Tensor, _length_N: Tensor) -> None:
        return None

    def head(self, hidden_RE: Tensor) -> Tensor:
        if self.norm is not None:
            hidden_RE = self.norm(hidden_RE)
        if self.project_out is not None:
            hidden_RE = self.project_out(hidden_RE)
        return self.vocabulary.logits(hidden_RE)


class Layer:
    def __init__(self, spec: ModelSpec, weights: Weights, shard: Shard, index: int) -> None:
        config, name, size = spec.config, LAYER.format(index), spec.hidden_size
        bias, affine = config.get("enable_bias", True), config.get("layer_norm_elementwise_affine", True)
        group = shard.group
        inner = inner_range(spec, group, integer(config, "ffn_dim", 4 * size))
        self.norm_first = config.get("do_layer_norm_before", True)
        self.attention_norm = LayerNorm(weights, f"{name}.self_attn_layer_norm", size, affine=affine)
        qkv, output = projections(
            weights, spec, group, f"{name}.self_attn", qkv_bias=bias, output_bias=bias, output="out_proj"
        )
        self.attention = SelfAttention(attention_shape(spec, shard, index), qkv, output)
        self.mlp_norm = LayerNorm(weights, f"{name}.final_layer_norm", size, affine=affine)
        up = linear(weights, {f"{name}.fc1": inner}, size, bias=bias)
        down = partial_linear(weights, f"{name}.fc2", size, inner, group, bias=bias)
        self.mlp = summed(MLP(up, down, activation(weights.kernels, config.get("activation_function", "relu"))), group)

    def __call__(
        self, hidden_NE: Tensor, angles: Angles | None, attend: Attend, wanted_R: Tensor | None = None
    ) -> Tensor:
        residual_RE, attend = wanted_rows(hidden_NE, attend, wanted_R)
        if self.norm_first:
            attended_RE = self.attention(self.attention_norm(hidden_NE), angles, attend)
            return added(self.mlp, self.mlp_norm.of_sum(attended_RE, residual_RE), residual_RE)
        hidden_RE = self.attention_norm.of_sum(self.attention(hidden_NE, angles, attend), residual_RE)
        return self.mlp_norm.of_sum(self.mlp(hidden_RE), hidden_RE)
