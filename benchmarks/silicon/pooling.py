"""Serving runs of deployments that nothing has seen, and with three of their own rows: corrected by partial pooling.

    python -m benchmarks.silicon.pooling --data FOLDER [--rows FILE...] [--write FILE] [--keep FILE]

FOLDER holds `end_to_end_dense_h100.csv.gz` and `end_to_end_moe_h100_h200.csv.gz` as AIConfigurator publishes them;
--rows names other files of that form, whose runs are judged too. Every run is predicted from the device's datasheet and
one set of engine constants that was fitted to none of the runs, and corrected as `exeplan calibrate` does.

Experts are taken to be cut by width, also where a run states that they were whole: even routing, which predictions
assume, knows no busiest part, which in kernel tables takes 1.5 to 1.7 times as long for a prompt of 1024 tokens.

Protocol: a deployment (engine, device, model, dtype) is left out whole; variances, effects and the strength of the
pooling are found without it (the strength by leaving out each of the others in turn). Then its runs are predicted
without any of them, and with three of them, drawn 20 times, in which case the other runs are judged. Its figure is the
mean absolute error over its runs; told is the median over deployments. Without own runs every run is replayed with the
corrected profile; with three, what a replay would say is taken to move as far as the law takes it to. The form of the
correction and the kernels' constants are not found that way: residuals of all runs were seen while they were chosen,
and the constants (products in fp8, an engine's sums over GPUs) come from tables of kernels, no run. --write writes
`plans/calibration`'s file from all runs. Writes records/silicon-pooling.json.
"""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.record import write_record
from benchmarks.silicon.corrected_picks import with_reach
from benchmarks.silicon.pooled_fit import STRENGTHS, Sample, Strength, fitted_law, linear_ratios, with_own
from benchmarks.silicon.rows import Row, read_rows
from exeplan.arrays import Floats
from exeplan.core.correction import THETA, Correction
from exeplan.core.models.model import load_model_spec
from exeplan.core.profile import Profile
from exeplan.files import write_text
from exeplan.planner.reports.tables import table
from exeplan.profiler.calibration.law import CalibrationLaw, Observation, observation, placement_name
from exeplan.profiler.calibration.pooled_effects import LEVELS, PlacementName
from exeplan.profiler.calibration.predict import predict_run
from exeplan.profiler.datasheets.datasheet import load_datasheet, profile_from_datasheet
from exeplan.profiler.datasheets.engine_constants import EngineConstants, with_engine

_FILES = ("end_to_end_dense_h100.csv.gz", "end_to_end_moe_h100_h200.csv.gz")
_HOST = 8
"""GPUs; runs across hosts are left out."""
CONSTANTS = EngineConstants(
    name="any",
    layer=5e-6,
    row=15e-6,
    all_reduce_skew=3e-6,
    uncaptured_layer=0.3e-3,
    prefill_factor=1.05,
    memory_share=0.83,
)
"""Fitted to no run: rounded guesses of what any engine takes."""
_DRAWS, _OWN = 20, 3
_TARGETS = {"ttft": 0.35, "tpot": 0.10, "e2e": 0.10}
_COLUMNS = ("engine", "device", "model", "dtype", "runs", "uncorrected", "none of its rows", "three of its rows")
Errors = Mapping[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder of measured runs")
    parser.add_argument("--rows", type=Path, nargs="+", default=[], metavar="FILE", help="other measured runs")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the law of all runs as YAML")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="keep what the replays said there, or take it again")
    args = parser.parse_args()
    rows = [*published_rows(args.data), *(row for path in args.rows for row in rows_of_a_host(path))]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        samples = samples_of(rows, args.keep, pool)
        deployments = sorted({sample.name.deployment for sample in samples})
        found = list(pool.map(partial(_judged, samples), deployments))
    print(table(_COLUMNS, [tuple(_cells(one)) for one in found]))
    medians = {kind: _medians([one[kind] for one in found if one[kind]]) for kind in _KINDS}
    for kind, errors in medians.items():
        print(f"median over deployments left out whole of the mean absolute error, {kind}: {_shown(errors)} %")
    if args.write:
        law = with_reach(fitted_law(samples, chosen_strength(samples), CONSTANTS), samples)
        write_text(args.write, law_text(law))
    if not args.rows:
        print(f"record: {write_record('silicon-pooling', {'deployments': found, 'medians': medians})}")


_KINDS = ("uncorrected", "none of its rows", "three of its rows")


def published_rows(data: Path) -> list[Row]:
    """Of the folder's two files."""
    return [row for name in _FILES for row in rows_of_a_host(data / name)]


def rows_of_a_host(path: Path) -> list[Row]:
    """Without runs across hosts, each once: a file may hold a run under the names of two days. Experts cut by width."""
    read = (replace(row, expert_parallel_size=1) for row in read_rows(path)[0])
    here = [row for row in read if row.tensor_parallel_size <= _HOST]
    return list({_figures(row): row for row in reversed(here)}.values())[::-1]


def _figures(row: Row) -> Row:
    """What two copies of a run share, whose times may have been rounded."""
    return replace(row, ttft=float(f"{row.ttft:.5g}"), tpot=float(f"{row.tpot:.5g}"))


def samples_of(rows: Sequence[Row], keep: Path | None, pool: Executor) -> list[Sample]:
    """Each row with what replays say of it, which `keep` stores or has."""
    if keep and keep.is_file():
        kept = json.loads(keep.read_text())
        found = [Observation(np.array(one["logs"]), np.array(one["sensitivities"])) for one in kept]
    else:
        found = list(pool.map(_observed, rows, chunksize=4))
    if keep:
        kept = [{"logs": one.logs.tolist(), "sensitivities": one.sensitivities.tolist()} for one in found]
        keep.write_text(json.dumps(kept))
    return [Sample(row, _name(row), one) for row, one in zip(rows, found, strict=True)]


def _observed(row: Row) -> Observation:
    """Predicted and compared; three more replays say what moves it."""
    return observation(_profile_of(row), row)


@cache
def _profile(model: str, device: str, dtype: str, size: int, engine: str) -> Profile:
    kernels = profile_from_datasheet(
        load_model_spec(model),
        load_datasheet(device),
        dtype=dtype,
        kv_dtype="fp8" if dtype == "fp8" else None,
        tensor_parallel_sizes=(size,),
    )
    return with_engine(kernels, replace(CONSTANTS, name=engine))


def _name(row: Row) -> PlacementName:
    return placement_name(
        load_model_spec(row.model),
        engine=row.engine,
        device=row.device,
        dtype=row.dtype,
        tensor_parallel_size=row.tensor_parallel_size,
    )


def chosen_strength(samples: Sequence[Sample]) -> Strength:
    """The strength of pooling with which deployments left out in turn err least, relative to the targets."""
    deployments = sorted({sample.name.deployment for sample in samples})

    def score(strength: Strength) -> float:
        errors = []
        for left in deployments:
            law = fitted_law([s for s in samples if s.name.deployment != left], strength, CONSTANTS)
            own = [s for s in samples if s.name.deployment == left]
            correction = law.correction(own[0].name)
            errors.append(_mean_errors([linear_ratios(s, correction) for s in own]))
        return sum(value / _TARGETS[name] for name, value in _medians(errors).items())

    return min(STRENGTHS, key=score)


def _judged(samples: Sequence[Sample], left: tuple[str, str, str, str]) -> dict[str, Any]:
    known = [s for s in samples if s.name.deployment != left]
    own = [s for s in samples if s.name.deployment == left]
    strength = chosen_strength(known)
    law = fitted_law(known, strength, CONSTANTS)
    draws, draw = [], np.random.default_rng(0)
    for _ in range(_DRAWS if len(own) > _OWN else 0):
        picked = set(draw.choice(len(own), _OWN, replace=False).tolist())
        correction = with_own(law, [own[i] for i in picked])
        draws.append(_mean_errors([linear_ratios(s, correction) for i, s in enumerate(own) if i not in picked]))
    return {
        "deployment": left,
        "runs": len(own),
        "strength": strength,
        "uncorrected": _mean_errors([linear_ratios(s, Correction()) for s in own]),
        "none of its rows": _replayed(own, law.correction(own[0].name)),
        "three of its rows": {name: float(np.mean([d[name] for d in draws])) for name in _TARGETS} if draws else {},
    }


def _replayed(judged: Sequence[Sample], correction: Correction) -> Errors:
    """Of replays with the corrected profile."""
    found = []
    for one in judged:
        predicted = predict_run(replace(_profile_of(one.row), correction=correction), one.row)
        e2e = predicted.e2e(one.row) / one.row.e2e
        found.append((predicted.ttft / one.row.ttft, predicted.tpot / one.row.tpot, e2e))
    return _mean_errors(found)


def _profile_of(row: Row) -> Profile:
    return _profile(row.model, row.device, row.dtype, row.tensor_parallel_size, row.engine)


def _mean_errors(ratios: Sequence[tuple[float, float, float]]) -> Errors:
    means = np.abs(np.array(ratios) - 1).mean(0)
    return dict(zip(_TARGETS, map(float, means), strict=True))


def _medians(found: Sequence[Errors]) -> Errors:
    return {name: float(np.median([one[name] for one in found])) for name in _TARGETS}


def _cells(one: Mapping[str, Any]) -> list[str]:
    return [*one["deployment"], str(one["runs"]), *(_shown(one[kind]) if one[kind] else "-" for kind in _KINDS)]


def _shown(errors: Errors) -> str:
    return " / ".join(f"{100 * errors[name]:.1f}" for name in _TARGETS)


def law_text(law: CalibrationLaw) -> str:
    """As `read_law` reads it."""
    c = law.constants
    lines = [
        "# Measured serving runs against predictions from datasheets; the law: profiler/calibration/pooled_effects.py.",
        f"# Measured: {sum(one.num_runs for one in law.evidence)} runs published with AIConfigurator 0.12.0 (NVIDIA, "
        "Apache-2.0), end to end, closed loops.",
        "# Written by: python -m benchmarks.silicon.pooling --data FOLDER --write plans/calibration/serving.yaml",
        "# constants: of every engine, fitted to no run. noise: of one run. reach: a factor on the spread of a",
        "# latency's error. deviations: of effects, by level;",
        f"# theta: {', '.join(THETA)}. information: the upper triangle, row by row.",
        "constants:",
        f"  layer: {c.layer * 1e6:g}us",
        f"  row: {c.row * 1e6:g}us",
        f"  all_reduce_skew: {c.all_reduce_skew * 1e6:g}us",
        f"  uncaptured_layer: {c.uncaptured_layer * 1e6:g}us",
        f"  prefill_factor: {c.prefill_factor}",
        f"  memory_share: {c.memory_share}",
        f"noise: {{ttft: {law.noise[0]:.4f}, tpot: {law.noise[1]:.4f}}}",
        f"reach: {law.reach:g}",
        "deviations:",
        *(f"  {level}: {_numbers(np.sqrt(law.spread.variances[level]))}" for level in LEVELS),
        "placements:",
    ]
    upper = np.triu_indices(len(THETA))
    for one in law.evidence:
        name = ", ".join(f"{key}: {getattr(one.name, key)}" for key in PlacementName.__dataclass_fields__)
        weights = [law.spread.weights.get((lv, one.name.key(lv)), 1.0) for lv in ("deployment", "placement")]
        lines.append(
            f"  - {{{name}, runs: {one.num_runs}, weights: {_numbers(weights)}, "
            f"information: {_numbers(one.information[upper])}, vector: {_numbers(one.vector)}}}"
        )
    return "\n".join([*lines, ""])


def _numbers(values: Sequence[float] | Floats) -> str:
    return f"[{', '.join(f'{value:.5g}' for value in values)}]"


if __name__ == "__main__":
    main()
