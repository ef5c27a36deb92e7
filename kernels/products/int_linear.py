"""Linear layers with weights of 8 or 4 bits, a scale and a zero point a group of inputs, by the compiled CPU kernels.

Letters: N rows (tokens), I inputs, O outputs, G groups of inputs.

Rows become integers as in `int8_linear.py`: one digit of 8 bits where a checkpoint means its inputs to be quantized,
otherwise two for 16 bits and three for float32, below whose rounding what is dropped is. Products of integers are
exact; sums over groups are in float32, with the scales of the checkpoint. Bytes: a weight's bits, read once. LOG.md
(2026-11-25) has what it was measured at. Not here: processors without AVX-512 VNNI (`int8_linear.py`,
`int4_linear.py`).
"""

import torch
from torch import Tensor

from exeplan.kernels import native
from exeplan.kernels.products.int8_linear import num_digits


class IntLinear:
    """`y_NO = x_NI @ (scale * (value - zero)).T + bias_O`, scale and zero of each group."""

    packed = False

    def __init__(
        self,
        value_OI: Tensor,
        scale_OG: Tensor,
        zero_OG: Tensor,
        bias_O: Tensor | None = None,
        *,
        bits: int,
        dtype: torch.dtype,
        order_I: Tensor | None = None,
        quantized_rows: bool = False,
    ) -> None:
        """Values are uint8, below 2 ** bits, groups of adjacent inputs; with `order_I` these are the rows' elements in
        that order. `dtype` is that of rows; with `quantized_rows` these are rounded to 8 bits."""
        self.out_features, self.in_features = value_OI.shape
        self.order_I, self.bias_O = order_I, None if bias_O is None else bias_O.float()
        self.weight = native.pack_integers(value_OI, scale_OG, zero_OG, bits)
        self.num_digits, self._way = num_digits(dtype, quantized_rows), native.fastest_for_integers()

    @property
    def num_bytes(self) -> int:
        """Bytes of weight, scales, zeros and order."""
        return self.weight.num_bytes + (0 if self.order_I is None else self.order_I.nbytes)

    def __call__(self, x_NI: Tensor) -> Tensor:
        if self.order_I is not None:
            x_NI = x_NI.index_select(1, self.order_I)
        dtype = x_NI.dtype
        x_NI = x_NI.float() if dtype == torch.float16 else x_NI
        found = native.linear_integers(x_NI, self.weight, self.bias_O, digits=self.num_digits, way=self._way)
        return found.to(dtype)
