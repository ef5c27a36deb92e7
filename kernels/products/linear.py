"""Linear layers, with the weight packed once for the CPU's matrix products.

Letters: N rows (tokens), I inputs, O outputs.

The packed copy replaces the plain one. The compiled kernels (`native`) multiply it in float32, and in bfloat16 in the
way that is the fastest on this processor; without them oneDNN multiplies float32, where one to three rows cost more
than four, so they are padded to four. LOG.md (2026-11-25 and -26) has what each was measured at. Other devices and
dtypes take torch's own product. Not here: quantised weights.
"""

import torch
import torch.nn.functional as F  # noqa: N812 - the name the whole field uses
from torch import Tensor

from exeplan.kernels import native

_PACK_ROWS = 32  # The blocking chosen for 32 rows is within 2 % of the best from 4 to 2048 rows.
_MIN_ROWS = 4


class Linear:
    """`y_NO = x_NI @ weight_OI.T + bias_O`."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight_OI.shape
        self.bias_O = bias_O
        self._halves = native.multiplies() and _is(weight_OI, torch.bfloat16)
        self._native = native.multiplies() and _is(weight_OI, torch.float32)
        self.packed = self._halves or prepacks(weight_OI.device, weight_OI.dtype)
        if self._halves:
            weight_OI, self._way = native.pack_halves(weight_OI), native.fastest_for_halves()
            self.bias_O = None if bias_O is None else bias_O.float()
        elif self._native:
            weight_OI = native.pack(weight_OI)
        elif self.packed:
            weight_OI = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), _PACK_ROWS)
        self.weight = weight_OI

    def dense(self) -> Tensor:
        """The weight `[O, I]` as it was before packing."""
        if self._halves:
            return native.unpack_halves(self.weight, self.out_features, self.in_features)
        if self._native:
            return native.unpack(self.weight, self.out_features)
        return self.weight.to_dense() if self.packed else self.weight

    def added_to(self, y_NO: Tensor, x_NI: Tensor) -> Tensor:
        """The sum of `y` and the product of `x`; `y` may be overwritten."""
        if self._native and y_NO.is_contiguous():
            return native.linear(x_NI, self.weight, self.bias_O, self.out_features, added_to=y_NO)
        if self.bias_O is None and not self.packed:
            return y_NO.addmm_(x_NI, self.weight.t())
        return self(x_NI).add_(y_NO)

    def __call__(self, x_NI: Tensor) -> Tensor:
        if self._halves:
            return native.linear_halves(x_NI, self.weight, self.bias_O, self.out_features, way=self._way)
        if self._native:
            return native.linear(x_NI, self.weight, self.bias_O, self.out_features)
        if not self.packed:
            return F.linear(x_NI, self.weight, self.bias_O)
        rows = x_NI.shape[0]
        if rows < _MIN_ROWS:
            x_NI = F.pad(x_NI, (0, 0, 0, _MIN_ROWS - rows))
        y_NO: Tensor = torch.ops.mkldnn._linear_pointwise(x_NI, self.weight, self.bias_O, "none", [], "")
        return y_NO[:rows]


def _is(weight_OI: Tensor, dtype: torch.dtype) -> bool:
    return weight_OI.device.type == "cpu" and weight_OI.dtype == dtype


def row_bucket(rows: int) -> int:
    """Rounds a row count up to a bucket: all counts up to 32, then 16 a power of two, and multiples of 16 from 256."""
    step = 1 << min(4, max(0, (rows - 1).bit_length() - 5))
    return max(_MIN_ROWS, -(-rows // step) * step)


def compiles_by_rows(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of that device and dtype are oneDNN's, which compiles code for each number of rows."""
    return prepacks(device, dtype) and not native.multiplies()


def prepacks(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether weights of that device and dtype are packed, which replaces the plain copy."""
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call] # torch has no types here
    return device.type == "cpu" and dtype == torch.float32 and (native.multiplies() or has_onednn)
