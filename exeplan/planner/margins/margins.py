"""Margins: how far below each bound a plan stays, and what each part of that distance is for.

    replays      closed form -> replay: the winner replayed with several seeds, which includes the spread between
                 samples of requests; fresh replays of the winner are not biased by its selection. Where requests arrive
                 a replay is promised, and it is the spread alone; at the times of a trace there is none
    lengths      the trace is a sample of what will come (`sampling_error.py`)
    profile      the times in the profile are measured (`profile_error`)
    deployment   replay -> measurement: errors of measured deployments, and of this one (`deployments.py`); of a profile
                 that is corrected by measured runs, what its correction leaves unknown

The parts are independent and are compounded: their centres are added, their spreads are added in squares. Several
bounds share the risk equally, so that all hold together with it.

The best of several policies has the margin that it would have alone. Selection makes an error larger (winner's curse)
only where it is of one candidate and what selected it saw it. The errors of lengths, profile and deployment are of
what all policies share: trace, times, device and engine. If E is such an error, whatever policy is selected breaks its
bound exactly if E exceeds the margin, so with the chance that E does. The error of the closed form is the policy's own,
but is measured on the winner by replays with seeds that selected nothing. What this leaves out is an error that a real
engine makes with one policy alone: no measured deployment was run with several, so that its size is unknown; the law of
deployments has it as a part of the spread between runs. Picks among measured configurations of a deployment, each by
such a margin, do not break more (benchmarks/planner/margins/risk.py).
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any

import numpy as np

from exeplan.core.bounds import Bound, quantities, values_of
from exeplan.core.profile import UNSURE, Profile
from exeplan.core.schedule import Estimate, Schedule
from exeplan.forked import forked
from exeplan.planner.margins.deployments import correction_law, deployment_law, deployment_of, shipped_deployments
from exeplan.planner.margins.risk import ErrorLaw, compound, error_law
from exeplan.planner.margins.sampling_error import check_sample, sampling_error
from exeplan.planner.problems.problem import Problem
from exeplan.planner.problems.ranking import MOST_SEEDS, mean_estimate
from exeplan.planner.problems.replays import replay_estimate
from exeplan.policies import load_policy

_SEEDS = 8
"""Replays of the winner: with fewer, Student's law demands much more than the spread of the replays."""
_MEDIAN_ERROR = math.sqrt(math.pi / 2) / 0.6745
"""The standard error of a median, times the root of the repeats, over half the interquartile range; of a normal law."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Risk:
    """The share of plans that may break a bound, and this deployment's own errors by quantity (`risk.py`)."""

    share: float
    own: Mapping[str, ErrorLaw] = field(default_factory=dict)

    def law(self, problem: Problem, bound: Bound) -> ErrorLaw:
        """Of the bound's quantity on the problem's placement; of several together the one with the largest margin."""
        return max(
            (self._law(problem, name, bound) for name in quantities(bound)), key=lambda law: law.margin(self.share)
        )

    def _law(self, problem: Problem, quantity: str, bound: Bound) -> ErrorLaw:
        size = max(stage.num_devices for stage in problem.cost.placement)
        own = self.own.get(quantity)
        if own is None and problem.profile.correction is not None:
            return correction_law(
                problem.profile.correction, quantity, dict(bound.targets).get(quantity, bound.seconds)
            )
        here = deployment_of(problem.profile, size)
        return deployment_law(here, quantity, shipped_deployments(), own_logs=own.logs if own else ())


@dataclass(frozen=True, slots=True)
class Part:
    """One reason for a margin: in words, from how many observations, and the margin on each bound for it alone."""

    words: str
    count: int
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Margins:
    """One margin for each bound, 0 for an infinite one: what is promised, times (1 + margin), keeps the bound."""

    risk: float
    values: tuple[float, ...]
    parts: tuple[Part, ...]

    def promise(self, bounds: Sequence[Bound]) -> dict[str, Any]:
        """As a plan stores it."""
        return {"margin": _by_metric(bounds, self.values), "parts": [_part_json(bounds, part) for part in self.parts]}


def expected_margins(problem: Problem, risk: Risk) -> Margins:
    """Before any replay: from measured errors alone. Raises InputError as `check_sample` does."""
    check_sample(problem.workload)
    return _margins(problem, risk, [_deployment_laws(problem, risk)], [])


def margins(problem: Problem, schedule: Schedule, risk: Risk, *, seed: int) -> Margins:
    """Of a schedule on its placement, whether it is the best of one policy or of several.

    Raises Infeasible as `sampling_error` does.
    """
    laws, remarks = [_replay_laws(problem, schedule, seed=seed)], []
    if problem.arrivals and problem.arrivals.of_trace:  # Its one replay is what is promised.
        laws = []
    if sampled := sampling_error(problem, schedule, risk=risk.share, seed=seed):
        laws.append([_with_throughput(law, sampled.throughput) for law in sampled.laws])
    else:
        remarks.append("lengths: a stated law, no sample: no sampling error")
    kept = load_policy(schedule.policy).KEEPS_FINISHED_ROWS
    if measured := profile_error(problem.profile, keeps_finished_rows=kept):
        laws.append([measured] * len(problem.bounds))
        if problem.profile.reference_passes and not problem.profile.error_of(keeps_finished_rows=kept):
            remarks.append(UNSURE)
    else:
        remarks.append(f"profile: {problem.profile.source}, its times have no repeats to judge them by")
    laws.append(_deployment_laws(problem, risk))
    return _margins(problem, risk, laws, remarks)


def profile_error(profile: Profile, *, keeps_finished_rows: bool) -> ErrorLaw | None:
    """The standard error of the profile's medians, as if all erred alike; None where nothing was repeated.

    A mean over the rows, each as important as its seconds, and with it the error of the factor on all of them: that of
    batches which keep their rows, or of others.
    """
    rows = [m for m in profile.measurements if m.repeats > 1 and m.spread > 0]
    if not rows:
        return None
    errors = [_MEDIAN_ERROR * m.spread / math.sqrt(m.repeats) for m in rows]
    count, factor = sum(m.repeats for m in rows), profile.error_of(keeps_finished_rows=keeps_finished_rows)
    return ErrorLaw(
        logs=(0.0,),
        spread=math.hypot(float(np.average(errors, weights=[m.seconds for m in rows])), factor),
        freedom=float(count - len(rows)),
        count=count,
        source=f"profile: the repeats of its {len(rows)} measured times"
        + (f", whole steps +-{factor:.1%}" if factor else ""),
    )


def _deployment_laws(problem: Problem, risk: Risk) -> list[ErrorLaw | None]:
    return [None if math.isinf(b.seconds) else risk.law(problem, b) for b in problem.bounds]


def _replay_laws(problem: Problem, schedule: Schedule, *, seed: int) -> list[ErrorLaw | None]:
    """Of replays over the closed form, or where requests arrive, and a replay is promised, over their mean."""
    fresh = seed + MOST_SEEDS  # Those before may have selected it.
    since = time.perf_counter()
    runs = [_replayed(problem, schedule, fresh)]
    seconds = time.perf_counter() - since
    calls = [partial(_replayed, problem, schedule, fresh + number) for number in range(1, _SEEDS)]
    runs += forked(calls, seconds=seconds)
    promised = mean_estimate(runs) if problem.arrivals else problem.estimate(schedule)
    predicted = values_of(problem.bounds, promised)
    replayed = [values_of(problem.bounds, run) for run in runs]
    by = "chance" if problem.arrivals else "closed form"
    laws: list[ErrorLaw | None] = []
    for number in range(len(problem.bounds)):
        ratios = [ratio for run in replayed if (ratio := _ratio(run[number], predicted[number]))]
        ratios = ratios * 2 if len(ratios) == 1 else ratios
        laws.append(error_law(ratios, f"{by}: {len(runs)} replays of the winner") if ratios else None)
    return laws


def _replayed(problem: Problem, schedule: Schedule, seed: int) -> Estimate:
    return replay_estimate(problem, schedule, seed=seed, record_passes=False)[1]


def _with_throughput(law: ErrorLaw | None, throughput: float) -> ErrorLaw | None:
    return replace(law, source=f"{law.source} (throughput +-{100 * throughput:.1f} %)") if law else None


def _margins(
    problem: Problem,
    risk: Risk,
    laws: Sequence[Sequence[ErrorLaw | None]],
    remarks: Sequence[str],
) -> Margins:
    """Of laws by part and bound; an infinite bound has none. A part without a value of a bound is told."""
    bounded = [math.isfinite(b.seconds) for b in problem.bounds]
    share = risk.share / max(1, sum(bounded))
    values = []
    for number, counts in enumerate(bounded):
        found = [law for part in laws if (law := part[number])]
        values.append(reduce(compound, found).margin(share) if counts and found else 0.0)
    parts = [_part(part, bounded, share) for part in laws if any(part)]
    remarks = [*remarks, *_unknown(problem.bounds, laws)]
    return Margins(risk=risk.share, values=tuple(values), parts=(*parts, *(Part(words, 0, ()) for words in remarks)))


def _unknown(bounds: Sequence[Bound], laws: Sequence[Sequence[ErrorLaw | None]]) -> list[str]:
    """The finite bounds that some part says nothing about, in words."""
    return [
        f"{bound.metric}: only {sum(bool(part[number]) for part in laws)} of {len(laws)} parts could be estimated"
        for number, bound in enumerate(bounds)
        if math.isfinite(bound.seconds) and not all(part[number] for part in laws)
    ]


def _part(laws: Sequence[ErrorLaw | None], bounded: Sequence[bool], share: float) -> Part:
    found = [law for law in laws if law]
    values = [law.margin(share) if law and counts else 0.0 for law, counts in zip(laws, bounded, strict=True)]
    return Part("; ".join(dict.fromkeys(law.source for law in found)), max(law.count for law in found), tuple(values))


def _ratio(replayed: float | None, predicted: float | None) -> float | None:
    """Replay over prediction; None where one is missing or 0."""
    return replayed / predicted if replayed and predicted else None


def _by_metric(bounds: Sequence[Bound], values: Sequence[float]) -> dict[str, float]:
    return {bound.metric: round(value, 4) for bound, value in zip(bounds, values, strict=True)}


def _part_json(bounds: Sequence[Bound], part: Part) -> dict[str, Any]:
    found: dict[str, Any] = {"from": part.words}
    return {**found, "observations": part.count, "margin": _by_metric(bounds, part.values)} if part.count else found
