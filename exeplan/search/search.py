"""search(): the point of a grid with the most throughput whose latency and memory stay within their limits.

It knows boxes, not policies: a policy's control variables are knobs, a schedule's estimate is an outcome. Throughput,
latency and memory are expected to rise with every knob; `branch_and_bound` says what follows where they do not.
'exhaustive' is the referee and relies on nothing, 'bayesian' is there to compare with. Choosing among policies is the
caller's.
"""

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from exeplan.errors import InputError
from exeplan.policies.interface import Knob
from exeplan.search.branch_and_bound import Found, branch_and_bound
from exeplan.search.grid import Grid, Index, Limits, Outcome, Slack

METHODS = ("branch-and-bound", "exhaustive", "bayesian")

__all__ = ["METHODS", "Outcome", "Result", "Trial", "search", "search_grid"]


@dataclass(frozen=True, slots=True)
class Trial:
    """A point that was tried, as knob values by name."""

    point: Mapping[str, int]
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a search found, and how sure that is."""

    best: Trial | None
    """None when no point tried keeps both limits."""
    lowest_latency: Trial
    """The lower-left corner, or a point tried with less latency still: the least of those that fit the memory."""
    what_binds: tuple[str, ...]
    """Of 'latency' and 'memory': the limits that one step more of any of the winner's knobs breaks, or those that the
    lowest-latency point breaks if there is no winner."""
    frontier: tuple[Trial, ...]
    """Points tried that fit the memory and have more throughput than all with less latency; by latency."""
    num_points: int
    """Points evaluated, each once."""
    grid_size: int
    seconds: float
    gap: float | None
    """(largest throughput that what was left out could hold - best) / best, if nothing dips more than `dips` says; an
    estimate where some of these are `uncounted`. None when the method proves nothing or nothing was found."""
    dips: Slack | None
    """How far throughput and load were seen to fall while a knob rose; None when the method does not look."""
    uncounted: Slack | None
    """Of the dips those that the gap does not count, as they exceed the tolerance or what points were left for; 0 where
    it counts them."""


def search(
    knobs: Sequence[Knob],
    evaluate: Callable[[Mapping[str, int]], Outcome],
    *,
    bound: float,
    capacity: float,
    method: str = "branch-and-bound",
    at_least: float = 0.0,
    tolerance: Slack = Slack(throughput=0.02, load=0.02),  # noqa: B008 (frozen)
    budget: int | None = None,
    seed: int = 0,
) -> Result:
    """The best point with latency <= bound and memory <= capacity; ties go to the least latency, then the first point.

    Points of less throughput than `at_least`, which another grid may offer already, need not be found.
    `tolerance` is how far throughput and load (the fuller limit's share in use) may fall while a knob rises without
    leaving the gap's promise. `budget` is the number of trials of 'bayesian' (200 by default), and for branch and bound
    the points after which it splits no more boxes (20,000 by default). The same input gives the same result. Raises
    InputError for an unknown method.
    """
    grid = Grid(knobs, evaluate, Limits(bound, capacity), at_least)
    return search_grid(grid, method=method, tolerance=tolerance, budget=budget, seed=seed)


def search_grid(
    grid: Grid,
    *,
    method: str = "branch-and-bound",
    tolerance: Slack = Slack(throughput=0.02, load=0.02),  # noqa: B008 (frozen)
    budget: int | None = None,
    seed: int = 0,
    thorough: bool = True,
) -> Result:
    """`search` on a grid of which some points may have been tried; with fewer trials for dips if not `thorough`."""
    if method not in METHODS:
        raise InputError(f"no search method '{method}'; there are {', '.join(METHODS)}")
    start = time.perf_counter()
    grid(grid.bottom)
    gap: float | None = None
    found: Found | None = None
    if method == "exhaustive":
        gap = 0.0
        for index in itertools.product(*map(range, grid.shape)):
            grid(index)
    elif method == "bayesian":
        from exeplan.search.bayesian import sample

        sample(grid, num_trials=budget or 200, seed=seed)
    else:
        grid.lower()
        found = branch_and_bound(grid, tolerance, budget or 20_000, thorough=thorough)
        gap = found.gap
    return _result(grid, gap, found, time.perf_counter() - start)


def _result(grid: Grid, gap: float | None, found: Found | None, seconds: float) -> Result:
    def trial(index: Index) -> Trial:
        return Trial(grid.point(index), grid.tried[index])

    num_points = len(grid.tried)
    winner = grid.best[2] if grid.best else None
    return Result(
        best=trial(winner) if winner is not None else None,
        lowest_latency=trial(grid.lowest_latency()),
        what_binds=_what_binds(grid, winner),
        frontier=tuple(trial(index) for index in grid.frontier()),
        num_points=num_points,
        grid_size=math.prod(grid.shape),
        seconds=seconds,
        gap=gap if winner is not None else None,
        dips=found.dips if found else None,
        uncounted=found.uncounted if found else None,
    )


def _what_binds(grid: Grid, winner: Index | None) -> tuple[str, ...]:
    """The limits broken by one step more of any knob, or by the lowest-latency point if there is no winner."""
    if winner is None:
        return grid.limits.broken(grid(grid.lowest_latency()))
    steps = [(*winner[:k], winner[k] + 1, *winner[k + 1 :]) for k in range(len(winner))]
    broken = {limit for step in steps if step in grid for limit in grid.limits.broken(grid(step))}
    return tuple(sorted(broken))
