"""lint(): imported rows that are impossible or implausible. A pure function of rows, the model and the device.

    rates     no row computes, reads memory or sends faster than the device's peak
    growth    no time falls as the work grows, beyond noise
    gaps      neighbouring points of an axis are no more than four times apart where the time rises between them

Published tables contain single points several times slower than larger ones: `without_spikes` drops these and reports
it. In a plain CSV, where every row is intended, they are refused. Unlike `exeplan.profiler.measuring.lint`, which uses
ceilings measured on the same machine, ceilings here are a datasheet's peaks, and rows are of every tensor-parallel
degree.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from exeplan.core.models.layer_costs import (
    layer_kv_bytes_per_token,
    layer_parameters,
    layer_parameters_read,
    layer_parameters_used,
    pairs_attended,
    tokens_attended,
)
from exeplan.core.models.model import DTYPE_BYTES, ModelSpec
from exeplan.core.profile import Device, Measurement
from exeplan.errors import InputError
from exeplan.profiler.importing.imported_rows import ImportedRows
from exeplan.profiler.measuring.lint import row_name

_FALL_TOLERANCE = 1.1
_RATE_TOLERANCE = 1.05
_GAP, _GAP_RISE = 4.0, 1.5
_NEXT = 3
"""Rows that identify a spike."""
_NOISE_SECONDS = 20e-6
"""By which short kernels and launches differ for no visible reason."""
_IMPOSSIBLE = 2.0
"""From this ratio on a time that falls is wrong rather than noisy."""
_REPORTED = 2
"""Findings of one kind that are reported in full."""
_SIZES = ("num_tokens", "context_tokens", "num_seqs", "bytes")


@dataclass(frozen=True, slots=True)
class Finding:
    """One row that is not believable; `kind` is rates, growth or gaps."""

    kind: str
    ratio: float
    sentence: str


def lint(rows: Sequence[Measurement], spec: ModelSpec, dtype: str, device: Device | None) -> list[Finding]:
    """Everything that is wrong with the rows, worst first within a kind; rates only of a device that is known."""
    found = [*(_rates(rows, spec, dtype, device) if device else ()), *_falls(rows), *_gaps(rows)]
    return sorted(found, key=lambda finding: (finding.kind, -finding.ratio))


def report(findings: Iterable[Finding]) -> tuple[str, ...]:
    """Sentences: the worst of each kind, and the number of the others."""
    kinds: dict[str, list[Finding]] = defaultdict(list)
    for finding in findings:
        kinds[finding.kind].append(finding)
    sentences: list[str] = []
    for kind, of_kind in kinds.items():
        sentences += [finding.sentence for finding in of_kind[:_REPORTED]]
        if len(of_kind) > _REPORTED:
            sentences.append(f"{kind}: {len(of_kind) - _REPORTED} more, none of them worse")
    return tuple(sentences)


def refuse_falls(rows: Iterable[Measurement]) -> None:
    """Raises InputError with the worst row whose time falls by a factor of two or more as the work grows.

    A row above the device's peak is only reported: the device may not be the one that was named.
    """
    wrong = [finding for finding in _falls(rows) if finding.ratio >= _IMPOSSIBLE]
    if wrong:
        worst = max(wrong, key=lambda finding: finding.ratio)
        more = f" ({len(wrong) - 1} more fall to half or less)" if len(wrong) > 1 else ""
        raise InputError(f"{worst.sentence}{more}; correct the row or leave it out")


def without_spikes(part: ImportedRows) -> ImportedRows:
    """Without the rows that take at least twice the median of the next three along their axis, and a sentence."""
    spikes: dict[Measurement, Measurement] = {}
    for curve in _curves(part.rows):
        kept: list[Measurement] = []
        for row in reversed(curve):
            later = statistics.median(more.seconds for more in kept[-_NEXT:]) if kept else math.inf
            if row.seconds >= _IMPOSSIBLE * later and row.seconds - later > _NOISE_SECONDS:
                spikes[row] = kept[-1]
            else:
                kept.append(row)
    if not spikes:
        return part
    worst = max(spikes, key=lambda row: row.seconds / spikes[row].seconds)
    note = (
        f"left out for taking at least twice as long as larger ones ({len(spikes)} in all): {_name(worst)} with "
        f"{worst.seconds * 1e3:.4g} ms where {_name(spikes[worst])} takes {spikes[worst].seconds * 1e3:.4g} ms"
    )
    return ImportedRows(tuple(row for row in part.rows if row not in spikes), (*part.notes, note))


def _name(row: Measurement) -> str:
    size = f" bytes={row.bytes}" if row.bytes else ""
    degree = f" at tensor_parallel_size={row.tensor_parallel_size}" if row.tensor_parallel_size > 1 else ""
    return f"{row_name(row)}{size}{degree}"


def _rates(rows: Iterable[Measurement], spec: ModelSpec, dtype: str, device: Device) -> Iterator[Finding]:
    windows = spec.windows
    for row in rows:
        for amount, peak, unit, what in (
            (_operations(row, spec, windows), device.flops_per_second, "FLOP/s", "peak"),
            (_moved(row, spec, dtype, windows), device.copy_bytes_per_second, "B/s", "memory bandwidth"),
        ):
            ratio = amount / row.seconds / peak
            if ratio > _RATE_TOLERANCE:
                rate = f"{amount / row.seconds / 1e9:.4g} G{unit}"
                yield Finding("rates", ratio, f"{_name(row)}: {rate} is beyond the device's {what} of {peak / 1e9:.4g}")


def _operations(row: Measurement, spec: ModelSpec, windows: Mapping[int | None, int]) -> float:
    """Operations that the row must execute on one device."""
    if row.op == "rest":
        used = layer_parameters_used(spec) if spec.experts else _layer_parameters(row, spec)
        total = 2.0 * row.num_tokens * used
    elif row.op == "head":
        total = 2.0 * row.num_seqs * spec.vocab_size * spec.hidden_size
    elif row.op == "attention":
        each = (
            pairs_attended(windows, row.num_tokens / row.num_seqs)
            if row.phase == "prefill"
            else tokens_attended(windows, row.context_tokens / row.num_seqs)
        )
        total = 4.0 * spec.num_heads * spec.head_dim * row.num_seqs * each
    else:
        return 0.0
    return total / row.tensor_parallel_size


def _moved(row: Measurement, spec: ModelSpec, dtype: str, windows: Mapping[int | None, int]) -> float:
    """Bytes that one device must read; nothing is sent faster than memory is read."""
    size = DTYPE_BYTES[dtype]
    if row.op in ("all_reduce", "send"):
        return float(row.bytes)
    if row.op == "rest":
        # Uneven routing reads fewer experts than even routing would.
        read = layer_parameters_read(spec, 1) if spec.experts else _layer_parameters(row, spec)
        return read * size / row.tensor_parallel_size
    if row.op == "head":
        return float(spec.vocab_size * spec.hidden_size * size) / row.tensor_parallel_size
    if row.op == "attention" and row.phase == "decode":
        # Fewer key/value heads than devices are copied, so no device has less than one head's share.
        share = max(1 / row.tensor_parallel_size, 1 / spec.num_kv_shares)
        read = row.num_seqs * tokens_attended(windows, row.context_tokens / row.num_seqs)
        return read * layer_kv_bytes_per_token(spec, dtype) * share
    return 0.0


def _layer_parameters(row: Measurement, spec: ModelSpec) -> int:
    return layer_parameters(spec, encoder=spec.is_encoder_decoder and row.phase == "prefill")


def _falls(rows: Iterable[Measurement]) -> Iterator[Finding]:
    for curve in _curves(rows):
        for less, more in pairwise(curve):
            ratio = less.seconds / more.seconds
            if ratio > _FALL_TOLERANCE and less.seconds - more.seconds > _NOISE_SECONDS:
                yield Finding(
                    "growth",
                    ratio,
                    f"{_name(more)}: {more.seconds * 1e3:.4g} ms is less than the {less.seconds * 1e3:.4g} ms of "
                    f"{_name(less)}",
                )


def _gaps(rows: Iterable[Measurement]) -> Iterator[Finding]:
    for curve in _curves(rows):
        for less, more in pairwise(curve):
            ratio = max(getattr(more, size) / max(1, getattr(less, size)) for size in _SIZES)
            if ratio > _GAP and more.seconds > _GAP_RISE * less.seconds:
                yield Finding("gaps", ratio, f"between {_name(less)} and {_name(more)} nothing was measured")


def _curves(rows: Iterable[Measurement]) -> Iterator[list[Measurement]]:
    """Rows along the axis of their op, everything else equal."""
    groups: dict[tuple[object, ...], list[Measurement]] = defaultdict(list)
    for row in rows:
        fixed = row.num_seqs if row.op == "attention" else 0
        groups[row.op, row.phase, row.sharding, fixed].append(row)
    for group in groups.values():
        yield sorted(group, key=lambda row: tuple(getattr(row, size) for size in _SIZES))
