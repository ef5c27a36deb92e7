"""Serving runs on H100s, predicted from kernel tables by exeplan's import, cost model, policies and replay.

    python -m benchmarks.silicon --data FOLDER [--quick] [--shipped] [--rows FILE]

FOLDER holds AIConfigurator's operator tables as it publishes them (`h100_sxm/gemm/...`; they need pyarrow) and
`end_to_end_dense_h100.csv.gz`: 534 runs of Llama-3.1-8B and Qwen3-32B by TensorRT-LLM, vLLM and SGLang, with the mean
TTFT and TPOT that were measured. --rows names other runs of that form.

The rows are split in halves by a hash of their configuration. On one half an engine's constants
(`exeplan.profiler.datasheets.engine_constants`) are fitted to TPOT and E2E, and its scheduling options (prompts a pass,
pauses of the clients, KV cache budget) are chosen among a few values; the other half is judged with them; then the
halves are exchanged. --shipped judges all rows with `plans/engines` instead, --quick takes every sixth row. Writes
records/silicon.json.
"""

import argparse
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.lib.record import write_record
from benchmarks.silicon.engines import Setting, has_tables, kernels, predict, shipped_setting
from benchmarks.silicon.fit import fitted_settings
from benchmarks.silicon.rows import (
    Margin,
    Pair,
    Row,
    errors,
    least_margin,
    picks,
    quantile_margin,
    read_rows,
    spread_bounds,
    tight_bounds,
)
from exeplan.planner.reports.tables import table

_ROWS = "end_to_end_dense_h100.csv.gz"
_RISK = 0.01
_BLANKET = 0.15
_SOURCE = ("the source's planner (H100 and H200)", "", "52.5", "14.7", "15.0 / 9.9")
_SOURCE_PICKS = (("none", "16.9 %", "", ""), ("15 %", "3.9 %", "", "86 %"))
_PICKS_LEGEND = """kept: measured throughput of the picks that hold over the best that keeps the bound
refused: nothing is predicted to keep the bound, and something does
margins at 1 % risk come from the other half: the least with which 1 % of its picks break (by picks), and what one of
its rows exceeds with that chance, by the law of errors that plans use (by rows)"""
_BOUNDS = {"each measured e2e": tight_bounds, "twelve a group": spread_bounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder of operator tables")
    parser.add_argument("--rows", type=Path, help=f"the measured runs (default: {_ROWS} in that folder)")
    parser.add_argument("--quick", action="store_true", help="every sixth row")
    parser.add_argument("--shipped", action="store_true", help="the constants of plans/engines, none fitted")
    args = parser.parse_args()
    read, num_left = read_rows(args.rows or args.data / _ROWS)
    rows = [row for row in read if has_tables(args.data, row)]
    print(f"{len(rows)} rows; {num_left} of other models, dtypes and layouts, {len(read) - len(rows)} without tables")
    rows = rows[:: 6 if args.quick else 1]
    for key in sorted({(row.system, row.engine, row.model, row.dtype) for row in rows}):
        kernels(args.data, *key)  # Before the fork, so that the processes share them.
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        settings = _shipped(rows) if args.shipped else fitted_settings(args.data, rows, pool)
        pairs = _judged(args.data, rows, settings, pool)
    error_rows, pick_rows = list(_error_rows(pairs)), list(_pick_rows(pairs))
    print(table(("", "rows", "TTFT", "TPOT", "E2E"), [_SOURCE, *error_rows]))
    print("mean / median of the absolute error in percent, and its mean with the sign\n")
    print(table(("bounds", "margin", "cases", "broken", "refused", "kept"), [*_source_picks(), *pick_rows]))
    print(f"{_PICKS_LEGEND}\n\n{_summary(settings)}")
    if not (args.rows or args.quick or args.shipped):
        print(f"\nrecord: {write_record('silicon', _figures(settings, error_rows, pick_rows))}")


Settings = Mapping[int, Mapping[tuple[str, ...], Setting]]
"""By the half that they were fitted on, and the deployment."""


def _shipped(rows: Sequence[Row]) -> Settings:
    return {half: {row.deployment: shipped_setting(row.engine) for row in rows} for half in (0, 1)}


def _judged(data: Path, rows: Sequence[Row], settings: Settings, pool: Executor) -> list[Pair]:
    """Every row with the constants of the other half."""
    of_rows = [settings[1 - row.half][row.deployment] for row in rows]
    return list(zip(rows, pool.map(partial(predict, data), rows, of_rows, chunksize=4), strict=True))


def _error_rows(pairs: Sequence[Pair]) -> Iterator[tuple[str, ...]]:
    groups: dict[str, list[Pair]] = defaultdict(list)
    for row, prediction in pairs:
        groups[f"{row.engine} {row.model} {row.dtype}"].append((row, prediction))
    for name, group in [*sorted(groups.items()), ("all", list(pairs))]:
        found = errors(group)
        cells = (f"{100 * mean:.1f} / {100 * median:.1f} ({100 * bias:+.1f})" for mean, median, bias in found.values())
        yield name, str(len(group)), *cells


def _pick_rows(pairs: Sequence[Pair]) -> Iterator[tuple[str, ...]]:
    for name, bounds in _BOUNDS.items():
        margins = {
            "none": lambda row: 0.0,
            "15 %": lambda row: _BLANKET,
            "1 % risk, by picks": _by_half(pairs, lambda group, of=bounds: least_margin(group, _RISK, of)),
            "1 % risk, by rows": _by_half(pairs, lambda group: quantile_margin(group, _RISK)),
        }
        for said, margin in margins.items():
            found = picks(pairs, margin, bounds)
            yield name, said, str(found.cases), *(f"{100 * x:.1f} %" for x in (found.broken, found.refused, found.kept))


def _by_half(pairs: Sequence[Pair], margin_of: Callable[[Sequence[Pair]], float]) -> Margin:
    """A margin from the half that the constants were fitted on."""
    margins = [margin_of([pair for pair in pairs if pair[0].half != half]) for half in (0, 1)]
    return lambda row: margins[row.half]


def _source_picks() -> Iterator[tuple[str, ...]]:
    for margin, broken, refused, kept in _SOURCE_PICKS:
        yield "the source's, its own", margin, "154", broken, refused, kept


def _summary(settings: Settings) -> str:
    """Fitted constants and chosen options, by half."""
    lines = []
    for half, of_half in settings.items():
        for deployment, setting in sorted(of_half.items()):
            c, d = setting.constants, setting.options
            lines.append(
                f"half {half} {' '.join(deployment)}: layer {c.layer * 1e6:.1f} us, row {c.row * 1e6:.1f} us, skew "
                f"{c.all_reduce_skew * 1e6:.2f} us, uncaptured layer {c.uncaptured_layer * 1e3:.2f} ms, prefill factor "
                f"{c.prefill_factor:.3f}, memory {c.memory_share:.2f}; prompts a pass {d.max_num_prefills or 'any'}, "
                f"pause {d.think_seconds * 1e3:.0f} ms, reserved {d.reserved:g}, idle slots {d.idle_slots}"
            )
    return "\n".join(lines)


def _figures(settings: Settings, error_rows: Sequence[Any], pick_rows: Sequence[Any]) -> dict[str, Any]:
    return {
        "errors": error_rows,
        "picks": pick_rows,
        "settings": [
            {"half": half, "deployment": deployment, **asdict(setting)}
            for half, of_half in settings.items()
            for deployment, setting in of_half.items()
        ],
    }


if __name__ == "__main__":
    main()
