"""At a rate, which policy's best schedule keeps the bounds up to the highest rate.

The search ranks by what full batches sustain within the bounds. Where requests wait long before that, as under a tight
bound on a percentile of the ttft, another policy's schedule may keep them further: those whose full batches serve more
than the rate at which the winner's bounds break are looked at, and the one with the most headroom is replayed in full.

Not here: the headroom of one plan (`exeplan/planner/problems/headroom.py`).
"""

from collections.abc import Mapping
from functools import partial

from exeplan.core.bounds import utilizations
from exeplan.forked import forked
from exeplan.planner.choice.candidates import Key
from exeplan.planner.choice.pipelines import Pipelines, keys_of, placed_at
from exeplan.planner.problems.headroom import as_replayed, rate_headroom
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
    reached = _headroom(pipelines, best)
    keys = [key for policy in pipelines.policies for key in keys_of(pipelines.best([policy])) if key != best]
    keys = [key for key in keys if _keeps(pipelines, key) and _capacity(pipelines, key) > 1 + reached + _MORE]
    found = forked([partial(_headroom, pipelines, key) for key in keys], seconds=_SECONDS)
    for headroom, key in sorted(zip(found, keys, strict=True), reverse=True):
        if headroom <= reached + _MORE:
            break
        if key not in pipelines.proofs:
            pipelines.replay(key)
        if key in pipelines.proofs and _headroom(pipelines, key) > reached + _MORE:
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


def _headroom(pipelines: Pipelines, key: Key) -> float:
    """That of a proved pipeline is kept for the plan."""
    found = pipelines.found[key]
    assert found.schedule is not None
    assert found.placement is not None
    placed = placed_at(pipelines.parts[key[0]], found.placement)
    known = pipelines.proofs[key].margin if key in pipelines.proofs else pipelines.margin
    margin = known.promise(placed.bounds)["margin"] if known else {}
    placed = as_replayed(placed, found.schedule, pipelines.told(key), margin=margin)
    headroom = rate_headroom(placed, found.schedule) or 0.0
    if key in pipelines.proofs:
        pipelines.rate_headrooms[key] = headroom
    return headroom
