"""OPT: LayerNorm instead of RMSNorm, learned positions, a plain feed-forward block, no rotary embedding.

Positions start at 2 in the table. `do_layer_norm_before` False puts the norms behind the residual sums and drops
the final one. `word_embed_proj_dim` other than the hidden size adds a projection behind the embedding and one
before the tied head.
"""

from torch import Tensor

from exeplan.model import ModelSpec
from exeplan.runner.checkpoint import Weights
from exeplan.runner.layers import (
    MLP,
    Attend,
    LayerNorm,
    SelfAttention,
    activation,
    attention_shape,
    integer,
    linear,
    output_head,
    projections,
)
from exeplan.runner.rotary import Angles

PREFIX = "model."
DECODER, HEAD, LAYER = "model.decoder", "lm_head.weight", "model.decoder.layers.{}"
"""Within a layer: self_attn.{q,k,v,out}_proj, fc1, fc2, self_attn_layer_norm, final_layer_norm."""
_POSITION_OFFSET = 2


class Model:
    def __init__(self, spec: ModelSpec, weights: Weights) -> None:
        config, size = spec.config, spec.hidden_size
        width = integer(config, "word_embed_proj_dim", size)
        self.table_VW = weights.take(f"{DECODER}.embed_tokens.weight", spec.vocab_size, width)
        self.positions_PE = weights.take(f"{DECODER}.embed_positions.weight", spec.max_context + _POSITION_OFFSET, size)
        self.project_in = self.project_out = None
        if width != size:
            self.project_in = linear(weights, {f"{DECODER}.project_in": size}, width, bias=False)
            self.project_out = linear(weights, {f"{DECODER}.project_out": width}, size, bias=False)
        self.layers = [Layer(spec, weights, index) for index in range(spec.num_layers)]
        self.norm = None
        if config.get("do_layer_norm_before", True) and not config.get("_remove_final_layer_norm", False):
            affine = config.get("layer_norm_elementwise_affine", True)
            self.norm = LayerNorm(weights, f"{DECODER}.final_layer_norm", size, affine=affine)
        tied = config.get("tie_word_embeddings", True)
        self.output = output_head(weights, HEAD, self.table_VW, tied=tied)

    def embed(self, token_N: Tensor, position_N: Tensor) -> Tensor:
        hidden = self.table_VW[token_N]
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
        return self.output(hidden_RE)


class Layer:
    def __init__(self, spec: ModelSpec, weights: Weights, index: int) -> None:
        config, name, size = spec.config, LAYER.format(index), spec.hidden_size
        bias, affine = config.get("enable_bias", True), config.get("layer_norm_elementwise_affine", True)
        inner = integer(config, "ffn_dim", 4 * size)
        self.norm_first = config.get("do_layer_norm_before", True)
        self.attention_norm = LayerNorm(weights, f"{name}.self_attn_layer_norm", size, affine=affine)
        qkv, output = projections(
            weights, spec, f"{name}.self_attn", qkv_bias=bias, output_bias=bias, output="out_proj"
        )
        self.attention = SelfAttention(attention_shape(spec, index), qkv, output)
        self.mlp_norm = LayerNorm(weights, f"{name}.final_layer_norm", size, affine=affine)
        up = linear(weights, {f"{name}.fc1": inner}, size, bias=bias)
        down = linear(weights, {f"{name}.fc2": size}, inner, bias=bias)
        self.mlp = MLP(up, down, activation(config.get("activation_function", "relu")))

    def __call__(self, hidden_NE: Tensor, angles: Angles | None, attend: Attend) -> Tensor:
        if self.norm_first:
            hidden_NE = self.attention(self.attention_norm(hidden_NE), angles, attend).add_(hidden_NE)
            return self.mlp(self.mlp_norm(hidden_NE)).add_(hidden_NE)
        hidden_NE = self.attention_norm(self.attention(hidden_NE, angles, attend).add_(hidden_NE))
        return self.mlp_norm(self.mlp(hidden_NE).add_(hidden_NE))
