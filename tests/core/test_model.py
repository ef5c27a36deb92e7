"""A model's shape is read from its Hugging Face config whatever the family's spelling, or refused by the field."""

import json
from pathlib import Path
from typing import Any

import pytest

from exeplan.core.model import load_model_spec, model_spec
from exeplan.errors import InputError
from exeplan.files import shipped_names

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}


def test_reads_the_spelling_of_llama() -> None:
    spec = model_spec(LLAMA, name="tiny")
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (2, 8, 2, 8)
    assert (spec.hidden_size, spec.vocab_size, spec.max_context) == (64, 100, 128)


def test_reads_the_spelling_of_gpt2() -> None:
    config = {"model_type": "gpt2", "n_layer": 3, "n_embd": 48, "n_head": 4, "vocab_size": 9, "n_positions": 32}
    spec = model_spec(config, name="tiny")
    assert (spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.max_context) == (3, 4, 12, 32)


def test_a_head_may_have_its_own_size() -> None:
    assert model_spec({**LLAMA, "head_dim": 32}, name="tiny").head_dim == 32


def test_kv_bytes_are_two_per_layer_head_and_element() -> None:
    spec = model_spec(LLAMA, name="tiny")
    assert spec.kv_bytes_per_token("float32") == 2 * 2 * 2 * 8 * 4
    assert spec.kv_bytes_per_token("bfloat16") == spec.kv_bytes_per_token("float32") // 2


def test_the_fingerprint_is_of_the_shape_alone() -> None:
    spec = model_spec(LLAMA, name="tiny")
    same = {**dict(reversed(LLAMA.items())), "torch_dtype": "float16", "_name_or_path": "elsewhere"}
    assert model_spec(same, name="other").fingerprint == spec.fingerprint
    assert model_spec({**LLAMA, "vocab_size": 101}, name="tiny").fingerprint != spec.fingerprint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": None}, "no usable model_type (found None)"),
        ({"model_type": "../llama"}, "no usable model_type (found '../llama')"),
        ({"num_hidden_layers": None}, "has no num_hidden_layers"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer, found '64'"),
        ({"vocab_size": 0}, "vocab_size must be a positive integer, found 0"),
        ({"num_attention_heads": True}, "num_attention_heads must be a positive integer, found True"),
        ({"num_key_value_heads": 3}, "8 heads cannot share 3 key/value heads"),
        ({"num_key_value_heads": -2}, "num_key_value_heads must be a positive integer, found -2"),
        ({"head_dim": 1.5}, "head_dim must be a positive integer, found 1.5"),
    ],
)
def test_a_wrong_size_is_refused_by_its_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as refusal:
        model_spec({**LLAMA, **change}, name="tiny")
    assert message in str(refusal.value)
    assert "'tiny'" in str(refusal.value)


@pytest.mark.parametrize("name", shipped_names("models"))
def test_shipped_models_load(name: str) -> None:
    spec = load_model_spec(name)
    assert spec.name == name
    assert spec.directory is None


def test_a_model_is_a_directory_or_a_shipped_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no model directory or shipped model 'nope'; shipped are .*demo"):
        load_model_spec("nope")
    with pytest.raises(InputError, match=r"holds no config.json, so it is not a Hugging Face model directory"):
        load_model_spec(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    spec = load_model_spec(str(tmp_path))
    assert (spec.name, spec.directory) == (tmp_path.name, tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"config.json is not valid JSON"):
        load_model_spec(str(tmp_path))
