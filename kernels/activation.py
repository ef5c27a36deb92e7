"""Activations of feed-forward blocks: gated (SwiGLU, GeGLU), of gate and up in one matrix, or plain (GeLU, ReLU).

Letters: N tokens, F elements of the intermediate.

Bytes: gated 3 * N * F elements (two read, one written), where activation and product apart move 5; plain 2 * N * F.
Operations: about 10 for an element, in float32. Source: Shazeer 2020.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - the name the whole field uses
from torch import Tensor

from exeplan.kernels import native
from exeplan.kernels.kernel import MODEL_DTYPES, Kernel
from exeplan.kernels.language import jit, tl

KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
"""The activations in plain PyTorch; gated, the first two are SwiGLU and GeGLU."""
_BLOCK = 1024


def gated_activation(gate_up_NF: Tensor, kind: str) -> Tensor:
    """`activation(gate) * up`, `[N, F]`, of `[N, 2F]`: gate before up."""
    return _launch(gate_up_NF, kind, gated=True)


def gated_activation_reference(gate_up_NF: Tensor, kind: str) -> Tensor:
    gate_NF, up_NF = gate_up_NF.chunk(2, -1)
    if gate_up_NF.dtype == torch.float32:
        return KINDS[kind](gate_NF).mul_(up_NF)
    return KINDS[kind](gate_NF.float()).mul_(up_NF).to(gate_up_NF.dtype)


def gated_activation_compiled(gate_up_NF: Tensor, kind: str) -> Tensor:
    """By the CPU's compiled kernels, where they have the activation."""
    if kind == "silu" and native.computes(gate_up_NF):
        return native.gated_silu(gate_up_NF)
    return gated_activation_reference(gate_up_NF, kind)


def plain_activation(x_NF: Tensor, kind: str) -> Tensor:
    """The activation of every element."""
    return _launch(x_NF, kind, gated=False)


def plain_activation_reference(x_NF: Tensor, kind: str) -> Tensor:
    return KINDS[kind](x_NF)


def _launch(x: Tensor, kind: str, *, gated: bool) -> Tensor:
    assert kind in KINDS, kind
    tokens, width = x.shape[0], x.shape[1] // (2 if gated else 1)
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    if not tokens * width:
        return out
    assert x.stride(1) == 1, "the elements of a token must be adjacent"
    blocks = -(-width // _BLOCK)
    _activate[(tokens, blocks)](x, x.stride(0), out, width, KIND=kind, GATED=gated, BLOCK=_BLOCK, num_warps=4)
    return out


@jit
def _activate(x, stride, out, width, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = i < width
    value = tl.load(x + token * stride + i, mask=there, other=0.0).to(tl.float32)
    if KIND == "silu":
        value = value * tl.sigmoid(value)
    elif KIND == "gelu":
        value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        inner = 0.7978845608028654 * (value + 0.044715 * value * value * value)
        value = value * tl.sigmoid(2.0 * inner)  # (1 + tanh(x)) / 2 is sigmoid(2x).
    else:
        value = tl.where(value < 0.0, 0.0, value)  # A NaN stays one.
    if GATED:
        value = value * tl.load(x + token * stride + width + i, mask=there, other=0.0).to(tl.float32)
    tl.store(out + token * width + i, value, mask=there)


KERNELS = (
    Kernel("gated_activation", gated_activation, "cuda", MODEL_DTYPES),
    Kernel("gated_activation", gated_activation_compiled, "cpu", (torch.float32,)),
    Kernel("gated_activation", gated_activation_reference),
    Kernel("plain_activation", plain_activation, "cuda", MODEL_DTYPES),
    Kernel("plain_activation", plain_activation_reference),
)
