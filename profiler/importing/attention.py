"""Attention rows of a model's shard from tables of attention kernels by heads.

    exact     the shard's (query heads, key/value heads, head dimension) are in the table: its rows as they are
    scaled    they are not: kernels of the nearest shape with f times fewer heads, at f times as many sequences. A
              kernel works through sequences and heads alike, so decode keeps the bytes of keys and values (f counts
              key/value heads times dimension) and prefill its operations (f counts query heads times dimension)
    fitted    the table is no grid (a few lengths only): relative least squares, coefficients not negative, with
                  decode   a + b*K*n + c*K*n*context         n sequences, K = key/value heads x dimension
                  prefill  a + b*Q*x + c*Q*x^2 + d*Q*x*cached   x new tokens of one prompt, Q = query heads x dimension

A scaled or fitted row has `repeats` 0: derived, not measured. So has one beyond a sliding window: the tables time
attention to all tokens, and rows are the mean layer's. Prefills on top of cached tokens have no row of their own and
serve the fit only.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from exeplan.arrays import Floats
from exeplan.core.models.model import ModelSpec
from exeplan.core.profile import Measurement
from exeplan.profiler.importing.imported_rows import ImportedRows, rounded, thinned
from exeplan.simulator.curves import Surface, surface_of

_AXES = ("num_seqs", "tokens", "cached", "seconds")
Shape = tuple[int, int, int]
"""Query heads, key/value heads and head dimension of one device."""
_LEAST_LENGTHS = 4
_LEAST_REACH = 8.0
"""A curve over lengths needs this many, and this ratio between the longest and the shortest."""
_MOST_SEQS, _MOST_LENGTHS = 1.5, 1.18
"""Neighbours closer than this ratio are thinned out."""
_FITTED_SEQS = tuple(2**i for i in range(12))


@dataclass(frozen=True, slots=True)
class Kernels:
    """Measured kernels of one phase; arrays over rows."""

    phase: str
    heads: NDArray[np.int64]
    """[rows, 3]: a `Shape` each."""
    num_seqs: Floats
    tokens: Floats
    """Of one sequence: its new tokens (prefill), or those in its cache (decode)."""
    cached: Floats
    """Before a prefill's new tokens; 0 for decode."""
    seconds: Floats
    notes: tuple[str, ...] = field(kw_only=True)
    """What its reader has to say."""


def attention_rows(tables: Iterable[Kernels], spec: ModelSpec, degrees: Sequence[int]) -> ImportedRows:
    """Rows of both phases at every degree, and what was scaled or fitted."""
    tables = tuple(tables)
    part = ImportedRows(notes=tuple(note for table in tables for note in table.notes))
    for phase in ("prefill", "decode"):
        of_phase = [table for table in tables if table.phase == phase]
        if of_phase:
            part += _phase_rows(_joined(phase, of_phase), spec, degrees)
    return part


def within_windows(part: ImportedRows, spec: ModelSpec) -> ImportedRows:
    """Rows of the mean layer of a model with sliding windows from those of attention to all tokens, and a sentence."""
    windows = [(window, count) for window, count in spec.windows.items() if window is not None]
    if not windows or not part.rows:
        return part
    num_layers = sum(count for _, count in windows)
    spans = " or ".join(str(window) for window, _ in sorted(windows))
    note = (
        f"attention: {num_layers} of {spec.num_layers} layers attend to the last {spans} tokens; theirs is taken from "
        "the tables' attention to all tokens, over as many"
    )
    by_axis: dict[tuple[str, int], list[Measurement]] = defaultdict(list)
    for row in part.rows:
        by_axis[row.phase, row.tensor_parallel_size].append(row)
    rows = tuple(row for own in by_axis.values() for row in _within_windows(own, spec))
    return ImportedRows(rows, (*part.notes, note))


def _within_windows(rows: Sequence[Measurement], spec: ModelSpec) -> Iterator[Measurement]:
    """Of one phase and degree."""
    axis, windows = "num_tokens" if rows[0].phase == "prefill" else "context_tokens", spec.windows
    whole = surface_of(rows, axis)
    for row in rows:
        tokens = getattr(row, axis) / row.num_seqs
        saved = sum(
            count * (row.seconds - _windowed_seconds(row, tokens, window, whole))
            for window, count in windows.items()
            if window is not None and window < tokens
        )
        yield replace(row, seconds=rounded(row.seconds - saved / spec.num_layers), repeats=0) if saved else row


def _windowed_seconds(row: Measurement, tokens: float, window: int, whole: Surface) -> float:
    """A new token attends to those of its window. Prompts take what shorter ones do that have as many tokens and pairs
    of them together; never more than without the window."""
    num_seqs, length = float(row.num_seqs), float(window)
    if row.phase == "prefill":
        length = window * (2 - window / tokens)
        num_seqs *= tokens / length
    return min(row.seconds, float(whole(num_seqs, length)))


def shard_shape(spec: ModelSpec, degree: int) -> Shape:
    """One device's heads; fewer key/value heads than devices are copied, one to each."""
    return spec.num_heads // degree, max(1, spec.num_kv_heads // degree), spec.head_dim


def _joined(phase: str, tables: Sequence[Kernels]) -> Kernels:
    return Kernels(
        phase,
        np.concatenate([table.heads for table in tables]),
        *(np.concatenate([getattr(table, name) for table in tables]) for name in _AXES),
        notes=(),
    )


def _phase_rows(table: Kernels, spec: ModelSpec, degrees: Sequence[int]) -> ImportedRows:
    grids = {shape: grid for shape in _shapes(table) if (grid := _grid(table, shape))}
    if not grids:
        return _fitted(table, spec, degrees)
    part = ImportedRows()
    sources: dict[Shape, list[Shape]] = defaultdict(list)
    for degree in degrees:
        shape = shard_shape(spec, degree)
        near = min(grids, key=lambda other: _distance(shape, other, table.phase))
        times = grids[near] if near == shape else _scaled(grids[near], _factor(shape, near, table.phase))
        part += ImportedRows(tuple(_measurements(times, table.phase, degree, spec, measured=near == shape)))
        if near != shape:
            sources[near].append(shape)
    what = "bytes of keys and values" if table.phase == "decode" else "operations"
    return part + ImportedRows(
        notes=tuple(
            f"{table.phase} attention of {_named(*shapes)} is not in the tables: scaled by {what} from {_named(near)}"
            for near, shapes in sources.items()
        )
    )


def _named(*shapes: Shape) -> str:
    return ", ".join(f"{q}/{k}/{d}" for q, k, d in shapes) + " (query heads/key-value heads/dimension)"


def _shapes(table: Kernels) -> list[Shape]:
    return [(int(q), int(k), int(d)) for q, k, d in np.unique(table.heads, axis=0)]


Grid = dict[int, dict[int, float]]
"""Seconds by number of sequences and tokens of each."""


def _grid(table: Kernels, shape: Shape) -> Grid | None:
    """The medians of a shape's kernels, thinned; None unless at least half of them lie on curves that reach."""
    chosen = np.all(table.heads == np.array(shape), axis=1) & (table.cached == 0)
    samples: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for n, tokens, seconds in zip(table.num_seqs[chosen], table.tokens[chosen], table.seconds[chosen], strict=True):
        samples[int(n)][int(tokens)].append(float(seconds))
    curves = {n: curve for n, curve in samples.items() if _reaches(curve)}
    if 2 * sum(map(len, curves.values())) < sum(map(len, samples.values())) or not curves:
        return None
    return {
        int(n): {int(at): float(np.median(curves[int(n)][int(at)])) for at in thinned(curves[int(n)], _MOST_LENGTHS)}
        for n in thinned(curves, _MOST_SEQS)
    }


def _reaches(curve: Iterable[int]) -> bool:
    lengths = sorted(curve)
    return len(lengths) >= _LEAST_LENGTHS and lengths[-1] >= _LEAST_REACH * max(1, lengths[0])


def _work(shape: Shape, phase: str) -> int:
    """What a kernel's time follows: its keys' and values' width, or its queries'."""
    queries, keys, dimension = shape
    return (keys if phase == "decode" else queries) * dimension


def _factor(shape: Shape, other: Shape, phase: str) -> float:
    return _work(shape, phase) / _work(other, phase)


def _distance(shape: Shape, other: Shape, phase: str) -> tuple[float, ...]:
    """Other head dimensions are farthest, then other numbers of queries to a key; then the nearest size."""
    ratios = (other[2] / shape[2], other[0] * shape[1] / (other[1] * shape[0]), _factor(shape, other, phase))
    return tuple(abs(math.log(ratio)) for ratio in ratios)


def _scaled(grid: Grid, factor: float) -> Grid:
    """Times of `factor` times as many heads: those of `factor` times the sequences, within the measured range."""
    found: Grid = {}
    for n in grid:
        curve = {}
        for tokens in sorted({tokens for times in grid.values() for tokens in times}):
            known = [m for m in sorted(grid) if tokens in grid[m]]
            if known[0] <= max(n * factor, known[0]) <= known[-1] and known[0] == min(grid):
                curve[tokens] = float(np.interp(n * factor, known, [grid[m][tokens] for m in known]))
        if curve:
            found[n] = curve
    return found


def _fitted(table: Kernels, spec: ModelSpec, degrees: Sequence[int]) -> ImportedRows:
    """Rows on a grid of the range that was measured, from a fit over all kernels of the phase."""
    from scipy.optimize import nnls

    work = np.array([_work(shape, table.phase) for shape in map(tuple, table.heads.tolist())], dtype=float)
    terms = _terms(table.phase, work, table.num_seqs, table.tokens, table.cached)
    scale = terms.max(axis=0)
    weights, _ = nnls(terms / scale / table.seconds[:, None], np.ones(len(terms)))
    weights = weights / np.where(scale > 0, scale, 1.0)
    misses = np.abs(terms @ weights / table.seconds - 1.0)
    longest, most = int(table.tokens.max()), int(table.num_seqs.max())
    if table.phase == "prefill":
        longest = int(np.max(table.tokens[table.cached == 0], initial=longest))
    lengths = [*(2**i for i in range(4, 20) if 2**i < longest), longest]
    rows: list[Measurement] = []
    for degree in degrees:
        shard = float(_work(shard_shape(spec, degree), table.phase))
        grid = {
            n: {
                x: float(_terms(table.phase, *(np.array([v], float) for v in (shard, n, x, 0)))[0] @ weights)
                for x in lengths
            }
            for n in _FITTED_SEQS
            if n <= most
        }
        rows += _measurements(grid, table.phase, degree, spec, measured=False)
    note = (
        f"{table.phase} attention: {len(terms)} rows are too few lengths for a grid, so a fit stands for them; it "
        f"misses them by {np.median(misses):.1%} (median), {misses.max():.1%} at most"
    )
    return ImportedRows(tuple(rows), (note,))


def _terms(phase: str, work: Floats, num_seqs: Floats, tokens: Floats, cached: Floats) -> Floats:
    if phase == "decode":
        return np.stack([np.ones_like(work), work * num_seqs, work * num_seqs * tokens], axis=1)
    new = work * num_seqs * tokens
    return np.stack([np.ones_like(work), new, new * tokens, new * cached], axis=1)


def _measurements(grid: Grid, phase: str, degree: int, spec: ModelSpec, *, measured: bool) -> list[Measurement]:
    """Rows up to the model's context."""
    axis = "num_tokens" if phase == "prefill" else "context_tokens"
    return [
        Measurement(
            op="attention",
            phase=phase,
            num_seqs=n,
            tensor_parallel_size=degree,
            seconds=rounded(seconds),
            repeats=1 if measured else 0,
            **{axis: n * tokens},
        )
        for n, curve in sorted(grid.items())
        for tokens, seconds in sorted(curve.items())
        if tokens <= spec.max_context
    ]
