"""Precision: a plan's dtypes as torch dtypes, and which of them a device supports.

Layers compute in `dtype`; fp8 means 8-bit weights with a scale for each output channel, and bfloat16 between layers,
for embedding and output head. Keys and values are stored in `kv_dtype`: `dtype`, or fp8 with scale 1. One scale
suffices: e4m3 has 3 bits of mantissa from 2^-6 to 448, the range of the keys and values of these families; larger
values saturate. Scales calibrated on some prompts would tie a cache to these.

Weights of a quantized checkpoint stay in its 4 or 8 bits where the device has products of those that pay, and are
dequantized to `dtype` when loaded elsewhere; a sentence says which. Not here: calibrated scales.
"""

import torch

from exeplan.core.models.model import DTYPE_BYTES, FP8, RUN_DTYPES, ModelSpec
from exeplan.core.models.quantization import Quantization
from exeplan.errors import InputError
from exeplan.kernels import native
from exeplan.kernels.products.fp8_linear import multiplies_fp8
from exeplan.kernels.products.int4_linear import multiplies_int4
from exeplan.kernels.products.int8_linear import multiplies_int8


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


def held_bits(how: Quantization, dtype: str, place: torch.device) -> int | None:
    """The bits in which a device holds quantized weights; None where they are dequantized.

    The compiled kernels take all; torch's products 8 bits with a scale an output, and 4 with groups in bfloat16.
    """
    if how.layout in ("fp8", "mxfp4"):
        return None
    if place.type == "cpu" and native.multiplies_integers():
        return how.bits
    if how.group_size is None:
        return 8 if multiplies_int8(place) else None
    fits = how.bits == 4 and activation_dtype(dtype) == torch.bfloat16
    return 4 if fits and multiplies_int4(place) else None


def holding_remarks(spec: ModelSpec, dtype: str, place: torch.device) -> list[str]:
    """Sentences on how the weights of a quantized checkpoint are held, and where a CPU takes torch's operations."""
    how, slower = spec.quantization, native.remarks(place)
    return slower if how is None else [_how_held(spec, how, dtype, place), *slower]


def other_kernels(profiled: str | None, place: torch.device) -> list[str]:
    """A sentence where a CPU computes by other kernels than the plan's profile was measured with."""
    here = native.description()
    if profiled is None or place.type != "cpu" or profiled == here:
        return []
    return [f"the plan's profile was measured with other CPU kernels ({profiled}) than run here ({here})"]


def _how_held(spec: ModelSpec, how: Quantization, dtype: str, place: torch.device) -> str:
    weights, bits = f"the weights of '{spec.name}' ({how})", held_bits(how, dtype, place)
    weights += " but for latent attention's, which are dequantized," if bits and spec.latent else ""
    compiled = place.type == "cpu" and native.multiplies_integers()
    if bits == 8 or (bits and compiled):
        rows = "rounded to 8 bits a token" if how.int8_rows else f"in digits of 8 bits that hold {dtype}"
        cut = f"; what tensor parallelism cuts through groups is dequantized to {dtype}" if how.group_size else ""
        return f"{weights} are kept in {bits} bits and multiplied so, by inputs {rows}{cut}"
    if bits == 4:
        parts = " or cuts through groups" + (" (desc_act)" if how.ordered else "")
        return (
            f"{weights} are kept in 4 bits; what tensor parallelism leaves no multiples of 64 outputs{parts} is "
            f"dequantized to {dtype} when loaded"
        )
    instead = ""
    if place.type == "cpu" and how.bits == 4 and how.layout != "mxfp4" and multiplies_int4(place):
        instead = "; with --dtype bfloat16 they stay in 4 bits"
    form = "bfloat16 and then quantized to fp8 with a scale an output" if dtype == FP8 else dtype
    return f"{weights} are dequantized to {form} when loaded, and take the memory of that{instead}"
