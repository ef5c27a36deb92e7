"""Measured kernels of latent attention, which stand in for a datasheet's roofline where the sheet names them.

`plans/kernels/<name>.yaml` has the microseconds of one layer's kernel on one device, by phase, dtype of the latent
vectors, query heads, sequences and tokens of each: those in the cache (decode), or of whole prompts (prefill). Between
its points logarithms are interpolated. What was not measured (batches beyond the memory) takes what the nearest point
below does, times the ratio that the roofline gives; so do numbers of heads between those of the table. A time above one
of more work was disturbed, and counts as that one. None is below what the device's peaks allow.

Not here: which device has which table (`plans/devices`), and the store of a new token's vector (`datasheet.py`).
"""

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np

from exeplan.arrays import Floats
from exeplan.core.models.model import DTYPE_BYTES, FP8
from exeplan.core.models.sparse_layers import LatentAttention
from exeplan.errors import InputError
from exeplan.files import read_yaml, shipped, shipped_names
from exeplan.profiler.datasheets.roofline import Datasheet, latent_decode_seconds, prefill_attention_seconds

_PHASES = ("decode", "prefill")
_DTYPES = {"bfloat16": "bfloat16", "float16": "bfloat16", FP8: FP8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """What is timed: one layer's attention of one device, the latent vectors kept in `dtype`."""

    phase: str
    """`decode` or `prefill`."""
    latent: LatentAttention
    compute_dtype: str
    dtype: str


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Seconds at [num_seqs, tokens], NaN where there are none; both axes rise."""

    num_seqs: Floats
    tokens: Floats
    seconds: Floats


@dataclass(frozen=True, slots=True)
class Curves:
    """A grid without gaps, as plain numbers: a profile asks for thousands of points, one at a time."""

    num_seqs: tuple[float, ...]
    tokens: tuple[float, ...]
    logs: tuple[tuple[float, ...], ...]
    """Of the seconds at [num_seqs, tokens]."""

    def at(self, num_seqs: float, tokens: float) -> float:
        """Seconds within the grid: linear in the logarithms of all three."""
        (i, u), (j, v) = _cell(self.num_seqs, num_seqs), _cell(self.tokens, tokens)
        low, high = ((1 - v) * row[j] + v * row[j + 1] for row in self.logs[i : i + 2])
        return math.exp((1 - u) * low + u * high)


def _cell(axis: tuple[float, ...], value: float) -> tuple[int, float]:
    """The point below, and how far it is on the way to the next one."""
    below = min(bisect_right(axis, value) - 1, len(axis) - 2)
    return below, math.log(value / axis[below]) / math.log(axis[below + 1] / axis[below])


@dataclass(frozen=True, slots=True, eq=False)
class LatentKernels:
    """A table: grids by phase and dtype, each by query heads."""

    source: str
    """Which kernels they are, in a few words."""
    sizes: Mapping[str, int]
    """Of the attention that was measured: `kv_rank`, `nope_dim`, `rope_dim`, `value_dim`."""
    grids: Mapping[tuple[str, str], Mapping[int, Grid]]

    def times(self, kernel: Kernel) -> bool:
        """Whether it has kernels of these sizes and dtypes."""
        alike = all(getattr(kernel.latent, name) == size for name, size in self.sizes.items())
        return alike and kernel.compute_dtype in _DTYPES and (kernel.phase, _DTYPES.get(kernel.dtype)) in self.grids


def latent_attention_seconds(sheet: Datasheet, kernel: Kernel, *, heads: int, num_seqs: int, tokens: int) -> float:
    """Of one layer for `num_seqs` sequences of `tokens` each, by the sheet's table where it has such kernels."""
    if not sheet.latent_kernels or not load_latent_kernels(sheet.latent_kernels).times(kernel):
        return roofline_seconds(sheet, kernel, heads=heads, num_seqs=num_seqs, tokens=tokens)
    curves = _whole_curves(sheet, kernel, heads)
    near = {
        "num_seqs": min(max(num_seqs, curves.num_seqs[0]), curves.num_seqs[-1]),
        "tokens": min(max(tokens, curves.tokens[0]), curves.tokens[-1]),
    }
    # Below the first point times hardly fall any more.
    work = {"num_seqs": max(num_seqs, near["num_seqs"]), "tokens": max(tokens, near["tokens"])}
    beyond = roofline_seconds(sheet, kernel, heads=heads, **work) / roofline_seconds(sheet, kernel, heads=heads, **near)
    took = curves.at(**near) * beyond
    return max(took, least_seconds(sheet, kernel, heads=heads, num_seqs=num_seqs, tokens=tokens))


def roofline_seconds(sheet: Datasheet, kernel: Kernel, *, heads: int, num_seqs: float, tokens: float) -> float:
    """The same by the datasheet's constants."""
    latent = kernel.latent
    if kernel.phase == "decode":
        return latent_decode_seconds(
            sheet,
            kernel.dtype,
            num_seqs=num_seqs,
            context_tokens=num_seqs * tokens,
            heads=heads,
            rank=latent.kv_rank,
            rope_dim=latent.rope_dim,
        )
    return prefill_attention_seconds(
        sheet,
        kernel.compute_dtype,
        num_seqs=num_seqs,
        tokens=tokens,
        heads=heads,
        kv_heads=heads,
        head_dim=(latent.nope_dim + latent.rope_dim + latent.value_dim) / 2,
        causal=True,
    )


def least_seconds(sheet: Datasheet, kernel: Kernel, *, heads: int, num_seqs: float, tokens: float) -> float:
    """What the device's peaks allow: its operations, and in a decode the bytes of the latent vectors."""
    latent, peak = kernel.latent, sheet.flops(kernel.compute_dtype)
    if kernel.phase == "decode":
        cached = num_seqs * tokens
        read = cached * latent.kept * DTYPE_BYTES[kernel.dtype] / sheet.memory_bandwidth
        return max(read, 2 * cached * heads * latent.absorbed / peak)
    widths = latent.nope_dim + latent.rope_dim + latent.value_dim
    return 2 * num_seqs * tokens**2 / 2 * heads * widths / peak


@cache
def load_latent_kernels(name: str) -> LatentKernels:
    """A shipped table. Raises InputError where there is none of that name, or it is no such table."""
    if name not in shipped_names("kernels"):
        raise InputError(f"no table of kernels '{name}' is shipped; there are {', '.join(shipped_names('kernels'))}")
    body = read_yaml(shipped("kernels", name))
    return LatentKernels(
        source=str(body["source"]),
        sizes={str(key): int(value) for key, value in body["sizes"].items()},
        grids={
            (phase, dtype): {int(heads): _grid(rows, body[phase]["tokens"]) for heads, rows in by_heads.items()}
            for phase in _PHASES
            for dtype, by_heads in body[phase]["microseconds"].items()
        },
    )


def _grid(rows: Mapping[Any, str], tokens: str) -> Grid:
    values = [[float("nan" if cell == "-" else cell) for cell in row.split()] for row in rows.values()]
    return Grid(np.array([float(n) for n in rows]), np.array(tokens.split(), dtype=float), np.array(values) * 1e-6)


@lru_cache(256)
def _whole_curves(sheet: Datasheet, kernel: Kernel, heads: int) -> Curves:
    """The table's grid of the nearest number of heads, for these heads, filled up and rising."""
    by_heads = load_latent_kernels(sheet.latent_kernels).grids[kernel.phase, _DTYPES[kernel.dtype]]
    near = min(by_heads, key=lambda count: abs(np.log(count / heads)))
    grid = by_heads[near]

    def by_sheet(count: int) -> Floats:
        return np.array(
            [
                [roofline_seconds(sheet, kernel, heads=count, num_seqs=n, tokens=x) for x in grid.tokens]
                for n in grid.num_seqs
            ]
        )

    roofline = by_sheet(near)
    ratio = _undisturbed(grid.seconds) / roofline
    for column in range(1, ratio.shape[1]):
        ratio[:, column] = np.where(np.isnan(ratio[:, column]), ratio[:, column - 1], ratio[:, column])
    seconds = _rising(ratio * (roofline if near == heads else by_sheet(heads)))
    logs = tuple(map(tuple, np.log(seconds).tolist()))
    return Curves(tuple(grid.num_seqs.tolist()), tuple(grid.tokens.tolist()), logs)


def _undisturbed(seconds: Floats) -> Floats:
    """No time above one of as many sequences and tokens, or more; NaN stays."""
    filled = np.where(np.isnan(seconds), np.inf, seconds)[::-1, ::-1]
    lowest = np.minimum.accumulate(np.minimum.accumulate(filled, axis=0), axis=1)[::-1, ::-1]
    return np.where(np.isnan(seconds), np.nan, lowest)


def _rising(seconds: Floats) -> Floats:
    return np.maximum.accumulate(np.maximum.accumulate(seconds, axis=0), axis=1)
