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
        self.packed = packs(weight_OI.device, weight_OI.dtype)
        if self.packed:
            weight_OI = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), _PACK_ROWS)
        self.weight = weight_OI

    @property
    def adds(self) -> bool:
        """Whether `addmm` of the weight does the same, and so can add to something at no cost."""
        return self.bias_O is None and not self.packed

    def __call__(self, x_NI: Tensor) -> Tensor:
        if not self.packed:
            return F.linear(x_NI, self.weight, self.bias_O)
        rows = x_NI.shape[0]
        if rows < _MIN_ROWS:
            x_NI = F.pad(x_NI, (0, 0, 0, _MIN_ROWS - rows))
        y_NO: Tensor = torch.ops.mkldnn._linear_pointwise(x_NI, self.weight, self.bias_O, "none", [], "")
        return y_NO[:rows]


def rounded_rows(rows: int) -> int:
    """The next of the numbers of rows that products should be asked for: all to 32, then 16 to each power of two, and
    multiples of 16 from 256 on."""
    step = 1 << min(4, max(0, (rows - 1).bit_length() - 5))
    return max(_MIN_ROWS, -(-rows // step) * step)


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a weight of that kind is packed, so that its plain copy is not kept."""
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call] # torch has no types here
    return device.type == "cpu" and dtype == torch.float32 and has_onednn
