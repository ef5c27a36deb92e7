"""Weights: read from safetensors, or drawn at random for a shape without a checkpoint.

Standard: a Hugging Face directory holds `model.safetensors`, or shards named by `model.safetensors.index.json`.
Pickled checkpoints (*.bin, *.pt) are refused: reading one can run code. Nothing is ever imported from a checkpoint.
"""

from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from exeplan.errors import InputError
from exeplan.files import read_json

INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class Weights(Protocol):
    """Where a family takes its tensors from."""

    dtype: torch.dtype
    device: torch.device
    num_bytes: int
    """Bytes of all tensors taken so far."""

    def take(self, name: str, *shape: int) -> Tensor:
        """The named tensor, copied to dtype and device. Raises InputError unless it has that shape and is finite."""


class Checkpoint:
    """The safetensors files of one directory.

    `prefix` is what a family's names start with; a checkpoint of the bare model has the same names without it.
    """

    def __init__(self, directory: Path, *, dtype: torch.dtype, device: torch.device, prefix: str = "") -> None:
        self.directory, self.dtype, self.device, self.prefix = directory, dtype, device, prefix
        self.num_bytes = 0
        self._files = _find_tensors(directory)

    def take(self, name: str, *shape: int) -> Tensor:
        if name not in self._files:
            name = name.removeprefix(self.prefix)
        path = self._files.get(name)
        if path is None:
            raise InputError(f"{self.directory} has no tensor '{name}', which its config.json calls for")
        try:
            with safe_open(path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise InputError(f"cannot read tensor '{name}' from {path}: {error}") from None
        if tuple(tensor.shape) != shape:
            raise InputError(
                f"tensor '{name}' in {path} has shape {list(tensor.shape)}, config.json calls for {list(shape)}"
            )
        if not tensor.is_floating_point():
            raise InputError(f"tensor '{name}' in {path} is {tensor.dtype}; quantized weights are not supported")
        tensor = tensor.to(self.device, self.dtype, copy=True)
        if not tensor.isfinite().all():
            raise InputError(f"tensor '{name}' in {path} holds values that are not finite in {self.dtype}")
        self.num_bytes += tensor.nbytes
        return tensor


class RandomWeights:
    """Random weights of any shape: equal for equal seeds, whatever the order of taking."""

    def __init__(self, *, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self.dtype, self.device = dtype, device
        self.num_bytes = 0
        self._generator = torch.Generator(device=device).manual_seed(seed)

    def take(self, name: str, *shape: int) -> Tensor:
        if name.endswith("bias"):
            tensor = torch.zeros(shape, dtype=self.dtype, device=self.device)
        elif len(shape) == 1:
            tensor = torch.ones(shape, dtype=self.dtype, device=self.device)
        else:
            tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
            tensor.normal_(std=0.02, generator=self._generator)
        self.num_bytes += tensor.nbytes
        return tensor


def _find_tensors(directory: Path) -> dict[str, Path]:
    """The file of every tensor name."""
    if (directory / INDEX).is_file():
        return _read_index(directory)
    whole = directory / "model.safetensors"
    files = [whole] if whole.is_file() else sorted(directory.glob("*.safetensors"))
    if not files:
        raise InputError(_no_safetensors(directory))
    return {name: path for path in files for name in _names(path)}


def _read_index(directory: Path) -> dict[str, Path]:
    path = directory / INDEX
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise InputError(f"{path} has no weight_map")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise InputError(f"{path}: '{name}' is in {shard!r}, which is no safetensors file of that directory")
        if not (directory / shard).is_file():
            raise InputError(f"{path} names the shard {shard}, which is not there")
    return {name: directory / shard for name, shard in weight_map.items()}


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is not a readable safetensors file: {error}") from None


def _no_safetensors(directory: Path) -> str:
    pickles = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
    if not pickles:
        return f"{directory} holds no *.safetensors; for random weights use `--weights dummy`"
    return (
        f"{directory} holds only a pickled checkpoint ({pickles[0]}), which is not read because that can run code; "
        "convert it once, where you trust it, with transformers: "
        "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(DIR, safe_serialization=True)"
    )
