"""A config is planned by its part for text, with its sliding windows, or refused in one sentence; never in silence."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exeplan.core.models.model import load_model_spec, model_spec
from exeplan.core.models.model_config import attention_window
from exeplan.errors import InputError

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}
METHODS = ("bitsandbytes", "hqq", "quark", "modelopt")
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 256}


def refusal(change: dict[str, Any], base: dict[str, Any] = LLAMA) -> str:
    with pytest.raises(InputError) as found:
        model_spec({**base, **change}, name="tiny")
    message = str(found.value)
    assert "\n" not in message
    assert "'tiny'" in message
    return message


@pytest.mark.parametrize("method", METHODS)
def test_quantized_weights_are_refused_by_their_method(method: str) -> None:
    message = refusal({"quantization_config": {"quant_method": method, "bits": 4}})
    assert message.startswith(f"'tiny' is quantized by {method} (quantization_config), and")
    assert "its unquantized checkpoint, whose sizes are the same, or one by awq, gptq, " in message


@pytest.mark.parametrize(
    ("file", "body", "method"),
    [
        ("quantize_config.json", {"quant_method": "hqq"}, "hqq"),
        ("hf_quant_config.json", {"producer": {}, "quantization": {"quant_algo": "FP8"}}, "FP8"),
    ],
)
def test_a_file_next_to_the_config_may_say_that_weights_are_quantized(
    tmp_path: Path, file: str, body: dict[str, Any], method: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / file).write_text(json.dumps(body))
    with pytest.raises(InputError, match=f"is quantized by {method} \\({file}\\)"):
        load_model_spec(str(tmp_path))


@pytest.mark.parametrize(
    ("fields", "sparse"),
    [
        ({}, 2),
        ({"decoder_sparse_step": 2}, 1),
        ({"mlp_only_layers": [0]}, 1),
        ({"first_k_dense_replace": 1}, 1),
        ({"moe_layer_freq": 2}, 1),
        ({"moe_layers": [1]}, 1),
        ({"interleave_moe_layer_step": 2}, 1),
    ],
)
def test_every_familys_way_to_say_which_layers_have_experts_is_read(fields: dict[str, Any], sparse: int) -> None:
    spec = model_spec({**LLAMA, **EXPERTS, **fields}, name="tiny")
    assert spec.experts is not None
    assert spec.experts.num_layers == sparse
    said, of_datasheet = spec.datasheet_remarks
    assert spec.remarks == (said,) == (f"{sparse} of 2 layers of 'tiny' send each token to 2 of 8 experts",)
    assert of_datasheet == "a datasheet takes all experts to be as likely, unless --routing says otherwise"
    assert spec.fingerprint != model_spec({**LLAMA, **EXPERTS, "num_experts": 16}, name="tiny").fingerprint


def test_a_mixture_whose_layers_are_all_dense_is_dense() -> None:
    spec = model_spec({**LLAMA, **EXPERTS, "mlp_only_layers": [0, 1]}, name="tiny")
    assert spec.experts is None
    assert spec.fingerprint == model_spec(LLAMA, name="tiny").fingerprint


def test_a_multimodal_config_is_planned_by_its_part_for_text() -> None:
    text = {**LLAMA, "model_type": "gemma3_text", "head_dim": 16}
    nested = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}}
    spec = model_spec(nested, name="tiny")
    assert (spec.family, spec.hidden_size, spec.head_dim) == ("gemma3_text", 64, 16)
    assert spec.is_multimodal
    assert spec.remarks == ("'tiny' is multimodal: its part for text is planned, and images and sound are not",)
    again = model_spec(spec.config, name="tiny")  # As a profile keeps it.
    assert (again.fingerprint, again.remarks) == (spec.fingerprint, spec.remarks)


def test_a_flat_multimodal_config_says_so_too() -> None:
    spec = model_spec({**LLAMA, "model_type": "qwen2_vl", "vision_config": {"depth": 32}}, name="tiny")
    assert spec.is_multimodal
    assert not model_spec(LLAMA, name="tiny").is_multimodal


def test_a_part_for_text_that_relies_on_defaults_is_refused_with_the_remedy() -> None:
    message = refusal({"text_config": {"model_type": "gemma3_text", "hidden_size": 64}, "vision_config": {}})
    assert "has no num_hidden_layers; write the one that transformers fills in into its text_config" in message


def test_a_checkpoint_in_fp8_is_planned_so_and_has_the_sizes_of_the_other() -> None:
    spec = model_spec(
        {**LLAMA, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, name="t"
    )
    assert spec.quantization is not None
    assert spec.quantization.planned_dtype == "fp8"
    assert spec.remarks == ("the weights of 't' are quantized (fp8, 8 bits, blocks of 128 x 128)",)
    assert spec.fingerprint == model_spec(LLAMA, name="t").fingerprint


def test_quantization_around_the_part_for_text_counts() -> None:
    assert "quantized by hqq" in refusal({"text_config": LLAMA, "quantization_config": {"quant_method": "hqq"}}, {})


@pytest.mark.parametrize("family", ["bert", "modernbert", "distilbert", "roberta", "xlm-roberta", "deberta-v2", "clip"])
def test_encoders_are_refused(family: str) -> None:
    assert f"'tiny' is of the family {family}, which encodes and generates no tokens" in refusal({"model_type": family})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_theta": 0}, "rope_theta must be a number above 1, found 0"),
        ({"rope_theta": float("nan")}, "rope_theta must be a number above 1, found nan"),
        ({"rope_theta": 10**400}, "rope_theta must be a number above 1, found 1000"),
        ({"original_max_position_embeddings": "4096"}, "original_max_position_embeddings must be a number above 1"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 1e29}},
            "the context of rope_scaling must be at most 1073741824",
        ),
        ({"rope_scaling": "linear"}, "rope_scaling must be a mapping of settings, found linear"),
        ({"rope_parameters": {"rope_type": 3}}, "rope_type of the rotary embedding must be text, found 3"),
        ({"rope_parameters": {"rope_theta": "1e6"}}, "rope_theta must be a number above 1, found '1e6'"),
        ({"rope_parameters": {"full_attention": {"factor": -8}}}, "factor must be a number above 0, found -8"),
        ({"rope_scaling": {"short_factor": [1, "2"]}}, "short_factor must list numbers above 0, found [1, '2']"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a number above 0 and below 1, found -1"),
        ({"layer_norm_eps": float("inf")}, "layer_norm_eps must be a number above 0 and below 1, found inf"),
        ({"eos_token_id": 2**70}, "eos_token_id must be a token id from 0 to 2147483647, found 1180591620717411303424"),
        ({"eos_token_id": [1, None]}, "eos_token_id must be a token id from 0 to 2147483647, found [1, None]"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, found 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 10000, found 1000000000"),
        ({"vocab_size": float("nan")}, "vocab_size must be a positive integer, found nan"),
        ({"vocab_size": 2**70}, "vocab_size must be at most 1073741824, found 1180591620717411303424"),
        ({"num_attention_heads": 7, "num_key_value_heads": 7}, "7 heads do not divide the hidden size 64"),
        ({"hidden_act": ["silu"]}, "hidden_act must be text, found ['silu']"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, found no"),
        ({"sliding_window": -4}, "sliding_window must be a positive integer, found -4"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 2 layers; give one a layer"),
        ({"layer_types": ["linear_attention"] * 2}, "layers of type linear_attention are not supported"),
        ({"layer_types": "full_attention"}, "layer_types must list a type a layer, found full_attention"),
        ({"num_local_experts": 8}, "has no num_experts_per_tok"),
        ({"num_experts": "8"}, "num_experts must be a positive integer up to 1048576, found '8'"),
        ({"num_experts": 8, "num_experts_per_tok": 9}, "a token cannot go to 9 of 8 experts"),
        ({**EXPERTS, "moe_intermediate_size": 0}, "moe_intermediate_size must be a positive integer up to 1048576"),
        ({**EXPERTS, "decoder_sparse_step": 0}, "decoder_sparse_step must be a positive integer, found 0"),
        ({**EXPERTS, "first_k_dense_replace": -1}, "first_k_dense_replace must be a whole number of at least 0"),
        ({**EXPERTS, "is_encoder_decoder": True}, "experts are planned in decoder-only models only"),
        ({"kv_lora_rank": 512}, "has no qk_nope_head_dim"),
        ({"kv_lora_rank": 512, "index_topk": 2048}, "attention to chosen tokens only is not supported"),
        ({"mamba_d_state": 16}, "layers without attention are not supported"),
        (
            {"ffn_config": {"moe_num_experts": 16}},
            "moe_num_experts=16: mixtures of experts of this kind are not supported",
        ),
        ({"num_mel_bins": 80, "model_type": "whisper"}, "of the family whisper, which reads speech"),
        ({"block_types": ["recurrent", "attention"]}, "has block_types: layers of different kinds"),
        ({"attn_type_list": [0, 1]}, "has attn_type_list: layers of different kinds"),
        ({"attention_layers": ["global", "local"]}, "has attention_layers: layers of different kinds"),
        ({"blocksparse_block_size": 64}, "has blocksparse_block_size: layers of different kinds"),
        ({"sliding_window_pattern": "LLLG"}, "positive integer, found LLLG; or give layer_types"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_sentence(change: dict[str, Any], message: str) -> None:
    assert message in refusal(change)


NO, W = None, 64
FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("family", "config", "windows"),
    [
        ("mistral", {"sliding_window": W}, [W, W, W, W]),
        ("mistral", {"sliding_window": None}, [NO, NO, NO, NO]),
        ("llama", {"sliding_window": W}, [NO, NO, NO, NO]),
        ("qwen2", {"sliding_window": W, "use_sliding_window": False}, [NO, NO, NO, NO]),
        ("qwen2", {"sliding_window": W, "use_sliding_window": True, "max_window_layers": 3}, [NO, NO, NO, W]),
        ("qwen3", {"sliding_window": W, "layer_types": [FULL, SLIDING, FULL, SLIDING]}, [NO, W, NO, W]),
        ("gemma2", {"sliding_window": W}, [W, NO, W, NO]),
        ("gemma3_text", {"sliding_window": W}, [W, W, W, W]),
        ("gemma3_text", {"sliding_window": W, "sliding_window_pattern": 3}, [W, W, NO, W]),
        (
            "exaone4",
            {"sliding_window": W, "sliding_window_pattern": "LG", "layer_types": [SLIDING, FULL] * 2},
            [W, NO, W, NO],
        ),
    ],
)
def test_windows_are_those_of_the_family(family: str, config: dict[str, Any], windows: list[int | None]) -> None:
    assert [attention_window(config, family, layer) for layer in range(4)] == windows
    spec = model_spec({**LLAMA, "num_hidden_layers": 4, "model_type": family, **config}, name="tiny")
    assert spec.windows == {kind: windows.count(kind) for kind in windows}
    narrow = windows.count(W)
    said = f"{narrow} of 4 layers of 'tiny' attend to the last 64 tokens; keys and values of all tokens"
    assert [remark.startswith(said) for remark in spec.remarks] == [True] * (narrow > 0)


def test_mpt_has_its_key_value_heads_in_its_attn_config() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert model_spec({**config, "attn_config": {"kv_n_heads": 1}}, name="tiny").num_kv_heads == 1


def test_a_window_that_spans_the_context_is_none() -> None:
    wide = model_spec({**LLAMA, "model_type": "mistral", "sliding_window": 128}, name="tiny")
    assert (set(wide.windows), wide.remarks) == ({None}, ())
    assert wide.fingerprint == model_spec({**LLAMA, "model_type": "mistral"}, name="tiny").fingerprint
    narrow = model_spec({**LLAMA, "model_type": "mistral", "sliding_window": 64}, name="tiny")
    assert narrow.fingerprint != wide.fingerprint


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [
    *LLAMA, "head_dim", "intermediate_size", "rope_theta", "rope_scaling", "rope_parameters", "rms_norm_eps",
    "original_max_position_embeddings", "eos_token_id",
    "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "quantization_config", "text_config",
    "vision_config", "is_encoder_decoder", "num_layers", "decoder_layers", "encoder_layers", "d_kv", "hidden_act",
    "relative_attention_num_buckets", "multi_query", "tie_word_embeddings", "feed_forward_proj", "num_experts",
    "encoder_ffn_dim", "word_embed_proj_dim", "scale_decoder_outputs", "kv_lora_rank",
]  # fmt: skip


@given(change=st.dictionaries(st.sampled_from(FIELDS), JSON, min_size=1, max_size=4))
def test_any_config_is_read_or_refused_in_one_sentence(change: dict[str, Any]) -> None:
    try:
        spec = model_spec({**LLAMA, **change}, name="tiny")
    except InputError as error:
        refused = str(error)
        assert "\n" not in refused
    else:
        assert spec.fingerprint == model_spec(spec.config, name="again").fingerprint
        assert sum(spec.windows.values()) == spec.num_layers
