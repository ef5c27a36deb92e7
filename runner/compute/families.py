"""Model families: the file in `runner/models` that a configuration names, and its model with real or random weights."""

import importlib
from pathlib import Path
from types import ModuleType

import torch

from exeplan.core.model import FP8, ModelSpec
from exeplan.errors import InputError
from exeplan.kernels.select import Kernels
from exeplan.runner.compute.checkpoint import Checkpoint, OnRead, RandomWeights, Weights
from exeplan.runner.compute.layers import Model
from exeplan.runner.compute.precision import activation_dtype
from exeplan.runner.compute.shard import Shard, whole


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
        weights = RandomWeights(dtype=kind, device=place, seed=seed, kernels=kernels, fp8=fp8, on_read=on_read)
    else:
        weights = Checkpoint(
            spec.directory, dtype=kind, device=place, prefix=family.PREFIX, kernels=kernels, fp8=fp8, on_read=on_read
        )
    model: Model = family.Model(spec, weights, shard or whole(spec))
    return model, weights.num_bytes


def family_names() -> list[str]:
    """All families, sorted: the files in `runner/models`."""
    return sorted(path.stem for path in (Path(__file__).parents[1] / "models").glob("[a-z]*.py"))


def _family(spec: ModelSpec) -> ModuleType:
    if spec.family not in family_names():
        raise InputError(f"no model family '{spec.family}'; there are {', '.join(family_names())}")
    if quantization := spec.config.get("quantization_config"):
        method = (
            quantization.get("quant_method", "an unknown method") if isinstance(quantization, dict) else quantization
        )
        raise InputError(
            f"'{spec.name}' is quantized by {method}, which is not supported; use its unquantized checkpoint"
        )
    return importlib.import_module(f"exeplan.runner.models.{spec.family}")
