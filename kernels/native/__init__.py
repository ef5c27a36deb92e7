"""The CPU's compiled kernels: products of packed weights, and decode attention, on the threads that torch has.

Letters: N rows (tokens), I inputs, O outputs, P outputs of a panel, G groups of inputs, B sequences,
H query heads, K key/value heads, D head_dim, C context tokens, R rows of the cache, X slots of all sequences.

A weight is packed into panels of outputs, which a product reads once, in order; what the next tile of rows by outputs
reads is fetched while this one is multiplied. In float32 a panel is two vectors, `[O / P, I, P]`. In bfloat16, and in
integers of 8 and 4 bits, it is 32 outputs, in the order that the processor's dot products take (`narrow.h`). Of
bfloat16 and of integers there are several ways to multiply the same panels, by what the processor has: that of AMX
(`tiles.h`), that of AVX-512 BF16 or VNNI, and bfloat16 widened to float32. Which is the fastest is measured when the
first weight is loaded, as what has an instruction is not always faster by it. RMSNorm and SwiGLU pass over their rows
once, in float32. Decode attention reads every key and
every value once for the query heads that share it, in any number up to four (two with AVX2). Bytes: those.

The module `_native` is built from C with the package (`pyproject.toml`), for AVX-512 and for AVX2 with FMA; integers
need AVX-512 VNNI. Where it or what it needs is missing, torch's operations serve (`kernels/products`,
`kernels/attention/plain.py`); `remarks` says so. Threads split panels, or sequences and heads: no bit of a result
depends on how many there are, nor on the other rows.
"""

import functools
import importlib
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch
import torch.nn.functional as F  # noqa: N812 - the name the whole field uses
from torch import Tensor

_ROWS, _PADDING = 480, 16
"""ROWS and PADDING of the C file: rows that are copied at a time, and floats between copied rows."""
_MAX_HEADS = 4
_PANEL = 32
"""Outputs of a panel of weights of 16, 8 and 4 bits."""
_DEPTH = 32
"""Inputs of a weight in bfloat16 are a multiple of it, a tile's."""
_TILE_ROWS, _TILE_BYTES = 16, 64
FLOATS, PAIRS, TILES = "as float32", "in pairs", "in tiles"
"""Ways to multiply: bfloat16 as float32, what a lane adds up (two of bfloat16, four bytes), and in tiles (AMX)."""
_WAYS = (FLOATS, PAIRS, TILES)
"""As the C file counts them."""
_TRIAL, _TRIAL_ROWS, _TRIALS = (512, 1024), 32, 7
"""Outputs and inputs of the weight by which ways are compared, rows, and turns."""
_MOST_INPUTS = 1 << 16
"""Of a group: 255 * 127 of each fit 32 bits."""
_MOST_DIGITS = 3
_FEW_ELEMENTS = 1 << 15
_PLAIN = (Tensor, torch.nn.Parameter)
_FEW_DIGITS = 4
"""Of all rows, for which tiles do not pay: LOG.md, 2026-11-26."""


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


def remarks(device: torch.device) -> list[str]:
    """A sentence where torch's operations compute on a CPU what these kernels would on another build or processor."""
    if device.type != "cpu":
        return []
    missing = _missing(num_threads())
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
    integers = [f"int8 {fastest_for_integers()}"] if multiplies_integers() else []
    parts = [f"{width()} floats a vector", *integers, f"bfloat16 {fastest_for_halves()}"]
    return f"compiled, {', '.join(parts)}"


def multiplies() -> bool:
    """Whether the products of float32 and bfloat16 weights that are packed now are these."""
    return width() > 0 and (num_threads() == 1 or _shares_threads())


def multiplies_integers() -> bool:
    """Whether there are products of weights of 8 and 4 bits."""
    found = module()
    return bool(found and width() == 16 and found.integers()) and multiplies()


def ways_of_halves() -> list[str]:
    """The ways in which this processor multiplies bfloat16, that of the fewest FLOP/s by its datasheet first."""
    found = module()
    if not found or not width():
        return []
    return [FLOATS, *([PAIRS] if found.pairs() else []), *([TILES] if found.tiles() else [])]


def ways_of_integers() -> list[str]:
    """Likewise of weights of 8 and 4 bits; all have the same bits."""
    found = module()
    if not found or not found.integers():
        return []
    return [PAIRS, *([TILES] if found.tiles() else [])]


def fastest_for_halves() -> str:
    """The way that was the fastest here, or that processes which work together use: sums in another order have other
    bits."""
    return _agreed or _measured_for_halves()


def said_of_halves() -> str:
    """For `agree_on_halves`: the fastest way here and all that there are; nothing where there is none."""
    return ",".join([fastest_for_halves(), *ways_of_halves()]) if ways_of_halves() else ""


def agree_on_halves(said: Sequence[str]) -> None:
    """Has this process multiply the weights that it packs from now on as all others do that get the same, what each of
    them has said: in the first one's fastest way, or in the last that all have where some lack that."""
    global _agreed
    fastest, *ways = said[0].split(",")
    common = [way for way in ways if all(way in one.split(",")[1:] for one in said)]
    _agreed = fastest if fastest in common else common[-1] if common else ""


_agreed = ""
"""What `agree_on_halves` has found."""


@functools.cache
def _measured_for_halves() -> str:
    """Once in a process."""
    weight, x_NI = pack_halves(torch.ones(_TRIAL, dtype=torch.bfloat16)), torch.ones(_TRIAL_ROWS, _TRIAL[1])
    half = x_NI.bfloat16()
    return _fastest({way: partial(linear_halves, half, weight, None, _TRIAL[0], way=way) for way in ways_of_halves()})


@functools.cache
def fastest_for_integers() -> str:
    """The way that was the fastest here for a weight of 8 bits, measured once in a process."""
    of_output = torch.ones(_TRIAL[0], 1)
    weight = pack_integers(torch.ones(_TRIAL, dtype=torch.uint8), of_output, of_output, 8)
    x_NI = torch.ones(_TRIAL_ROWS, _TRIAL[1], dtype=torch.bfloat16)
    ways = ways_of_integers()
    return _fastest({way: partial(linear_integers, x_NI, weight, None, digits=2, way=way) for way in ways})


def _fastest(products: Mapping[str, Callable[[], Tensor]]) -> str:
    """The last whose shortest time of a few turns is at most a tenth above the shortest of all: two processes are to
    choose the same where two ways take about as long."""
    times: dict[str, list[float]] = {way: [] for way in products}
    for _ in range(_TRIALS if len(products) > 1 else 0):
        for way, product in products.items():
            began = time.thread_time()
            product()
            times[way].append(time.thread_time() - began)
    least = {way: min(found, default=0.0) for way, found in times.items()}
    return [way for way in products if least[way] <= 1.1 * min(least.values())][-1]


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


def computes(x: Tensor) -> bool:
    """Whether norms and activations of these rows are: a traced one has no memory."""
    return x.dtype == torch.float32 and x.is_cpu and type(x) in _PLAIN and multiplies() and x.stride(-1) == 1


def _threads_for(x: Tensor) -> int:
    """Starting threads takes as long as a few thousand elements."""
    return num_threads() if x.numel() > _FEW_ELEMENTS else 1


def rms_norm(x: Tensor, weight_E: Tensor, eps: float, out: Tensor) -> Tensor:
    """`x / sqrt(mean(x ** 2) + eps) * weight` over the last dimension of `[N, E]` or `[N, H, E]`; `out` may be `x`."""
    found = module()
    assert found is not None
    x_NHE, out_NHE = (t if t.dim() == 3 else t[:, None] for t in (x, out))
    assert x_NHE.shape == out_NHE.shape
    assert x_NHE.shape[2:] == weight_E.shape
    assert out_NHE.stride(2) == 1
    assert weight_E.dtype == out.dtype == torch.float32
    rows, heads, size = x_NHE.shape
    weight_E = weight_E.contiguous()
    places = (x_NHE.data_ptr(), *x_NHE.stride()[:2], weight_E.data_ptr(), out_NHE.data_ptr(), *out_NHE.stride()[:2])
    found.norm(width(), _threads_for(x), *places, rows, heads, size, eps)
    return out


def gated_silu(gate_up_NF: Tensor) -> Tensor:
    """`silu(gate) * up`, `[N, F]`, of `[N, 2F]`."""
    found = module()
    assert found is not None
    rows, size = gate_up_NF.shape[0], gate_up_NF.shape[1] // 2
    out_NF = torch.empty(rows, size)
    place = (gate_up_NF.data_ptr(), gate_up_NF.stride(0), out_NF.data_ptr())
    found.gate(width(), _threads_for(out_NF), *place, rows, size)
    return out_NF


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
    """`[O / 32, I / 2, 32, 2]` of a weight in bfloat16, padded with zeros to whole panels and tiles."""
    outputs, inputs = weight_OI.shape
    padded = F.pad(weight_OI, (0, -inputs % _DEPTH, 0, -outputs % _PANEL))
    return padded.view(-1, _PANEL, padded.shape[1] // 2, 2).transpose(1, 2).contiguous()


def unpack_halves(weight: Tensor, outputs: int, inputs: int) -> Tensor:
    """The reverse of `pack_halves`, `[O, I]`."""
    return weight.transpose(1, 2).reshape(len(weight) * _PANEL, -1)[:outputs, :inputs]


def linear_halves(x_NI: Tensor, weight: Tensor, bias_O: Tensor | None, outputs: int, *, way: str) -> Tensor:
    """`x @ weight.T + bias`, `[N, O]` in bfloat16, summed in float32, in one of `ways_of_halves`; `bias` in float32."""
    rows, inputs = x_NI.shape
    if type(x_NI) is not Tensor:  # A traced one has no memory.
        bias_O = None if bias_O is None else bias_O.to(x_NI.dtype)
        return F.linear(x_NI, unpack_halves(weight, outputs, inputs), bias_O)
    if inputs % _DEPTH:
        x_NI = F.pad(x_NI, (0, -inputs % _DEPTH))
    x_NI = x_NI if x_NI.stride(1) == 1 else x_NI.contiguous()
    inputs = x_NI.shape[1]
    y_NO = torch.empty(rows, outputs, dtype=torch.bfloat16)
    some = min(-(-rows // _TILE_ROWS) * _TILE_ROWS, _ROWS)
    scratch = torch.empty(0 if way == PAIRS else some * (inputs + _PADDING))
    found = module()
    assert found is not None
    assert x_NI.dtype == weight.dtype == torch.bfloat16
    assert weight.shape[1] * 2 == inputs
    found.linear_halves(
        _WAYS.index(way),
        width(),
        num_threads(),
        x_NI.data_ptr(),
        x_NI.stride(0),
        weight.data_ptr(),
        _pointer(bias_O),
        y_NO.data_ptr(),
        scratch.data_ptr(),
        rows,
        inputs,
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


def fits_tiles(inputs: int, groups: int) -> bool:
    """Whether groups of integers are whole tiles."""
    return inputs % (groups * _TILE_BYTES) == 0


def linear_integers(
    x_NI: Tensor, weight: PackedIntegers, bias_O: Tensor | None, *, digits: int, way: str = PAIRS
) -> Tensor:
    """`x @ weight.T + bias`, `[N, O]`, with rows in float32 or bfloat16, rounded to as many digits of 8 bits (three at
    most, `int8_linear.digits`), in one of `ways_of_integers`, in tiles only where they fit and pay; `bias` in float32.
    """
    rows, inputs = x_NI.shape
    if type(x_NI) is not Tensor:  # A traced one has no memory.
        return F.linear(x_NI.float(), unpack_integers(weight), bias_O).to(x_NI.dtype)
    x_NI = x_NI if x_NI.stride(1) == 1 else x_NI.contiguous()
    groups = weight.scales.shape[1]
    y_NO = torch.empty(rows, weight.outputs, dtype=x_NI.dtype)
    some = min(rows, _ROWS // digits)
    filled = -(-some * digits // _TILE_ROWS) * _TILE_ROWS
    scratch = torch.empty(some * (4 + 4 * digits * groups) + filled * (inputs + 4), dtype=torch.uint8)
    found = module()
    assert found is not None
    assert x_NI.dtype in (torch.float32, torch.bfloat16)
    assert inputs == weight.inputs
    assert 1 <= digits <= _MOST_DIGITS
    found.linear_integers(
        way == TILES and rows * digits > _FEW_DIGITS and fits_tiles(inputs, groups),
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
