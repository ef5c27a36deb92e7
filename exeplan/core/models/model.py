"""ModelSpec: the shape of a transformer, read from a Hugging Face config; no weights and no torch here.

A model is named by a directory that holds a `config.json`, by a shipped name (`plans/models/<name>.yaml` holds the same
fields), or by its id on the Hugging Face Hub, whose cache is read and never filled. Of equal names the shipped one is
taken; a directory is always reached by its path (`./demo`). What a family does with its shape is known only to
`runner/models`.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from exeplan.core.models.hub import cached_snapshot, is_hub_id
from exeplan.core.models.model_config import (
    attention_window,
    check_config,
    check_layer_types,
    is_multimodal,
    nested,
    planned_part,
)
from exeplan.core.models.quantization import Quantization, quantization_of
from exeplan.core.models.sparse_layers import (
    RUN_DENSE,
    RUN_SPARSE,
    Experts,
    LatentAttention,
    dense_width,
    experts_of,
    has_experts,
    latent_of,
)
from exeplan.errors import InputError, shown
from exeplan.files import read_json, read_yaml, shipped, shipped_names

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
"""Of weights, keys and values. With fp8 the activations between layers are kept in bfloat16."""
FP8 = "fp8"
RUN_DTYPES = ("float32", "bfloat16", "float16", FP8)
"""Those that the engine runs, and that a device is profiled in; fp8 needs a GPU that has it."""

# Hugging Face configs spell the same numbers differently; the first spelling present is taken.
NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_SPELLINGS = {
    "num_layers": NUM_LAYERS,
    "hidden_size": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"),
    "vocab_size": ("vocab_size",),
}
_CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "max_seq_len", "seq_length")
_DECODER_LAYERS = ("num_decoder_layers", "decoder_layers")
"""Of an encoder-decoder model, whose `num_hidden_layers` (BART) and `num_layers` (T5) count its encoder's."""
_ENCODER_LAYERS = ("encoder_layers", "num_encoder_layers", "num_layers")
_INTERMEDIATE = ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "decoder_ffn_dim", "ffn_hidden_size")
_QUANTIZATION_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": None}
"""What AutoGPTQ, AutoAWQ and ModelOpt write next to a config that does not mention it, and the method it stands for."""
_LARGEST, _MOST_LAYERS = 1 << 30, 10_000
"""Beyond any size, and any number of layers."""
_SIZES = (
    "family", "num_layers", "num_encoder_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim",
    "intermediate_size", "gated_mlp", "tied_head", "vocab_size",
)  # fmt: skip
"""Fields of which a fingerprint is made, with the context, widths that some families have apart, and windows."""
_WIDTHS = {"encoder_ffn_dim": "intermediate_size", "word_embed_proj_dim": "hidden_size"}
"""Widths that some families have apart, and the size that they have otherwise."""
_RELATIVE_CONTEXT = 1 << 20
"""The context of models with relative positions, which have no limit of their own (T5)."""
_UNSTATED_CONTEXT = {"falcon": 2048, "bloom": 2048}
"""Families whose configs may leave the context out, with what their checkpoints were trained on."""
_GATED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "phi3")
"""Beginnings of families that gate the MLP whatever the config calls its activation, if it does."""
_TIED_GATED_FAMILIES = ("gemma", "cohere", "t5")
# What names a checkpoint or its author rather than its shape; of fingerprints before they were of sizes.
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
    """Sizes of a decoder-only or an encoder-decoder transformer.

    `config` is the whole Hugging Face config, for the family's own flags. `directory` is where its weights are, and
    None for a shipped shape, which runs with random weights.
    """

    name: str
    family: str
    num_layers: int
    """Decoder layers."""
    num_encoder_layers: int = 0
    """0 for a decoder-only model, whose prefill runs on its decoder layers."""
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    gated_mlp: bool
    """The MLP has a gate projection in addition to its up projection (SwiGLU)."""
    tied_head: bool
    """The output head is the embedding."""
    vocab_size: int
    max_context: int
    """Tokens of a sequence, with those that YaRN's or the dynamic scaling of rotary positions adds to the config's."""
    experts: Experts | None = None
    """Of a mixture of experts, whose `intermediate_size` is that of the layers without any."""
    latent: LatentAttention | None = None
    """Of latent attention, whose `head_dim` is that of queries and keys."""
    quantization: Quantization | None = None
    """Of the layers' weights; None for a checkpoint of 16 or 32 bits."""
    config: Mapping[str, Any] = field(repr=False)
    directory: Path | None = None
    reference: str | None = None
    """What names it from any working directory: an absolute path, a shipped name, an id of the Hub; None for none."""
    remarks: tuple[str, ...] = ()
    """What a person should know of how it was read, a sentence each."""

    @property
    def datasheet_remarks(self) -> tuple[str, ...]:
        """The remarks, and what a profile takes for granted that a datasheet is made into."""
        likely = "a datasheet takes all experts to be as likely, unless --routing says otherwise"
        return (*self.remarks, likely) if self.experts else self.remarks

    @property
    def is_encoder_decoder(self) -> bool:
        return self.num_encoder_layers > 0

    @property
    def is_multimodal(self) -> bool:
        """Whether the checkpoint has parts for images or sound too; the sizes are of its part for text."""
        return is_multimodal(self.config)

    @property
    def is_only_planned(self) -> bool:
        """Whether the engine here does not run the family; other engines may."""
        runs = RUN_SPARSE if self.experts or self.latent else RUN_DENSE + RUN_SPARSE
        return self.family not in runs or self.is_multimodal

    def has_experts(self, layer: int) -> bool:
        """Whether this decoder layer has experts instead of one feed-forward block."""
        return self.experts is not None and has_experts(self.config, layer, self.name)

    @property
    def layers_differ(self) -> bool:
        """Whether some decoder layers have experts and others have none."""
        return len({self.has_experts(layer) for layer in range(self.num_layers)}) > 1

    def attention_window(self, layer: int) -> int | None:
        """Tokens that a token of this decoder layer attends to, itself included; None for all."""
        return attention_window(self.config, self.family, layer)

    @property
    def num_positions(self) -> int:
        """Positions that the config states, which a scaling of rotary positions may stretch to a longer context."""
        return _num_positions(self.config, self.family, self.name)

    @property
    def windows(self) -> Counter[int | None]:
        """How many decoder layers have each sliding window that is below the context, and none (None)."""
        found = Counter(self.attention_window(layer) for layer in range(self.num_layers))
        narrow: Counter[int | None] = Counter()
        for window, count in found.items():
            narrow[window if window is not None and window < self.max_context else None] += count
        return narrow

    @property
    def first_token_from_prefill(self) -> bool:
        """Whether the prefill yields the first output token, as it does where no encoder stands before the decoder."""
        return not self.is_encoder_decoder

    @property
    def kv_width(self) -> int:
        """Values that one token keeps in one layer: a key and a value of each key/value head, or a latent vector."""
        return self.latent.kept if self.latent else 2 * self.num_kv_heads * self.head_dim

    @property
    def num_kv_shares(self) -> int:
        """Devices of a tensor-parallel group among which keys and values can be divided; more hold copies."""
        return 1 if self.latent else self.num_kv_heads

    @property
    def num_kv_tables(self) -> int:
        """Vectors that a token keeps in one layer for each of those shares: a key and a value, or a latent vector."""
        return 1 if self.latent else 2

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of keys and values that one token keeps over all layers."""
        return self.num_layers * self.kv_width * DTYPE_BYTES[dtype]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the sizes on which times and memory depend: equal for two checkpoints of one shape."""
        sizes = {name: getattr(self, name) for name in _SIZES}
        # Not the field: a scaling of positions changes no size, and where positions set no limit, the engine and a
        # profile set one of their own.
        sizes["max_context"] = self.num_positions
        widths = {name: self.config.get(name) or getattr(self, size) for name, size in _WIDTHS.items()}
        more = {name: width for name, width in widths.items() if width != getattr(self, _WIDTHS[name])}
        windows = sorted((window, count) for window, count in self.windows.items() if window is not None)
        parts = {name: asdict(part) for name in ("experts", "latent") if (part := getattr(self, name))}
        return _digest({**sizes, **more, **parts, **({"windows": windows} if windows else {})})

    def matches(self, fingerprint: object) -> bool:
        """Whether a file's fingerprint is of this shape; files from before fingerprints were of sizes are read too."""
        if fingerprint == self.fingerprint:
            return True
        return fingerprint == _digest({key: value for key, value in self.config.items() if key not in _NOT_SHAPE})


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


def load_model_spec(model: str) -> ModelSpec:
    """The spec of a shipped name, a model directory, a config file in one, or an id of the Hugging Face Hub.

    Raises InputError when there is no such model, or its config is none that can be planned.
    """
    path = _absolute(model)
    if model in shipped_names("models"):
        spec = model_spec(_shipped(model)[0], name=model, reference=model)
        remark = f"'{model}' is the shipped model; the directory of that name here is ./{model}"
        return replace(spec, remarks=(*spec.remarks, remark)) if path.is_dir() else spec
    if model and path.is_dir():
        return _in_directory(path, name=path.name, reference=str(path))
    if path.suffix == ".json" and path.is_file():
        if path.name == "config.json":
            return _in_directory(path.parent, name=path.parent.name, reference=str(path.parent))
        return model_spec(read_json(path), name=path.stem, directory=path.parent, reference=str(path))
    if path.is_file():
        raise InputError(f"'{model}' is a file; a model is named by its directory, or by the config.json in it")
    if is_hub_id(model) and (snapshot := cached_snapshot(model)):
        return _in_directory(snapshot, name=model, reference=model)
    if model.startswith((".", "~", "/")):
        raise InputError(f"no model directory '{model}'")
    raise InputError(
        f"no model directory or shipped model '{model}'; shipped are {', '.join(shipped_names('models'))}; a model of "
        "the Hugging Face Hub is named organisation/name"
    )


def load_model_sizes(model: str) -> ModelSpec:
    """As `load_model_spec`, but of an id of the Hub whose sizes a shipped model has nothing need be in the cache.

    `serve` needs its weights, and says how to download them.
    """
    try:
        return load_model_spec(model)
    except InputError:
        for name in shipped_names("models"):
            config, ids = _shipped(name)
            if model in ids:
                method = {"quantization_config": {"quant_method": ids[model]}} if ids[model] else {}
                spec = model_spec({**config, **method}, name=model, reference=model)
                return replace(spec, remarks=(f"'{model}' has the sizes of the shipped '{name}'", *spec.remarks))
        raise


def shipped_twin(spec: ModelSpec) -> str:
    """The name of the shipped model that has a model's sizes, and else its own."""
    names = shipped_names("models")
    if spec.name in names:
        return spec.name
    for name in names:
        if spec.name in _shipped(name)[1] or load_model_spec(name).fingerprint == spec.fingerprint:
            return name
    return spec.name


def hub_ids(name: str) -> tuple[str, ...]:
    """The ids of the Hub that have a shipped model's sizes."""
    return tuple(_shipped(name)[1])


def quantized_id(name: str) -> str | None:
    """The first id of the Hub that has a shipped model's weights quantized; None of other models."""
    ids = _shipped(name)[1] if name in shipped_names("models") else {}
    return next((hub_id for hub_id, method in ids.items() if method), None)


def _shipped(name: str) -> tuple[Mapping[str, Any], Mapping[str, str | None]]:
    """The config of a shipped model, and the ids of the Hub that have its sizes, with the method where quantized."""
    config = dict(read_yaml(shipped("models", name)))
    return config, config.pop("hub", {})


def model_reference(reference: str, file: Path) -> str:
    """How a file at that path names a model: a directory below its own folder from there, others by absolute paths."""
    path, folder = _absolute(reference), _absolute(file).parent
    if reference in shipped_names("models") or not path.exists():
        return reference
    return f"./{path.relative_to(folder)}" if path.is_relative_to(folder) else str(path)


def model_reference_from(reference: str, file: Path) -> str:
    """The name that a file gives a model, as it is understood in any working directory."""
    path = Path(os.path.normpath(_absolute(file).parent / os.path.expanduser(reference)))
    if reference in shipped_names("models") or not (reference.startswith((".", "~")) or path.exists()):
        return reference
    return str(path)


def _absolute(path: str | Path) -> Path:
    """Seen from the working directory, links kept."""
    return Path(os.path.abspath(os.path.expanduser(path)))


def _in_directory(directory: Path, *, name: str, reference: str) -> ModelSpec:
    if not (directory / "config.json").is_file():
        raise InputError(f"{directory} holds no config.json, so it is not a Hugging Face model directory")
    config = read_json(directory / "config.json")
    for file, method in _QUANTIZATION_FILES.items():
        if (directory / file).is_file() and not planned_part(config).get("quantization_config"):
            found = {**({"quant_method": method} if method else {}), **read_json(directory / file)}
            quantization_of(found, name, file)
            config = {**config, "quantization_config": found}
    return model_spec(config, name=name, directory=directory, reference=reference)


def model_spec(
    config: Mapping[str, Any], *, name: str, directory: Path | None = None, reference: str | None = None
) -> ModelSpec:
    """The spec of a Hugging Face config. Raises InputError naming the field that is missing or wrong."""
    config = planned_part(config)
    check_config(config, name)
    family = config.get("model_type")
    if not isinstance(family, str) or not family.isidentifier():
        raise InputError(f"config of '{name}' has no usable model_type (found {shown(family)})")
    sizes = _sizes(config, name)
    check_layer_types(config, name, num_layers=sizes["num_layers"])
    gated = _is_gated(config, family)
    experts = experts_of(config, name, num_layers=sizes["num_layers"])
    spec = ModelSpec(
        name=name,
        family=family,
        num_layers=sizes["num_layers"],
        num_encoder_layers=_integer(config, _ENCODER_LAYERS, name) if config.get("is_encoder_decoder") else 0,
        hidden_size=sizes["hidden_size"],
        num_heads=sizes["num_heads"],
        num_kv_heads=sizes["num_kv_heads"],
        head_dim=sizes["head_dim"],
        intermediate_size=dense_width(config, name)
        if experts
        else _integer(config, _INTERMEDIATE, name, default=4 * sizes["hidden_size"]),
        gated_mlp=gated or experts is not None,
        tied_head=_is_tied(config, family, gated=gated),
        vocab_size=sizes["vocab_size"],
        max_context=_max_context(config, family, name),
        experts=experts,
        latent=latent_of(config, name),
        quantization=quantization_of(config.get("quantization_config"), name),
        config=dict(config),
        directory=directory,
        reference=reference,
    )
    return replace(spec, remarks=tuple(_remarks(spec)))


def _sizes(config: Mapping[str, Any], name: str) -> dict[str, int]:
    """Those of `_SPELLINGS`, and what the heads are."""
    sizes = {size: _integer(config, names, name) for size, names in _SPELLINGS.items()}
    if config.get("is_encoder_decoder"):
        sizes["num_layers"] = _integer(config, _DECODER_LAYERS, name, default=sizes["num_layers"])
    head_dim = _checked("head_dim", _head_dim(config, sizes, name), name)
    num_kv_heads = _checked("num_key_value_heads", _num_kv_heads(config, sizes["num_heads"]), name)
    if sizes["num_heads"] % num_kv_heads:
        raise InputError(f"config of '{name}': {sizes['num_heads']} heads cannot share {num_kv_heads} key/value heads")
    return {**sizes, "head_dim": head_dim, "num_kv_heads": num_kv_heads}


def _remarks(spec: ModelSpec) -> Iterator[str]:
    if spec.experts:
        yield (
            f"{spec.experts.num_layers} of {spec.num_layers} layers of '{spec.name}' send each token to "
            f"{spec.experts.per_token} of {spec.experts.count} experts"
        )
    if spec.quantization:
        yield f"the weights of '{spec.name}' are quantized ({spec.quantization})"
    if spec.is_multimodal:
        yield f"'{spec.name}' is multimodal: its part for text is planned, and images and sound are not"
    windows = sorted(window for window in spec.windows if window is not None)
    if windows:
        count, spans = spec.num_layers - spec.windows[None], " and ".join(map(str, windows))
        yield (
            f"{count} of {spec.num_layers} layers of '{spec.name}' attend to the last {spans} tokens; "
            "keys and values of all tokens are kept"
        )


def _head_dim(config: Mapping[str, Any], sizes: Mapping[str, int], name: str) -> Any:
    if latent := latent_of(config, name):
        return latent.nope_dim + latent.rope_dim
    if stated := config.get("head_dim") or config.get("d_kv"):
        return stated
    hidden, heads = sizes["hidden_size"], sizes["num_heads"]
    if hidden % heads:
        raise InputError(f"config of '{name}': {heads} heads do not divide the hidden size {hidden}; give a head_dim")
    return hidden // heads


def _num_kv_heads(config: Mapping[str, Any], num_heads: int) -> Any:
    """Falcon-7B and StarCoder share one key/value head and say so by a flag, whatever their count says."""
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    mpt = nested(config, "attn_config").get("kv_n_heads")
    return config.get("num_key_value_heads") or config.get("num_kv_heads") or mpt or num_heads


def _is_gated(config: Mapping[str, Any], family: str) -> bool:
    """By the family or the activation: the other families with SiLU gate it, and T5's config says so."""
    if family.startswith(_GATED_FAMILIES) or str(config.get("feed_forward_proj", "")).startswith("gated"):
        return True
    return config.get("hidden_act") in ("silu", "swish")


def _is_tied(config: Mapping[str, Any], family: str, *, gated: bool) -> bool:
    """transformers 5 says of every T5 that its head is tied, and by another flag whether it was trained so."""
    if config.get("scale_decoder_outputs") is False:
        return False
    return bool(config.get("tie_word_embeddings", not gated or family.startswith(_TIED_GATED_FAMILIES)))


def _max_context(config: Mapping[str, Any], family: str, name: str) -> int:
    """As vLLM's, but for the linear scaling, whose checkpoints state all the positions that they were trained on."""
    stated = _num_positions(config, family, name)
    rope = nested(config, "rope_parameters") or nested(config, "rope_scaling")
    original = "original_max_position_embeddings"
    pretrained: dict[Any, Any] = {"dynamic": stated, "yarn": config.get(original, rope.get(original))}
    base = pretrained.get(rope.get("rope_type") or rope.get("type"))
    if base is None:
        return stated
    return _checked("the context of rope_scaling", max(stated, int(base * (rope.get("factor") or 1))), name)


def _num_positions(config: Mapping[str, Any], family: str, name: str) -> int:
    if "relative_attention_num_buckets" in config:
        return _RELATIVE_CONTEXT
    return _integer(config, _CONTEXT, name, default=_UNSTATED_CONTEXT.get(family))


def _integer(config: Mapping[str, Any], names: tuple[str, ...], model: str, *, default: int | None = None) -> int:
    for name in names:
        if (value := config.get(name)) is not None:
            return _checked(name, value, model)
    if default is None:
        raise InputError(f"config of '{model}' has no {names[0]}{_ask_for_default(config)}")
    return default


def _ask_for_default(config: Mapping[str, Any]) -> str:
    """Configs of multimodal models often leave out what transformers has a default for."""
    return "; write the one that transformers fills in into its text_config" if is_multimodal(config) else ""


def _checked(field_name: str, value: Any, model: str) -> int:
    """A size of the config. Raises InputError unless it is a positive integer that some model might have."""
    if type(value) is not int or value < 1:
        raise InputError(f"config of '{model}': {field_name} must be a positive integer, found {shown(value)}")
    if value > (most := _MOST_LAYERS if "layer" in field_name else _LARGEST):
        raise InputError(f"config of '{model}': {field_name} must be at most {most}, found {shown(value)}")
    return value
