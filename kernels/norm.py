"""RMSNorm and LayerNorm, alone or fused with the residual sum before them.

Letters: N rows, E elements of a row.

Bytes, fused: the block's output and the residual are read, the sum and its norm written, 4 * N * E elements, while
separate sum and norm move 5; alone 2 * N * E. Operations: about 4 * N * E. One program holds a whole row, so that it is
read once; sums are float32. Source: Zhang and Sennrich 2019 (RMSNorm), Ba et al. 2016 (LayerNorm).
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

import torch
import torch.nn.functional as F  # noqa: N812 - the name the whole field uses
from torch import Tensor

from exeplan.kernels import native
from exeplan.kernels.kernel import MODEL_DTYPES, Kernel
from exeplan.kernels.language import jit, next_power_of_2, tl


def rms_norm(x: Tensor, weight_E: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """`x / sqrt(mean(x ** 2) + eps) * weight` over the last dimension of `[N, E]` or, as for heads, `[N, H, E]`.

    `out` may be `x` itself; by default the result is new. A row must be contiguous; rows may be strided.
    """
    return _launch(x, None, weight_E, None, eps, out, centre=False)


def rms_norm_reference(x: Tensor, weight_E: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    normed = F.rms_norm(x, weight_E.shape, weight_E, eps)
    return normed if out is None else out.copy_(normed)


def rms_norm_compiled(x: Tensor, weight_E: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """By the CPU's compiled kernels, which torch takes three to five times as long as."""
    if x.dim() not in (2, 3) or not native.computes(x):
        return rms_norm_reference(x, weight_E, eps, out=out)
    return native.rms_norm(x, weight_E, eps, torch.empty(x.shape) if out is None else out)


def add_rms_norm_compiled(x_NE: Tensor, residual_NE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    return rms_norm_compiled(residual_NE.add_(x_NE), weight_E, eps)


def layer_norm(x_NE: Tensor, weight_E: Tensor | None, bias_E: Tensor | None, eps: float) -> Tensor:
    """`(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`."""
    return _launch(x_NE, None, weight_E, bias_E, eps, None, centre=True)


def layer_norm_reference(x_NE: Tensor, weight_E: Tensor | None, bias_E: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x_NE, x_NE.shape[-1:], weight_E, bias_E, eps)


def add_rms_norm(x_NE: Tensor, residual_NE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """Adds `x` to `residual`, in place, rounded to its dtype; returns the RMSNorm of the sum."""
    return _launch(x_NE, residual_NE, weight_E, None, eps, None, centre=False)


def add_rms_norm_reference(x_NE: Tensor, residual_NE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    return rms_norm_reference(residual_NE.add_(x_NE), weight_E, eps)


def add_layer_norm(
    x_NE: Tensor, residual_NE: Tensor, weight_E: Tensor | None, bias_E: Tensor | None, eps: float
) -> Tensor:
    """Adds `x` to `residual`, in place, rounded to its dtype; returns the LayerNorm of the sum."""
    return _launch(x_NE, residual_NE, weight_E, bias_E, eps, None, centre=True)


def add_layer_norm_reference(
    x_NE: Tensor, residual_NE: Tensor, weight_E: Tensor | None, bias_E: Tensor | None, eps: float
) -> Tensor:
    return layer_norm_reference(residual_NE.add_(x_NE), weight_E, bias_E, eps)


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight_E: Tensor | None,
    bias_E: Tensor | None,
    eps: float,
    out: Tensor | None,
    *,
    centre: bool,
) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    x_NHE, out_NHE = (t if t.dim() == 3 else t[:, None] for t in (x, out))
    tokens, heads, size = x_NHE.shape
    if not tokens * heads:
        return out
    assert x_NHE.stride(2) == out_NHE.stride(2) == 1, "the elements of a row must be adjacent"
    assert residual is None or (residual.is_contiguous() and residual.shape == x.shape)
    block = next_power_of_2(size)
    _norm[(tokens * heads,)](
        x_NHE,
        *x_NHE.stride()[:2],
        residual,
        weight_E,
        bias_E,
        out_NHE,
        *out_NHE.stride()[:2],
        eps,
        HEADS=heads,
        SIZE=size,
        BLOCK=block,
        CENTRE=centre,
        num_warps=min(16, max(1, block // 512)),
    )
    return out


@jit
def _norm(
    x,
    x_stride,
    x_head_stride,
    residual,
    weight,
    bias,
    out,
    out_stride,
    out_head_stride,
    eps,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    CENTRE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token, head = row // HEADS, row % HEADS
    i = tl.arange(0, BLOCK)
    there = i < SIZE
    value = tl.load(x + token * x_stride + head * x_head_stride + i, mask=there, other=0.0)
    if residual is not None:
        place = residual + row * SIZE + i
        value = (value.to(tl.float32) + tl.load(place, mask=there, other=0.0).to(tl.float32)).to(value.dtype)
        tl.store(place, value, mask=there)
    value = value.to(tl.float32)
    if CENTRE:
        value = tl.where(there, value - tl.sum(value, 0) / SIZE, 0.0)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    if weight is not None:
        value = value * tl.load(weight + i, mask=there, other=0.0).to(tl.float32)
    if bias is not None:
        value = value + tl.load(bias + i, mask=there, other=0.0).to(tl.float32)
    tl.store(out + token * out_stride + head * out_head_stride + i, value, mask=there)


KERNELS = (
    Kernel("rms_norm", rms_norm, "cuda", MODEL_DTYPES),
    Kernel("rms_norm", rms_norm_compiled, "cpu", (torch.float32,)),
    Kernel("rms_norm", rms_norm_reference),
    Kernel("layer_norm", layer_norm, "cuda", MODEL_DTYPES),
    Kernel("layer_norm", layer_norm_reference),
    Kernel("add_rms_norm", add_rms_norm, "cuda", MODEL_DTYPES),
    Kernel("add_rms_norm", add_rms_norm_compiled, "cpu", (torch.float32,)),
    Kernel("add_rms_norm", add_rms_norm_reference),
    Kernel("add_layer_norm", add_layer_norm, "cuda", MODEL_DTYPES),
    Kernel("add_layer_norm", add_layer_norm_reference),
)
