"""What the measured runs themselves allow: their noise, how few broken picks that means, and where the rest comes from.

    python -m benchmarks.silicon.noise_floor --data FOLDER [--keep FILE]

FOLDER and --keep are as for `benchmarks.silicon.pooling`. A deployment's runs of one version, at least twelve, lie
about a smooth surface over the logarithms of devices, prompt, answer and clients: the logarithm of a time is a plane, a
Gaussian process with a length for each axis, and noise of single runs, all by maximum likelihood with a prior on the
lengths (in standard deviations of their axis, log-normal about 1.6 with 0.7). Three figures of each time, mean absolute
errors over runs:

    noise           of one who knew the surface: sqrt(2 / pi) of the noise's deviation; too high where the truth steps
    interpolated    each run from all others of its deployment (left out one at a time, in closed form)
    one correction  of the law's own form, found from all the runs that it is judged on: the best that it can say

Picks are as in `benchmarks.planner.risk_corrected` under twelve bounds a group, by each of these, by a law without the
deployment and with three of its runs (drawn eight times). The margin is one for all cases and chosen by hindsight, the
least with which at most one pick in a hundred breaks: what no margin that is the same everywhere can beat. Last, the
measured times themselves times errors that are drawn, one for a group and one for each of its configurations: how
exact predictions must be. Writes records/silicon-noise-floor.json.
"""

import argparse
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from scipy.optimize import minimize

from benchmarks.lib.record import write_record
from benchmarks.silicon.corrected_picks import Tally, groups, picked
from benchmarks.silicon.pooled_fit import Sample, fitted_law, linear_ratios, with_own
from benchmarks.silicon.pooling import CONSTANTS, chosen_strength, published_rows, samples_of
from benchmarks.silicon.rows import Row, spread_bounds
from exeplan.arrays import Floats
from exeplan.core.correction import Correction
from exeplan.planner.reports.tables import table

_LEAST_RUNS = 12
_LENGTH, _LENGTH_SPREAD = 0.5, 0.7
"""Of the prior of a length's logarithm."""
_FLAT = 4.0
"""Standard deviations of the times, of the plane's coefficients."""
_QUANTITIES = ("ttft", "tpot", "e2e")
_OWN, _DRAWS, _MOST_BROKEN = 3, 8, 0.01
_MARGINS = np.arange(0.0, 0.601, 0.01)
_ERRORS = ((0.0, 0.01), (0.0, 0.02), (0.0, 0.03), (0.0, 0.05), (0.03, 0.03), (0.05, 0.03), (0.05, 0.05), (0.1, 0.05))
"""Deviations of the logarithm of an error, common to a group and of each configuration."""
_PICKS = (
    "predicted by",
    "deployments",
    "broken",
    "kept",
    "within 5 % of the best",
    "margin",
    "broken with it",
    "kept with it",
)

Case = tuple[Sequence[Sample], Mapping[Row, float]]
"""Runs, and what is predicted for the end-to-end time of each."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder of measured runs")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="keep what the replays said there, or take it again")
    args = parser.parse_args()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        samples = samples_of(published_rows(args.data), args.keep, pool)
        names = sorted({sample.name.deployment for sample in samples})
        found = [one for one in pool.map(partial(_of_deployment, samples), names) if one]
    shown = [_shown(one) for one in found]
    print(table(tuple(shown[0]), [tuple(row.values()) for row in shown]))
    medians = {kind: {q: median(one.errors[kind][q] for one in found) for q in _QUANTITIES} for kind in found[0].errors}
    cases = {kind: [case for one in found for case in one.cases[kind]] for kind in found[0].cases}
    rows = [_frontier(kind, of_kind, len(found)) for kind, of_kind in cases.items()]
    truth = [case for one in found for case in one.cases["interpolated"]]
    rows += [_frontier(_said(*errors), _with_errors(truth, *errors), len(found)) for errors in _ERRORS]
    print(table(_PICKS, [tuple(row.values()) for row in rows]))
    print(f"record: {write_record('silicon-noise-floor', {'floor': shown, 'medians': medians, 'picks': rows})}")


@dataclass(frozen=True, slots=True)
class _Found:
    name: tuple[str, str, str, str]
    runs: int
    errors: Mapping[str, Mapping[str, float]]
    cases: Mapping[str, Sequence[Case]]


def _of_deployment(samples: Sequence[Sample], left: tuple[str, str, str, str]) -> _Found | None:
    """Nothing of one with too few runs of a version."""
    known = [s for s in samples if s.name.deployment != left]
    own = _most_of_a_version([s for s in samples if s.name.deployment == left])
    if len(own) < _LEAST_RUNS:
        return None
    surfaces = {name: fitted_surface(*_points(own, name)) for name in _QUANTITIES}
    law = fitted_law(known, chosen_strength(known), CONSTANTS)
    best = [linear_ratios(s, with_own(law, own)) for s in own]
    errors = {
        "noise": {name: float(np.sqrt(2 / np.pi) * found.noise) for name, found in surfaces.items()},
        "interpolated": {name: _mean(np.expm1(found.left_out_errors)) for name, found in surfaces.items()},
        "one correction": {name: _mean(np.array(best)[:, i] - 1) for i, name in enumerate(_QUANTITIES)},
    }
    off = surfaces["e2e"].left_out_errors
    interpolated = {s.row: s.row.e2e * float(np.exp(error)) for s, error in zip(own, off, strict=True)}
    draw, drawn = np.random.default_rng(0), []
    for _ in range(_DRAWS):
        chosen = set(draw.choice(len(own), _OWN, replace=False).tolist())
        others = [s for i, s in enumerate(own) if i not in chosen]
        drawn.append(_case(others, with_own(law, [own[i] for i in chosen])))
    cases: dict[str, Any] = {
        "interpolated": [(own, interpolated)],
        "one correction": [_case(own, with_own(law, own))],
        "none of its runs": [_case(own, law.correction(own[0].name))],
        "three of its runs": drawn,
    }
    return _Found(left, len(own), errors, cases)


def _most_of_a_version(own: Sequence[Sample]) -> list[Sample]:
    versions: dict[str, list[Sample]] = defaultdict(list)
    for one in own:
        versions[one.row.version].append(one)
    return max(versions.values(), key=len)


def _points(own: Sequence[Sample], quantity: str) -> tuple[Floats, Floats]:
    axes = [(s.row.tensor_parallel_size, s.row.input_tokens, s.row.output_tokens, s.row.concurrency) for s in own]
    return np.log(np.array(axes, dtype=float)), np.log([getattr(s.row, quantity) for s in own])


def _case(own: Sequence[Sample], correction: Correction) -> Case:
    return own, {s.row: linear_ratios(s, correction)[2] * s.row.e2e for s in own}


# --- a smooth surface -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Surface:
    """The deviation of single values about it, and by how much each is missed from all others [n]."""

    noise: float
    left_out_errors: Floats


def fitted_surface(points: Floats, values: Floats) -> Surface:
    """Of values [n] at points [n, axes]; axes that do not vary are left out."""
    points = points[:, points.std(0) > 0]
    points = (points - points.mean(0)) / points.std(0)
    values = values - values.mean()
    apart = (points[:, None] - points[None]) ** 2
    plane = np.column_stack([np.ones(len(points)), points])
    flat = (_FLAT * values.std()) ** 2 * (plane @ plane.T)

    def covariance(parameters: Floats) -> Floats:
        deviation, lengths, noise = parameters[0], parameters[1:-1], parameters[-1]
        smooth = np.exp(2 * deviation - 0.5 * (apart / np.exp(2 * lengths)).sum(-1))
        return flat + smooth + np.exp(2 * noise) * np.eye(len(points))

    def loss(parameters: Floats) -> float:
        root = np.linalg.cholesky(covariance(parameters))
        white = np.linalg.solve(root, values)
        prior = ((parameters[1:-1] - _LENGTH) / _LENGTH_SPREAD) ** 2
        return float(0.5 * white @ white + np.log(np.diag(root)).sum() + 0.5 * prior.sum())

    axes = points.shape[1]
    limits = [(-6.0, 2.0), *([(-1.0, 4.0)] * axes), (np.log(0.002), 0.0)]
    starts = [np.array([np.log(0.3), *([_LENGTH] * axes), np.log(noise)]) for noise in (0.02, 0.1)]
    found = min((minimize(loss, start, method="L-BFGS-B", bounds=limits) for start in starts), key=lambda f: f.fun)
    inverse = np.linalg.inv(covariance(found.x))
    return Surface(float(np.exp(found.x[-1])), -(inverse @ values) / np.diag(inverse))


# --- picks ------------------------------------------------------------------------------------------------------------


def _frontier(name: str, cases: Sequence[Case], deployments: int) -> dict[str, str]:
    without = _tally(cases, 0.0)
    margin, found = next(
        ((m, found) for m in _MARGINS if (found := _tally(cases, m)).broken <= _MOST_BROKEN * found.cases),
        (_MARGINS[-1], _tally(cases, _MARGINS[-1])),
    )
    _, broken, _, kept, near = without.cells
    _, still, _, still_kept, _ = found.cells
    cells = name, str(deployments), broken, kept, near, f"{100 * margin:.0f} %", still, still_kept
    return dict(zip(_PICKS, cells, strict=True))


def _tally(cases: Sequence[Case], margin: float) -> Tally:
    total = Tally()
    for own, predicted in cases:
        for group in groups(own):
            rows = [s.row for s in group]
            times = np.array([predicted[row] for row in rows])
            measured, rates = np.array([row.e2e for row in rows]), np.array([row.rate(row.e2e) for row in rows])
            hoped = np.array([row.rate(seconds) for row, seconds in zip(rows, times, strict=True)])
            for bound in spread_bounds(rows):
                total += picked(times * (1 + margin) <= bound, hoped, measured <= bound, rates)
    return total


def _with_errors(cases: Sequence[Case], common: float, single: float) -> list[Case]:
    draw = np.random.default_rng(0)
    found: list[Case] = []
    for own, _ in list(cases) * _DRAWS:
        of_groups = [(group, common * draw.normal()) for group in groups(own)]
        times = {s.row: s.row.e2e * float(np.exp(off + single * draw.normal())) for g, off in of_groups for s in g}
        found.append((own, times))
    return found


def _said(common: float, single: float) -> str:
    return f"measured, errors of {100 * common:.0f} % common to a group and {100 * single:.0f} % of each"


def _shown(one: _Found) -> dict[str, str]:
    cells = {kind: " / ".join(f"{100 * errors[q]:.1f}" for q in _QUANTITIES) for kind, errors in one.errors.items()}
    return {"deployment": " ".join(one.name), "runs": str(one.runs), **cells}


def _mean(errors: Floats) -> float:
    return float(np.abs(errors).mean())


if __name__ == "__main__":
    main()
