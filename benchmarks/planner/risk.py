"""Risk: bounds that break and throughput that is kept on deployments left out whole, and on traces of few requests.

    python -m benchmarks.planner.risk [--data FOLDER] [--trials 200] [--write FOLDER]

Deployments: FOLDER is that of `benchmarks.silicon`. Each deployment (engine, model, dtype, tensor parallel size) is
predicted with constants fitted on the others, and its margin at 1 % risk comes from the errors of the others, by
several laws. Then, as in `benchmarks.silicon`, the fastest configuration is picked that is predicted to keep a bound.
Without the folder this part is left out. --write writes the errors as `plans/errors` has them.

Traces: a schedule is planned on 100 or 1,000 requests drawn from a law, with and without the margin for that, and
judged by the closed form on 6,000 others of the same law. Writes records/planner-risk.json.
"""

import argparse
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.intervals import wilson
from benchmarks.lib.record import write_record
from benchmarks.silicon.engines import has_tables, kernels
from benchmarks.silicon.left_out import FITTED, KINDS, deployment_name, deployments_of, left_out_pairs, pairs_of
from benchmarks.silicon.rows import (
    Margin,
    Pair,
    Picks,
    Row,
    least_margin,
    picks,
    quantile_margin,
    read_rows,
    spread_bounds,
    tight_bounds,
)
from exeplan.core.bounds import Bound, utilizations
from exeplan.core.models.model import load_model_spec
from exeplan.core.profile import Profile
from exeplan.core.schedule import Schedule
from exeplan.planner.margins.deployments import Deployment, deployment_law
from exeplan.planner.margins.sampling_error import sampling_error
from exeplan.planner.problems.problem import Problem, make_problem
from exeplan.planner.reports.tables import table
from exeplan.profiler.datasheets.datasheet import load_datasheet, profile_from_datasheet
from exeplan.workload.files import load_workload
from exeplan.workload.workload import Trace, Workload

RISK = 0.01
_ROWS = "end_to_end_dense_h100.csv.gz"
_BOUNDS = {"each measured e2e": tight_bounds, "twelve a group": spread_bounds}
_LAWS = ("azure-2023-conv", "S")
_SIZES, _JUDGED = (100, 1000), 6000
_MODEL, _DEVICE = "llama-3.1-8b", "h100-80gb"
_DECODE_STEPS = 32
_BATCHES = tuple(sorted({int(n) for n in np.geomspace(1, 128, 48)}))
_HEADER = ("bounds", "margin", "median", "cases", "broken", "95 % of it", "refused", "kept, mean", "median of it")
_TRACE_HEADER = ("law", "requests", "margin", "median", "plans", "kept the bound", "95 % of it")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="the folder of operator tables")
    parser.add_argument("--trials", type=int, default=200, help="traces of each size")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write the errors of all deployments there")
    args = parser.parse_args()
    body: dict[str, Any] = {}
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        if args.data and (args.data / _ROWS).is_file():
            body["left_out"] = _left_out(args.data, pool, args.write)
        else:
            print(f"left-out deployments: skipped, as no --data FOLDER with {_ROWS} is given")
        body["traces"] = list(_traces(args.trials, pool))
    print(table(_TRACE_HEADER, [tuple(row.values()) for row in body["traces"]]))
    print(f"record: {write_record('planner-risk', body)}")


# --- deployments ------------------------------------------------------------------------------------------------------


def _left_out(data: Path, pool: Executor, folder: Path | None) -> list[dict[str, str]]:
    rows = [row for row in read_rows(data / _ROWS)[0] if has_tables(data, row)]
    for key in sorted({(row.system, row.engine, row.model, row.dtype) for row in rows}):
        kernels(data, *key)
    pairs = left_out_pairs(data, rows, pool)
    if folder:
        found = {kind: pairs if kind == FITTED else pairs_of(data, rows, kind, pool) for kind in KINDS}
        _write([d for kind, of_kind in found.items() for d in deployments_of(of_kind, kind).values()], folder)
    shown = [dict(zip(_HEADER, row, strict=True)) for row in _pick_rows(pairs)]
    print(table(_HEADER, [tuple(row.values()) for row in shown]))
    return shown


def _pick_rows(pairs: Sequence[Pair]) -> Iterator[tuple[str, ...]]:
    for name, bounds in _BOUNDS.items():
        for said, margin in margins(pairs, bounds).items():
            found = picks(pairs, margin, bounds)
            typical = float(np.median([margin(row) for row, _ in pairs]))
            yield name, said, f"{100 * typical:.1f} %", *_cells(found)


def _cells(found: Picks) -> tuple[str, ...]:
    low, high = wilson(round(found.broken * found.cases), found.cases)
    kept = (f"{100 * x:.1f} %" for x in (found.refused, found.kept, found.median_kept))
    return str(found.cases), f"{100 * found.broken:.1f} %", f"{100 * low:.1f} to {100 * high:.1f} %", *kept


def margins(pairs: Sequence[Pair], bounds: Callable[[Sequence[Row]], Sequence[float]]) -> dict[str, Margin]:
    """By several laws, each from the deployments but the row's own."""
    known = deployments_of(pairs, FITTED)
    return {
        "none": lambda row: 0.0,
        "all rows alike": _by_deployment(pairs, lambda others: quantile_margin(others, RISK)),
        "the worst other deployment": _by_deployment(pairs, _worst_deployment),
        "by load": _by_load(pairs),
        "by picks": _by_deployment(pairs, partial(least_margin, share=RISK, bounds=bounds)),
        "by deployment (as planned)": _planned(known),
    }


def _planned(known: Mapping[tuple[object, ...], Deployment]) -> Margin:
    found = {
        name: deployment_law(
            replace(one, errors={}), "latency", [other for key, other in known.items() if key != name]
        ).margin(RISK)
        for name, one in known.items()
    }
    return lambda row: found[deployment_name(row)]


def _by_deployment(pairs: Sequence[Pair], margin_of: Callable[[Sequence[Pair]], float]) -> Margin:
    names = {deployment_name(row) for row, _ in pairs}
    found = {name: margin_of([pair for pair in pairs if deployment_name(pair[0]) != name]) for name in names}
    return lambda row: found[deployment_name(row)]


def _worst_deployment(pairs: Sequence[Pair]) -> float:
    """Conformal by deployment: fewer than a hundred of them leave only the worst, by its own quantile."""
    groups: dict[tuple[object, ...], list[float]] = {}
    for row, prediction in pairs:
        groups.setdefault(deployment_name(row), []).append(row.e2e / prediction.e2e(row))
    return max(float(np.quantile(ratios, 1 - RISK)) for ratios in groups.values()) - 1


def _by_load(pairs: Sequence[Pair]) -> Margin:
    """Errors of the thirds of the rows with the least, middle and most tokens a second, each with its own law."""
    loads = {row: prediction_load(row, prediction) for row, prediction in pairs}
    edges = np.quantile(list(loads.values()), [1 / 3, 2 / 3])

    def law_of(third: int) -> Margin:
        return _by_deployment(
            pairs,
            lambda others: quantile_margin([p for p in others if np.searchsorted(edges, loads[p[0]]) == third], RISK),
        )

    thirds = [law_of(third) for third in range(3)]
    return lambda row: thirds[int(np.searchsorted(edges, loads[row]))](row)


def prediction_load(row: Row, prediction: Any) -> float:
    """Output tokens a second of the whole engine, as predicted."""
    return row.concurrency * row.output_tokens / float(prediction.e2e(row))


def _write(found: Sequence[Deployment], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    silicon = (
        "# Serving runs on H100s. Errors: logarithms of measured / predicted, percent: [runs, mean, spread above it].\n"
        "# Measured: 534 runs published with AIConfigurator 0.12.0 (NVIDIA, Apache-2.0), end to end, closed loops.\n"
        "# Predicted by exeplan as `kind` says; with tables an engine's constants are fitted without the deployment.\n"
        "# Written by: python -m benchmarks.planner.risk --data FOLDER --write plans/errors\n"
    )
    (folder / "h100-serving.yaml").write_text(silicon + deployments_yaml(found))


def deployments_yaml(found: Sequence[Deployment]) -> str:
    """As `plans/errors` has them."""
    lines = ["deployments:"]
    for one in found:
        cells = {
            "kind": one.kind,
            "engine": one.engine,
            "device": one.device,
            "model": one.model,
            "dtype": one.dtype,
            "tensor_parallel_size": one.tensor_parallel_size,
        }
        cells |= {name: f"[{e.count}, {100 * e.mean:.2f}, {100 * e.spread:.2f}]" for name, e in one.errors.items()}
        lines.append("  - {" + ", ".join(f"{name}: {value}" for name, value in cells.items()) + "}")
    return "\n".join(lines) + "\n"


# --- traces -----------------------------------------------------------------------------------------------------------


def _traces(trials: int, pool: Executor) -> Iterator[dict[str, str]]:
    for law in _LAWS:
        for size in _SIZES:
            found = list(pool.map(partial(trial, law, size), range(trials), chunksize=4))
            for number, said in enumerate(("none", "lengths, 1 % risk")):
                kept, margins_of = zip(*filter(None, (one[number] for one in found)), strict=True)
                margin, plans = float(np.median(margins_of)), len(kept)
                low, high = wilson(sum(kept), plans)
                cells = (law, str(size), said, f"{100 * margin:.1f} %", str(plans), f"{100 * np.mean(kept):.1f} %")
                yield dict(zip(_TRACE_HEADER, (*cells, f"{100 * low:.1f} to {100 * high:.1f} %"), strict=True))


Judged = tuple[bool, float]
"""Whether a plan keeps the bound on other requests, and its margin."""


def trial(law: str, size: int, seed: int) -> tuple[Judged | None, Judged | None]:
    """Of the plans without and with a margin; None where no batch keeps the bound."""
    workload = load_workload(law)
    bound = Bound(seconds=1.5 * _problem(workload, math.inf).estimate(_schedule(16)).latency or 0.0)
    planned = _problem(_sample(workload, size, seed), bound.seconds)
    judged = _problem(_sample(workload, _JUDGED, seed + 1_000_000), bound.seconds)
    found = list[Judged | None]()
    for careful in (False, True):
        plan = planned_schedule(planned, bound, seed=seed, careful=careful)
        found.append((max(utilizations((bound,), judged.estimate(plan[0]))) <= 1, plan[1]) if plan else None)
    return found[0], found[1]


def planned_schedule(problem: Problem, bound: Bound, *, seed: int, careful: bool) -> tuple[Schedule, float] | None:
    """The largest batch that keeps the bound with its margin, and that; None where not even one request does."""
    plan = None
    low, high = 0, len(_BATCHES)
    while low < high:
        middle = (low + high) // 2
        schedule = _schedule(_BATCHES[middle])
        error = sampling_error(problem, schedule, risk=RISK, seed=seed) if careful else None
        law = error.laws[0] if error else None
        needed = law.margin(RISK) if law else 0.0
        full = max(utilizations((bound,), problem.estimate(schedule)))
        if full * (1 + needed) <= 1:
            plan, low = (schedule, needed), middle + 1
        else:
            high = middle
    return plan


def _schedule(batch: int) -> Schedule:
    return Schedule("rra", {"prefill_batch": batch, "decode_steps": _DECODE_STEPS})


def _sample(workload: Workload, size: int, seed: int) -> Workload:
    inputs, outputs = workload.sample(size, seed=seed, stratified=False)
    return Workload.of_trace(workload.name, Trace(inputs, outputs))


def _problem(workload: Workload, bound: float) -> Problem:
    return make_problem(_profile(), workload, Bound(seconds=bound))


@cache
def _profile() -> Profile:
    return profile_from_datasheet(load_model_spec(_MODEL), load_datasheet(_DEVICE), dtype="bfloat16")


if __name__ == "__main__":
    main()
