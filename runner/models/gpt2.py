"""GPT-2: LayerNorm, learned positions, a plain feed-forward block, queries, keys and values stored as one product.

The checkpoint holds every product transposed (`Conv1D`). `scale_attn_by_inverse_layer_idx` divides the scores by
the layer's number, `scale_attn_weights` False leaves out the division by sqrt(head_dim).
"""

from torch import Tensor

from exeplan.errors import InputError
from exeplan.kernels.linear import Linear
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
    output_head,
)
from exeplan.runner.rotary import Angles

PREFIX = "transformer."
EMBEDDING, POSITIONS, NORM = "transformer.wte.weight", "transformer.wpe.weight", "transformer.ln_f"
HEAD, LAYER = "lm_head.weight", "transformer.h.{}"
"""Within a layer: attn.c_attn, attn.c_proj, mlp.c_fc, mlp.c_proj, ln_1, ln_2."""


class Model:
    def __init__(self, spec: ModelSpec, weights: Weights) -> None:
        config, size = spec.config, spec.hidden_size
        if config.get("add_cross_attention"):
            raise InputError(f"{spec.name}: add_cross_attention is set, but gpt2 runs as a decoder only")
        self.table_VE = weights.take(EMBEDDING, spec.vocab_size, size)
        self.positions_PE = weights.take(POSITIONS, spec.max_context, size)
        self.layers = [Layer(spec, weights, index) for index in range(spec.num_layers)]
        self.norm = LayerNorm(weights, NORM, size, eps=config.get("layer_norm_epsilon", 1e-5))
        tied = config.get("tie_word_embeddings", True)
        self.output = output_head(weights, HEAD, self.table_VE, tied=tied)

    def embed(self, token_N: Tensor, position_N: Tensor) -> Tensor:
        return self.table_VE[token_N].add_(self.positions_PE[position_N])

    def angles(self, _position_N: Tensor, _length_N: Tensor) -> None:
        return None

    def head(self, hidden_RE: Tensor) -> Tensor:
        return self.output(self.norm(hidden_RE))


class Layer:
    def __init__(self, spec: ModelSpec, weights: Weights, index: int) -> None:
        config, name, size = spec.config, LAYER.format(index), spec.hidden_size
        inner, eps = integer(config, "n_inner", 4 * size), config.get("layer_norm_epsilon", 1e-5)
        self.attention_norm = LayerNorm(weights, f"{name}.ln_1", size, eps=eps)
        self.attention = SelfAttention(
            attention_shape(spec, index, scale=_scale(spec, index)),
            _transposed(weights, f"{name}.attn.c_attn", size, 3 * size),
            _transposed(weights, f"{name}.attn.c_proj", size, size),
        )
        self.mlp_norm = LayerNorm(weights, f"{name}.ln_2", size, eps=eps)
        self.mlp = MLP(
            _transposed(weights, f"{name}.mlp.c_fc", size, inner),
            _transposed(weights, f"{name}.mlp.c_proj", inner, size),
            activation(config.get("activation_function", "gelu_new")),
        )

    def __call__(self, hidden_NE: Tensor, angles: Angles | None, attend: Attend) -> Tensor:
        hidden_NE = self.attention(self.attention_norm(hidden_NE), angles, attend).add_(hidden_NE)
        return self.mlp(self.mlp_norm(hidden_NE)).add_(hidden_NE)


def _transposed(weights: Weights, name: str, num_inputs: int, num_outputs: int) -> Linear:
    weight_IO = weights.take(f"{name}.weight", num_inputs, num_outputs)
    return Linear(weight_IO.t().contiguous(), weights.take(f"{name}.bias", num_outputs))


def _scale(spec: ModelSpec, index: int) -> float:
    scale = spec.head_dim**-0.5 if spec.config.get("scale_attn_weights", True) else 1.0
    return scale / (index + 1) if spec.config.get("scale_attn_by_inverse_layer_idx", False) else scale
