"""Quantization of rows to 8-bit floats (e4m3) with a scale each, for the operands of 8-bit matrix products.

Letters: N rows, I elements of a row.

Source: Micikevicius et al. 2022 (FP8 formats for deep learning). The largest element of a row becomes 448, the largest
number of e4m3, so that no row overflows and small rows keep their 3 bits of mantissa. Bytes: 2 * I read and I written a
row, in one pass. Operations: some 5 an element.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

import torch
from torch import Tensor

from exeplan.kernels.kernel import MODEL_DTYPES, Kernel
from exeplan.kernels.language import jit, next_power_of_2, tl

LARGEST = 448.0
_LEAST = 1e-12
"""Lower bound of a row's largest element, so that a row of zeros has a scale."""


def quantize_rows(x_NI: Tensor) -> tuple[Tensor, Tensor]:
    """The rows divided by their scales and rounded, and the scales `[N, 1]` (float32). Rows must be contiguous."""
    rows, size = x_NI.shape
    assert x_NI.stride(1) == 1
    quantized_NI = torch.empty(rows, size, dtype=torch.float8_e4m3fn, device=x_NI.device)
    scale_N1 = torch.empty(rows, 1, dtype=torch.float32, device=x_NI.device)
    if rows:
        block = next_power_of_2(size)
        warps = min(16, max(1, block // 512))
        _quantize[(rows,)](x_NI, x_NI.stride(0), quantized_NI, scale_N1, size, BLOCK=block, num_warps=warps)
    return quantized_NI, scale_N1


def quantize_rows_reference(x_NI: Tensor) -> tuple[Tensor, Tensor]:
    x_NI = x_NI.float()
    scale_N1 = x_NI.abs().amax(1, keepdim=True).clamp(min=_LEAST) / LARGEST
    return saturated(x_NI / scale_N1, torch.float8_e4m3fn), scale_N1


def saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Converted; a value too large for 8 bits becomes the largest number instead of NaN."""
    return x.clamp(-LARGEST, LARGEST).to(dtype) if dtype == torch.float8_e4m3fn else x.to(dtype)


@jit
def _quantize(x, row_stride, quantized, scales, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    value = tl.load(x + row * row_stride + i, mask=i < size, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 0), 1e-12) / 448.0
    tl.store(scales + row, scale)
    value = tl.minimum(tl.maximum(value / scale, -448.0), 448.0)
    tl.store(quantized + row * size + i, value.to(quantized.dtype.element_ty), mask=i < size)


KERNELS = (
    Kernel("quantize_rows", quantize_rows, "cuda", MODEL_DTYPES),
    Kernel("quantize_rows", quantize_rows_reference),
)
