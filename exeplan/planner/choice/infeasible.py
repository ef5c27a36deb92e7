"""Why no schedule keeps the bounds or sustains the rate: the binding limit, and the nearest feasible request."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from exeplan.core.bounds import MAX_ITL, Bound, is_deadline, percentile, quantities
from exeplan.core.schedule import Placement, Schedule
from exeplan.errors import Infeasible
from exeplan.planner.margins.margins import Margins
from exeplan.planner.problems.problem import Problem
from exeplan.search.search import Result
from exeplan.simulator.closed_form import steady_state
from exeplan.units import show_apart, show_bytes, show_seconds

_WIDER = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0)
"""Factors on the bounds that are tried to find the nearest ones that sustain a rate."""


def policy_refusal(problem: Problem, policy: str, result: Result) -> str:
    """Why one policy has no schedule on the problem's placement, where it was searched."""
    if result.best is not None:
        return f"{policy} sustains {_rate(result.best.outcome.throughput)} within the bounds"
    outcome = result.lowest_latency.outcome
    schedule = problem.schedule(policy, result.lowest_latency.point)
    if "memory" not in result.what_binds:
        return f"{policy} needs at least {_least_latency(problem, schedule, outcome.latency)}"
    residents = steady_state(schedule, problem.workload, problem.cost).cycle.num_seqs
    if math.isclose(outcome.memory * problem.max_seqs, residents, rel_tol=1e-6):
        return (
            f"{policy} needs at least {math.ceil(residents - 1e-6)} resident requests, {problem.max_seqs} are allowed"
        )
    return f"{policy} needs at least {show_bytes(outcome.memory * problem.memory)}"


def _least_latency(problem: Problem, schedule: Schedule, latency: float) -> str:
    """The binding bound's own value at a search's `latency`, in seconds of `problem.limit`; its name if of several."""
    if sum(math.isfinite(bound.seconds) for bound in problem.bounds) < 2:
        return show_apart(latency, problem.limit)[0]
    factor = latency / problem.limit
    bound = problem.binding_bound(schedule)
    wider = replace(bound, seconds=factor * bound.seconds)
    return str(wider) if bound.targets else f"{show_apart(wider.seconds, bound.seconds)[0]} {bound.name}"


def too_tight(problem: Problem, lowest: Schedule, shares: Sequence[float], margin: Margins | None = None) -> Infeasible:
    """The lowest-latency schedule needs these shares of the bounds, one of them more than 1, with the `margin` if there
    is one. What its replay takes is the tightest bound found to work: another schedule, as low by closed form and not
    replayed, may take less."""
    number = shares.index(max(shares))
    bound = problem.bounds[number]
    needed = shares[number] * bound.seconds
    length = problem.workload.output_quantile(0.99)
    name = "latency bound" if bound.on_latency else f"{bound.metric} bound"
    tightest, (shown, asked) = _round_up(needed), show_apart(needed, bound.seconds)
    added = f"with the margin of --risk, {100 * margin.values[number]:.1f} %, " if margin else ""
    return Infeasible(
        f"{name} {asked}, but {added}the lowest-latency schedule, {lowest}, needs "
        f"{shown} for {meaning(bound, length)}: {_floor(problem, bound, length)}; the tightest bound found to work"
        f"{' with that margin' if margin else ''} is {tightest}",
        nearest=f"the tightest {name} found to work{' with the margin of --risk' if margin else ''} is {tightest}",
        wider=needed / bound.seconds,
    )


def too_slow(
    problem: Problem,
    placed: Problem,
    result: Result,
    *,
    reached: float,
    by: Sequence[tuple[int, Schedule]],
    advice: str,
    margin: Margins | None = None,
) -> Infeasible:
    """The most throughput within the bounds, `reached` by these numbers of replicas, is less than the required rate.

    Under a backlog it was replayed, so that it would be sustained; arrivals need some more, as they come by chance.
    `placed` is the problem of one of the first replicas, and `result` its search.
    """
    wanted = f"{problem.arrivals} arrive" if problem.arrivals else f"{_rate(problem.required)} are required"
    most = _rate(_round_down(reached))
    less = " less the margin of --risk" if margin else ""
    replicas = " and ".join(f"{number} replicas of {one}" if number > 1 else str(one) for number, one in by)
    return Infeasible(
        f"{wanted}, but within the bounds{less} the most is {most}, by {replicas}: "
        f"{_what_binds(placed, by[0][1], result)}{advice}",
        nearest=f"less than {most} would be sustained" if problem.arrivals else f"{most} would be sustained",
        reached=reached,
    )


def burst(problem: Problem, schedule: Schedule, bound: Bound, needed: float) -> Infeasible:
    """Every schedule breaks a bound in the replay with arrivals."""
    shown, asked = show_apart(needed, bound.seconds)
    return Infeasible(
        f"{problem.arrivals} arrive, and the best replayed schedule, {schedule}, needs "
        f"{shown} for {bound.metric}, the wait included; the bound is {asked}",
        nearest=f"{bound.metric} would be {_round_up(needed)}",
        wider=needed / bound.seconds,
    )


def _what_binds(problem: Problem, schedule: Schedule, result: Result) -> str:
    found = [str(problem.binding_bound(schedule))] if "latency" in result.what_binds else []
    found += ["memory"] if "memory" in result.what_binds else []
    return f"the binding limit is {' and '.join(found)}" if found else "larger batches bring no more"


def wider_bounds(
    problem: Problem, search_again: Callable[[Problem], tuple[float, Placement | None]], *, replicas: int
) -> str:
    """The end of a sentence: the bounds, wider by one factor, that sustain the required rate, or that none do.

    The problem is that of one of equal `replicas`. `search_again` finds the most throughput of another problem and its
    placement: first without bounds on every placement, then on the one that it found.
    """
    if math.isinf(problem.limit):
        return ""
    unbounded, placement = search_again(problem.held_to([Bound(seconds=math.inf, metric=problem.bound.metric)]))
    if unbounded < problem.required or placement is None:
        by = f" of {replicas} such replicas" if replicas > 1 else ""
        return f"; wider bounds do not help: without any the most{by} is {_rate(replicas * unbounded)}"
    there = replace(problem.at(placement), cluster=None)
    for factor in _WIDER:
        wider = there.limited_to(problem.limit * factor)
        if search_again(wider)[0] >= problem.required:
            shown = ", ".join(str(b) for b in wider.bounds if math.isfinite(b.seconds))
            return f"; it is sustained under {shown}"
    return f"; bounds {_WIDER[-1]:g} times as wide do not suffice, no bounds do"


def meaning(bound: Bound, length: int) -> str:
    """What a bound is on, in words; `length` is the 99th-percentile output."""
    if bound.metric == "p99-length":
        return f"an output of the 99th-percentile length ({length} tokens)"
    if is_deadline(bound.metric):
        return f"{bound.metric.removeprefix('p').removesuffix('-deadline')} % of requests by their deadline"
    if bound.on_latency:
        return f"{bound.metric.removeprefix('p').removesuffix('-requests')} % of requests"
    if bound.metric == MAX_ITL:
        return "the longest gap between two tokens"
    if (found := percentile(bound.metric)) is None:
        return "the first token" if bound.metric == "ttft" else "each further token"
    share = bound.metric[1:].partition("-")[0]
    if bound.targets:
        each = " and ".join(f"{name} {show_seconds(value)}" for name, value in bound.scaled_targets)
        return f"{share} % of requests to keep {each}, all scaled alike"
    return f"the {'first token' if found[0] == 'ttft' else 'pace of the further tokens'} of {share} % of requests"


def _floor(problem: Problem, bound: Bound, length: int) -> str:
    """Where the time of the lowest-latency schedule goes: one request through all layers, once a token."""
    cost, layers = problem.cost, problem.profile.model.num_layers
    on = quantities(bound)
    if on[0] == "ttft":
        return f"the floor is the prefill of a single request, {problem.workload.mean_input:.0f} tokens on average"
    stages = [stage for stage in cost.placement if stage.phase != "prefill"]
    context = problem.workload.mean_input + length / 2
    shards, numbers = [cost.shards[stage.sharding] for stage in stages], [len(range(*stage.layers)) for stage in stages]
    each = [float(shard.rest["decode"](1.0) + shard.decode_attention(1.0, context)) for shard in shards]
    layer = float(np.average(each, weights=numbers))
    around = float(shards[0].embed(1.0) + shards[-1].head(1.0) + cost.overhead(1.0))
    times = "" if on[0] == "tpot" else f", {length} times"
    return (
        f"the floor is one request alone, {layers} layers at {show_seconds(layer)} and {show_seconds(around)} around "
        f"them{times}"
    )


def _rate(throughput: float) -> str:
    return f"{throughput:.3g} requests/s"


def _round_down(value: float) -> float:
    """To three digits, so that what is promised is kept."""
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 0
    return math.floor(value * 10**digits) / 10**digits


def _round_up(value: float) -> str:
    digits = 2 - math.floor(math.log10(value))
    return show_seconds(math.ceil(value * 10**digits) / 10**digits)
