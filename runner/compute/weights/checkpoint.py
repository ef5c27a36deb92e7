"""Weights: read from safetensors, or random for a model without a checkpoint.

Standard: a Hugging Face directory holds `model.safetensors`, or shards named by `model.safetensors.index.json`; of both
the first is read, as by transformers.
Pickled checkpoints (*.bin, *.pt) are refused, because reading one can run code. No code of a checkpoint is imported.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from exeplan.core.models.hub import download_command
from exeplan.core.models.quantization import Quantization
from exeplan.errors import InputError
from exeplan.files import read_json
from exeplan.kernels.select import Kernels, kernels_for
from exeplan.runner.compute.weights.quantized import (
    QUANTIZED_BY,
    IntMatrix,
    Wanted,
    fp8_matrix,
    int_matrix,
    mxfp4_values,
    rounded,
)
from exeplan.runner.compute.weights.shard import ShardRange

INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
log = logging.getLogger(__name__)

OnRead = Callable[[int], None]
"""Called after each tensor with the bytes taken so far."""


class Weights(Protocol):
    """The source of a model's tensors."""

    dtype: torch.dtype
    device: torch.device
    kernels: Kernels
    """The kernels that its layers call."""
    fp8: bool
    """Whether linear layers quantize their weights."""
    quantization: Quantization | None
    """How the checkpoint's weights are quantized."""
    num_bytes: int
    """Bytes of all tensors taken so far, as the model holds them."""

    def holds(self, name: str) -> bool:
        """Whether there is a tensor of that name."""

    def take(self, name: str, *shape: int | ShardRange) -> Tensor:
        """The named tensor, copied to dtype and device; of a dimension given as a ShardRange only that range is read.

        Quantized ones are dequantized. Raises InputError unless the whole tensor has that shape and the values taken
        are finite.
        """

    def matrix(self, name: str, outputs: int | ShardRange, inputs: int | ShardRange) -> Tensor | IntMatrix:
        """The weight of the linear layer with that name: as `take`, or in small integers, of which the bytes are not
        counted yet."""

    def count(self, num_bytes: int) -> None:
        """Adds bytes that the model holds."""


class Checkpoint:
    """The safetensors files of one directory.

    `prefix` begins the tensor names of a family; a checkpoint of the bare model has the same names without it.
    """

    def __init__(
        self,
        directory: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        prefix: str = "",
        kernels: Kernels | None = None,
        fp8: bool = False,
        quantization: Quantization | None = None,
        on_read: OnRead = lambda num_bytes: None,
    ) -> None:
        self.directory, self.dtype, self.device, self.prefix = directory, dtype, device, prefix
        self.kernels, self.fp8 = kernels or kernels_for(device, dtype), fp8
        self.quantization = quantization
        self.num_bytes, self._on_read = 0, on_read
        self._files = _find_tensors(directory)
        self._open: dict[Path, Any] = {}
        """Files stay open: to open one takes a millisecond for a thousand tensors, as a mixture of experts has."""

    def holds(self, name: str) -> bool:
        return name in self._files or name.removeprefix(self.prefix) in self._files

    def take(self, name: str, *shape: int | ShardRange) -> Tensor:
        tensor = self._dequantized(name, shape)
        if tensor is None:
            tensor = self._stored(name, *shape)
            if not tensor.is_floating_point() or tensor.itemsize == 1:
                raise InputError(f"tensor '{name}' in {self._path(name)} is {tensor.dtype}{self._unscaled()}")
        tensor = tensor.to(self.device, self.dtype, copy=True, memory_format=torch.contiguous_format)
        if not tensor.isfinite().all():
            raise InputError(f"tensor '{name}' in {self._path(name)} holds values that are not finite in {self.dtype}")
        self.count(tensor.nbytes)
        return tensor

    def matrix(self, name: str, outputs: int | ShardRange, inputs: int | ShardRange) -> Tensor | IntMatrix:
        how = self.quantization
        if how is None or how.layout == "fp8" or not self._is_quantized(name, how):
            return self.take(f"{name}.weight", outputs, inputs)
        return int_matrix(self._stored, self.holds, Wanted.of(name, outputs, inputs), how)

    def count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._on_read(self.num_bytes)

    def _dequantized(self, name: str, shape: Sequence[int | ShardRange]) -> Tensor | None:
        """A tensor that is stored quantized, in any dtype of numbers; None for others."""
        how, layer = self.quantization, name.removesuffix(".weight")
        if how is None:
            return None
        if how.layout == "mxfp4":
            if not self.holds(f"{name}_blocks"):
                return None
            experts, inputs, outputs = (Wanted.of(name, part, 1).outputs for part in shape)
            return mxfp4_values(self._stored, name, experts, outputs, inputs)
        if layer == name or len(shape) != 2 or not self._is_quantized(layer, how):
            return None
        wanted = Wanted.of(layer, *shape)
        if how.layout == "fp8":
            return fp8_matrix(self._stored, self.holds, wanted, how)
        return int_matrix(self._stored, self.holds, wanted, how).dequantized(self.dtype)

    def _unscaled(self) -> str:
        """Why a tensor of 8 bits is not read."""
        if self.quantization is None or not (scales := QUANTIZED_BY[self.quantization.layout]):
            return ", which its config.json does not say how to dequantize"
        return f" without {' or '.join(scales)}, which its quantization ({self.quantization}) needs"

    def _is_quantized(self, layer: str, how: Quantization) -> bool:
        return any(self.holds(f"{layer}.{tensor}") for tensor in QUANTIZED_BY[how.layout])

    def _path(self, name: str) -> Path | None:
        return self._files.get(name if name in self._files else name.removeprefix(self.prefix))

    def _stored(self, name: str, *shape: int | ShardRange) -> Tensor:
        """The tensor, or the requested part of it, in the file's dtype; without a shape, the tensor of any."""
        path = self._path(name)
        if path is None:
            raise InputError(f"{self.directory} has no tensor '{name}', which its config.json calls for")
        return self._read(path, name if name in self._files else name.removeprefix(self.prefix), shape)

    def _read(self, path: Path, name: str, shape: Sequence[int | ShardRange]) -> Tensor:
        """The tensor, or the requested part of it, in the file's dtype."""
        try:
            file = self._open.get(path)
            if file is None:
                file = self._open[path] = safe_open(path, framework="pt")
            stored = file.get_slice(name)
            if shape and stored.get_shape() != _sizes(shape):
                raise InputError(
                    f"tensor '{name}' in {path} has shape {stored.get_shape()}, config.json calls for {_sizes(shape)}"
                )
            tensor: Tensor = file.get_tensor(name) if _is_whole(shape) else stored[_index(shape)]
        except (SafetensorError, OSError) as error:
            raise InputError(f"cannot read tensor '{name}' from {path}: {error}") from None
        return tensor


class RandomWeights:
    """Random weights of any shape: equal for equal seeds and names, in any order and for any part."""

    def __init__(
        self,
        *,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        kernels: Kernels | None = None,
        fp8: bool = False,
        quantization: Quantization | None = None,
        on_read: OnRead = lambda num_bytes: None,
    ) -> None:
        self.dtype, self.device, self.seed = dtype, device, seed
        self.kernels, self.fp8 = kernels or kernels_for(device, dtype), fp8
        self.quantization = quantization
        self.num_bytes, self._on_read = 0, on_read

    def holds(self, name: str) -> bool:
        return True

    def take(self, name: str, *shape: int | ShardRange) -> Tensor:
        tensor = self._draw(name, _sizes(shape))
        if not _is_whole(shape):
            tensor = tensor[_index(shape)].clone(memory_format=torch.contiguous_format)
        self.count(tensor.nbytes)
        return tensor

    def matrix(self, name: str, outputs: int | ShardRange, inputs: int | ShardRange) -> Tensor | IntMatrix:
        how, wanted = self.quantization, Wanted.of(name, outputs, inputs)
        if how is None or how.layout in ("fp8", "mxfp4") or how.skips(name):
            return self.take(f"{name}.weight", outputs, inputs)
        weight_OI = self._draw(f"{name}.weight", [wanted.outputs.size, wanted.inputs.size])
        part_OI = weight_OI[_index((wanted.outputs, wanted.inputs))].to("cpu", torch.float32)
        return rounded(part_OI, wanted, how)

    def count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._on_read(self.num_bytes)

    def _draw(self, name: str, sizes: Sequence[int]) -> Tensor:
        if name.endswith("bias"):
            return torch.zeros(sizes, dtype=self.dtype, device=self.device)
        if len(sizes) == 1:
            return torch.ones(sizes, dtype=self.dtype, device=self.device)
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        generator = torch.Generator(device=self.device).manual_seed(int.from_bytes(digest[:8], "little"))
        return torch.empty(sizes, dtype=self.dtype, device=self.device).normal_(std=0.02, generator=generator)


def _sizes(shape: Sequence[int | ShardRange]) -> list[int]:
    return [part.size if isinstance(part, ShardRange) else part for part in shape]


def _is_whole(shape: Sequence[int | ShardRange]) -> bool:
    return all(isinstance(part, int) or part.is_whole for part in shape)


def _index(shape: Sequence[int | ShardRange]) -> tuple[slice, ...]:
    return tuple(slice(part.start, part.stop) if isinstance(part, ShardRange) else slice(None) for part in shape)


def _find_tensors(directory: Path) -> dict[str, Path]:
    """The file of every tensor name."""
    whole, has_index = directory / "model.safetensors", (directory / INDEX).is_file()
    if has_index and not whole.is_file():
        return _read_index(directory)
    if has_index:
        log.warning("%s is read, and not the shards that %s names", whole, INDEX)
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
            raise InputError(f"{path} names the shard {shard}, which is not there{_download(directory)}")
    return {name: directory / shard for name, shard in weight_map.items()}


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is not a readable safetensors file: {error}") from None


def _download(directory: Path) -> str:
    """The end of a sentence on a file that is missing: how to get it, where that is known."""
    command = download_command(directory)
    return f"; download it with `{command}`" if command else ""


def _no_safetensors(directory: Path) -> str:
    pickles = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
    if not pickles:
        remedy = _download(directory) or "; for random weights use `--weights dummy`"
        return f"{directory} holds no *.safetensors{remedy}"
    return (
        f"{directory} holds only a pickled checkpoint ({pickles[0]}), which is not read because that can run code; "
        "convert it once, where you trust it, with transformers: "
        "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(DIR, safe_serialization=True)"
    )
