"""What a layer of a model weighs, computes and sends: counting, from sizes alone.

`encoder` picks an encoder-decoder model's encoder layer instead of its decoder layer. Parameters, not bytes; a tensor
parallel group shares them evenly, but for normalisation weights and biases, which are left out: OPT-13B's
layer has 13 hidden sizes of them and 12 squares of it, 0.02 %.
"""

from collections.abc import Mapping

from exeplan.core.models.model import DTYPE_BYTES, ModelSpec


def tokens_attended(windows: Mapping[int | None, int], context: float) -> float:
    """Tokens in the cache that a new one attends to, the mean of the decoder layers (`ModelSpec.windows`)."""
    reached = sum(count * _reach(window, context) for window, count in windows.items())
    return reached / sum(windows.values())


def pairs_attended(windows: Mapping[int | None, int], num_tokens: float) -> float:
    """Pairs of tokens in a prompt, of which the later attends to the earlier one, the mean of the decoder layers."""
    reaches = ((count, _reach(window, num_tokens)) for window, count in windows.items())
    pairs = sum(count * reach * (num_tokens - reach / 2) for count, reach in reaches)
    return pairs / sum(windows.values())


def _reach(window: int | None, num_tokens: float) -> float:
    return num_tokens if window is None else min(num_tokens, window)


def attention_parameters(spec: ModelSpec) -> int:
    """Query, key, value and output projections of one attention."""
    if spec.latent:
        return spec.latent.parameters(spec.hidden_size, spec.num_heads)
    queries = spec.num_heads * spec.head_dim
    keys = spec.num_kv_heads * spec.head_dim
    return spec.hidden_size * (2 * queries + 2 * keys)


def mlp_parameters(spec: ModelSpec) -> int:
    """Of one layer; where some layers have experts and some have none, the mean of all, as each stage is taken to have
    its share of both."""
    return round(_mlp_parameters(spec, spec.experts.count if spec.experts else 0))


def layer_parameters(spec: ModelSpec, *, encoder: bool = False) -> int:
    """One layer; an encoder-decoder model's decoder layer has a cross attention too."""
    return _attentions(spec, encoder) + mlp_parameters(spec)


def layer_parameters_used(spec: ModelSpec, *, encoder: bool = False) -> float:
    """Of one layer, those that one token is multiplied with: all, but for the experts that it does not go to."""
    return _attentions(spec, encoder) + _mlp_parameters(spec, _experts_of_a_token(spec))


def share_behind_attention(spec: ModelSpec) -> float:
    """Of a layer's products for one token, the part of the output projection and of the MLP."""
    width = spec.latent.value_dim if spec.latent else spec.head_dim
    behind = spec.hidden_size * spec.num_heads * width + _mlp_parameters(spec, _experts_of_a_token(spec))
    return behind / layer_parameters_used(spec)


def layer_parameters_read(spec: ModelSpec, num_tokens: float, *, encoder: bool = False) -> float:
    """Of one layer, those that a pass of so many tokens reads: all, but for the experts to which none goes."""
    return _attentions(spec, encoder) + _mlp_parameters(spec, spec.experts.touched(num_tokens) if spec.experts else 0)


def expert_parameters(spec: ModelSpec) -> float:
    """Of one layer, those of its routed experts: the mean of all layers, as in `mlp_parameters`; 0 of a dense one."""
    if not (experts := spec.experts):
        return 0.0
    return 3 * spec.hidden_size * experts.width * experts.count * experts.num_layers / spec.num_layers


def expert_parameters_read(spec: ModelSpec, num_tokens: float) -> float:
    """Of them, those that a pass of so many tokens reads."""
    if not spec.experts:
        return 0.0
    return expert_parameters(spec) * spec.experts.touched(num_tokens) / spec.experts.count


def _experts_of_a_token(spec: ModelSpec) -> int:
    return spec.experts.per_token if spec.experts else 0


def _attentions(spec: ModelSpec, encoder: bool) -> int:
    return (2 if spec.is_encoder_decoder and not encoder else 1) * attention_parameters(spec)


def _mlp_parameters(spec: ModelSpec, num_experts: float) -> float:
    """Mean over the layers, of which those with experts count that many of them."""
    dense = (3 if spec.gated_mlp else 2) * spec.hidden_size * spec.intermediate_size
    if not (experts := spec.experts):
        return dense
    own = spec.hidden_size * (3 * (num_experts * experts.width + experts.shared_width) + experts.count)
    sparse = experts.num_layers / spec.num_layers
    return sparse * own + (1 - sparse) * dense


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
    return spec.kv_width * DTYPE_BYTES[dtype]


def handover_bytes_per_token(spec: ModelSpec, dtype: str) -> int:
    """Keys and values of one token in one layer as they leave a stage that prefills: in the activations' type."""
    return spec.kv_width * max(DTYPE_BYTES[dtype], DTYPE_BYTES["bfloat16"])


def num_all_reduces(spec: ModelSpec, *, encoder: bool = False) -> int:
    """Sums over a tensor parallel group in one layer: after each attention and after the MLP (Megatron's split)."""
    return 3 if spec.is_encoder_decoder and not encoder else 2


def all_to_all_bytes(spec: ModelSpec, num_tokens: float, dtype: str, *, devices: int, parts: int) -> float:
    """What each of the devices sends in a layer with experts when so many tokens a device go to them, or come back."""
    copies = spec.experts.copies_sent(devices, parts) if spec.experts else 0.0
    return activation_bytes(spec, num_tokens, dtype) * copies


def num_all_to_alls(spec: ModelSpec) -> float:
    """Exchanges of a layer, to the experts and back: the mean of all layers, as some may have none."""
    return 2 * spec.experts.num_layers / spec.num_layers if spec.experts else 0.0


def activation_bytes(spec: ModelSpec, num_tokens: float, dtype: str) -> float:
    """What one all-reduce sums, and what one stage sends to the next."""
    return num_tokens * spec.hidden_size * max(DTYPE_BYTES[dtype], DTYPE_BYTES["bfloat16"])
