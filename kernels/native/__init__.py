"""The CPU's compiled kernels: products of packed weights, and decode attention, on the threads that torch has.

Letters: N rows (tokens), I inputs, O outputs, P outputs of a panel, G groups of inputs, B sequences,
H query heads, K key/value heads, D head_dim, C context tokens, R rows of the cache, X slots of all sequences.

A weight is packed into panels of outputs, which a product reads once, in order; what the next tile of rows by outputs
reads is fetched while this one is multiplied. In float32 a panel is two vectors, `[O / P, I, P]`. In bfloat16, and in
integers of 8 and 4 bits, which are decoded in registers, it is 32 outputs, in the order that the processor's dot
products take (`narrow.h`). Decode attention reads every key and every value once for the query heads that share it, in
any number up to four (two with AVX2). Bytes: those.

The module `_native` is built from C with the package (`pyproject.toml`), for AVX-512 and for AVX2 with FMA; integers
need AVX-512 VNNI, bfloat16 needs AVX-512 BF16. Where it or what it needs is missing, torch's operations serve
(`kernels/products`, `kernels/attention/plain.py`); `remarks` says so. Threads split panels, or sequences and heads: no
bit of a result depends on how many there are.
"""

import functools
import importlib
import platform
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F  # noqa: N812 - the name the whole field uses
from torch import Tensor

_ROWS, _PADDING = 480, 16
"""ROWS and PADDING of the C file: rows that are copied at a time, and floats between copied rows."""
_MAX_HEADS = 4
_PANEL = 32
"""Outputs of a panel of weights of 16, 8 and 4 bits."""
_MOST_INPUTS = 1 << 16
"""Of a group: 255 * 127 of each fit 32 bits."""
_MOST_DIGITS = 3


@functools.cache
def module() -> ModuleType | None:
    """The compiled module; None where it was not built."""
    try:
        return importlib.import_module("exeplan.kernels.native._native")
    except ImportError:
        return None


@functools.cache
def width() -> int:
    """Floats of a vector; 0 where the kernels were not built or the processor lacks their instructions."""
    found = module()
    return int(found.width()) if found else 0


@functools.cache
def _shares_threads() -> bool:
    """Whether there is an OpenMP library in the process, torch's, whose threads the kernels can run on."""
    found = module()
    return bool(found and width() and found.threads())


def num_threads() -> int:
    """Threads that the kernels run on: torch's."""
    return torch.get_num_threads()


def remarks(device: torch.device, dtype: torch.dtype) -> list[str]:
    """A sentence where torch's operations compute on a CPU what these kernels would on another build or processor."""
    if device.type != "cpu":
        return []
    missing = _missing(num_threads())
    if not missing and dtype == torch.bfloat16 and width() and not multiplies_halves():
        return ["products of bfloat16 are torch's: the compiled ones need a processor with AVX-512 BF16"]
    return [f"{missing}: torch's operations are used, slower"] if missing else []


def _missing(threads: int) -> str:
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return ""  # There are none for it.
    if not module():
        return "the compiled CPU kernels were not built (they need GCC 12 or Clang)"
    if not width():
        return "the compiled CPU kernels need a processor with AVX2 and FMA"
    if threads > 1 and not _shares_threads():
        return f"the compiled CPU kernels found no OpenMP library for {threads} threads"
    return ""


def description() -> str:
    """What computes on this CPU, as profiles record it."""
    if not multiplies():
        return "torch"
    more = [name for name, there in (("int8", multiplies_integers()), ("bfloat16", multiplies_halves())) if there]
    return f"compiled, {width()} floats a vector" + "".join(f", {name}" for name in more)


def multiplies() -> bool:
    """Whether the products of float32 weights that are packed now are these."""
    return width() > 0 and (num_threads() == 1 or _shares_threads())


def multiplies_integers() -> bool:
    """Whether there are products of weights of 8 and 4 bits."""
    found = module()
    return bool(found and width() == 16 and found.integers()) and multiplies()


def multiplies_halves() -> bool:
    """Whether there are products of weights in bfloat16."""
    found = module()
    return bool(found and width() == 16 and found.halves()) and multiplies()


def attends(table_RD: Tensor) -> bool:
    """Whether decode attention over this table is."""
    fits = table_RD.device.type == "cpu" and table_RD.dtype in (torch.float32, torch.bfloat16)
    return fits and multiplies() and table_RD.shape[1] % width() == 0


def pack(weight_OI: Tensor) -> Tensor:
    """`[O / P, I, P]`, padded with zeros to whole panels."""
    panel = 2 * width()
    outputs, inputs = weight_OI.shape
    padded = F.pad(weight_OI, (0, 0, 0, -outputs % panel)) if outputs % panel else weight_OI
    return padded.view(-1, panel, inputs).transpose(1, 2).contiguous()


def unpack(weight_PIP: Tensor, outputs: int) -> Tensor:
    """The reverse of `pack`, `[O, I]`."""
    return weight_PIP.transpose(1, 2).reshape(-1, weight_PIP.shape[1])[:outputs]


def linear(
    x_NI: Tensor, weight_PIP: Tensor, bias_O: Tensor | None, outputs: int, *, added_to: Tensor | None = None
) -> Tensor:
    """`x @ weight.T + bias`, `[N, O]`; in place of `added_to`, which must be contiguous, the sum of both."""
    if type(x_NI) is not Tensor:  # A traced one has no memory.
        product = F.linear(x_NI, unpack(weight_PIP, outputs), bias_O)
        return product if added_to is None else added_to.add_(product)
    rows, inputs = x_NI.shape
    x_NI = x_NI if x_NI.stride(1) == 1 else x_NI.contiguous()
    y_NO = torch.empty(rows, outputs) if added_to is None else added_to
    some = min(rows, _ROWS)
    scratch = torch.empty(some * (inputs + _PADDING))
    found = module()
    assert found is not None
    assert x_NI.dtype == weight_PIP.dtype == y_NO.dtype == torch.float32
    assert weight_PIP.shape[1] == inputs
    found.linear(
        width(),
        num_threads(),
        x_NI.data_ptr(),
        x_NI.stride(0),
        weight_PIP.data_ptr(),
        _pointer(bias_O),
        y_NO.data_ptr(),
        scratch.data_ptr(),
        rows,
        inputs,
        outputs,
        added_to is not None,
    )
    return y_NO


def pack_halves(weight_OI: Tensor) -> Tensor:
    """`[O / 32, I / 2, 32, 2]` of a weight in bfloat16, padded with zeros to whole panels and pairs."""
    outputs, inputs = weight_OI.shape
    padded = F.pad(weight_OI, (0, inputs % 2, 0, -outputs % _PANEL))
    return padded.view(-1, _PANEL, padded.shape[1] // 2, 2).transpose(1, 2).contiguous()


def unpack_halves(weight: Tensor, outputs: int, inputs: int) -> Tensor:
    """The reverse of `pack_halves`, `[O, I]`."""
    return weight.transpose(1, 2).reshape(len(weight) * _PANEL, -1)[:outputs, :inputs]


def linear_halves(x_NI: Tensor, weight: Tensor, bias_O: Tensor | None, outputs: int) -> Tensor:
    """`x @ weight.T + bias`, `[N, O]` in bfloat16, summed in float32; `bias` in float32."""
    rows, inputs = x_NI.shape
    if type(x_NI) is not Tensor:  # A traced one has no memory.
        bias_O = None if bias_O is None else bias_O.to(x_NI.dtype)
        return F.linear(x_NI, unpack_halves(weight, outputs, inputs), bias_O)
    if inputs % 2:
        x_NI = F.pad(x_NI, (0, 1))
    x_NI = x_NI if x_NI.stride(1) == 1 else x_NI.contiguous()
    y_NO = torch.empty(rows, outputs, dtype=torch.bfloat16)
    found = module()
    assert found is not None
    assert x_NI.dtype == weight.dtype == torch.bfloat16
    assert weight.shape[1] * 2 == x_NI.shape[1]
    found.linear_halves(
        num_threads(),
        x_NI.data_ptr(),
        x_NI.stride(0),
        weight.data_ptr(),
        _pointer(bias_O),
        y_NO.data_ptr(),
        rows,
        x_NI.shape[1],
        outputs,
    )
    return y_NO


@dataclass(frozen=True)
class PackedIntegers:
    """A weight `scale_OG * (value_OI - zero_OG)` in panels; values are of 8 or 4 bits, without a sign."""

    values: Tensor
    """`[O / 32, I / 4, 32, 4]`, of 4 bits `[O / 32, I / 4, 16, 4]`: two outputs a byte, 16 apart."""
    zeros: Tensor
    """`[O / 32, G, 32]` in uint8."""
    scales: Tensor
    """`[O / 32, G, 32]` in float32."""
    outputs: int
    inputs: int
    bits: int

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + self.zeros.nbytes + self.scales.nbytes


def pack_integers(value_OI: Tensor, scale_OG: Tensor, zero_OG: Tensor, bits: int) -> PackedIntegers:
    """Of values in uint8; groups are of adjacent inputs, equally many, `fits_integers`."""
    outputs, inputs = value_OI.shape
    more = -outputs % _PANEL
    padded = F.pad(value_OI, (0, -inputs % 4, 0, more)).view(-(-outputs // _PANEL), _PANEL, -1, 4)
    value = padded.transpose(1, 2)
    if bits == 4:
        value = value[:, :, : _PANEL // 2] | value[:, :, _PANEL // 2 :] << 4
    scales, zeros = (
        F.pad(part, (0, 0, 0, more)).view(len(padded), _PANEL, -1).transpose(1, 2).to(dtype).contiguous()
        for part, dtype in ((scale_OG, torch.float32), (zero_OG, torch.uint8))
    )
    return PackedIntegers(value.contiguous(), zeros, scales, outputs, inputs, bits)


def unpack_integers(weight: PackedIntegers) -> Tensor:
    """The weight itself, `[O, I]` in float32."""
    value = weight.values
    if weight.bits == 4:
        value = torch.cat([value & 15, value >> 4], 2)
    value_OI, scale_OG, zero_OG = (
        part.transpose(1, 2).reshape(len(part) * _PANEL, -1)[: weight.outputs].float()
        for part in (value.flatten(3), weight.scales, weight.zeros)
    )
    groups = scale_OG.shape[1]
    value_OGg = value_OI[:, : weight.inputs].reshape(len(value_OI), groups, -1)
    return ((value_OGg - zero_OG[..., None]) * scale_OG[..., None]).flatten(1)


def fits_integers(inputs: int, groups: int) -> bool:
    """Whether sums of a group fit 32 bits, and whole groups the four inputs that are multiplied at a time."""
    return inputs // groups <= _MOST_INPUTS and (groups == 1 or inputs % (4 * groups) == 0)


def linear_integers(x_NI: Tensor, weight: PackedIntegers, bias_O: Tensor | None, *, digits: int) -> Tensor:
    """`x @ weight.T + bias`, `[N, O]`, with rows in float32 or bfloat16, rounded to as many digits of 8 bits (three at
    most, `int8_linear.digits`); `bias` in float32."""
    rows, inputs = x_NI.shape
    if type(x_NI) is not Tensor:  # A traced one has no memory.
        return F.linear(x_NI.float(), unpack_integers(weight), bias_O).to(x_NI.dtype)
    x_NI = x_NI if x_NI.stride(1) == 1 else x_NI.contiguous()
    groups = weight.scales.shape[1]
    y_NO = torch.empty(rows, weight.outputs, dtype=x_NI.dtype)
    some = min(rows, _ROWS // digits)
    scratch = torch.empty(some * (4 + digits * (4 * groups + inputs + 4)), dtype=torch.uint8)
    found = module()
    assert found is not None
    assert x_NI.dtype in (torch.float32, torch.bfloat16)
    assert inputs == weight.inputs
    assert 1 <= digits <= _MOST_DIGITS
    found.linear_integers(
        num_threads(),
        x_NI.dtype == torch.bfloat16,
        weight.bits,
        digits,
        x_NI.data_ptr(),
        x_NI.stride(0),
        weight.values.data_ptr(),
        weight.zeros.data_ptr(),
        weight.scales.data_ptr(),
        _pointer(bias_O),
        y_NO.data_ptr(),
        scratch.data_ptr(),
        rows,
        inputs,
        weight.outputs,
        groups,
        -(-inputs // (4 * groups)) * 4,
    )
    return y_NO


def decode(
    q_BHD: Tensor,
    keys_RD: Tensor,
    values_RD: Tensor,
    slot_X: Tensor,
    context_B: Tensor,
    *,
    longest: int,
    kv_heads: int,
    scale: float,
    bias: Tensor | None,
    sink_H: Tensor | None,
) -> Tensor:
    """One query token a sequence over its slots, `[B, H, D]` in the dtype of queries.

    `slot_X` and `context_B` are int64; slot s of head k is row `k * R / K + s`. `bias` has the `[H, C]` of every
    sequence, flattened and concatenated, in float32 as `sink_H`. `longest` is the largest context.
    """
    q = q_BHD.float()
    q = q if q.stride(2) == 1 and q.stride(1) == q.shape[2] else q.contiguous()
    batch, heads, dim = q.shape
    out_BHD = torch.empty(batch, heads, dim)
    stride = -(-longest // 16) * 16
    threads = num_threads()
    scratch = torch.empty(threads * _MAX_HEADS * stride)
    found = module()
    assert found is not None
    assert keys_RD.is_contiguous()
    assert values_RD.is_contiguous()
    assert keys_RD.shape[1] == dim
    found.decode(
        width(),
        threads,
        keys_RD.dtype == torch.bfloat16,
        q.data_ptr(),
        q.stride(0),
        keys_RD.data_ptr(),
        values_RD.data_ptr(),
        len(keys_RD) // kv_heads,
        slot_X.data_ptr(),
        context_B.data_ptr(),
        _pointer(bias),
        _pointer(sink_H),
        out_BHD.data_ptr(),
        scratch.data_ptr(),
        stride,
        batch,
        heads,
        kv_heads,
        dim,
        len(slot_X),
        scale,
    )
    return out_BHD.to(q_BHD.dtype)


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
