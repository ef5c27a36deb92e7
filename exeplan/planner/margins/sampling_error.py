"""How far a plan's times may be off because a trace is a sample: other samples of the same law give other lengths.

Bayesian bootstrap (Rubin 1981): the requests get random weights, Dirichlet(1, ..., 1), and the closed form is
evaluated again under each. One more weight goes to requests longer than any that was seen, outputs and prompts each: of
n requests the longest may well be the true 96th percentile (n = 100, once in a hundred samples), which reweighting the
sample cannot show. How much longer they are is a Pareto law of the longest tenth's slope (Hill), itself drawn anew with
its sampling error; a length that several requests share at the top is taken for a limit. The arrivals of a trace are
taken as a Poisson stream of its rate. Only values above the planned
ones break a bound, so they make the spread. A law that was stated is no sample and has no such error.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from exeplan.arrays import Floats
from exeplan.core.bounds import values_of
from exeplan.core.schedule import Schedule
from exeplan.errors import Infeasible, InputError
from exeplan.planner.margins.risk import ErrorLaw
from exeplan.planner.problems.problem import Problem
from exeplan.workload.length_law import Ints
from exeplan.workload.workload import Workload

_DRAWS = 40
_TAIL_SHARE, _LEAST_TAIL = 0.1, 20
"""The longest requests that tell how lengths go on."""
LEAST_REQUESTS = 2 * _LEAST_TAIL
"""So that the tail is at most the longer half: of fewer requests its slope is that of all lengths, and the margin is
any (nothing of one request, hundreds of times the prediction of twenty)."""
_TAIL_POINTS = 16
_TIES = 3
"""Requests that share the greatest length where it is a limit."""


@dataclass(frozen=True, slots=True)
class SamplingError:
    """Of each bound, None for one without a value; and the standard deviation of the logarithm of the throughput."""

    laws: tuple[ErrorLaw | None, ...]
    throughput: float


def check_sample(workload: Workload) -> None:
    """Raises InputError for a trace of too few requests to say how others of its law differ."""
    if workload.trace is not None and (size := len(workload.trace.outputs)) < LEAST_REQUESTS:
        raise InputError(
            f"--risk needs a trace of at least {LEAST_REQUESTS} requests to tell by how much longer others may be, "
            f"'{workload.name}' has {size}; give more requests, state their law, such as --workload 'normal:...', or "
            "leave --risk out"
        )


def sampling_error(problem: Problem, schedule: Schedule, *, risk: float, seed: int) -> SamplingError | None:
    """What the size of the workload's trace leaves open about a schedule; None for a workload that is no trace.

    Raises Infeasible where more draws than the risk cannot sustain the arrival rate.
    """
    trace = problem.workload.trace
    if trace is None:
        return None
    planned = problem.estimate(schedule)
    found = []
    for workload in resampled(problem.workload, problem.profile.model.max_context, seed=seed):
        try:
            found.append(replace(problem, workload=workload).estimate(schedule))
        except Infeasible:
            continue
    if _DRAWS - len(found) > risk * _DRAWS:
        raise Infeasible(
            f"{schedule} sustains the rate for the {len(trace.outputs)} requests of the trace, but not in "
            f"{_DRAWS - len(found)} of {_DRAWS} samples of as many; give a longer trace, a lower rate or a higher "
            "--risk",
            nearest=f"{_DRAWS - len(found)} of {_DRAWS} samples of the trace would not sustain the rate",
        )
    values = [values_of(problem.bounds, one) for one in found]
    laws = [
        _law([row[number] for row in values], value, len(trace.outputs))
        for number, value in enumerate(values_of(problem.bounds, planned))
    ]
    throughputs = np.log([one.throughput / planned.throughput for one in found])
    return SamplingError(tuple(laws), float(np.sqrt(np.mean(throughputs**2))))


def _law(drawn: Sequence[float | None], planned: float | None, size: int) -> ErrorLaw | None:
    logs = np.log([value / planned for value in drawn if value and planned])
    if not len(logs):
        return None
    return ErrorLaw(
        logs=(0.0,),
        spread=math.sqrt(2 * float(np.mean(np.maximum(logs, 0.0) ** 2))),
        freedom=len(logs) - 1.0,
        count=size,
        source=f"lengths: a trace of {size} requests, reweighted {len(logs)} times",
    )


def resampled(workload: Workload, max_context: int, *, seed: int) -> Iterator[Workload]:
    """Workloads that the trace may be a sample of."""
    rng, trace = np.random.default_rng(seed), workload.trace
    assert trace is not None
    size = len(trace.outputs)
    tails = [_Tail.of(trace.inputs), _Tail.of(trace.outputs)]
    counts = np.rint(workload.weights * size)
    for _ in range(_DRAWS):
        inputs, outputs, weights = [workload.inputs], [workload.outputs], [rng.gamma(counts)]
        for number, tail in enumerate(tails):
            longer = tail.draw(rng)
            # With it goes the other side of one of the longest requests, as far as the context leaves room.
            side = (trace.inputs, trace.outputs)[number]
            of_longest = rng.choice(np.argsort(side)[-tail.size :], _TAIL_POINTS)
            other = np.minimum((trace.outputs, trace.inputs)[number][of_longest], max_context - side.max())
            longer = np.maximum(np.minimum(longer, max_context - other), 1)
            inputs.append(longer if number == 0 else other)
            outputs.append(other if number == 0 else longer)
            weights.append(np.full(_TAIL_POINTS, rng.gamma(1.0) / _TAIL_POINTS))
        yield replace(
            Workload.of(
                workload.name,
                inputs=np.concatenate(inputs),
                outputs=np.concatenate(outputs),
                weights=np.concatenate(weights),
            ),
            deadlines=workload.deadlines,
            as_paper=workload.as_paper,
        )


@dataclass(frozen=True, slots=True)
class _Tail:
    """Lengths beyond the longest: `longest` times a Pareto variable of this slope, from the `size` longest requests."""

    longest: int
    slope: float
    size: int

    @classmethod
    def of(cls, lengths: Ints) -> "_Tail":
        rising = np.sort(lengths)
        size = max(1, min(max(_LEAST_TAIL, int(_TAIL_SHARE * len(rising))), len(rising) - 1))
        first = rising[max(len(rising) - size - 1, 0)]
        slope = float(np.mean(np.log(rising[-size:] / first)))
        return cls(int(rising[-1]), 0.0 if np.count_nonzero(rising == rising[-1]) >= _TIES else slope, size)

    def draw(self, rng: np.random.Generator) -> Ints:
        """Lengths of `_TAIL_POINTS` requests, evenly over the tail, its slope drawn anew."""
        slope = self.slope * self.size / rng.gamma(self.size)
        exponential: Floats = -np.log1p(-(np.arange(_TAIL_POINTS) + 0.5) / _TAIL_POINTS)
        # A slope of few requests may be any: nothing is taken for a hundred times the longest.
        return np.rint(self.longest * np.exp(np.minimum(slope * exponential, math.log(100)))).astype(np.int64)
