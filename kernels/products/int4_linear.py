"""Linear layers with weights of 4 bits and a scale and a zero point for each group of inputs, for rows in bfloat16.

Letters: N rows (tokens), I inputs, O outputs, G groups of inputs, g inputs of a group, B blocks of 64 outputs.

torch's product for CPUs reads the 4 bits themselves, which is what a few rows are bound by, and computes a row at a
time; beyond `_FEW_ROWS` the blocks are dequantized to bfloat16, some at a time, and multiplied as such. A quarter of
bfloat16's bytes, then, for a price that rises with the rows. Measured on one core of a Sapphire Rapids (2048 x 2048,
groups of 128, 1 / 4 / 16 / 64 rows): 206 / 387 / 1440 / 7000 us, bfloat16 466 / 490 / 501 / 864 us. A sum over groups
of products of 8-bit integers, at a byte a weight, takes 620 / 648 / 873 / 1897 us and more where groups are smaller.
Not here: other dtypes, in which torch's product takes milliseconds a row.
"""

import functools

import torch
from torch import Tensor

GROUP_SIZES = (32, 64, 128, 256)
"""Those of torch's product."""
_BLOCK = 64
_FEW_ROWS = 128
"""Beyond some 200 the blocks win."""
_BLOCKS_AT_ONCE = 16
_MIDDLE = 8


class Int4Linear:
    """`y_NO = x_NI @ (scale * (value - zero)).T + bias_O`, scale and zero of each group."""

    packed = False

    def __init__(
        self,
        value_OI: Tensor,
        scale_OG: Tensor,
        zero_OG: Tensor,
        bias_O: Tensor | None = None,
        *,
        order_I: Tensor | None = None,
    ) -> None:
        """Values are from 0 to 15, groups of adjacent inputs; with `order_I` these are the rows' elements in that
        order."""
        self.out_features, self.in_features = value_OI.shape
        self.bias_O, self.order_I = bias_O, order_I
        self.group_size = self.in_features // scale_OG.shape[1]
        self.weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(value_OI.int(), 1)
        scale_GO = scale_OG.t().float()
        low_GO = (_MIDDLE - zero_OG.t().float()) * scale_GO
        self.scale_GO2 = torch.stack([scale_GO, low_GO], -1).to(torch.bfloat16).contiguous()

    @property
    def num_bytes(self) -> int:
        """Bytes of weight, scales and order."""
        order = 0 if self.order_I is None else self.order_I.nbytes
        return self.weight.nbytes + self.scale_GO2.nbytes + order

    def __call__(self, x_NI: Tensor) -> Tensor:
        if not len(x_NI):
            return x_NI.new_empty(0, self.out_features)
        if self.order_I is not None:
            x_NI = x_NI.index_select(1, self.order_I)
        y_NO = self._of_few(x_NI) if len(x_NI) <= _FEW_ROWS else self._by_blocks(x_NI)
        return y_NO if self.bias_O is None else y_NO.add_(self.bias_O)

    def _of_few(self, x_NI: Tensor) -> Tensor:
        y_NO: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x_NI.contiguous(), self.weight, self.group_size, self.scale_GO2
        )
        return y_NO

    def _by_blocks(self, x_NI: Tensor) -> Tensor:
        packed = blocks(self.weight, self.in_features)
        parts = self.scale_GO2.view(-1, len(packed), _BLOCK, 2).permute(3, 1, 0, 2)[:, :, :, None]
        y_NO = x_NI.new_empty(len(x_NI), self.out_features)
        for first in range(0, len(packed), _BLOCKS_AT_ONCE):
            some = slice(first, first + _BLOCKS_AT_ONCE)
            scale, low = parts[:, some]
            value_BIO = unpacked(packed[some]).to(x_NI.dtype).sub_(_MIDDLE)
            value_BGgO = value_BIO.view(len(value_BIO), -1, self.group_size, _BLOCK)
            weight_BIO = torch.addcmul(low, value_BGgO, scale).flatten(1, 2)
            for part_NO, weight_IO in zip(torch.split(y_NO, _BLOCK, 1)[some], weight_BIO, strict=True):
                torch.mm(x_NI, weight_IO, out=part_NO)
        return y_NO


def blocks(weight: Tensor, num_inputs: int) -> Tensor:
    """torch's packed weight as `[B, I, 32]`: a byte is an output of a block's first half and one of its second."""
    return weight.view(-1, num_inputs, _BLOCK // 2)


def unpacked(blocks_BI2: Tensor) -> Tensor:
    """The values of blocks, `[B, I, 64]`."""
    return torch.cat([blocks_BI2 & 15, blocks_BI2 >> 4], -1)


@functools.cache
def multiplies_int4(device: torch.device) -> bool:
    """Whether a device has the product, and its weights are packed as `blocks` takes them, which differs by CPU."""
    if device.type != "cpu" or not torch.cpu._is_avx512_supported():
        return False
    value_OI = (torch.arange(2 * _BLOCK * 32) * 7 // 5 % 16).view(2 * _BLOCK, 32).int()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(value_OI, 1)
    return torch.equal(unpacked(blocks(packed, 32)).transpose(1, 2).reshape_as(value_OI).int(), value_OI)


def fits_int4(num_outputs: int, num_inputs: int, group_size: int) -> bool:
    """Whether the product takes a weight of these sizes."""
    return num_outputs % _BLOCK == 0 and num_inputs % group_size == 0 and group_size in GROUP_SIZES
