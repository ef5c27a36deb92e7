"""Counts from sizes alone agree with each model's published parameters, KV cache and all-reduces."""

from typing import Any

import pytest

from exeplan.core.models.layer_costs import (
    activation_bytes,
    attention_parameters,
    embedding_parameters,
    layer_kv_bytes_per_token,
    layer_parameters,
    layer_parameters_read,
    layer_parameters_used,
    model_parameters,
    num_all_reduces,
    share_behind_attention,
)
from exeplan.core.models.model import load_model_spec, model_spec
from exeplan.files import shipped_names

SHIPPED = {
    "flan-t5-xxl": 11.1e9,
    "deepseek-v2-lite": 15.7e9,
    "deepseek-v3": 671e9,
    "minimax-m2": 229e9,
    "gpt3-39b": 39e9,
    "gpt3-101b": 101e9,
    "gpt3-175b": 175e9,
    "gpt3-341b": 341e9,
    "llama-2-7b": 6.74e9,
    "llama-2-70b": 69.0e9,
    "llama-3.1-8b": 8.03e9,
    "llama-3.1-70b": 70.6e9,
    "mistral-7b": 7.25e9,
    "mixtral-8x7b": 46.7e9,
    "opt-13b": 13e9,
    "opt-66b": 66e9,
    "qwen3-8b": 8.19e9,
    "qwen3-30b-a3b": 30.5e9,
    "qwen3-32b": 32.8e9,
    "qwen3-235b-a22b": 235e9,
    "t5-11b": 11.3e9,
}
"""Billions of parameters, from the papers' tables and the checkpoints."""

PUBLIC: dict[str, tuple[float, dict[str, Any]]] = {
    "gpt2": (124e6, {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}),
    "gpt_neox": (
        20.6e9,
        {
            "hidden_size": 6144,
            "intermediate_size": 24576,
            "num_hidden_layers": 44,
            "num_attention_heads": 64,
            "hidden_act": "gelu_fast",
            "max_position_embeddings": 2048,
            "vocab_size": 50432,
            "tie_word_embeddings": False,
        },
    ),
    "gpt_bigcode": (
        15.5e9,
        {
            "n_embd": 6144,
            "n_head": 48,
            "n_layer": 40,
            "n_inner": 24576,
            "n_positions": 8192,
            "multi_query": True,
            "vocab_size": 49152,
        },
    ),
    "mpt": (6.65e9, {"d_model": 4096, "n_heads": 32, "n_layers": 32, "max_seq_len": 2048, "vocab_size": 50432}),
    "bloom": (
        176e9,
        {"n_embed": 14336, "n_layer": 70, "num_attention_heads": 112, "n_inner": None, "vocab_size": 250880},
    ),
    "falcon": (
        41.3e9,
        {
            "hidden_size": 8192,
            "num_hidden_layers": 60,
            "num_attention_heads": 128,
            "num_kv_heads": 8,
            "new_decoder_architecture": True,
            "multi_query": True,
            "vocab_size": 65024,
        },
    ),
    "gemma2": (
        9.24e9,
        {
            "hidden_size": 3584,
            "intermediate_size": 14336,
            "num_hidden_layers": 42,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 8192,
            "vocab_size": 256000,
        },
    ),
    "phi3": (
        3.82e9,
        {
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "vocab_size": 32064,
            "tie_word_embeddings": False,
        },
    ),
    "qwen2": (
        7.62e9,
        {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "hidden_act": "silu",
            "max_position_embeddings": 32768,
            "vocab_size": 152064,
            "tie_word_embeddings": False,
        },
    ),
    "bart": (
        406e6,
        {
            "is_encoder_decoder": True,
            "d_model": 1024,
            "encoder_layers": 12,
            "decoder_layers": 12,
            "num_hidden_layers": 12,
            "encoder_attention_heads": 16,
            "decoder_attention_heads": 16,
            "encoder_ffn_dim": 4096,
            "decoder_ffn_dim": 4096,
            "max_position_embeddings": 1024,
            "vocab_size": 50265,
        },
    ),
    "t5": (
        60.5e6,
        {
            "is_encoder_decoder": True,
            "d_model": 512,
            "d_kv": 64,
            "d_ff": 2048,
            "num_layers": 6,
            "num_heads": 8,
            "relative_attention_num_buckets": 32,
            "vocab_size": 32128,
        },
    ),
    "mt5": (
        13.0e9,
        {
            "is_encoder_decoder": True,
            "d_model": 4096,
            "d_kv": 64,
            "d_ff": 10240,
            "num_layers": 24,
            "num_decoder_layers": 24,
            "num_heads": 64,
            "relative_attention_num_buckets": 32,
            "feed_forward_proj": "gated-gelu",
            "vocab_size": 250112,
            "tie_word_embeddings": False,
        },
    ),
    "gpt_oss": (
        117e9,
        {
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "hidden_act": "silu",
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 18,
            "max_position_embeddings": 131072,
            "vocab_size": 201088,
            "tie_word_embeddings": False,
        },
    ),
    "glm4_moe": (
        355e9,
        {
            "hidden_size": 5120,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "n_routed_experts": 160,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "num_hidden_layers": 92,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "hidden_act": "silu",
            "max_position_embeddings": 131072,
            "vocab_size": 151552,
            "tie_word_embeddings": False,
        },
    ),
    "llama4_text": (
        109e9,
        {
            "hidden_size": 5120,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "hidden_act": "silu",
            "max_position_embeddings": 131072,
            "vocab_size": 202048,
            "tie_word_embeddings": False,
        },
    ),
    "kimi_k2": (
        1.04e12,
        {
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 384,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "num_hidden_layers": 61,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "hidden_act": "silu",
            "max_position_embeddings": 131072,
            "vocab_size": 163840,
            "tie_word_embeddings": False,
        },
    ),
    "qwen2_moe": (
        57.4e9,
        {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "moe_intermediate_size": 2560,
            "shared_expert_intermediate_size": 20480,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "hidden_act": "silu",
            "max_position_embeddings": 32768,
            "vocab_size": 151936,
            "tie_word_embeddings": False,
        },
    ),
}
"""By model_type: published parameters, and the sizes that its config.json states."""


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_a_shipped_model_has_the_parameters_of_its_name(name: str) -> None:
    assert model_parameters(load_model_spec(name)) == pytest.approx(SHIPPED[name], rel=0.03)


def test_every_shipped_model_of_a_known_size_is_counted() -> None:
    assert set(shipped_names("models")) - set(SHIPPED) == {
        "demo",
        "demo-experts",
        "llama-50m",
        "tcb-small",
        "tcb-transformer",
    }


@pytest.mark.parametrize("family", sorted(PUBLIC))
def test_a_public_config_has_its_published_parameters(family: str) -> None:
    parameters, config = PUBLIC[family]
    spec = model_spec({"model_type": family, **config}, name=family)
    assert model_parameters(spec) == pytest.approx(parameters, rel=0.03)


def test_what_a_family_leaves_unsaid_is_known() -> None:
    falcon = model_spec({"model_type": "falcon", **PUBLIC["falcon"][1], "new_decoder_architecture": False}, name="f")
    assert (falcon.num_kv_heads, falcon.max_context) == (1, 2048)
    gemma = model_spec({"model_type": "gemma2", **PUBLIC["gemma2"][1]}, name="g")
    assert (gemma.gated_mlp, gemma.tied_head) == (True, True)
    llama = {k: v for k, v in PUBLIC["qwen2"][1].items() if k not in ("hidden_act", "tie_word_embeddings")}
    spec = model_spec({"model_type": "llama", **llama}, name="l")
    assert (spec.gated_mlp, spec.tied_head) == (True, False)


def test_a_shorter_decoder_is_not_taken_for_the_encoder() -> None:
    config = {"model_type": "bart", **PUBLIC["bart"][1], "decoder_layers": 6}
    spec = model_spec(config, name="distilbart")
    assert (spec.num_encoder_layers, spec.num_layers) == (12, 6)
    assert model_parameters(spec) == pytest.approx(306e6, rel=0.03)


ACTIVE = {
    "qwen3-235b-a22b": 22.2e9,
    "qwen3-30b-a3b": 3.35e9,
    "mixtral-8x7b": 12.9e9,
    "deepseek-v3": 37.6e9,
    "deepseek-v2-lite": 2.66e9,
}
"""Parameters that one token uses, embedding and head included, as their authors count them (Mixtral, DeepSeek: 37 and
2.4 billion without an embedding), or as their names say."""


@pytest.mark.parametrize("name", sorted(ACTIVE))
def test_a_token_uses_the_experts_that_it_goes_to(name: str) -> None:
    spec = load_model_spec(name)
    used = spec.num_layers * layer_parameters_used(spec) + 2 * embedding_parameters(spec)
    assert used == pytest.approx(ACTIVE[name], rel=0.01)


def test_a_pass_reads_more_experts_the_more_tokens_it_has() -> None:
    spec = load_model_spec("qwen3-235b-a22b")
    read = [layer_parameters_read(spec, tokens) for tokens in (1, 2, 16, 128, 4096)]
    assert read == sorted(read)
    assert read[0] == pytest.approx(layer_parameters_used(spec))
    assert read[-1] == pytest.approx(layer_parameters(spec))
    # Two tokens meet in one expert of 128 with a chance of 8 / 128 for each of eight.
    assert spec.experts is not None
    assert spec.experts.touched(2) == pytest.approx(8 + 8 * (1 - 8 / 128))


def test_a_dense_layer_reads_and_uses_all() -> None:
    for name in ("opt-13b", "t5-11b"):
        spec = load_model_spec(name)
        for encoder in (False, True):
            whole = layer_parameters(spec, encoder=encoder)
            assert layer_parameters_used(spec, encoder=encoder) == whole
            assert layer_parameters_read(spec, 1, encoder=encoder) == whole


def test_a_latent_vector_is_kept_once_for_all_heads() -> None:
    spec = load_model_spec("deepseek-v3")
    assert layer_kv_bytes_per_token(spec, "bfloat16") == 2 * (512 + 64)
    assert (spec.num_kv_shares, load_model_spec("llama-3.1-8b").num_kv_shares) == (1, 8)


def test_t5_11b_is_the_papers_row() -> None:
    spec = load_model_spec("t5-11b")
    assert (spec.num_encoder_layers, spec.num_layers) == (24, 24)
    assert (spec.hidden_size, spec.num_heads, spec.head_dim, spec.intermediate_size) == (1024, 128, 128, 65536)


def test_a_decoder_layer_of_t5_has_a_cross_attention_more_and_one_more_sum() -> None:
    spec = load_model_spec("t5-11b")
    assert attention_parameters(spec) == 4 * 1024 * 128 * 128
    assert layer_parameters(spec) - layer_parameters(spec, encoder=True) == attention_parameters(spec)
    assert (num_all_reduces(spec), num_all_reduces(spec, encoder=True)) == (3, 2)
    assert num_all_reduces(load_model_spec("opt-13b")) == 2


def test_grouped_heads_shrink_the_cache() -> None:
    assert layer_kv_bytes_per_token(load_model_spec("llama-2-7b"), "float16") == 2 * 32 * 128 * 2
    assert layer_kv_bytes_per_token(load_model_spec("llama-3.1-8b"), "float16") == 2 * 8 * 128 * 2


def test_a_stage_sends_one_hidden_state_a_token() -> None:
    assert activation_bytes(load_model_spec("opt-13b"), 3, "float16") == 3 * 5120 * 2


def test_the_share_of_a_layer_behind_its_attention_by_hand():
    """OPT: one of four squares of the attention, and eight of the MLP. Llama-2: three products of 11008 x 4096.
    Mixtral: two of eight experts, and a router."""
    assert share_behind_attention(load_model_spec("opt-13b")) == 9 / 12
    mlp = 3 * 4096 * 11008
    assert share_behind_attention(load_model_spec("llama-2-7b")) == (4096**2 + mlp) / (4 * 4096**2 + mlp)
    experts = 2 * 3 * 4096 * 14336 + 8 * 4096
    assert share_behind_attention(load_model_spec("mixtral-8x7b")) == (4096**2 + experts) / (2.5 * 4096**2 + experts)
