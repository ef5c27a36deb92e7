"""The CPU's compiled kernels: products of packed float32 weights, and decode attention, on one thread.

Letters: N rows (tokens), I inputs, O outputs, P outputs of a panel, B sequences, H query heads, K key/value heads,
D head_dim, C context tokens, R rows of the cache, X slots of all sequences.

A weight is packed into panels of two vectors of outputs, `[O / P, I, P]`, which a product reads once, in order; what
the next tile of rows by outputs reads is fetched while this one is multiplied. Decode attention reads every key and
every value once for the query heads that share it, in any number up to four (two with AVX2). Bytes: those.

The module `_native` is built from C with the package (`pyproject.toml`), for AVX-512 and for AVX2 with FMA. Where it is
missing, on another processor, and with several threads, torch's operations serve (`linear.py`, `attention.py`).
"""

import functools
import importlib
import platform
from types import ModuleType

import torch
import torch.nn.functional as F  # noqa: N812 - the name the whole field uses
from torch import Tensor

_ROWS, _PADDING = 480, 16
"""ROWS and PADDING of the C file: rows that are copied at a time, and floats between copied rows."""
_MAX_HEADS = 4


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


def remarks(device: torch.device) -> list[str]:
    """A sentence where a CPU could run these kernels and the package was built without them."""
    if device.type != "cpu" or module() or platform.machine() != "x86_64":
        return []
    return ["the compiled CPU kernels were not built (they need GCC 12 or Clang): torch's operations are used, slower"]


def multiplies() -> bool:
    """Whether the products of float32 weights that are packed now are these."""
    return width() > 0 and torch.get_num_threads() == 1


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
    scratch = torch.empty(some * (inputs + _PADDING + 2 * width()))
    found = module()
    assert found is not None
    assert x_NI.dtype == weight_PIP.dtype == y_NO.dtype == torch.float32
    assert weight_PIP.shape[1] == inputs
    found.linear(
        width(),
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
    scratch = torch.empty(_MAX_HEADS * stride)
    found = module()
    assert found is not None
    assert keys_RD.is_contiguous()
    assert values_RD.is_contiguous()
    assert keys_RD.shape[1] == dim
    found.decode(
        width(),
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
        scale,
    )
    return out_BHD.to(q_BHD.dtype)


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
