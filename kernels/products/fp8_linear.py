"""Linear layers with 8-bit weights: half the bytes of bfloat16, and on Hopper twice its rate.

Letters: N rows (tokens), I inputs, O outputs.

Weights are quantized at load time, with a scale for each output channel; rows at run time, with a scale each. A GPU
that multiplies 8-bit floats (compute capability 8.9 or higher) runs torch's scaled product; elsewhere the weight is
dequantized to the rows' dtype first, which is the reference and only saves memory. Not here: scales from a calibrated
checkpoint, 8-bit integers.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - the name the whole field uses
from torch import Tensor

from exeplan.kernels.products.fp8 import quantize_rows_reference

_MULTIPLE = 16
"""Inputs and outputs of the 8-bit product must be multiples of this."""
_FIRST_CAPABILITY = (8, 9)

QuantizeRows = Callable[[Tensor], tuple[Tensor, Tensor]]


class Fp8Linear:
    """`y_NO = x_NI @ (scale_O1 * weight_OI).T + bias_O`."""

    packed = False

    def __init__(
        self, weight_OI: Tensor, bias_O: Tensor | None = None, *, quantize_rows: QuantizeRows = quantize_rows_reference
    ) -> None:
        self.out_features, self.in_features = weight_OI.shape
        self.bias_O, self.quantize_rows = bias_O, quantize_rows
        self.weight, self.scale_O1 = quantize_rows_reference(weight_OI)
        fitting = self.out_features % _MULTIPLE == 0 and self.in_features % _MULTIPLE == 0
        self.in_8_bits = fitting and multiplies_fp8(weight_OI.device)

    @property
    def num_bytes(self) -> int:
        """Bytes of weight and scales."""
        return self.weight.nbytes + self.scale_O1.nbytes

    def __call__(self, x_NI: Tensor) -> Tensor:
        if not self.in_8_bits or not len(x_NI):
            return F.linear(x_NI, self.dequantized(x_NI.dtype), self.bias_O)
        rows_NI, scale_N1 = self.quantize_rows(x_NI)
        y_NO = torch._scaled_mm(
            rows_NI,
            self.weight.t(),
            scale_a=scale_N1,
            scale_b=self.scale_O1.t(),
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        return y_NO if self.bias_O is None else y_NO.add_(self.bias_O)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The dequantized weight `[O, I]`."""
        return (self.weight.float() * self.scale_O1).to(dtype)


@functools.cache
def multiplies_fp8(device: torch.device) -> bool:
    """Whether a device multiplies 8-bit floats."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY
