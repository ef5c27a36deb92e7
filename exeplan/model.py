"""ModelSpec: the shape of a transformer, read from a Hugging Face config; no weights and no torch here.

A model is named by a directory that holds a `config.json`, or by a shipped name: `plans/models/<name>.yaml` holds the
same fields. What a family does with its shape is known only to `runner/models/<model_type>.py`.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exeplan.errors import InputError
from exeplan.files import read_json, read_yaml, shipped, shipped_names

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# Hugging Face configs spell the same numbers differently; the first spelling present is taken.
_SPELLINGS = {
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads"),
    "vocab_size": ("vocab_size",),
    "max_context": ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length"),
}
# What names a checkpoint or its author rather than its shape.
_NOT_SHAPE = {
    "_name_or_path",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "name_or_path",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Sizes of a decoder-only transformer.

    `config` is the whole Hugging Face config, for the family's own flags. `directory` is where its weights are, and
    None for a shipped shape, which runs with random weights.
    """

    name: str
    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    config: Mapping[str, Any] = field(repr=False)
    directory: Path | None = None

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of keys and values that one token keeps over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the shape: equal for two checkpoints of one architecture, different when any size differs."""
        shape = {key: value for key, value in self.config.items() if key not in _NOT_SHAPE}
        return hashlib.sha256(json.dumps(shape, sort_keys=True, default=str).encode()).hexdigest()[:16]


def load_model_spec(model: str) -> ModelSpec:
    """The spec of a model directory or a shipped name.

    Raises InputError when there is no such model, or its config lacks a size.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"{path} holds no config.json, so it is not a Hugging Face model directory")
        return model_spec(read_json(path / "config.json"), name=path.resolve().name, directory=path)
    if path.suffix == ".json" and path.is_file():
        return model_spec(read_json(path), name=path.stem)
    if model not in shipped_names("models"):
        raise InputError(
            f"no model directory or shipped model '{model}'; shipped are {', '.join(shipped_names('models'))}"
        )
    return model_spec(read_yaml(shipped("models", model)), name=model)


def model_spec(config: Mapping[str, Any], *, name: str, directory: Path | None = None) -> ModelSpec:
    """The spec of a Hugging Face config. Raises InputError naming the field that is missing or wrong."""
    family = config.get("model_type")
    if not isinstance(family, str) or not family.isidentifier():
        raise InputError(f"config of '{name}' has no usable model_type (found {family!r})")
    sizes = {size: _integer(config, names, name) for size, names in _SPELLINGS.items()}
    head_dim = config.get("head_dim") or sizes["hidden_size"] // sizes["num_heads"]
    num_kv_heads = config.get("num_key_value_heads") or sizes["num_heads"]
    for what, value in (("head_dim", head_dim), ("num_key_value_heads", num_kv_heads)):
        if not isinstance(value, int) or value < 1:
            raise InputError(f"config of '{name}': {what} must be a positive integer, found {value!r}")
    if sizes["num_heads"] % num_kv_heads:
        raise InputError(f"config of '{name}': {sizes['num_heads']} heads cannot share {num_kv_heads} key/value heads")
    return ModelSpec(
        name=name,
        family=family,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        config=dict(config),
        directory=directory,
        **sizes,
    )


def _integer(config: Mapping[str, Any], names: tuple[str, ...], model: str) -> int:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"config of '{model}': {name} must be a positive integer, found {value!r}")
        return value
    raise InputError(f"config of '{model}' has no {names[0]}")
