"""Picks among the runs of a deployment that a law has not seen, and how wide its margins must be for few to break.

The fastest configuration by prediction is picked whose predicted end-to-end time keeps a bound, among those of one
version, prompt and answer length.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks.lib.intervals import wilson
from benchmarks.silicon.pooled_fit import Sample, linear_ratios, with_own
from benchmarks.silicon.rows import Row, spread_bounds, tight_bounds
from exeplan.core.correction import Correction
from exeplan.planner.margins.deployments import correction_law
from exeplan.profiler.calibration.law import CalibrationLaw

RISK = 0.01
_LEAST, _OWN, _DRAWS = 3, 3, 4
_NEAR = 0.95
"""Of the best rate: a pick that reaches it is as good as the best."""
_REACHES = tuple(round(0.2 * 1.1**step, 3) for step in range(22))
"""Factors on a spread that are tried, each a tenth wider: on a coarser grid margins are wider than the risk asks."""
Case = tuple[Sequence[Sample], Correction]
"""Runs, and what is known of their deployment."""


@dataclass(slots=True)
class Tally:
    """Of picks: how many broke their bound, how many found nothing, and shares of the best rate that others kept."""

    cases: int = 0
    broken: int = 0
    refused: int = 0
    kept: list[float] = field(default_factory=list)
    draws: int = 1

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            cases=self.cases + other.cases,
            broken=self.broken + other.broken,
            refused=self.refused + other.refused,
            kept=self.kept + other.kept,
            draws=max(self.draws, other.draws),
        )

    @property
    def cells(self) -> tuple[str, ...]:
        """Cases of one draw, broken and refused, the mean share that is kept, and how many are near the best."""
        near = sum(share >= _NEAR for share in self.kept)
        broken, refused, near_ones = (number / max(self.cases, 1) for number in (self.broken, self.refused, near))
        shares = (broken, refused, float(np.mean(self.kept or [0])), near_ones)
        return str(round(self.cases / self.draws)), *(f"{100 * share:.1f} %" for share in shares)

    @property
    def interval(self) -> str:
        low, high = wilson(round(self.broken / self.draws), max(1, round(self.cases / self.draws)))
        return f"{100 * low:.1f} to {100 * high:.1f} %"


def picks(
    own: Sequence[Sample],
    correction: Correction,
    bounds: Callable[[Sequence[Row]], Sequence[float]],
    *,
    risk: float | None,
) -> Tally:
    """In each group of three configurations and more; without a risk the corrected prediction keeps the bound."""
    found = Tally()
    for group in groups(own):
        rows = [s.row for s in group]
        predicted = np.array([linear_ratios(s, correction)[2] * s.row.e2e for s in group])
        by_passes = np.array(
            [linear_ratios(s, replace(correction, first=0.0, first_seconds=0.0))[2] * s.row.e2e for s in group]
        )
        measured, rates = np.array([row.e2e for row in rows]), np.array([row.rate(row.e2e) for row in rows])
        hoped = np.array([row.rate(seconds) for row, seconds in zip(rows, predicted, strict=True)])
        for bound in bounds(rows):
            margin = correction_law(correction, "latency", bound).margin(risk) if risk else 0.0
            fits = (by_passes * (1 + margin) if risk else predicted) <= bound
            found += picked(fits, hoped, measured <= bound, rates)
    return found


def picked(fits: Any, hoped: Any, holds: Any, rates: Any) -> Tally:
    """One case: the most hoped for of what fits, and whether it holds."""
    if not fits.any():
        return Tally(1, 0, 1)
    pick = int(np.argmax(np.where(fits, hoped, -np.inf)))
    return Tally(1, 0, 0, [float(rates[pick] / rates[holds].max())]) if holds[pick] else Tally(1, 1, 0)


def groups(own: Sequence[Sample]) -> Iterator[list[Sample]]:
    """Of one version, prompt and answer length, with three configurations and more."""
    alike: dict[tuple[object, ...], list[Sample]] = defaultdict(list)
    for one in own:
        alike[one.row.version, one.row.input_tokens, one.row.output_tokens].append(one)
    yield from (group for group in alike.values() if len(group) >= _LEAST)


def with_reach(law: CalibrationLaw, samples: Sequence[Sample]) -> CalibrationLaw:
    """The law with the least factor on its spread of latencies with which no more picks break than the risk, on
    deployments left out in turn, without own runs and with three, which all weigh alike. Variances are not found anew.

    A spread is of all runs, to both sides; a pick is broken only by what is slower than predicted, and is seldom one of
    the few that are far off, such as those that wait for memory. One factor for both, so that own runs, which narrow
    the law, narrow the margin.
    """
    cases: list[list[Case]] = []
    for left in sorted({sample.name.deployment for sample in samples}):
        own, rest = [s for s in samples if s.name.deployment == left], law.without(left)
        cases.append([(own, rest.correction(own[0].name))])
        draw, drawn = np.random.default_rng(0), []
        for _ in range(_DRAWS if len(own) > _OWN else 0):
            picked = set(draw.choice(len(own), _OWN, replace=False).tolist())
            found = with_own(rest, [own[i] for i in picked])
            others: Sequence[Sample] = [s for i, s in enumerate(own) if i not in picked]
            drawn.append((others, found))
        cases += [drawn] if drawn else []
    enough = bisect_left(_REACHES, True, key=lambda reach: _broken(cases, reach) <= RISK)
    return replace(law, reach=_REACHES[min(enough, len(_REACHES) - 1)])


def _broken(cases: Sequence[Sequence[Case]], reach: float) -> float:
    """The mean share of broken picks."""
    shares = []
    for drawn in cases:
        total = Tally()
        for own, correction in drawn:
            spreads = {**correction.spreads, "latency": reach * correction.spreads["latency"]}
            for bounds in (tight_bounds, spread_bounds):
                total += picks(own, replace(correction, spreads=spreads), bounds, risk=RISK)
        shares.append(total.broken / max(total.cases, 1))
    return float(np.mean(shares))
