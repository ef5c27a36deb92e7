"""At a rate, which policy's best schedule keeps the bounds up to the highest rate.

The search ranks by what full batches sustain within the bounds. Where requests wait long before that, as under a tight
bound on a percentile of the ttft, another policy's schedule may keep them further: those whose full batches serve more
than the rate at which the winner's bounds break are looked at, and the one with the most headroom is replayed in full.

Not here: the headroom of one plan (`exeplan/planner/problems/headroom.py`).
"""

from collections.abc import Mapping
from functools import partial

from exeplan.core.bounds import utilizations
from exeplan.core.schedule import Schedule
from exeplan.forked import forked
from exeplan.planner.choice.candidates import Key
from exeplan.planner.choice.pipelines import Pipelines, keys_of, placed_at
from exeplan.planner.problems.headroom import Headrooms, as_replayed, drift_headroom, rate_headroom
from exeplan.planner.problems.problem import Problem
from exeplan.simulator.closed_form import steady_state

_MORE = 0.01
"""Headroom, as a share of the rate, that makes another policy the winner."""
_SECONDS = 0.3
"""About what the headroom of one schedule takes."""


def most_headroom(pipelines: Pipelines, division: Mapping[int, tuple[str, int]]) -> dict[int, tuple[str, int]]:
    """The division of the policy that keeps the bounds up to the highest rate; that of a trace has one rate alone."""
    problem = pipelines.problem
    assert problem.arrivals is not None
    if problem.arrivals.of_trace:
        return dict(division)
    (best,) = keys_of(division)
    reached = headrooms(pipelines, best).rate or 0.0
    keys = [key for policy in pipelines.policies for key in keys_of(pipelines.best([policy])) if key != best]
    keys = [key for key in keys if _keeps(pipelines, key) and _capacity(pipelines, key) > 1 + reached + _MORE]
    found = forked([partial(_rate_headroom, pipelines, key) for key in keys], seconds=_SECONDS)
    for headroom, key in sorted(zip(found, keys, strict=True), reverse=True):
        if headroom <= reached + _MORE:
            break
        if key not in pipelines.proofs:
            pipelines.replay(key)
        if key in pipelines.proofs and _rate_headroom(pipelines, key) > reached + _MORE:
            return {key[0]: (key[1], pipelines.count(key[0]))}
    return dict(division)


def _keeps(pipelines: Pipelines, key: Key) -> bool:
    return max(utilizations(pipelines.problem.bounds, pipelines.told(key))) <= 1


def _capacity(pipelines: Pipelines, key: Key) -> float:
    """What full batches serve, over the rate."""
    schedule, part = pipelines.found[key].schedule, pipelines.parts[key[0]]
    placement = pipelines.found[key].placement
    assert schedule is not None
    assert placement is not None
    assert part.arrivals is not None
    return steady_state(schedule, part.workload, placed_at(part, placement).cost).throughput / part.arrivals.rate


def headrooms(pipelines: Pipelines, key: Key) -> Headrooms:
    """Of a proved pipeline; both at the same time, and once."""
    if key not in pipelines.headrooms:
        placed, schedule = _as_replayed(pipelines, key)
        calls = [partial(headroom, placed, schedule) for headroom in (rate_headroom, drift_headroom)]
        pipelines.headrooms[key] = Headrooms(*forked(calls, seconds=_SECONDS))
    return pipelines.headrooms[key]


def _rate_headroom(pipelines: Pipelines, key: Key) -> float:
    return rate_headroom(*_as_replayed(pipelines, key)) or 0.0


def _as_replayed(pipelines: Pipelines, key: Key) -> tuple[Problem, Schedule]:
    """The problem of one replica with its bounds as its replays use them, and the schedule."""
    found = pipelines.found[key]
    assert found.schedule is not None
    assert found.placement is not None
    placed = placed_at(pipelines.parts[key[0]], found.placement)
    known = pipelines.proofs[key].margin if key in pipelines.proofs else pipelines.margin
    margin = known.promise(placed.bounds)["margin"] if known else {}
    return as_replayed(placed, found.schedule, pipelines.told(key), margin=margin), found.schedule
