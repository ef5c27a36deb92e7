"""Precision: a plan's dtypes as torch dtypes, and which of them a device supports.

Layers compute in `dtype`; fp8 means 8-bit weights with a scale for each output channel, and bfloat16 between layers,
for embedding and output head. Keys and values are stored in `kv_dtype`: `dtype`, or fp8 with scale 1. One scale
suffices: e4m3 has 3 bits of mantissa from 2^-6 to 448, the range of the keys and values of these families; larger
values saturate. Scales calibrated on some prompts would tie a cache to these. Not here: calibrated scales, 4 bits.
"""

import torch

from exeplan.core.model import DTYPE_BYTES, FP8, RUN_DTYPES
from exeplan.errors import InputError
from exeplan.kernels.fp8_linear import multiplies_fp8


def activation_dtype(dtype: str) -> torch.dtype:
    """The dtype of hidden states. Raises InputError for an unknown name."""
    if dtype == FP8:
        return torch.bfloat16
    if dtype not in RUN_DTYPES:
        raise InputError(f"no dtype '{dtype}'; there are {', '.join(RUN_DTYPES)}")
    found: torch.dtype = getattr(torch, dtype)
    return found


def cache_dtype(dtype: str, kv_dtype: str | None) -> torch.dtype:
    """The dtype of cached keys and values."""
    return torch.float8_e4m3fn if (kv_dtype or dtype) == FP8 else activation_dtype(kv_dtype or dtype)


def check_precision(dtype: str, kv_dtype: str | None, place: torch.device) -> None:
    """Raises InputError where the device does not support these dtypes."""
    if kv_dtype and kv_dtype != FP8 and DTYPE_BYTES[kv_dtype] != torch.finfo(activation_dtype(dtype)).bits // 8:
        raise InputError(f"keys and values are stored as {dtype} or as fp8, not as {kv_dtype}")
    if FP8 not in (dtype, kv_dtype) or multiplies_fp8(place):
        return
    if place.type == "cpu":
        raise InputError("fp8 needs a GPU, this is a CPU; it has float32, bfloat16 and float16")
    name, capability = torch.cuda.get_device_name(place), ".".join(map(str, torch.cuda.get_device_capability(place)))
    raise InputError(f"fp8 needs a GPU of compute capability 8.9, {name} has {capability}; use bfloat16")
