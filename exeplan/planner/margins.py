"""Margins: how far below each bound a plan stays, from replays of the winner and from measured errors.

    closed form -> replay    the winner replayed with several seeds, which includes the spread between samples of
                             requests; fresh replays of the winner are not biased by its selection
    replay -> measurement    `Risk.laws`

Several bounds share the risk equally, so that all hold together with it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from exeplan.core.bounds import Bound, quantities, values_of
from exeplan.core.schedule import Schedule
from exeplan.planner.problem import Problem
from exeplan.planner.replays import replay_estimate
from exeplan.planner.risk import ErrorLaw, compound, error_law

_SEEDS = 8
"""Replays of the winner: with fewer, Student's law demands much more than the spread of the replays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Risk:
    """The share of plans that may break a bound, and the error laws of replays by quantity (`planner/risk.py`)."""

    share: float
    laws: Mapping[str, ErrorLaw]

    def law(self, bound: Bound) -> ErrorLaw:
        """Of the bound's quantity; of several together the law with the widest spread."""
        return max((self.laws[quantity] for quantity in quantities(bound)), key=lambda law: law.spread)


@dataclass(frozen=True, slots=True, kw_only=True)
class Margins:
    """One margin for each bound, 0 for an infinite one: the closed form times (1 + margin) keeps the bound."""

    risk: float
    values: tuple[float, ...]
    source: str


def expected_margins(problem: Problem, risk: Risk) -> Margins:
    """Before any replay: from measured errors alone."""
    share = risk.share / _num_finite(problem)
    values = [0.0 if math.isinf(b.seconds) else risk.law(b).margin(share) for b in problem.bounds]
    return Margins(risk=risk.share, values=tuple(values), source=_sources([risk.law(b) for b in problem.bounds]))


def margins(problem: Problem, schedule: Schedule, risk: Risk, *, num_compared: int, seed: int) -> Margins:
    """Of the schedule that was selected as the best of `num_compared`, on its placement."""
    predicted = values_of(problem.bounds, problem.estimate(schedule))
    # A trace is replayed at its own times: other seeds give the same run.
    seeds = 1 if problem.arrivals and problem.arrivals.of_trace else _SEEDS
    runs = [
        replay_estimate(problem, schedule, seed=seed + 1 + number, record_passes=False)[1] for number in range(seeds)
    ]
    replayed = [values_of(problem.bounds, run) for run in runs]
    values, laws = [], []
    for number, bound in enumerate(problem.bounds):
        ratios = [ratio for run in replayed if (ratio := _ratio(run[number], predicted[number]))]
        if math.isinf(bound.seconds) or not ratios:
            values.append(0.0)
            continue
        ratios = ratios * 2 if len(ratios) == 1 else ratios
        law = compound(error_law(ratios, f"{len(runs)} replays of the winner"), risk.law(bound))
        values.append(law.margin(risk.share / _num_finite(problem), num_compared=num_compared))
        laws.append(law)
    compared = f"; best of {num_compared} policies" if num_compared > 1 else ""
    return Margins(risk=risk.share, values=tuple(values), source=_sources(laws) + compared)


def _ratio(replayed: float | None, predicted: float | None) -> float | None:
    """Replay over prediction; None where one is missing or 0."""
    return replayed / predicted if replayed and predicted else None


def _num_finite(problem: Problem) -> int:
    return max(1, sum(math.isfinite(b.seconds) for b in problem.bounds))


def _sources(laws: list[ErrorLaw]) -> str:
    return "; ".join(dict.fromkeys(part for law in laws for part in law.source.split("; ")))
