"""Linear layers, with the weight packed once for the CPU's float32 matrix product.

Letters: N rows (tokens), I inputs, O outputs.

oneDNN multiplies a weight that was reordered beforehand at 92-112 GFLOP/s where the plain product gives about 60
(32 rows, one Zen 4 core); the packed copy replaces the plain one. One to three rows cost more than four, so they
are padded to four. Other devices and dtypes take torch's own product. Not here: quantised weights.
"""

import torch
import torch.nn.functional as F  # noqa: N812 - the name the whole field uses
from torch import Tensor

_PACK_ROWS = 32  # The blocking chosen for 32 rows is within 2 % of the best from 4 to 2048 rows.
_MIN_ROWS = 4


class Linear:
    """`y_NO = x_NI @ weight_OI.T + bias_O`."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight_OI.shape
        self.bias_O = bias_O
        self.packed = prepacks(weight_OI.device, weight_OI.dtype)
        if self.packed:
            weight_OI = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), _PACK_ROWS)
        self.weight = weight_OI

    @property
    def adds(self) -> bool:
        """Whether `addmm` with the weight computes the same, so that a sum can be fused into the product."""
        return self.bias_O is None and not self.packed

    def __call__(self, x_NI: Tensor) -> Tensor:
        if not self.packed:
            return F.linear(x_NI, self.weight, self.bias_O)
        rows = x_NI.shape[0]
        if rows < _MIN_ROWS:
            x_NI = F.pad(x_NI, (0, 0, 0, _MIN_ROWS - rows))
        y_NO: Tensor = torch.ops.mkldnn._linear_pointwise(x_NI, self.weight, self.bias_O, "none", [], "")
        return y_NO[:rows]


def row_bucket(rows: int) -> int:
    """Rounds a row count up to a bucket: all counts up to 32, then 16 a power of two, and multiples of 16 from 256."""
    step = 1 << min(4, max(0, (rows - 1).bit_length() - 5))
    return max(_MIN_ROWS, -(-rows // step) * step)


def prepacks(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether weights of that device and dtype are packed, which replaces the plain copy."""
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call] # torch has no types here
    return device.type == "cpu" and dtype == torch.float32 and has_onednn
