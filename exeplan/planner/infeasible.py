"""Refusals: why no schedule keeps the bounds or sustains the rate, what binds, and the nearest that is possible."""

import math
from collections.abc import Callable
from dataclasses import replace

from exeplan.core.bounds import Bound, is_deadline
from exeplan.core.schedule import Placement, Schedule
from exeplan.errors import Infeasible
from exeplan.planner.problem import Problem
from exeplan.search.search import Result
from exeplan.units import show_bytes, show_seconds

_WIDER = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0)
"""How much wider bounds are tried to find the nearest ones that sustain a rate."""


def policy_refusal(problem: Problem, policy: str, result: Result) -> str:
    """Why one policy has no schedule."""
    if result.best is not None:
        return f"{policy} sustains {_rate(result.best.outcome.throughput)} within the bounds"
    outcome = result.lowest_latency.outcome
    if "memory" in result.what_binds:
        return f"{policy} needs {show_bytes(outcome.memory * problem.memory)} at its gentlest"
    return f"{policy} needs {show_seconds(outcome.latency)} at its gentlest"


def too_tight(problem: Problem, gentlest: Schedule, bound: Bound, needed: float) -> Infeasible:
    """The gentlest schedule needs so many seconds for what the bound is on: what binds, and the tightest bound."""
    length = problem.workload.output_quantile(0.99)
    name = "latency bound" if bound.on_latency else f"{bound.metric} bound"
    tightest = _round_up(needed)
    return Infeasible(
        f"{name} {show_seconds(bound.seconds)}, but the gentlest schedule, {gentlest}, needs {show_seconds(needed)} "
        f"for {_meaning(bound, length)}: {_floor(problem, bound, length)}; the tightest bound that is possible is "
        f"{tightest}",
        nearest=f"the tightest {name} would be {tightest}",
        wider=needed / bound.seconds,
    )


def too_slow(problem: Problem, most: Schedule, result: Result, advice: str) -> Infeasible:
    """The schedule with the most throughput within the bounds falls short of what is required."""
    assert result.best is not None
    wanted = f"{problem.arrivals} come" if problem.arrivals else f"{_rate(problem.required)} are wanted"
    reached = _rate(result.best.outcome.throughput)
    return Infeasible(
        f"{wanted}, but the most that a schedule sustains within the bounds is {reached}, by {most}: "
        f"{_what_binds(problem, most, result)}{advice}",
        nearest=f"{reached} would be sustained",
    )


def burst(problem: Problem, schedule: Schedule, bound: Bound, needed: float) -> Infeasible:
    """The replay with arrivals breaks a bound whichever schedule is taken."""
    return Infeasible(
        f"{problem.arrivals} come, and the best schedule that was replayed with them, {schedule}, needs "
        f"{show_seconds(needed)} for {bound.metric}, the wait included; the bound is {show_seconds(bound.seconds)}",
        nearest=f"{bound.metric} would be {_round_up(needed)}",
        wider=needed / bound.seconds,
    )


def _what_binds(problem: Problem, schedule: Schedule, result: Result) -> str:
    found = [str(problem.binding_bound(schedule))] if "latency" in result.what_binds else []
    found += ["memory"] if "memory" in result.what_binds else []
    return f"what binds is {' and '.join(found)}" if found else "no batch is larger"


def wider_bounds(problem: Problem, search_again: Callable[[Problem], tuple[float, Placement | None]]) -> str:
    """Bounds, all wider by one factor, that sustain what is required, or that none do; as the end of a sentence.

    `search_again` finds the most throughput of another problem, and where. Without bounds it is asked for every
    placement, then for the one that it found.
    """
    if math.isinf(problem.limit):
        return ""
    unbounded, placement = search_again(problem.held_to([Bound(seconds=math.inf, metric=problem.bound.metric)]))
    if unbounded < problem.required or placement is None:
        return f"; no bounds would do: without any it is {_rate(unbounded)}"
    there = replace(problem.at(placement), cluster=None)
    for factor in _WIDER:
        wider = there.limited_to(problem.limit * factor)
        if search_again(wider)[0] >= problem.required:
            shown = ", ".join(str(b) for b in wider.bounds if math.isfinite(b.seconds))
            return f"; it would do under {shown}"
    return f"; bounds {_WIDER[-1]:g} times as wide would not do, none at all would"


def _meaning(bound: Bound, length: int) -> str:
    if bound.metric == "p99-length":
        return f"an output of the 99th-percentile length ({length} tokens)"
    if is_deadline(bound.metric):
        return f"{bound.metric.removeprefix('p').removesuffix('-deadline')} % of requests by their deadline"
    if bound.on_latency:
        return f"{bound.metric.removeprefix('p').removesuffix('-requests')} % of requests"
    return "the first token" if bound.metric == "ttft" else "each further token"


def _floor(problem: Problem, bound: Bound, length: int) -> str:
    """Where the time of the gentlest schedule goes: one row through all layers, once a token."""
    cost, layers = problem.cost, problem.profile.model.num_layers
    if bound.metric == "ttft":
        return f"what binds is the prefill of a single request, {problem.workload.mean_input:.0f} tokens on average"
    shard = cost.shards[min(cost.shards)]
    layer = float(shard.rest["decode"](1.0) + shard.decode_attention(1.0, problem.workload.mean_input + length / 2))
    around = float(shard.embed(1.0) + shard.head(1.0) + cost.overhead(1.0))
    often = "" if bound.metric == "tpot" else f", {length} times"
    return (
        f"what binds is one row alone, {layers} layers at {show_seconds(layer)} and {show_seconds(around)} around "
        f"them{often}"
    )


def _rate(throughput: float) -> str:
    return f"{throughput:.3g} requests/s"


def _round_up(value: float) -> str:
    digits = 2 - math.floor(math.log10(value))
    return show_seconds(math.ceil(value * 10**digits) / 10**digits)
