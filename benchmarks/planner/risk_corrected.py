"""Risk after correction: bounds broken and throughput kept on deployments left out whole, with none and three own runs.

    python -m benchmarks.planner.risk_corrected --data FOLDER [--keep FILE]

FOLDER is that of `benchmarks.silicon.pooling`, whose runs, predictions and law these are: dense models and mixtures of
experts, in bfloat16 and fp8, on H100s and H200s. A deployment (engine, device, model, dtype) is left out whole, the law
is fitted without it, strength of the pooling included, and its runs are predicted without any of them, or with three,
drawn 20 times, in which case the others are judged. Among the configurations of one version, prompt and answer length
the one of the highest predicted rate is picked whose predicted end-to-end time keeps a bound: twelve bounds a group
between its fastest and slowest run, or each measured time, where the best lies exactly on the bound. A pick is near the
best if it keeps the bound with at least 95 % of the best rate of those that do. With a margin the
time by passes keeps it as `--risk 1%` demands (`planner/margins/deployments.py`: correction_law); the factor on the
margin's spread is found without the deployment too, by picks on the others, each left out in turn.

Intervals are Wilson's, of one draw's cases; runs of a deployment err alike, so that they are too narrow: the table by
deployments shows it. Writes records/planner-risk-corrected.json.
"""

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.lib.record import write_record
from benchmarks.silicon.corrected_picks import RISK, Tally, picks, with_reach
from benchmarks.silicon.pooled_fit import Sample, fitted_law, with_own
from benchmarks.silicon.pooling import (
    CONSTANTS,
    chosen_strength,
    published_rows,
    samples_of,
)
from benchmarks.silicon.rows import Row, spread_bounds, tight_bounds
from exeplan.core.correction import Correction
from exeplan.planner.reports.tables import table

_BOUNDS: Mapping[str, Callable[[Sequence[Row]], Sequence[float]]] = {
    "each measured e2e": tight_bounds,
    "twelve a group": spread_bounds,
}
_DRAWS, _OWN = 20, 3
_KNOWN = ("none of its runs", "three of its runs")
_MARGINS = ("none", "as planned")
_HEADER = (
    "bounds",
    "known",
    "margin",
    "cases",
    "broken",
    "95 % of it",
    "refused",
    "kept, mean",
    "within 5 % of the best",
)
_BY_DEPLOYMENT = ("deployment", "known", "cases", "broken", "refused", "kept, mean", "within 5 % of the best")


Key = tuple[str, str, str]
"""Bounds, what is known, and margin."""
Deployment = tuple[str, str, str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder of measured runs")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="keep what the replays said there, or take it again")
    args = parser.parse_args()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        samples = samples_of(published_rows(args.data), args.keep, pool)
        names = sorted({sample.name.deployment for sample in samples})
        found = dict(zip(names, pool.map(partial(judged, samples), names), strict=True))
    shown = [dict(zip(_HEADER, row, strict=True)) for row in _rows(list(found.values()))]
    by_deployment = [dict(zip(_BY_DEPLOYMENT, row, strict=True)) for row in _deployment_rows(found)]
    for rows in (shown, by_deployment):
        print(table(tuple(rows[0]), [tuple(row.values()) for row in rows]))
    print(f"record: {write_record('planner-risk-corrected', {'left_out': shown, 'deployments': by_deployment})}")


def judged(samples: Sequence[Sample], left: Deployment) -> dict[Key, Tally]:
    """Picks among one deployment's runs, by a law without them."""
    known = [s for s in samples if s.name.deployment != left]
    own = [s for s in samples if s.name.deployment == left]
    law = with_reach(fitted_law(known, chosen_strength(known), CONSTANTS), known)
    found = _all_picks(_KNOWN[0], own, law.correction(own[0].name))
    draw, drawn = np.random.default_rng(0), []
    for _ in range(_DRAWS if len(own) > _OWN else 0):
        picked = set(draw.choice(len(own), _OWN, replace=False).tolist())
        others = [s for i, s in enumerate(own) if i not in picked]
        drawn.append(_all_picks(_KNOWN[1], others, with_own(law, [own[i] for i in picked])))
    for key in drawn[0] if drawn else ():
        found[key] = replace(sum((one[key] for one in drawn), Tally()), draws=_DRAWS)
    return found


def _all_picks(known: str, own: Sequence[Sample], correction: Correction) -> dict[Key, Tally]:
    return {
        (name, known, margin): picks(own, correction, bounds, risk=RISK if margin == _MARGINS[1] else None)
        for name, bounds in _BOUNDS.items()
        for margin in _MARGINS
    }


def _rows(found: Sequence[Mapping[Key, Tally]]) -> Iterator[tuple[str, ...]]:
    for bounds in _BOUNDS:
        for known in _KNOWN:
            for margin in _MARGINS:
                parts = [one[bounds, known, margin] for one in found if (bounds, known, margin) in one]
                total = sum(parts, Tally())
                cases, broken, *others = total.cells
                yield bounds, known, margin, cases, broken, total.interval, *others


def _deployment_rows(found: Mapping[Deployment, Mapping[Key, Tally]]) -> Iterator[tuple[str, ...]]:
    """Under twelve bounds a group, with the margin."""
    for name, tallies in found.items():
        for known in _KNOWN:
            if (tally := tallies.get(("twelve a group", known, _MARGINS[1]))) and tally.cases:
                yield " ".join(name), known, *tally.cells


if __name__ == "__main__":
    main()
