"""Quantized weights as checkpoints store them, brought to one form: small integers, a scale and a zero of each group.

Letters: O outputs, I inputs, G groups of inputs.

    layout   tensors below a layer's name, shapes of [O, I] weights of b bits, p = 32 / b in a word
    awq      qweight [I, O/p], qzeros [G, O/p], scales [G, O]; the eight values of a word in the order 0 2 4 6 1 3 5 7
    gptq     qweight [I/p, O], qzeros [G, O/p], scales [G, O], g_idx [I] where groups are of inputs anywhere
    packed   weight_packed [O, I/p], weight_scale [O, G], weight_zero_point [O/p, G] or none: values around 0
    int8     weight [O, I] int8, weight_scale [O, 1], [O] or [1]
    fp8      weight [O, I] e4m3, and weight_scale_inv or weight_scale: one, one an output, or one a block
    mxfp4    *_blocks [X, O, I/32, 16], two values a byte, and *_scales [X, O, I/32], exponents of 2

Words are of 32 bits, the first value lowest. Sources: AutoAWQ (utils/packing_utils.py), GPTQModel (qlinear), which adds
1 to the zero points of GPTQ's first format, compressed-tensors (pack_quantized.py), transformers
(integrations/finegrained_fp8.py, mxfp4.py), OCP Microscaling Formats 1.0. Only the outputs and inputs of a shard are
unpacked. Not here: what multiplies them (`precision.py`, `products.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exeplan.core.models.quantization import Quantization
from exeplan.errors import InputError
from exeplan.runner.compute.weights.shard import ShardRange

Read = Callable[..., Tensor]
"""The tensor of a name in the dtype of its file, of the given shape; of a dimension given as a ShardRange that part."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word the outputs 0 to 7 are."""
_ROWS = 1024
"""Outputs that are dequantized at a time."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127
_RANDOM_LARGEST = 0.08
"""The largest of random weights, four of their standard deviations."""


@dataclass(frozen=True, slots=True)
class IntMatrix:
    """A weight `[O, I]`: `scales[:, groups] * (values - zeros[:, groups])`."""

    values: Tensor
    """`[O, I]` in uint8, from 0 to 2 ** bits - 1."""
    scales: Tensor
    """`[O, G]` in float32."""
    zeros: Tensor
    """`[O, G]` in float32, whole numbers."""
    groups: Tensor
    """`[I]` in int64, of each input."""
    bits: int

    @property
    def num_groups(self) -> int:
        return self.scales.shape[1]

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight itself, computed in float32, some outputs at a time."""
        found = torch.empty(self.values.shape, dtype=dtype)
        for start in range(0, len(found), _ROWS):
            some = slice(start, start + _ROWS)
            zero_OI, scale_OI = (part[some].index_select(1, self.groups) for part in (self.zeros, self.scales))
            found[some] = (self.values[some].float() - zero_OI) * scale_OI
        return found

    def joins(self, other: "IntMatrix") -> bool:
        """Whether the outputs of both can be those of one weight."""
        return self.bits == other.bits and torch.equal(self.groups, other.groups)


def joined(parts: Sequence[IntMatrix]) -> IntMatrix:
    """One weight with the outputs of all."""
    values, scales, zeros = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("values", "scales", "zeros")
    )
    return replace(parts[0], values=values, scales=scales, zeros=zeros)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The part of a layer's weight that a shard takes."""

    name: str
    outputs: ShardRange
    inputs: ShardRange

    @classmethod
    def of(cls, name: str, outputs: int | ShardRange, inputs: int | ShardRange) -> "Wanted":
        both = (part if isinstance(part, ShardRange) else ShardRange(part, 0, part) for part in (outputs, inputs))
        return cls(name, *both)


QUANTIZED_BY = {
    "awq": ("qweight",),
    "gptq": ("qweight",),
    "packed": ("weight_packed",),
    "int8": ("weight_scale",),
    "fp8": ("weight_scale_inv", "weight_scale"),
    "mxfp4": (),
}
"""By layout, the tensors of which a layer has one where it is quantized."""


def int_matrix(read: Read, holds: Callable[[str], bool], wanted: Wanted, how: Quantization) -> IntMatrix:
    """The weight of a layer in one of the layouts of integers. Raises InputError where a tensor is missing or of
    another shape than the config calls for."""
    return _LAYOUTS[how.layout](read, holds, wanted, how)


def _awq(read: Read, holds: Callable[[str], bool], wanted: Wanted, how: Quantization) -> IntMatrix:
    name, outputs, inputs = wanted.name, wanted.outputs, wanted.inputs
    groups, per_word = _num_groups(wanted, how), 32 // how.bits
    words = _words(outputs, per_word, f"{name}.qweight")
    value_IO = _unpacked(read(f"{name}.qweight", inputs, words), how.bits)
    zero_GO = _unpacked(read(f"{name}.qzeros", groups, words), how.bits)
    value_IO, zero_GO = (part.view(len(part), -1, 8)[:, :, list(_AWQ_ORDER)].flatten(1) for part in (value_IO, zero_GO))
    scale_GO = read(f"{name}.scales", groups, outputs)
    cut = _within(outputs, per_word)
    return _grouped(value_IO[:, cut].t(), scale_GO.t(), zero_GO[:, cut].t(), _adjacent(wanted, groups), how)


def _gptq(read: Read, holds: Callable[[str], bool], wanted: Wanted, how: Quantization) -> IntMatrix:
    name, outputs, inputs = wanted.name, wanted.outputs, wanted.inputs
    groups, per_word = _num_groups(wanted, how), 32 // how.bits
    qweight = read(f"{name}.qweight", _words(inputs, per_word, f"{name}.qweight"), outputs)
    value_OI = _unpacked(qweight.t(), how.bits)[:, _within(inputs, per_word)]
    words = _words(outputs, per_word, f"{name}.qzeros")
    zero_GO = _unpacked(read(f"{name}.qzeros", groups, words), how.bits)[:, _within(outputs, per_word)]
    zero_GO = (zero_GO + how.zero_shift) & (2**how.bits - 1)
    scale_GO = read(f"{name}.scales", groups, outputs)
    group_I = _adjacent(wanted, groups)
    if holds(f"{name}.g_idx"):
        group_I = _indices(read(f"{name}.g_idx", inputs), groups, f"{name}.g_idx")
    return _grouped(value_OI, scale_GO.t(), zero_GO.t(), group_I, how)


def _packed(read: Read, holds: Callable[[str], bool], wanted: Wanted, how: Quantization) -> IntMatrix:
    name, outputs, inputs = wanted.name, wanted.outputs, wanted.inputs
    groups, per_word = _num_groups(wanted, how), 32 // how.bits
    words = read(f"{name}.weight_packed", outputs, _words(inputs, per_word, f"{name}.weight_packed", padded=True))
    value_OI = _unpacked(words, how.bits)[:, _within(inputs, per_word)]
    scale_OG = read(f"{name}.weight_scale", outputs, groups)
    zero_OG = torch.full(scale_OG.shape, 2 ** (how.bits - 1))
    if holds(f"{name}.weight_zero_point"):
        rows = _words(outputs, per_word, f"{name}.weight_zero_point", padded=True)
        zeros = _unpacked(read(f"{name}.weight_zero_point", rows, groups).t(), how.bits)
        zero_OG = zeros[:, _within(outputs, per_word)].t()
    group_I = _adjacent(wanted, groups)
    if holds(f"{name}.weight_g_idx"):
        group_I = _indices(read(f"{name}.weight_g_idx", inputs), groups, f"{name}.weight_g_idx")
    return _grouped(value_OI, scale_OG, zero_OG, group_I, how)


def _int8(read: Read, holds: Callable[[str], bool], wanted: Wanted, how: Quantization) -> IntMatrix:
    name = wanted.name
    if holds(f"{name}.weight_zero_point"):
        raise InputError(f"'{name}' has zero points (weight_zero_point), and 8-bit weights are read without")
    value_OI = read(f"{name}.weight", wanted.outputs, wanted.inputs)
    if value_OI.dtype != torch.int8:
        raise InputError(f"tensor '{name}.weight' is {value_OI.dtype}, its config says that it is int8")
    groups, scales = _num_groups(wanted, how), f"{name}.weight_scale"
    scale_OG = _scales(read, scales, wanted, None) if groups == 1 else read(scales, wanted.outputs, groups)
    zero_OG = torch.full(scale_OG.shape, 128)
    return _grouped(value_OI.int() + 128, scale_OG, zero_OG, _adjacent(wanted, groups), how)


_LAYOUTS = {"awq": _awq, "gptq": _gptq, "packed": _packed, "int8": _int8}


def rounded(weight_OI: Tensor, wanted: Wanted, how: Quantization) -> IntMatrix:
    """A weight of a layer brought to integers with one scale, equal for all groups: for random weights."""
    middle = 2 ** (how.bits - 1)
    value_OI = (weight_OI / _RANDOM_LARGEST * (middle - 1)).round_().clamp_(1 - middle, middle - 1)
    groups = _num_groups(wanted, how)
    shape = (len(wanted.outputs), groups)
    group_I = (
        torch.arange(wanted.inputs.start, wanted.inputs.stop) % groups if how.ordered else _adjacent(wanted, groups)
    )
    scale_OG, zero_OG = torch.full(shape, _RANDOM_LARGEST / (middle - 1)), torch.full(shape, middle)
    return _grouped(value_OI.int() + middle, scale_OG, zero_OG, group_I, how)


def fp8_matrix(read: Read, holds: Callable[[str], bool], wanted: Wanted, how: Quantization) -> Tensor:
    """The dequantized weight `[O, I]` of a layer in fp8, in float32. Raises InputError where its scales are missing or
    of a shape that is none of the layout's."""
    name = wanted.name
    scale = next((one for one in (f"{name}.weight_scale_inv", f"{name}.weight_scale") if holds(one)), None)
    if scale is None:
        raise InputError(f"'{name}' is in 8-bit floats and has neither weight_scale_inv nor weight_scale")
    value_OI = read(f"{name}.weight", wanted.outputs, wanted.inputs)
    if value_OI.dtype != torch.float8_e4m3fn:
        raise InputError(f"tensor '{name}.weight' is {value_OI.dtype}, its config says that it is float8_e4m3fn")
    return value_OI.float().mul_(_scales(read, scale, wanted, how.block))


def _scales(read: Read, name: str, wanted: Wanted, block: tuple[int, int] | None) -> Tensor:
    """Scales of a whole tensor, of outputs or of blocks, `[O, 1]` or `[O, I]` in float32."""
    found, outputs, inputs = read(name).float(), wanted.outputs, wanted.inputs
    if found.numel() == 1 and block is None:
        return found.view(1, 1).expand(len(outputs), 1)
    height, width = block or (1, inputs.size)
    expected = [-(-outputs.size // height), -(-inputs.size // width)]
    if found.ndim == 1 and block is None:
        found = found[:, None]
    if list(found.shape) != expected:
        raise InputError(
            f"tensor '{name}' has shape {list(found.shape)}, scales of a weight of shape "
            f"{[outputs.size, inputs.size]} have {expected}"
        )
    found = found[torch.arange(outputs.start, outputs.stop) // height]
    return found if expected[1] == 1 else found[:, torch.arange(inputs.start, inputs.stop) // width]


def mxfp4_values(read: Read, name: str, experts: ShardRange, outputs: ShardRange, inputs: ShardRange) -> Tensor:
    """Dequantized weights of experts `[X, I, O]` in bfloat16, which holds them exactly; inputs before outputs, as
    gpt-oss has them where they are not quantized."""
    groups = ShardRange(-(-inputs.size // 32), inputs.start // 32, -(-inputs.stop // 32))
    blocks = read(f"{name}_blocks", experts, outputs, groups, 16)
    exponents = read(f"{name}_scales", experts, outputs, groups)
    if inputs.size % 32 or blocks.dtype != torch.uint8 or exponents.dtype != torch.uint8:
        raise InputError(f"tensor '{name}_blocks' is not of bytes in groups of 32 inputs, as mxfp4 is")
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.bfloat16)
    first = inputs.start - 32 * groups.start
    found = torch.empty(len(experts), len(inputs), len(outputs), dtype=torch.bfloat16)
    for number in range(len(experts)):
        halves = torch.stack([blocks[number] & 15, blocks[number] >> 4], -1).flatten(-2)
        value = torch.ldexp(table[halves.int()], exponents[number].int()[..., None] - _EXPONENT_BIAS)
        found[number] = value.flatten(1)[:, first : first + len(inputs)].t()
    return found


def _num_groups(wanted: Wanted, how: Quantization) -> int:
    """Groups of all inputs of a layer. Raises InputError where they do not divide these."""
    size = how.group_size or wanted.inputs.size
    if wanted.inputs.size % size:
        raise InputError(f"'{wanted.name}' has {wanted.inputs.size} inputs, which groups of {size} do not divide")
    return wanted.inputs.size // size


def _words(part: ShardRange, per_word: int, name: str, *, padded: bool = False) -> ShardRange:
    """The words that hold a part of a dimension."""
    if part.size % per_word and not padded:
        raise InputError(f"tensor '{name}' packs {per_word} values a word, which do not divide {part.size}")
    return ShardRange(-(-part.size // per_word), part.start // per_word, -(-part.stop // per_word))


def _within(part: ShardRange, per_word: int) -> slice:
    """The part's place among the values of its words."""
    first = part.start % per_word
    return slice(first, first + len(part))


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Values of the words of the last dimension, int32, the lowest bits first."""
    if words.dtype != torch.int32:
        raise InputError(f"packed weights are words of 32 bits, found {words.dtype}")
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words[..., None] >> shifts) & (2**bits - 1)).flatten(-2)


def _adjacent(wanted: Wanted, groups: int) -> Tensor:
    size = wanted.inputs.size // groups
    return torch.arange(wanted.inputs.start, wanted.inputs.stop) // size


def _indices(found: Tensor, groups: int, name: str) -> Tensor:
    if found.is_floating_point() or found.min() < 0 or found.max() >= groups:
        raise InputError(f"tensor '{name}' names groups that are not among the layer's {groups}")
    return found.long()


def _grouped(value_OI: Tensor, scale_OG: Tensor, zero_OG: Tensor, group_I: Tensor, how: Quantization) -> IntMatrix:
    """Without the groups of which this part of the inputs has none. Raises InputError for scales that are no
    numbers."""
    if not scale_OG.isfinite().all():
        raise InputError("scales of quantized weights hold values that are not finite")
    used, local_I = torch.unique(group_I, return_inverse=True)
    scale_OG, zero_OG = (part.expand(-1, 1) if part.shape[1] == 1 else part[:, used] for part in (scale_OG, zero_OG))
    return IntMatrix(
        value_OI.to(torch.uint8).contiguous(), scale_OG.float().contiguous(), zero_OG.float(), local_I, how.bits
    )
