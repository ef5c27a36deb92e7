"""Selects the kernels for a device and a dtype: Triton's on a GPU, plain PyTorch elsewhere, but for the few operations
that the CPU's compiled kernels have with the same arguments.

The table is built from the files of this folder and of those in it: a file that lists `KERNELS` (`kernel.Kernel`) is
found by being there. The runner asks once, when it loads a model; nothing else compares devices. Not in the table: the
CPU's fast paths, `attention/plain.py` and `products/linear.py`, which take other arguments because they use another
memory layout.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch
from torch import Tensor

from exeplan.kernels import language
from exeplan.kernels.kernel import Kernel

_FOLDER, _COMPILED = "exeplan.kernels", "exeplan.kernels.native"


class Kernels(SimpleNamespace):
    """A function for each op, as an attribute; its arguments are documented where it is defined.

    Annotated are the ops that the runner calls. An op of a new file is an attribute as well.
    """

    paged_attention: Callable[..., Tensor]
    ragged_attention: Callable[..., Tensor]
    mixed_attention: Callable[..., Tensor]
    slot_attention: Callable[..., Tensor]
    store_slots: Callable[..., None]
    scatter_slots: Callable[..., None]
    rms_norm: Callable[..., Tensor]
    layer_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., Tensor]
    add_layer_norm: Callable[..., Tensor]
    rotate: Callable[..., None]
    gated_activation: Callable[..., Tensor]
    plain_activation: Callable[..., Tensor]
    expert_mlp: Callable[..., Tensor]
    quantize_rows: Callable[[Tensor], tuple[Tensor, Tensor]]
    most_likely: Callable[..., tuple[Tensor, Tensor]]
    draw: Callable[..., tuple[Tensor, Tensor]]


def kernels_for(device: torch.device, dtype: torch.dtype) -> Kernels:
    """The most specific kernel of each op. A GPU without Triton gets the kernels that serve any device.

    Raises RuntimeError where two files serve an op equally.
    """
    compiles = language.AVAILABLE and not language.INTERPRETED
    return _table(None if device.type == "cuda" and not compiles else device.type, dtype)


def kernels_are_fused(kernels: Kernels) -> bool:
    """Whether they are a GPU's, also interpreted, not the references."""
    return kernels.expert_mlp is TRITON.expert_mlp


def _table(device_type: str | None, dtype: torch.dtype) -> Kernels:
    chosen: dict[str, Kernel] = {}
    for kernel in _found():
        best = chosen.get(kernel.op)
        if not kernel.serves(device_type, dtype) or (best and best.specificity > kernel.specificity):
            continue
        if best and best.specificity == kernel.specificity:
            files = " and ".join(found.function.__module__ for found in (best, kernel))
            raise RuntimeError(f"op '{kernel.op}' is served for {device_type} and {dtype} by both {files}")
        chosen[kernel.op] = kernel
    return Kernels(**{op: kernel.function for op, kernel in chosen.items()})


def _found() -> Iterator[Kernel]:
    for file in pkgutil.walk_packages(importlib.import_module(_FOLDER).__path__, f"{_FOLDER}."):
        if not file.name.startswith(_COMPILED):
            yield from getattr(importlib.import_module(file.name), "KERNELS", ())


TRITON = _table("cuda", torch.float32)
"""The GPU's kernels, also where they can only be interpreted."""
REFERENCE = _table(None, torch.float32)
"""Plain PyTorch, on any device."""
