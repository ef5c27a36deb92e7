"""Triton's language where kernels can run: with a CUDA build of torch, which includes triton, or interpreted.

Elsewhere placeholders replace it, so that every file of this folder can be imported without triton; only a launch
fails. `TRITON_INTERPRET=1` must be set before this import: triton decides at `jit` how a function runs.

The kernels avoid features that differ between triton 3.5 and 3.9, or that the interpreter lacks: block pointers,
chained comparisons, `tl.softmax`, products of bfloat16 (see `upcast`).
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import triton.language as tl

__all__ = ["AVAILABLE", "INTERPRETED", "heads_are_adjacent", "jit", "next_power_of_2", "tl", "upcast"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
AVAILABLE = False
"""Whether kernels can be launched: on CUDA tensors or, interpreted, on CPU tensors."""

jit: Callable[..., Any]
"""Makes a kernel of a function; `kernel[grid](...)` launches it. A kernel is compiled anew for a number that is 1, or a
multiple of 16, unless `do_not_specialize` names it: those must be named that differ between passes."""

if not TYPE_CHECKING:
    try:
        if not INTERPRETED and not torch.backends.cuda.is_built():
            raise ImportError("no device to run kernels on")
        import triton.language as tl
        from triton import jit

        AVAILABLE = True
    except ImportError:

        class tl:  # noqa: N801 - the name the whole field uses
            """The names that are evaluated when a kernel is defined."""

            @staticmethod
            def constexpr(value: object) -> object:
                return value

        def jit(function=None, **_options):
            return function if function else jit


def next_power_of_2(count: int) -> int:
    """The width of a block that covers `count` elements: triton's blocks are powers of two."""
    return 1 << max(count - 1, 0).bit_length()


def heads_are_adjacent(x_NHD: torch.Tensor) -> bool:
    """Whether each token's heads are contiguous; tokens may be strided."""
    _, heads, head_dim = x_NHD.shape
    return x_NHD.stride(2) == 1 and (heads == 1 or x_NHD.stride(1) == head_dim)


def upcast(dtype: torch.dtype) -> bool:
    """Whether operands of a matrix product are converted to float32: the interpreter multiplies bfloat16 wrongly."""
    return INTERPRETED and dtype == torch.bfloat16
