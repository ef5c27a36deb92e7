"""A model's shape is read from its Hugging Face config whatever the family's spelling, or refused by the field."""

import json
from pathlib import Path
from typing import Any

import pytest

from exeplan.core.models.hub import download_command
from exeplan.core.models.model import (
    load_model_sizes,
    load_model_spec,
    model_reference,
    model_reference_from,
    model_spec,
)
from exeplan.errors import InputError
from exeplan.files import read_yaml, shipped, shipped_names

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


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        ({"type": "dynamic", "factor": 4.0}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 128),
        ({"rope_type": "yarn", "factor": 4.0}, 128),
        ({"rope_type": "linear", "factor": 4.0}, 128),
        ({"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 128}, 128),
        (None, 128),
    ],
    ids=str,
)
def test_the_context_is_that_of_the_rope_scaling(scaling: dict[str, Any] | None, context: int) -> None:
    for field in ("rope_scaling", "rope_parameters"):
        spec = model_spec({**LLAMA, field: scaling}, name="tiny")
        assert (spec.max_context, spec.num_positions) == (context, 128)
        assert spec.fingerprint == model_spec(LLAMA, name="tiny").fingerprint


def test_kv_bytes_are_two_per_layer_head_and_element() -> None:
    spec = model_spec(LLAMA, name="tiny")
    assert spec.kv_bytes_per_token("float32") == 2 * 2 * 2 * 8 * 4
    assert spec.kv_bytes_per_token("bfloat16") == spec.kv_bytes_per_token("float32") // 2


def test_the_fingerprint_is_of_the_sizes_alone() -> None:
    spec = model_spec(LLAMA, name="tiny")
    same = {**dict(reversed(LLAMA.items())), "torch_dtype": "float16", "_name_or_path": "elsewhere", "head_dim": 8}
    assert model_spec({**same, "rope_theta": 5e5, "eos_token_id": 3}, name="x").fingerprint == spec.fingerprint
    for size in ("num_hidden_layers", "vocab_size", "intermediate_size", "max_position_embeddings"):
        assert model_spec({**LLAMA, size: 136}, name="tiny").fingerprint != spec.fingerprint
    assert model_spec({**LLAMA, "model_type": "mistral"}, name="tiny").fingerprint != spec.fingerprint
    assert model_spec({**LLAMA, "word_embed_proj_dim": 32}, name="tiny").fingerprint != spec.fingerprint


def test_a_shipped_model_and_its_checkpoint_have_one_fingerprint() -> None:
    """The keys that the checkpoint's config.json has beyond the shipped ones."""
    shipped = load_model_spec("qwen3-8b")
    more = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "initializer_range": 0.02,
        "max_window_layers": 36,
        "rope_scaling": None,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
    }
    assert model_spec({**shipped.config, **more}, name="Qwen/Qwen3-8B").fingerprint == shipped.fingerprint


def test_fingerprints_of_whole_configs_are_read_too() -> None:
    spec = model_spec(LLAMA, name="tiny")
    assert spec.matches("fbb81f74ec16bcaa")
    assert not model_spec({**LLAMA, "vocab_size": 101}, name="tiny").matches("fbb81f74ec16bcaa")


def test_a_shipped_name_is_not_shadowed_by_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "config.json").write_text(json.dumps(LLAMA))
    assert load_model_spec("demo").hidden_size == 256
    (remark,) = load_model_spec("demo").remarks
    assert remark == "'demo' is the shipped model; the directory of that name here is ./demo"
    assert load_model_spec("./demo").hidden_size == 64


def test_a_file_names_a_model_so_that_any_working_directory_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("models/tiny", "demo", "elsewhere"):
        (tmp_path / folder).mkdir(parents=True)
    inside, outside = tmp_path / "plan.yaml", tmp_path / "elsewhere" / "plan.yaml"
    names = [("models/tiny", "./models/tiny"), ("demo", "demo"), ("./demo", "./demo"), ("org/name", "org/name")]
    for name, written in names:
        assert model_reference(name, inside) == written
    assert model_reference("models/tiny", outside) == str(tmp_path / "models" / "tiny")
    monkeypatch.chdir("/")
    assert model_reference_from("./models/tiny", inside) == str(tmp_path / "models" / "tiny")
    assert model_reference_from("models/tiny", inside) == str(tmp_path / "models" / "tiny")
    assert model_reference_from("../gone", inside) == str(tmp_path.parent / "gone")
    assert model_reference_from("demo", inside) == "demo"
    assert model_reference_from("org/name", inside) == "org/name"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the Hugging Face Hub, in the layout that its documentation describes."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def add_to(hub: Path, model: str, commit: str = "0" * 40) -> Path:
    folder = hub / f"models--{model.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "snapshots" / commit / "config.json").write_text(json.dumps(LLAMA))
    return folder / "snapshots" / commit


@pytest.mark.parametrize("model", ["org/tiny-1.1", "gpt2"])
def test_an_id_of_the_hub_is_found_in_its_cache(hub: Path, model: str) -> None:
    snapshot = add_to(hub, model)
    spec = load_model_spec(model)
    assert (spec.name, spec.reference, spec.directory) == (model, model, snapshot)


def test_an_id_that_is_not_in_the_cache_names_the_command_that_downloads_it(hub: Path) -> None:
    with pytest.raises(InputError, match=r"download it with `hf download org/tiny-1\.1`"):
        load_model_spec("org/tiny-1.1")
    with pytest.raises(InputError, match="a model of the Hugging Face Hub is named organisation/name"):
        load_model_spec("gpt2")
    for path in (
        "./org/tiny",
        "/org/tiny",
        "org/tiny/more",
        "../tiny",
        "-o/x",
        "a/b--c",
        "",
        "~nosuchuser/x",
        "a\0b",
    ):
        with pytest.raises(InputError, match="no model directory"):
            load_model_spec(path)


def test_a_snapshot_says_how_to_download_the_rest_of_it(hub: Path) -> None:
    assert download_command(add_to(hub, "org/tiny-1.1")) == "hf download org/tiny-1.1"
    assert download_command(hub) is None


def test_without_the_hubs_package_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exeplan.core.models.hub.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"needs huggingface_hub, .*pip install 'exeplan\[hub\]'"):
        load_model_spec("org/tiny")


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
    (tmp_path / "trace.csv").touch()
    with pytest.raises(InputError, match=r"trace.csv' is a file; a model is named by its directory"):
        load_model_spec(str(tmp_path / "trace.csv"))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    spec = load_model_spec(str(tmp_path))
    assert (spec.name, spec.directory, spec.reference) == (tmp_path.name, tmp_path, str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"config.json is not valid JSON"):
        load_model_spec(str(tmp_path))


def test_an_id_of_the_hub_has_the_sizes_of_a_shipped_model_without_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    spec = load_model_sizes("Qwen/Qwen3-235B-A22B-FP8")
    assert (spec.name, spec.reference) == ("Qwen/Qwen3-235B-A22B-FP8",) * 2
    assert spec.quantization is not None
    assert spec.quantization.planned_dtype == "fp8"
    assert spec.fingerprint == load_model_spec("qwen3-235b-a22b").fingerprint
    assert "has the sizes of the shipped 'qwen3-235b-a22b'" in spec.remarks[0]
    assert "hub" not in spec.config
    assert load_model_sizes("Qwen/Qwen3-8B").quantization is None
    with pytest.raises(InputError, match="Qwen/Qwen3-7B"):
        load_model_sizes("Qwen/Qwen3-7B")
    with pytest.raises(InputError, match="Qwen/Qwen3-8B"):  # Its weights are needed.
        load_model_spec("Qwen/Qwen3-8B")


def test_no_id_of_the_hub_is_of_two_shipped_models() -> None:
    named = [read_yaml(shipped("models", name)).get("hub", {}) for name in shipped_names("models")]
    ids = [one for of_model in named for one in of_model]
    assert len(ids) == len(set(ids)) > 20
    assert {method for of_model in named for method in of_model.values()} == {None, "fp8"}
