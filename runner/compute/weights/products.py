"""Products of a linear layer: the weights of one or several layers, in the form that the device multiplies fastest.

A weight of small integers stays one where the device has products of those (`precision.held_bits`), and is
dequantized once to the layer's dtype elsewhere. Not here: how a checkpoint stores it (`quantized.py`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from exeplan.core.models.quantization import Quantization
from exeplan.kernels import native
from exeplan.kernels.products.fp8_linear import Fp8Linear
from exeplan.kernels.products.int4_linear import Int4Linear, fits_int4, multiplies_int4
from exeplan.kernels.products.int8_linear import Int8Linear, multiplies_int8
from exeplan.kernels.products.int_linear import IntLinear
from exeplan.kernels.products.linear import Linear
from exeplan.runner.compute.weights.checkpoint import Weights
from exeplan.runner.compute.weights.quantized import IntMatrix, joined

_MIDDLE = 128


class Joined:
    """Several products of the same rows, their outputs side by side."""

    packed = False

    def __init__(self, parts: Sequence["Product"]) -> None:
        self.parts = list(parts)

    def __call__(self, x_NI: Tensor) -> Tensor:
        return torch.cat([part(x_NI) for part in self.parts], -1)


Product = Linear | Fp8Linear | IntLinear | Int8Linear | Int4Linear | Joined


def product(weights: Weights, weight_OI: Tensor, bias_O: Tensor | None = None) -> Product:
    """The linear layer of a weight, quantized where `weights.fp8`."""
    if not weights.fp8:
        return Linear(weight_OI, bias_O)
    layer = Fp8Linear(weight_OI, bias_O, quantize_rows=weights.kernels.quantize_rows)
    weights.num_bytes += layer.num_bytes - weight_OI.nbytes
    return layer


def merged(weights: Weights, parts: Sequence[Tensor | IntMatrix], biases: Sequence[Tensor] | None) -> Product:
    """One product of the parts' outputs, concatenated in that order."""
    bias_O = torch.cat(list(biases)) if biases else None
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if len(tensors) == len(parts):
        return product(weights, torch.cat(tensors), bias_O)
    matrices = [part for part in parts if isinstance(part, IntMatrix)]
    if len(matrices) < len(parts) or not all(matrices[0].joins(other) for other in matrices[1:]):
        own = [[bias] for bias in biases] if biases else [None] * len(parts)
        return Joined([merged(weights, [part], bias) for part, bias in zip(parts, own, strict=True)])
    matrix = joined(matrices)
    layer = _packed(weights, matrix, bias_O)
    if layer is not None:
        weights.count(layer.num_bytes)
        return layer
    weight_OI = matrix.dequantized(weights.dtype).to(weights.device)
    weights.count(weight_OI.nbytes)
    return product(weights, weight_OI, bias_O)


def _packed(weights: Weights, matrix: IntMatrix, bias_O: Tensor | None) -> IntLinear | Int8Linear | Int4Linear | None:
    """The product that multiplies integers; None where the device, the dtype or the groups have none."""
    how = weights.quantization
    assert how is not None
    if weights.device.type == "cpu" and native.multiplies_integers():
        return _compiled(weights, matrix, bias_O, how)
    if how.group_size is None:
        return _in_int8(weights, matrix, bias_O, how) if multiplies_int8(weights.device) else None
    if matrix.bits != 4 or weights.dtype != torch.bfloat16 or not multiplies_int4(weights.device):
        return None
    size = _group_size(matrix)
    if size is None or not fits_int4(len(matrix.values), len(matrix.groups), size):
        return None
    value_OI, order_I = _by_groups(matrix)
    return Int4Linear(value_OI, matrix.scales, matrix.zeros, bias_O, order_I=order_I)


def _group_size(matrix: IntMatrix) -> int | None:
    """Inputs of a group; None where not all have as many."""
    sizes = matrix.groups.bincount()
    return int(sizes[0]) if bool((sizes == sizes[0]).all()) else None


def _by_groups(matrix: IntMatrix) -> tuple[Tensor, Tensor | None]:
    """Values with the inputs of a group side by side, and the inputs in that order; None where they are so already."""
    if bool((matrix.groups.diff() >= 0).all()):
        return matrix.values, None
    order_I = matrix.groups.argsort(stable=True)
    return matrix.values.index_select(1, order_I), order_I.int()


def _compiled(weights: Weights, matrix: IntMatrix, bias_O: Tensor | None, how: Quantization) -> IntLinear | None:
    """By the compiled kernels, which take groups of any size that four divides."""
    if _group_size(matrix) is None or not native.fits_integers(len(matrix.groups), matrix.num_groups):
        return None
    value_OI, order_I = _by_groups(matrix)
    return IntLinear(
        value_OI,
        matrix.scales,
        matrix.zeros,
        bias_O,
        bits=matrix.bits,
        dtype=weights.dtype,
        order_I=order_I,
        quantized_rows=how.int8_rows,
    )


def _in_int8(weights: Weights, matrix: IntMatrix, bias_O: Tensor | None, how: Quantization) -> Int8Linear:
    """Less their zeros the values may be beyond 8 bits; then what is left of a zero is the same of all inputs."""
    zero_O, scale_O = matrix.zeros[:, 0], matrix.scales[:, 0]
    taken_O = zero_O if matrix.bits < 8 else torch.full_like(zero_O, _MIDDLE)
    return Int8Linear(
        (matrix.values.short() - taken_O[:, None].short()).to(torch.int8),
        scale_O,
        bias_O,
        dtype=weights.dtype,
        offset_O=None if torch.equal(taken_O, zero_O) else (taken_O - zero_O) * scale_O,
        quantized_rows=how.int8_rows,
    )
