"""Linear layers with weights of 8-bit integers, for CPUs that multiply those (VNNI, AMX).

Letters: N rows (tokens), I inputs, O outputs, D digits.

oneDNN multiplies 8-bit integers exactly, into 32 bits. Rows become integers too, with a scale each: one digit of 8 bits
where a checkpoint means its inputs to be quantized so (W8A8), otherwise a sum of digits, each in steps of 1/254 of the
one before, so that what is dropped is below the rounding of the layer's own dtype: two for 16 bits, three for float32.
The digits of all rows are rows of one product, and as the weights are read once, they cost little while rows are few.
Measured on one core of a Sapphire Rapids (2048 x 2048, 1 / 16 / 64 rows): one digit 221 / 253 / 405 us, bfloat16
466 / 501 / 864 us, float32 615 / 1026 / 3112 us. Not here: zero points of rows, groups of inputs (`int4_linear.py`).
"""

import functools

import torch
from torch import Tensor

_LARGEST, _STEP = 127, 254
_LEAST = 1e-30
"""Lower bound of a row's largest element, so that a row of zeros has a scale."""
_DIGITS = {torch.float32: 3}
"""Where rows are not meant to be quantized; two for dtypes of 16 bits."""


class Int8Linear:
    """`y_NO = x_NI @ (scale_O * value_OI + offset_O).T + bias_O`."""

    packed = True

    def __init__(
        self,
        value_OI: Tensor,
        scale_O: Tensor,
        bias_O: Tensor | None = None,
        *,
        dtype: torch.dtype,
        offset_O: Tensor | None = None,
        quantized_rows: bool = False,
    ) -> None:
        """`value_OI` is int8, `dtype` that of rows; with `quantized_rows` these are rounded to 8 bits."""
        self.out_features, self.in_features = value_OI.shape
        self.scale_O, self.bias_O, self.offset_O = scale_O.float(), bias_O, offset_O
        self.num_digits = num_digits(dtype, quantized_rows)
        self.weight = torch.ops.onednn.qlinear_prepack(value_OI.contiguous(), None)
        self._zero_O = torch.zeros(self.out_features, dtype=torch.int32)

    @property
    def num_bytes(self) -> int:
        """Bytes of weight and scales."""
        offset = 0 if self.offset_O is None else self.offset_O.nbytes
        return self.weight.numel() + self.scale_O.nbytes + self._zero_O.nbytes + offset

    def __call__(self, x_NI: Tensor) -> Tensor:
        if not len(x_NI):
            return x_NI.new_empty(0, self.out_features)
        rows, scale_N1 = digits(x_NI, self.num_digits)
        sums = torch.ops.onednn.qlinear_pointwise(
            rows, 1.0, 0, self.weight, self.scale_O, self._zero_O, None, 1.0, 0, torch.float32, "none", [], ""
        ).view(self.num_digits, len(x_NI), -1)
        y_NO: Tensor = sums[0]
        for number in range(1, self.num_digits):
            y_NO.add_(sums[number], alpha=_STEP**-number)
        y_NO.mul_(scale_N1)
        if self.offset_O is not None:
            y_NO.addcmul_(x_NI.sum(1, keepdim=True, dtype=torch.float32), self.offset_O)
        return (y_NO if self.bias_O is None else y_NO.add_(self.bias_O)).to(x_NI.dtype)


def num_digits(dtype: torch.dtype, quantized_rows: bool) -> int:
    """Digits of a row of that dtype, one where it is rounded to 8 bits."""
    return 1 if quantized_rows else _DIGITS.get(dtype, 2)


def digits(x_NI: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Integers `[D * N, I]`, all rows of a digit before the next digit's, and the scales of rows `[N, 1]` (float32).

    The sum over digits of `scale * digit / 254 ** number` is the row, to within half a step of the last.
    """
    x_NI = x_NI.float()
    scale_N1 = x_NI.abs().amax(1, keepdim=True).clamp_(min=_LEAST).div_(_LARGEST)
    rest_NI = x_NI / scale_N1
    found = []
    for number in range(count):
        digit_NI = rest_NI.round()
        found.append(digit_NI.to(torch.int8))
        if number < count - 1:
            rest_NI = rest_NI.sub_(digit_NI).mul_(_STEP)
    return torch.cat(found), scale_N1


@functools.cache
def multiplies_int8(device: torch.device) -> bool:
    """Whether a device has products of 8-bit integers that pay; elsewhere on CPUs they may even saturate."""
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call] # torch has no types here
    return device.type == "cpu" and has_onednn and torch.cpu._is_vnni_supported()
