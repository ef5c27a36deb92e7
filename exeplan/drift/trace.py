"""Plays a trace to a Watch offline: when a service would have re-planned, and what that would have gained.

Each request starts when it arrives and takes the time that the active plan predicts for its length under the current
lengths; without times in the trace, requests arrive at the rate that the plan was made for, or without one as fast as
it serves them. No queue is simulated: the question is which law the service would have seen (for the rest: `exeplan
simulate`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from exeplan.arrays import Floats
from exeplan.core.plan import Plan
from exeplan.drift.state import DriftState, RequestLengths
from exeplan.drift.watch import Proposal, Watch
from exeplan.errors import InputError
from exeplan.planner.problems.problem import Problem
from exeplan.simulator.closed_form import steady_state
from exeplan.units import show_seconds
from exeplan.workload.workload import Trace

MOST_LOOKS = 1_000_000
"""Of one trace: half a year by looks every 15 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLook:
    """One look, and the plan that was adopted then."""

    state: DriftState
    num_arrived: int
    adopted: Proposal | None = None


def arrivals_of(trace: Trace, problem: Problem, plan: Plan, rate: float | None = None) -> Floats:
    """Seconds from the first request; at `rate` requests a second where one is given, whatever the trace says.

    `problem` is that of one of the plan's equal replicas. A trace with times keeps its pattern; one without is evenly
    spread, at the plan's own rate or else at all that its replicas serve. Raises InputError for several requests whose
    times are all equal.
    """
    count, times = len(trace.inputs), trace.arrival_s
    if times is None:
        planned = problem.arrivals and problem.arrivals.rate
        one = planned or steady_state(plan.schedule, problem.workload, problem.cost).throughput
        return np.arange(count) / (rate or plan.num_replicas * one)
    if count > 1 and times[-1] <= times[0]:
        raise InputError("the arrivals of the trace span no time; leave `arrival_s` out of it")
    times = times - times[0]
    return times if rate is None or count == 1 else times * (count - 1) / (rate * times[-1])


def play_trace(
    watch: Watch, problem: Problem, trace: Trace, arrivals: Floats, *, predict: bool = True
) -> Iterator[TraceLook]:
    """Every look of the service; a proposal is adopted at once. Each request is told to the watch once, when it ends.

    Without `predict` the looks lack what the active plan would do (`Watch.look`), which takes a third of the time.
    """
    open_, ends, begun = np.empty(0, np.int64), np.empty(0), 0
    curve = _seconds(watch, problem, int(trace.outputs.max()))
    for now in look_times(watch, arrivals).tolist():
        latest = int(np.searchsorted(arrivals, now, side="right"))
        new = np.arange(begun, latest)
        open_ = np.concatenate([open_, new])
        ends = np.concatenate([ends, arrivals[new] + curve[trace.outputs[new] - 1]])
        begun = latest
        done, open_, ends = open_[ends <= now], open_[ends > now], ends[ends > now]
        # All get their tokens at one pace, whatever their final length: else the pace would reveal it.
        tokens = np.minimum(np.searchsorted(curve, now - arrivals[open_], side="right"), trace.outputs[open_] - 1)
        ended = [_seen(trace, arrivals, n, int(trace.outputs[n]), True) for n in done.tolist()]
        known = zip(open_.tolist(), tokens.tolist(), strict=True)
        running = [_seen(trace, arrivals, n, count, False) for n, count in known]
        watch.note(ended, running)
        state, proposal = watch.look(now, predict=predict)
        if proposal:
            watch.adopted(proposal, now=now)
            curve = _seconds(watch, problem, int(trace.outputs.max()))
        yield TraceLook(state=state, num_arrived=begun, adopted=proposal)


def look_times(watch: Watch, arrivals: Floats) -> Floats:
    """Seconds from the first request at which the service looks; the last look is not before the last arrival.

    Raises InputError for a trace that takes too many of them.
    """
    lasts, every = float(arrivals[-1]), watch.rules.every
    if not lasts / every <= MOST_LOOKS:
        raise InputError(
            f"a trace of {show_seconds(lasts)} takes more than {MOST_LOOKS:,} looks, one every {show_seconds(every)}; "
            "give a longer --every or a higher --rate"
        )
    return np.arange(1, max(math.ceil(lasts / every), 1) + 1, dtype=np.float64) * every


def _seconds(watch: Watch, problem: Problem, longest: int) -> Floats:
    """When the active plan delivers token 1, 2, ... of a request, from its start, under the lengths it was made for."""
    placed = problem.at(watch.plan.placement)
    steady = steady_state(watch.plan.schedule, watch.planned, placed.cost)
    return np.maximum.accumulate(steady.latency(np.arange(1.0, longest + 1.0)))


def _seen(trace: Trace, arrivals: Floats, number: int, num_tokens: int, complete: bool) -> RequestLengths:
    return RequestLengths(float(arrivals[number]), int(trace.inputs[number]), num_tokens, complete)
