"""How the weights of a checkpoint are quantized, as its config says it, and whether the engine loads them so.

Standards: the `quantization_config` of Hugging Face configs as AutoAWQ (method awq), GPTQModel and AutoGPTQ (gptq),
llm-compressor (compressed-tensors), DeepSeek and Qwen (fp8) and gpt-oss (mxfp4) write it, and the files that AutoGPTQ
and AutoAWQ write next to a config without one. Not here: the layouts of the tensors
(`runner/compute/weights/quantized.py`), and which products stay in 4 or 8 bits (`runner/compute/weights/precision.py`).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from exeplan.errors import InputError, shown

Config = Mapping[str, Any]
GROUP_SIZES = (32, 64, 128)
"""Inputs that may share a scale."""
_FP8 = "fp8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """The quantization of a checkpoint's linear layers; embeddings, norms and the output head are in 16 or 32 bits."""

    method: str
    layout: str
    """Of a weight's tensors: `awq`, `gptq`, `packed` and `int8` (compressed-tensors), `fp8`, `mxfp4`."""
    bits: int
    group_size: int | None = None
    """Inputs of an output channel that share a scale; None for all of them, and where blocks or tensors share one."""
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale (fp8); None for one an output channel or a tensor."""
    ordered: bool = False
    """Each input names its group (`desc_act`, `actorder`), so that groups are of inputs anywhere."""
    zero_shift: int = 0
    """What is added to stored zero points: 1 in the first of GPTQ's formats."""
    int8_rows: bool = False
    """The inputs of products are meant to be quantized to 8 bits too, with a scale a token (W8A8)."""
    skipped: tuple[str, ...] = ()
    """Names of layers that are not quantized, or parts of names; with `re:` a regular expression."""

    @property
    def planned_dtype(self) -> str | None:
        """The dtype of a profile that is made without measuring; None where datasheets have no such products."""
        return _FP8 if self.layout == "fp8" else None

    def skips(self, name: str) -> bool:
        """Whether the linear layer of that name is not quantized, by what the config says."""
        return any(_matches(one, name) for one in self.skipped)

    def __str__(self) -> str:
        groups = f", groups of {self.group_size}" if self.group_size else ""
        groups += f", blocks of {self.block[0]} x {self.block[1]}" if self.block else ""
        return f"{self.method}, {self.bits} bits{groups}"


def _matches(pattern: str, name: str) -> bool:
    if not pattern.startswith("re:"):
        return pattern in name
    try:
        return re.match(pattern[3:], name) is not None
    except re.error:
        return False


def quantization_of(found: Any, name: str, where: str = "quantization_config") -> Quantization | None:
    """What a config says of the model with that name; None where it says nothing.

    Raises InputError for a method that is not loaded, and for settings of one that are not.
    """
    if not found:
        return None
    config = found if isinstance(found, Mapping) else {"quant_method": str(found)}
    reader = _READERS.get(str(config.get("quant_method")))
    if reader is None:
        raise _refused(config, name, where)
    return reader(config, name)


def _refused(config: Config, name: str, where: str) -> InputError:
    nested = config.get("quantization")
    algorithm = nested.get("quant_algo") if isinstance(nested, Mapping) else None
    method = config.get("quant_method") or algorithm or (f"{config['bits']} bits" if "bits" in config else "a method")
    method = " ".join(str(method).split())[:40]
    return InputError(
        f"'{name}' is quantized by {method} ({where}), and its weights are neither timed nor loaded; plan and serve "
        f"its unquantized checkpoint, whose sizes are the same, or one by {', '.join(_READERS)} (GPUs that have fp8 "
        "run the unquantized one with --dtype fp8)"
    )


def _awq(config: Config, name: str) -> Quantization:
    _only(config, name, "version", lambda value: str(value).lower() == "gemm", "gemm", default="gemm")
    bits = _only(config, name, _spelled(config, "bits", "w_bit"), _among(4), "4", default=4)
    group = _group(config, name, _spelled(config, "group_size", "q_group_size"))
    return Quantization(method="awq", layout="awq", bits=bits, group_size=group, skipped=_skipped(config, name))


def _gptq(config: Config, name: str) -> Quantization:
    bits = _only(config, name, "bits", _among(4, 8), "4 and 8")
    kind = _only(config, name, "checkpoint_format", _among("gptq", "gptq_v2"), "gptq and gptq_v2", default="gptq")
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, Mapping) or any(not str(rule).startswith("-:") for rule in dynamic):
        raise _unread(config, name, "dynamic", "rules that leave layers out (-:)")
    return Quantization(
        method="gptq",
        layout="gptq",
        bits=bits,
        group_size=_group(config, name, "group_size"),
        ordered=bool(config.get("desc_act")),
        zero_shift=1 if kind == "gptq" else 0,
        skipped=(*_skipped(config, name), *(f"re:{rule[2:]}" for rule in dynamic)),
    )


def _compressed_tensors(config: Config, name: str) -> Quantization:
    layouts = {"int-quantized": "int8", "naive-quantized": "int8", "pack-quantized": "packed", "float-quantized": "fp8"}
    layout = layouts[_only(config, name, "format", lambda value: value in layouts, ", ".join(layouts))]
    for absent in ("sparsity_config", "kv_cache_scheme"):
        if config.get(absent):
            raise _unread(config, name, absent, "none")
    groups = config.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, Mapping) else []
    if len(schemes) != 1 or not isinstance(schemes[0], Mapping) or not isinstance(schemes[0].get("weights"), Mapping):
        raise _unread(config, name, "config_groups", "one group with its weights")
    weights, rows = schemes[0]["weights"], schemes[0].get("input_activations")
    float_type = weights.get("type") == "float"
    layout = "fp8" if float_type and layout == "int8" else layout
    _only(weights, name, "type", _among("float" if layout == "fp8" else "int"), f"that of {layout}", default="int")
    bits = _only(weights, name, "num_bits", _among(4, 8) if layout == "packed" else _among(8), "4 (packed) and 8")
    strategy = _only(weights, name, "strategy", _among(*_STRATEGIES), ", ".join(_STRATEGIES), default="tensor")
    return Quantization(
        method="compressed-tensors",
        layout=layout,
        bits=bits,
        group_size=_group(weights, name, "group_size") if strategy == "group" else None,
        block=_block(weights, name, "block_structure") if strategy == "block" else None,
        ordered=weights.get("actorder") in ("group", True),
        int8_rows=layout == "int8" and isinstance(rows, Mapping) and _is_dynamic_int8(rows),
        skipped=_skipped(config, name),
    )


def _fp8(config: Config, name: str) -> Quantization:
    _only(config, name, "fmt", _among("e4m3", "float8_e4m3fn"), "e4m3", default="e4m3")
    block = _block(config, name, "weight_block_size")
    return Quantization(method="fp8", layout="fp8", bits=8, block=block, skipped=_skipped(config, name))


def _mxfp4(config: Config, name: str) -> Quantization:
    return Quantization(method="mxfp4", layout="mxfp4", bits=4, group_size=32, skipped=_skipped(config, name))


_READERS: dict[str, Callable[[Config, str], Quantization]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
}
_STRATEGIES = ("tensor", "channel", "group", "block")


def _is_dynamic_int8(rows: Config) -> bool:
    token = rows.get("strategy") == "token" and rows.get("dynamic") is True
    return token and rows.get("num_bits") == 8 and rows.get("symmetric", True) is not False


def _spelled(config: Config, *names: str) -> str:
    """The first of these names that the config has."""
    return next((name for name in names if name in config), names[0])


def _among(*values: Any) -> Callable[[Any], bool]:
    return lambda value: any(value is one or (type(value) is type(one) and value == one) for one in values)


def _only(
    config: Config, name: str, field: str, holds: Callable[[Any], bool], read: str, *, default: Any = None
) -> Any:
    """The value of a field, or its default where it is missing or null. Raises InputError unless it is one that is
    read."""
    value = config.get(field)
    value = default if value is None else value
    if isinstance(value, Mapping | list) or not holds(value):
        raise _unread(config, name, field, read)
    return value


def _unread(config: Config, name: str, field: str, read: str) -> InputError:
    return InputError(
        f"config of '{name}': quantized weights with {field}={shown(config.get(field))} are not read, only {read}"
    )


def _group(config: Config, name: str, field: str) -> int | None:
    allowed = f"{', '.join(map(str, GROUP_SIZES))} and -1"
    size = _only(config, name, field, _among(-1, *GROUP_SIZES), allowed, default=None)
    return None if size == -1 else int(size)


def _block(config: Config, name: str, field: str) -> tuple[int, int] | None:
    found = config.get(field)
    if found is None:
        return None
    if not isinstance(found, list) or len(found) != 2 or not all(type(one) is int and 0 < one <= 4096 for one in found):
        raise _unread(config, name, field, "two sizes such as [128, 128]")
    return found[0], found[1]


def _skipped(config: Config, name: str) -> tuple[str, ...]:
    found: list[str] = []
    for field in ("modules_to_not_convert", "ignored_layers", "ignore"):
        names = config.get(field) or []
        if not isinstance(names, list) or not all(isinstance(one, str) and one for one in names):
            raise _unread(config, name, field, "a list of names")
        found += names
    return tuple(found)
