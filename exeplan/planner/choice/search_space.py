"""Variants: every placement and enumerated variable of a policy; its other control variables are searched in each.

Each variant is a grid. A few points of each give an upper estimate: variants that cannot win are left out, the others
are searched in the order of their estimates, each with the best throughput so far as the value to beat. Then values of
the enumerated variables between those of the best variant and its neighbours are tried, ever closer to the best. The
method 'exhaustive' searches all variants that a policy lists, and no others.
"""

import itertools
import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from exeplan.core.schedule import Placement, Schedule, num_ranks, num_servers
from exeplan.errors import InputError
from exeplan.planner.problems.balance_stages import Balance
from exeplan.planner.problems.layouts import Layout, layouts, moved_layers
from exeplan.planner.problems.problem import Problem
from exeplan.planner.problems.server_layouts import (
    fullest,
    layout_of,
    server_layouts,
    server_placement,
    server_shardings,
)
from exeplan.policies import load_policy
from exeplan.policies.interface import Knob, Policy
from exeplan.search.grid import Grid, Index, Limits, Slack
from exeplan.search.line import reach
from exeplan.search.search import Outcome, Result, Trial, search_grid
from exeplan.simulator.closed_form import steady_state

_FINEST = 1 / 16
"""Two values of an enumerated variable that are less apart, relative, have none between them tried."""
_WORTH = 1e-3
"""The least gain for which a value that no policy lists is taken."""
_FAR, _FAR_APART = 0.95, 0.8
"""Shares of the throughput to beat below which listed values are not searched, and so none between them: for policies
with one kind of stages, and for those that split GPUs among prefills and decodes, where splits between the listed ones
had up to 17 % more."""
_AROUND = 16
"""How many values below and above those of the best point are all tried, where throughput falls on the way up."""
_SLACK = 0.02
"""A variant that misses a limit, or the best throughput, by less than this may still contain the winner."""
Outcomes = dict[tuple[Hashable, ...], Outcome]
"""Of the schedules evaluated for one request, by law, placement and variables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A placement, and values of the variables that a policy enumerates."""

    problem: Problem
    """The problem on that placement."""
    enumerated: Mapping[str, int]
    layout: Layout | None = None
    """From which the placement was made; None where it was given."""

    def holds(self, placement: Placement, schedule: Schedule) -> bool:
        """Whether this schedule on this placement is one of its points; with ranks: whether that is its placement."""
        if num_ranks(placement) > 1:  # What the closed form misses of ranks, it misses whatever the schedule.
            return placement == self.problem.cost.placement
        point = {**schedule.variables, **self.enumerated}
        same = load_policy(schedule.policy).schedule(point, self.problem.workload).variables == schedule.variables
        return same and placement == self.problem.cost.placement

    def grid(
        self,
        policy: Policy,
        knobs: Sequence[Knob],
        limits: Limits,
        evaluated: Callable[[], None] = lambda: None,
        outcomes: Outcomes | None = None,
    ) -> Grid:
        """Its grid, with no point evaluated; `evaluated` is called for each point that is.

        Points that are one schedule, or one of another policy of the same law, have one outcome.
        """
        known = {} if outcomes is None else outcomes

        def evaluate(point: Mapping[str, int]) -> Outcome:
            schedule = policy.schedule({**point, **self.enumerated}, self.problem.workload)
            key = policy.steady_state, self.problem.cost.placement, tuple(sorted(schedule.variables.items()))
            if key not in known:
                evaluated()
                known[key] = self.problem.evaluate(schedule)
            return known[key]

        return Grid(knobs, evaluate, limits)


def variants(problem: Problem, policy: Policy) -> Iterator[Variant]:
    """Every variant of a policy; none where the cluster is too small for the policy.

    At a rate no more micro-batches than stages: with few requests those beyond stay empty, and with more than fit into
    one a stage times jump as another comes into use, which the closed form takes as gradual.
    """
    for placement, layout in _placements(problem, policy).items():
        placed = problem.at(placement) if problem.cluster else problem
        stages = len(placed.cost.decode_stages)
        for values in _enumerated(policy, placed):
            if problem.arrivals and values.get("micro_batches", 1) > stages:
                continue
            yield Variant(problem=placed, enumerated=values, layout=layout)


def _enumerated(policy: Policy, placed: Problem) -> Sequence[Mapping[str, int]]:
    """Values of the enumerated variables on a placement; engines with servers for each phase have one batch a stage."""
    stages = len(placed.cost.decode_stages)
    if placed.whole_servers and policy.SEPARATE_STAGES:
        return ({"micro_batches": stages} if stages > 1 else {},)
    found = policy.enumerated(stages)
    if placed.bounds_gaps and hasattr(policy, "token_limits"):
        limits = policy.token_limits()
        return (*found, *({**values, "max_num_batched_tokens": tokens} for values in found for tokens in limits))
    return found


def _placements(problem: Problem, policy: Policy) -> dict[Placement, Layout | None]:
    if problem.cluster is None:
        separate = any(stage.phase for stage in problem.cost.placement)
        return {problem.cost.placement: None} if separate == policy.SEPARATE_STAGES else {}
    if policy.SEPARATE_STAGES and problem.cluster.num_gpus < 2:
        return {}
    if policy.SEPARATE_STAGES and problem.whole_servers:
        return dict.fromkeys(_server_placements(problem))
    numbers = _balance(problem).prefill_gpus(policy.SPLIT_BY) if policy.SEPARATE_STAGES else (0,)
    found = layouts(
        problem.cluster,
        problem.profile.model,
        problem.profile.tensor_parallel_sizes,
        shardings=() if policy.SEPARATE_STAGES else problem.profile.expert_shardings,
        across_nodes=problem.across_nodes,
        even=bool(problem.profile.engine),
    )
    return _placed(problem, [replace(layout, num_prefill=number) for number in numbers for layout in found])


def _server_placements(problem: Problem) -> Iterator[Placement]:
    cluster = problem.cluster
    assert cluster is not None
    found = server_layouts(
        cluster,
        server_shardings(problem.profile, cluster, problem.memory, across_nodes=problem.across_nodes),
        prefill_gpus=_balance(problem).prefill_gpus("time"),
        one_pipeline=problem.one_pipeline,
    )
    placements = (server_placement(cluster, problem.profile.model, layout) for layout in found)
    return (one for one in placements if one is not None)


def _balance(problem: Problem) -> Balance:
    assert problem.cluster is not None
    return Balance(problem.cost.timings, problem.cluster, problem.workload, problem.memory)


def _placed(problem: Problem, found: Sequence[Layout]) -> dict[Placement, Layout | None]:
    """The placements that hold the layers, each with the first of its layouts."""
    balance, made = _balance(problem), dict[Placement, Layout | None]()
    for layout in found:
        placement = balance.split_placement(layout) if layout.num_prefill else balance.placement(layout)
        if placement is not None:
            made.setdefault(placement, layout)
    return made


def search_variants(
    problem: Problem,
    policy: str,
    *,
    method: str,
    bound: float,
    at_least: float = 0.0,
    without: Sequence[tuple[Placement, Schedule]] = (),
    evaluated: Callable[[], None] = lambda: None,
    outcomes: Outcomes | None = None,
) -> tuple[Result, Placement] | None:
    """The merged searches of all variants, and the placement of their best point, or of their lowest-latency one.

    A best point of less throughput than `at_least` need not be found. Variants that contain one of the placed schedules
    in `without` are left out. `evaluated` is called for each schedule that is evaluated, whose outcome is added to the
    `outcomes` of the request so far. None where the policy cannot be placed.
    """
    outcomes = {} if outcomes is None else outcomes
    began, module = time.perf_counter(), load_policy(policy)
    knobs, limits = module.knobs(problem.workload, problem.max_seqs), Limits(bound, 1.0)

    def left_out(variant: Variant) -> bool:
        return any(variant.holds(*other) for other in without)

    found = [variant for variant in variants(problem, module) if not left_out(variant)]
    if not found:
        return None
    listed_from = (_FAR_APART if module.SEPARATE_STAGES else _FAR) * at_least
    grids = [variant.grid(module, knobs, limits, evaluated, outcomes) for variant in found]
    if method == "branch-and-bound":
        results = _most_promising_first(grids, listed_from)
        for variant in _refined(found, grids, results, module, listed_from):
            grid = variant.grid(module, knobs, limits, evaluated, outcomes)
            grid.at_least, where = (1 + _WORTH) * _lead(grids, at_least)[0], _lead(grids, at_least)[1]
            found.append(variant)
            grids.append(grid)
            if left_out(variant) or not reach(grid, where, at_least=grid.at_least, slack=0.0):
                continue
            refined = search_grid(grid, thorough=False)
            if refined.best and refined.best.outcome.throughput >= grid.at_least:
                results[len(grids) - 1] = refined
        number = _chosen(results)
        results[number] = _searched_thoroughly(grids[number], results[number])
    else:
        results = {number: search_grid(grid, method=method) for number, grid in enumerate(grids)}
    number = _chosen(results)
    gaps = _gaps(results, number)
    if gaps and method == "branch-and-bound" and _lead(grids, 0.0)[0] >= listed_from:
        gaps.append(_gap_between(found, grids, number))
    tried = [
        Trial({**grid.point(index), **variant.enumerated}, grid.tried[index])
        for variant, grid in zip(found, grids, strict=True)
        for index in grid.frontier()
    ]
    result = replace(
        _with_enumerated(results[number], found[number].enumerated),
        frontier=pareto(tried),
        num_points=sum(len(grid.tried) for grid in grids),
        grid_size=sum(math.prod(grid.shape) for grid in grids),
        seconds=time.perf_counter() - began,
        gap=max(gaps, default=None),
        uncounted=_uncounted(results, number),
    )
    return result, found[number].problem.cost.placement


def _refined(
    found: Sequence[Variant],
    grids: Sequence[Grid],
    results: Mapping[int, Result],
    policy: Policy,
    at_least: float,
) -> Iterator[Variant]:
    """Variants near the best one: other numbers of GPUs that prefill, then enumerated variables between the values
    tried, then layers moved.

    The caller adds each variant, its grid and, where it gains, its result before it asks for the next. There are none
    where the best is below `at_least`.
    """

    def best() -> int | None:
        trial = results[number := _chosen(results)].best
        return number if trial and trial.outcome.throughput >= at_least else None

    while (number := best()) is not None and (made := list(_split_otherwise(found, found[number], policy))):
        yield from made
    while (number := best()) is not None and (made := list(_other_numbers(found, found[number], policy))):
        yield from made
    while (number := best()) is not None and (made := list(_between(found, grids[number], found[number], policy))):
        yield from made
    while (number := best()) is not None:
        yield from _layers_moved(found, grids[number], found[number], policy)
        if best() == number:
            return


def _split_otherwise(found: Sequence[Variant], best: Variant, policy: Policy) -> Iterator[Variant]:
    """Variants whose number of GPUs that prefill is halfway between the best one's and the next ones tried on both
    sides, with as many GPUs to a tensor-parallel stage."""
    if best.layout is None or not best.layout.num_prefill:
        return
    cluster, here = best.problem.cluster, best.layout
    assert cluster is not None
    tried = [v.layout for v in found if v.layout is not None]
    numbers = sorted({0, cluster.num_gpus, *(layout.num_prefill for layout in tried)})
    at = numbers.index(here.num_prefill)
    sides = {(numbers[at - 1] + here.num_prefill) // 2, (here.num_prefill + numbers[at + 1] + 1) // 2}
    made = [
        replace(layout, num_prefill=number)
        for number in sorted(sides - set(numbers))
        for layout in dict.fromkeys(replace(layout, num_prefill=0) for layout in tried if layout.size == here.size)
    ]
    for placement, layout in _placed(best.problem, made).items():
        placed = best.problem.at(placement)
        for values in policy.enumerated(len(placed.cost.decode_stages)):
            yield Variant(problem=placed, enumerated=values, layout=layout)


def _other_numbers(found: Sequence[Variant], best: Variant, policy: Policy) -> Iterator[Variant]:
    """Variants of which the number of servers that prefill is halfway to the next ones tried of the best one's
    shapes, on both sides."""
    here, cluster = layout_of(best.problem.cost.placement), best.problem.cluster
    if here is None or cluster is None or not best.problem.whole_servers:
        return
    tried = {variant.problem.cost.placement for variant in found}
    alike = [one for one in map(layout_of, tried) if one and (one.prefill, one.decode) == (here.prefill, here.decode)]
    numbers = sorted({0, cluster.num_gpus // here.prefill.num_devices, *(one.num_prefill for one in alike)})
    at = numbers.index(here.num_prefill)
    for number in {(near + here.num_prefill) // 2 for near in numbers[max(0, at - 1) : at + 2]} - {0}:
        layout = fullest(cluster.num_gpus, here.prefill, here.decode, number)
        placement = server_placement(cluster, best.problem.profile.model, layout) if layout.num_decode else None
        if placement is not None and placement not in tried:
            placed = best.problem.at(placement)
            for values in _enumerated(policy, placed):
                yield Variant(problem=placed, enumerated=values)


def _between(found: Sequence[Variant], grid: Grid, best: Variant, policy: Policy) -> Iterator[Variant]:
    """Variants of the best one's placement, an enumerated variable halfway to its next tried value, down to
    `_FINEST`."""
    knobs = grid.point(grid.bottom)
    alike = [v.enumerated for v in found if v.problem.cost.placement == best.problem.cost.placement]
    for name in best.enumerated:
        for value in _halfway(best.enumerated, alike, name):
            enumerated = {**best.enumerated, name: value}
            if _is_valid(policy, {**knobs, **enumerated}, best.problem):
                yield Variant(problem=best.problem, enumerated=enumerated, layout=best.layout)


def _layers_moved(found: Sequence[Variant], grid: Grid, best: Variant, policy: Policy) -> Iterator[Variant]:
    """Variants of the best one with one layer more on each other stage of a phase, taken from its slowest stage."""
    placement = best.problem.cost.placement
    apart = best.problem.whole_servers and num_servers(placement) is not None
    if best.problem.cluster is None or grid.best is None or len(placement) == 1 or apart:
        return
    schedule = policy.schedule({**grid.point(grid.best[2]), **best.enumerated}, best.problem.workload)
    seconds = steady_state(schedule, best.problem.workload, best.problem.cost).steady.seconds.mean(axis=1)
    tried = {variant.problem.cost.placement for variant in found}
    for other in moved_layers(placement, seconds.tolist()):
        if other not in tried:
            yield Variant(problem=best.problem.at(other), enumerated=best.enumerated, layout=best.layout)


def _gaps(results: Mapping[int, Result], number: int) -> list[float]:
    """How much more than the best point, relative, what each variant's search left out could have."""
    if (best := results[number].best) is None:
        return []
    most = best.outcome.throughput
    return [
        max(result.best.outcome.throughput * (1 + result.gap) / most - 1, 0.0) if most else 0.0
        for result in results.values()
        if result.best is not None and result.gap is not None
    ]


def _uncounted(results: Mapping[int, Result], number: int) -> Slack | None:
    """The largest dips that no gap counts, of the variants that such dips might lift to the best point; None where the
    method looks for none.

    Throughput rises no faster than the load, so that a dip in that lifts it no more.
    """
    best = results[number].best
    if results[number].uncounted is None or best is None:
        return None
    found = Slack()
    for result in results.values():
        if result.best is None or result.uncounted is None:
            continue
        hoped = result.best.outcome.throughput * (1 + (result.gap or 0.0)) * (1 + result.uncounted.most)
        if hoped >= best.outcome.throughput:
            found = found.joined(result.uncounted)
    return found


def _gap_between(found: Sequence[Variant], grids: Sequence[Grid], number: int) -> float:
    """What values between those tried of the best variant's enumerated variables could gain, relative.

    The most throughput within the limits is taken as concave in each of them: it lies below the lines through the
    values tried on either side.
    """
    best, grid = found[number], grids[number]
    if grid.best is None:
        return 0.0
    start, here, highest = grid.best[2], -grid.best[0], -grid.best[0]
    for name, value in best.enumerated.items():
        alike = {
            variant.enumerated[name]: other
            for variant, other in zip(found, grids, strict=True)
            if variant.problem.cost.placement == best.problem.cost.placement
            and name in variant.enumerated
            and {**variant.enumerated, name: value} == best.enumerated
        }
        at = sorted(alike).index(value)
        near = {x: reach(alike[x], start, at_least=0.0, slack=0.0) for x in sorted(alike)[max(0, at - 2) : at + 3]}
        highest = max(highest, concave_ceiling({**near, value: here}, value))
    return highest / here - 1


def concave_ceiling(values: Mapping[int, float], best: int) -> float:
    """The most that a concave function with these values may have at the whole numbers next to the best one's."""
    points = sorted(values)
    at, found = points.index(best), values[best]
    for left, right in ((at - 1, at), (at, at + 1)):
        if left < 0 or right >= len(points) or points[right] - points[left] < 2:
            continue
        low, high = points[left], points[right]
        between = np.arange(low + 1, high)
        ceiling = np.full(len(between), math.inf)
        if left > 0:
            slope = (values[low] - values[points[left - 1]]) / (low - points[left - 1])
            ceiling = np.minimum(ceiling, values[low] + slope * (between - low))
        if right + 1 < len(points):
            slope = (values[points[right + 1]] - values[high]) / (points[right + 1] - high)
            ceiling = np.minimum(ceiling, values[high] - slope * (high - between))
        if np.isfinite(ceiling).all():
            found = max(found, float(ceiling.max()))
    return found


def _halfway(best: Mapping[str, int], tried: Sequence[Mapping[str, int]], name: str) -> list[int]:
    """Values of a variable halfway to the next ones tried on both sides, the others being equal; none in between."""
    others = {key: value for key, value in best.items() if key != name}
    values = sorted({v[name] for v in tried if name in v and {k: v[k] for k in v if k != name} == others})
    at = values.index(best[name])
    sides = [*values[max(0, at - 1) : at], *values[at + 1 : at + 2]]
    return [(side + best[name]) // 2 for side in sides if abs(side - best[name]) > max(1, _FINEST * best[name])]


def _is_valid(policy: Policy, point: Mapping[str, int], problem: Problem) -> bool:
    """Whether the policy accepts these values together."""
    try:
        policy.check(policy.schedule(point, problem.workload))
    except InputError:
        return False
    return True


def _searched_thoroughly(grid: Grid, result: Result) -> Result:
    """The search of the best variant again, for falls too small to look for in all variants."""
    if grid.best is None or result.dips is None:
        return result
    if result.dips.throughput and not grid.falls:
        _try_around(grid)
    return search_grid(grid)


def _try_around(grid: Grid) -> None:
    """Tries all that is near the best point, until there is no better one."""
    start = None
    while grid.best is not None and (here := grid.best[2]) != start:
        start = here
        for knob, steps in itertools.product(range(len(here)), range(-_AROUND, _AROUND + 1)):
            nearby = (*here[:knob], here[knob] + steps, *here[knob + 1 :])
            if nearby in grid:
                grid(nearby)


def _most_promising_first(grids: Sequence[Grid], at_least: float) -> dict[int, Result]:
    """The results of the variants that may contain the best point, by their position; at least one."""
    promises, one_knob = _promises(grids, at_least), len(grids[0].shape) == 1
    results: dict[int, Result] = {}
    while promises:
        number = max(promises, key=lambda n: promises[n])
        grid, promise, (most, _) = grids[number], promises.pop(number), _lead(grids, at_least)
        if one_knob and grid.falls <= _SLACK and not _may_win(grid, promise, most):
            continue
        grid.at_least = most
        results[number] = search_grid(grid, thorough=False)
        more, where = _lead(grids, at_least)
        if more > most and not one_knob:
            promises = {n: reach(grids[n], where, at_least=more, slack=_SLACK) for n in promises}
    if not results:
        lowest = _lowest(grids, at_least)
        grids[lowest].at_least = at_least
        results[lowest] = search_grid(grids[lowest], thorough=False)
    return results


def _promises(grids: Sequence[Grid], at_least: float) -> dict[int, float]:
    """Upper estimates of the variants that may contain the best point, along their first knob through it."""
    one_knob, promises = len(grids[0].shape) == 1, {}
    for number, grid in enumerate(grids):
        most, where = _lead(grids, at_least)
        promise = reach(grid, where, at_least=most, slack=_SLACK)
        if not promise and _breaks_at_bottom(grid, most) and grid.lower():
            promise = reach(grid, grid.bottom, at_least=most, slack=_SLACK)
        # With a single knob that rises the estimate is complete, where there is a throughput to beat.
        complete = one_knob and most and grid.falls <= _SLACK
        if promise or (not complete and grid.fits(grid.bottom, max(_SLACK, grid.falls))):
            promises[number] = promise
    return promises


def _breaks_at_bottom(grid: Grid, most: float) -> bool:
    """Whether the bottom was tried, breaks a limit, and is good enough that points below it may be, too."""
    tried = grid.tried.get(grid.bottom)
    return tried is not None and tried.throughput >= most and not grid.fits(grid.bottom)


def _may_win(grid: Grid, promise: float, most: float) -> bool:
    """Whether dips as large as those seen can lift the estimate along a single knob to the best throughput."""
    if promise * (1 + _SLACK) < most:
        return False
    dips = grid.dips()
    return promise * (1 + dips.throughput + dips.load) >= most


def _lead(grids: Sequence[Grid], at_least: float) -> tuple[float, Index]:
    """The throughput to beat, and the best point so far; before there is one, the lowest-latency corner."""
    best = min((grid.best for grid in grids if grid.best is not None), default=None)
    return (max(at_least, -best[0]), best[2]) if best else (at_least, grids[0].bottom)


def _lowest(grids: Sequence[Grid], at_least: float) -> int:
    """The position of the grid whose lowest-latency corner has the least, of those that fit the memory if any does.

    Where there is a throughput to beat, which none can, of those whose corner was tried: nothing depends on it.
    """
    tried = [n for n, grid in enumerate(grids) if at_least and grid.bottom in grid.tried] or range(len(grids))
    corners = {number: grids[number](grids[number].bottom) for number in tried}
    return min(corners, key=lambda number: (corners[number].memory > 1.0, corners[number].latency))


def _chosen(results: Mapping[int, Result]) -> int:
    """The position of the best point, or else of the lowest-latency one."""
    won = {n: result.best.outcome for n, result in results.items() if result.best is not None}
    if won:
        return min(won, key=lambda n: (-won[n].throughput, won[n].latency, n))
    return min(results, key=lambda n: ("memory" in results[n].what_binds, results[n].lowest_latency.outcome.latency))


def _with_enumerated(result: Result, enumerated: Mapping[str, int]) -> Result:
    """The enumerated variables in the best and the lowest-latency trial."""

    def full(trial: Trial) -> Trial:
        return replace(trial, point={**trial.point, **enumerated})

    return replace(result, best=full(result.best) if result.best else None, lowest_latency=full(result.lowest_latency))


def pareto(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """The trials that no other beats in both latency and throughput, latency rising; all of them fit the memory."""
    kept: list[Trial] = []
    for trial in sorted(trials, key=lambda t: (t.outcome.latency, -t.outcome.throughput)):
        if not kept or trial.outcome.throughput > kept[-1].outcome.throughput:
            kept.append(trial)
    return tuple(kept)
