"""Model families: found in `runner/models` by Hugging Face `model_type`, and loaded with real or random weights.

A family is a file there, named after its `model_type`, or a row of a file's table `VARIANTS`. A file has `PREFIX`, with
which the names of its tensors begin, and `Model(spec, weights, shard)` (see `layers.Model`).
"""

import importlib
import pkgutil
from types import ModuleType

import torch

from exeplan.core.models.model import FP8, ModelSpec
from exeplan.core.models.sparse_layers import RUN_SPARSE
from exeplan.errors import InputError
from exeplan.kernels.select import Kernels
from exeplan.runner.compute.blocks.layers import Model
from exeplan.runner.compute.weights.checkpoint import Checkpoint, OnRead, RandomWeights, Weights
from exeplan.runner.compute.weights.precision import activation_dtype
from exeplan.runner.compute.weights.shard import Shard, whole
from exeplan.units import show_bytes

CPU_ONLY = {"deepseek_v2": "latent attention", "gpt_oss": "attention with sinks"}
"""Families whose attention the kernels over blocks have not, as a GPU needs them."""


def load_model(
    spec: ModelSpec,
    *,
    shard: Shard | None = None,
    dtype: str,
    device: str,
    dummy_weights: bool,
    seed: int = 0,
    kernels: Kernels | None = None,
    on_read: OnRead = lambda num_bytes: None,
) -> tuple[Model, int]:
    """The model of a spec, or a shard of it, and the bytes of its weights. Raises InputError when it cannot be run."""
    family = _family(spec)
    kind, place, fp8 = activation_dtype(dtype), torch.device(device), dtype == FP8
    weights: Weights
    if dummy_weights or spec.directory is None:
        weights = RandomWeights(
            dtype=kind,
            device=place,
            seed=seed,
            kernels=kernels,
            fp8=fp8,
            quantization=spec.quantization,
            on_read=on_read,
        )
    else:
        weights = Checkpoint(
            spec.directory,
            dtype=kind,
            device=place,
            prefix=family.PREFIX,
            kernels=kernels,
            fp8=fp8,
            quantization=spec.quantization,
            on_read=on_read,
        )
    try:
        model: Model = family.Model(spec, weights, shard or whole(spec))
    except torch.cuda.OutOfMemoryError:
        total = torch.cuda.mem_get_info(place)[1]
        raise InputError(
            f"the weights of '{spec.name}' do not fit: {show_bytes(weights.num_bytes)} of them were read when the "
            f"{show_bytes(total)} of {device} were full; use more GPUs, or a smaller dtype"
        ) from None
    return model, weights.num_bytes


def check_family(spec: ModelSpec) -> None:
    """Raises InputError for a model that no family here runs."""
    _family(spec)


def family_names() -> list[str]:
    """All families, sorted."""
    return sorted(_families())


def _families() -> dict[str, ModuleType]:
    """The module of each family. Families are looked up by name, because their modules import this package."""
    folder = "exeplan.runner.models"
    found: dict[str, ModuleType] = {}
    for file in pkgutil.iter_modules(importlib.import_module(folder).__path__):
        module = importlib.import_module(f"{folder}.{file.name}")
        for name in getattr(module, "VARIANTS", (file.name,)):
            if name in found:
                raise RuntimeError(f"model family '{name}' is in {found[name].__file__} and in {module.__file__}")
            found[name] = module
    return found


def _family(spec: ModelSpec) -> ModuleType:
    families = _families()
    if (spec.experts or spec.latent) and spec.family not in RUN_SPARSE:
        raise InputError(
            f"'{spec.name}' of the family {spec.family} has {'experts' if spec.experts else 'latent attention'}, which "
            f"is run only of {', '.join(RUN_SPARSE)}; it is planned by datasheet (`exeplan profile --datasheet`)"
        )
    if spec.family not in families:
        raise InputError(
            f"no model family '{spec.family}' is run; there are {', '.join(sorted(families))}; '{spec.name}' is "
            "planned by datasheet (`exeplan profile --datasheet`), for other engines"
        )
    if spec.is_multimodal:
        raise InputError(f"'{spec.name}' is multimodal, and only its part for text can be planned; it cannot be run")
    return families[spec.family]
