"""What a Hugging Face config must be to be planned: its part for text, its values in range, and what is refused.

Not here: the sizes (`model.py`), and what the engine runs (`runner/models`).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from exeplan.errors import InputError, shown

Config = Mapping[str, Any]
_TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
OTHER_PARTS = ("vision_config", "audio_config")
"""Parts for what is not text; a config that has one is multimodal."""
_SHARED = ("tie_word_embeddings", "torch_dtype", "dtype", "quantization_config", *OTHER_PARTS)
"""Fields that the part for text takes from around it."""
_ENCODERS = {
    "clip", "clip_text_model", "data2vec-text", "deberta", "deberta-v2", "electra", "ernie", "esm", "funnel",
    "layoutlm", "longformer", "mpnet", "nezha", "nystromformer", "reformer", "roberta", "roberta-prelayernorm",
    "siglip", "siglip_text_model", "vit", "wav2vec2", "xlm", "xlm-roberta", "xlm-roberta-xl", "xmod", "yoso",
}  # fmt: skip
"""Families that only encode, besides those whose names end with `bert`."""
_OTHER_EXPERTS = ("moe_num_experts", "moe_num_primary_experts", "num_experts_group")
"""Of mixtures of experts with rules of their own: DBRX, ERNIE, SmallThinker."""
_STATE_SPACE = ("layers_block_type", "hybrid_override_pattern", "ssm_state_size", "mamba_d_state", "state_size")
_OTHER_LAYERS = ("block_types", "attn_type_list", "block_configs", "attention_layers", "blocksparse_block_size")
"""Layers that differ in kind, in fields of their own: RecurrentGemma, MiniMax, Nemotron-NAS, GPT-Neo, Phi-3-small."""
_LAYER_TYPES = ("full_attention", "sliding_attention")
_SMALL = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_epsilon", "norm_eps")
_TEXTS = ("hidden_act", "hidden_activation", "activation_function", "feed_forward_proj")
_FLAGS = (
    "is_encoder_decoder", "tie_word_embeddings", "use_sliding_window", "attention_bias", "mlp_bias", "enable_bias",
    "do_layer_norm_before", "layer_norm_elementwise_affine", "scale_embedding", "scale_attn_weights",
    "scale_attn_by_inverse_layer_idx", "multi_query", "new_decoder_architecture", "scale_decoder_outputs",
)  # fmt: skip
_COUNTS = (
    "sliding_window",
    "relative_attention_num_buckets",
    "relative_attention_max_distance",
)
_TOKENS = ("eos_token_id", "bos_token_id", "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id")
_ROTARY_NUMBERS = {
    "rope_theta": 1.0, "factor": 0.0, "low_freq_factor": 0.0, "high_freq_factor": 0.0, "attention_factor": 0.0,
    "beta_fast": 0.0, "beta_slow": 0.0, "original_max_position_embeddings": 1.0,
}  # fmt: skip
"""Settings of the rotary embedding, and what each must exceed."""
_LARGEST_TOKEN = 2**31
_WINDOW_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4}
"""Families of which every n-th layer has no window, unless the config says it otherwise."""
_WINDOWED = ("mistral", "mixtral", "phi3", "starcoder2", *_WINDOW_PATTERNS)
"""Families whose `sliding_window` alone means that their layers have one."""
_ALL_WINDOWED = ("qwen3_moe",)
"""Families with `use_sliding_window`, all of whose layers have the window then."""
_WINDOW_LAYERS = 28
"""Qwen's `max_window_layers` where the config has none."""


def planned_part(config: Config) -> Config:
    """The part that is planned: the whole config, or the part for text of a multimodal one."""
    for name in _TEXT_PARTS:
        if isinstance(part := config.get(name), Mapping):
            return planned_part({**{key: config[key] for key in _SHARED if key in config}, **part})
    return config


def is_multimodal(config: Config) -> bool:
    return any(isinstance(config.get(name), Mapping) for name in OTHER_PARTS)


def attention_window(config: Config, family: str, layer: int) -> int | None:
    """Tokens that a token of this layer attends to, itself included; None for all."""
    window = config.get("sliding_window")
    if window is None or config.get("use_sliding_window") is False:
        return None
    if kinds := config.get("layer_types"):
        return window if kinds[layer % len(kinds)] == "sliding_attention" else None
    if "use_sliding_window" in config and family not in _ALL_WINDOWED:
        return window if layer >= config.get("max_window_layers", _WINDOW_LAYERS) else None
    if family not in (*_WINDOWED, *_ALL_WINDOWED):
        return None
    pattern = config.get("sliding_window_pattern") or _WINDOW_PATTERNS.get(family)
    return None if pattern and (layer + 1) % pattern == 0 else window


def nested(config: Config, part: str) -> Config:
    """A part of the config that is a mapping, such as MPT's `attn_config`; empty where it is none."""
    found = config.get(part)
    return found if isinstance(found, Mapping) else {}


def check_config(config: Config, name: str) -> None:
    """Raises InputError, in one sentence, for a model of a kind that is not planned, or a value that none can have."""
    _check_kind(config, name)
    # Of a Qwen2-MoE without windows transformers writes 0.
    no_window = config.get("use_sliding_window") is False and config.get("sliding_window") == 0
    counts = tuple(field for field in _COUNTS if not (field == "sliding_window" and no_window))
    checks: dict[str, tuple[tuple[str, ...], Callable[[Any], bool]]] = {
        "a number above 0 and below 1": (_SMALL, lambda value: _is_number(value) and 0 < value < 1),
        "text": (_TEXTS, lambda value: isinstance(value, str)),
        "true or false": (_FLAGS, lambda value: isinstance(value, bool)),
        "a positive integer": (counts, lambda value: type(value) is int and 0 < value < _LARGEST_TOKEN),
        f"a token id from 0 to {_LARGEST_TOKEN - 1}": (_TOKENS, _is_token),
        "a whole number of at least 0": (("max_window_layers",), lambda value: type(value) is int and value >= 0),
    }
    for what, (fields, holds) in checks.items():
        for field in fields:
            if (value := config.get(field)) is not None and not holds(value):
                raise InputError(f"config of '{name}': {field} must be {what}, found {shown(value)}")
    _check_pattern(config, name)
    _check_rotary({field: config.get(field) for field in ("rope_theta", "original_max_position_embeddings")}, name)
    for field in ("rope_scaling", "rope_parameters"):
        if (value := config.get(field)) is not None:
            if not isinstance(value, Mapping):
                raise InputError(f"config of '{name}': {field} must be a mapping of settings, found {shown(value)}")
            _check_rotary(value, name)


def _check_pattern(config: Config, name: str) -> None:
    """EXAONE's `sliding_window_pattern` is text such as LLLG, and its `layer_types` say the same."""
    pattern = config.get("sliding_window_pattern")
    if pattern is None or config.get("layer_types"):
        return
    if type(pattern) is not int or not 0 < pattern < _LARGEST_TOKEN:
        raise InputError(
            f"config of '{name}': sliding_window_pattern must be a positive integer, found {shown(pattern)}; "
            "or give layer_types"
        )


def check_layer_types(config: Config, name: str, *, num_layers: int) -> None:
    """Raises InputError unless all layers attend, to all tokens or to a window of them."""
    kinds = config.get("layer_types")
    if kinds is None:
        return
    if not isinstance(kinds, list) or not kinds:
        raise InputError(f"config of '{name}': layer_types must list a type a layer, found {shown(kinds)}")
    for kind in kinds:
        if kind not in _LAYER_TYPES:
            raise InputError(
                f"config of '{name}': layers of type {shown(kind)} are not supported, only {' and '.join(_LAYER_TYPES)}"
            )
    if len(kinds) != num_layers:
        raise InputError(f"config of '{name}': {len(kinds)} layer_types for {num_layers} layers; give one a layer")


def _check_kind(config: Config, name: str) -> None:
    family = str(config.get("model_type"))
    if family in _ENCODERS or family.endswith("bert"):
        raise InputError(
            f"'{name}' is of the family {family}, which encodes and generates no tokens; there is nothing to schedule"
        )
    if "num_mel_bins" in config:
        raise InputError(
            f"'{name}' is of the family {family}, which reads speech; only models that read text are planned"
        )
    experts = {**nested(config, "ffn_config"), **config}
    for field in _OTHER_EXPERTS:
        if experts.get(field) not in (None, 0, 1):
            raise InputError(
                f"config of '{name}' has {field}={shown(experts[field])}: mixtures of experts of this kind are not "
                "supported, only those of Mixtral, Qwen, DeepSeek, GLM, gpt-oss and Llama 4"
            )
    for field in _STATE_SPACE:
        if config.get(field):
            raise InputError(f"config of '{name}' has {field}: layers without attention are not supported")
    for field in _OTHER_LAYERS:
        if config.get(field):
            raise InputError(
                f"config of '{name}' has {field}: layers of different kinds are not supported, only attention to all "
                "tokens or to a sliding window"
            )


def _check_rotary(settings: Mapping[Any, Any], name: str) -> None:
    """Settings of the rotary embedding; by type of layer, they are one mapping deeper."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            _check_rotary(value, name)
        elif (least := _ROTARY_NUMBERS.get(str(key))) is not None and value is not None:
            if not _is_number(value) or not least < value < 1e30:
                raise InputError(f"config of '{name}': {key} must be a number above {least:g}, found {shown(value)}")
        elif key in ("short_factor", "long_factor"):
            if not isinstance(value, list) or not all(_is_number(one) and one > 0 for one in value):
                raise InputError(f"config of '{name}': {key} must list numbers above 0, found {shown(value)}")
        elif key in ("rope_type", "type") and not isinstance(value, str):
            raise InputError(f"config of '{name}': {key} of the rotary embedding must be text, found {shown(value)}")


def _is_number(value: Any) -> bool:
    """Of a size that a float has: a longer integer compares, and then overflows."""
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300 and math.isfinite(value)
    )


def _is_token(value: Any) -> bool:
    found = value if isinstance(value, list) else [value]
    return all(type(token) is int and 0 <= token < _LARGEST_TOKEN for token in found)
