"""A profile's rows at the times that its correction gives them (`core/correction.py`).

A corrected time is never below what reading its bytes takes (unless it was so before), and never falls as rows are
added: below the reference a pass takes no more than one at the next size, above it no less than one before.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from exeplan.core.correction import REFERENCE_ROWS, Correction, rows_distance
from exeplan.core.models.layer_costs import (
    expert_parameters,
    expert_parameters_read,
    layer_kv_bytes_per_token,
    layer_parameters,
    layer_parameters_read,
    tokens_attended,
)
from exeplan.core.models.model import DTYPE_BYTES
from exeplan.core.profile import Measurement, Profile

_PRODUCTS = ("rest", "dense", "experts")
_BETWEEN_ROWS = 1.02
"""How far a line between two sizes may lie under what a concave number of experts between them reads."""


def corrected_rows(profile: Profile) -> Sequence[Measurement]:
    """What prompts take is left to `prefill_factor_of`."""
    if profile.correction is None:
        return profile.measurements
    curves: dict[tuple[object, ...], list[Measurement]] = defaultdict(list)
    for row in (part for whole in profile.measurements for part in _by_phase(whole)):
        axis = row.num_seqs if row.op == "attention" else 0
        curves[row.op, row.phase, row.sharding, axis].append(row)
    windows = profile.model.windows
    return [row for curve in curves.values() for row in _corrected_curve(curve, profile.correction, profile, windows)]


def prefill_factor_of(profile: Profile) -> float:
    """On what passes with prompts take for their products and for attention to prompts."""
    return profile.prefill_calibration * (math.exp(profile.correction.prefill) if profile.correction else 1.0)


def _by_phase(row: Measurement) -> Iterator[Measurement]:
    """Products of passes with prompts and of those without, which may have one row for both."""
    phases = ("prefill", "decode") if row.op in _PRODUCTS and not row.phase else (row.phase,)
    yield from (row if phase == row.phase else replace(row, phase=phase) for phase in phases)


def _corrected_curve(
    curve: Sequence[Measurement], correction: Correction, profile: Profile, windows: Mapping[int | None, int]
) -> Iterator[Measurement]:
    rising = sorted(curve, key=lambda row: (_num_rows(row), row.context_tokens))
    times = [row.seconds * math.exp(_log_factor(row, correction)) for row in rising]
    if _num_rows(rising[-1]):
        split = sum(_num_rows(row) <= REFERENCE_ROWS for row in rising)
        before = list(accumulate(reversed(times[:split]), min))[::-1]
        times = list(accumulate([*before, *times[split:]], max))
    for row, seconds in zip(rising, times, strict=True):
        yield replace(row, seconds=max(seconds, min(row.seconds, _least_seconds(row, profile, windows))))


def _log_factor(row: Measurement, correction: Correction) -> float:
    if row.op in ("all_reduce", "all_to_all"):
        return correction.level + correction.links
    return correction.level + (correction.slope * rows_distance(rows) if (rows := _num_rows(row)) else 0.0)


def _num_rows(row: Measurement) -> int:
    """Of a pass without prompts; 0 for what is not such a pass's."""
    if row.op in _PRODUCTS and row.phase == "decode":
        return row.num_tokens
    return row.num_seqs if row.op in ("attention", "overhead") and row.phase == "decode" else 0


def _least_seconds(row: Measurement, profile: Profile, windows: Mapping[int | None, int]) -> float:
    """What one device takes to read the weights, or the keys and values, that the row must."""
    spec = profile.model
    if row.phase != "decode":
        return 0.0
    if row.op == "rest":
        read = layer_parameters_read(spec, row.num_tokens) * DTYPE_BYTES[profile.dtype] / row.tensor_parallel_size
    elif row.op == "dense":
        dense = layer_parameters(spec) - expert_parameters(spec)
        read = dense * DTYPE_BYTES[profile.dtype] / row.tensor_parallel_size
    elif row.op == "experts":
        routed = expert_parameters_read(spec, row.num_tokens)
        read = routed * DTYPE_BYTES[profile.dtype] / row.sharding.num_devices
    elif row.op == "attention":
        share = max(1 / row.tensor_parallel_size, 1 / spec.num_kv_shares)
        tokens = row.num_seqs * tokens_attended(windows, row.context_tokens / row.num_seqs)
        read = tokens * layer_kv_bytes_per_token(spec, profile.cache_dtype) * share
    else:
        return 0.0
    return _BETWEEN_ROWS * read / profile.device.copy_bytes_per_second
