"""What a layer of a model weighs, computes and sends: counting, from sizes alone.

`encoder` picks an encoder-decoder model's encoder layer instead of its decoder layer. Parameters, not bytes; a tensor
parallel group shares them evenly, but for normalisation weights and biases, which are left out: OPT-13B's
layer has 13 hidden sizes of them and 12 squares of it, 0.02 %.
"""

from exeplan.core.model import DTYPE_BYTES, ModelSpec


def attention_parameters(spec: ModelSpec) -> int:
    """Query, key, value and output projections of one attention."""
    queries = spec.num_heads * spec.head_dim
    keys = spec.num_kv_heads * spec.head_dim
    return spec.hidden_size * (2 * queries + 2 * keys)


def mlp_parameters(spec: ModelSpec) -> int:
    return (3 if spec.gated_mlp else 2) * spec.hidden_size * spec.intermediate_size


def layer_parameters(spec: ModelSpec, *, encoder: bool = False) -> int:
    """One layer; an encoder-decoder model's decoder layer has a cross attention too."""
    attentions = 2 if spec.is_encoder_decoder and not encoder else 1
    return attentions * attention_parameters(spec) + mlp_parameters(spec)


def embedding_parameters(spec: ModelSpec) -> int:
    """The token embedding; an untied output head is as large again."""
    return spec.vocab_size * spec.hidden_size


def model_parameters(spec: ModelSpec) -> int:
    """All layers, the embedding, and the output head where it is not the embedding."""
    layers = spec.num_layers * layer_parameters(spec)
    layers += spec.num_encoder_layers * layer_parameters(spec, encoder=True)
    return layers + embedding_parameters(spec) * (1 if spec.tied_head else 2)


def layer_kv_bytes_per_token(spec: ModelSpec, dtype: str) -> int:
    """Keys and values that one token keeps in one decoder layer (in a cross attention's cache too, for its prompt)."""
    return 2 * spec.num_kv_heads * spec.head_dim * DTYPE_BYTES[dtype]


def num_all_reduces(spec: ModelSpec, *, encoder: bool = False) -> int:
    """Sums over a tensor parallel group in one layer: after each attention and after the MLP (Megatron's split)."""
    return 3 if spec.is_encoder_decoder and not encoder else 2


def activation_bytes(spec: ModelSpec, num_tokens: float, dtype: str) -> float:
    """What one all-reduce sums, and what one stage sends to the next."""
    return num_tokens * spec.hidden_size * max(DTYPE_BYTES[dtype], DTYPE_BYTES["bfloat16"])
