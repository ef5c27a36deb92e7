"""Rotary position embedding, in place, of the queries and keys of a flat batch.

Letters: N tokens, M heads of queries and keys, D rotated dimensions of a head.

Bytes: 2 * N * M * D elements, read and written once, and 2 * N * D of cosines and sines; torch's four operations move
three times as much. Operations: 3 * N * M * D, in float32. One program takes all heads of a token, so that its angles
are read once. Source: Su et al. 2021. Not here: the angles (`runner/compute/blocks/rotary.py`).
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

import torch
from torch import Tensor

from exeplan.kernels.kernel import MODEL_DTYPES, Kernel
from exeplan.kernels.language import jit, next_power_of_2, tl


def rotate(x_NMD: Tensor, cos_N1D: Tensor, sin_N1D: Tensor) -> None:
    """Rotates the first D dimensions of every head: dimension i pairs with i + D / 2.

    The sine is signed: negative in its first half. A head must be contiguous; heads and tokens may be strided.
    """
    tokens, heads, _ = x_NMD.shape
    dim = cos_N1D.shape[-1]
    if not tokens * heads:
        return
    assert x_NMD.stride(2) == 1, "the dimensions of a head must be adjacent"
    assert cos_N1D.is_contiguous()
    assert sin_N1D.is_contiguous()
    block_m, block_d = next_power_of_2(heads), next_power_of_2(dim // 2)
    _rotate[(tokens,)](
        x_NMD,
        *x_NMD.stride()[:2],
        cos_N1D,
        sin_N1D,
        HEADS=heads,
        HALF=dim // 2,
        BLOCK_M=block_m,
        BLOCK_D=block_d,
        num_warps=min(8, max(1, block_m * block_d // 256)),
    )


def rotate_reference(x_NMD: Tensor, cos_N1D: Tensor, sin_N1D: Tensor) -> None:
    dim = cos_N1D.shape[-1]
    turned_NMD = x_NMD[..., :dim]
    swapped_NMD = torch.cat((turned_NMD[..., dim // 2 :], turned_NMD[..., : dim // 2]), -1)
    turned_NMD.mul_(cos_N1D).addcmul_(swapped_NMD, sin_N1D)


@jit
def _rotate(
    x,
    token_stride,
    head_stride,
    cos,
    sin,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    there = (m < HEADS)[:, None] & (d < HALF)[None, :]
    first_ptr = x + token * token_stride + m[:, None] * head_stride + d[None, :]
    first = tl.load(first_ptr, mask=there, other=0.0).to(tl.float32)
    second = tl.load(first_ptr + HALF, mask=there, other=0.0).to(tl.float32)
    angle = token * 2 * HALF + d
    cos_1 = tl.load(cos + angle, mask=d < HALF, other=0.0).to(tl.float32)
    cos_2 = tl.load(cos + angle + HALF, mask=d < HALF, other=0.0).to(tl.float32)
    sin_1 = tl.load(sin + angle, mask=d < HALF, other=0.0).to(tl.float32)
    sin_2 = tl.load(sin + angle + HALF, mask=d < HALF, other=0.0).to(tl.float32)
    tl.store(first_ptr, first * cos_1[None, :] + second * sin_1[None, :], mask=there)
    tl.store(first_ptr + HALF, second * cos_2[None, :] + first * sin_2[None, :], mask=there)


KERNELS = (
    Kernel("rotate", rotate, "cuda", MODEL_DTYPES),
    Kernel("rotate", rotate_reference),
)
