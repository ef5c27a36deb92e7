"""The reference for a search: the best points of a policy by exhaustive search, or by a random draw of all points; and
what a search lost against it."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from exeplan.core.schedule import Placement, Schedule
from exeplan.planner.choice.search_space import Variant, variants
from exeplan.planner.problems.problem import Problem
from exeplan.policies import load_policy
from exeplan.policies.interface import Policy
from exeplan.search.grid import Grid, Index, Limits, Outcome
from exeplan.search.search import Result

ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Referee:
    """Outcomes, which do not depend on the bound."""

    whole: bool
    """Everything that may fit the memory was tried."""
    points: int
    """That may fit the memory, each another schedule."""
    outcomes: list[Outcome]

    def best(self, bound: float) -> float:
        """The most throughput within the bound and the memory; 0 where nothing keeps both."""
        return max((o.throughput for o in self.outcomes if o.latency <= bound and o.memory <= 1), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """On what a search found, next to the most throughput that the reference has within the limits."""

    found: float
    """Its throughput, also where it breaks a limit; 0 where there is none."""
    best: float
    """0 where the reference has nothing within the limits."""
    broken: tuple[str, ...]
    """Of 'latency' and 'memory': the limits that the point found breaks."""

    @property
    def loss(self) -> float:
        """Of the best throughput: 1 where nothing was found or a limit is broken, below 0 where more was found, and -1
        where the reference has nothing."""
        if self.broken:
            return 1.0
        if not self.best:
            return -1.0 if self.found else 0.0
        return 1 - self.found / self.best

    @property
    def said(self) -> str:
        """For a line of the benchmark."""
        if self.broken:
            return f"loss 100 %: it breaks the limit of {' and '.join(self.broken)}"
        if self.loss < -ROUNDING:
            return f"{-100 * self.loss:.3g} % above the reference"
        nothing = ": nothing is found within the limits" if self.best and not self.found else ""
        return f"loss {100 * max(0.0, self.loss):.3g} %{nothing}"


def judged(
    problem: Problem, policy: str, searched: tuple[Result, Placement] | None, *, best: float, bound: float
) -> Verdict:
    """The point that `search_variants` found is evaluated anew, on its placement, and must keep bound and memory."""
    if searched is None or searched[0].best is None:
        return Verdict(found=0.0, best=best, broken=())
    placed = problem.at(searched[1]) if problem.cluster else problem
    outcome = placed.evaluate(load_policy(policy).schedule(searched[0].best.point, problem.workload))
    return Verdict(found=outcome.throughput, best=best, broken=Limits(bound, 1.0).broken(outcome))


def counts(losses: Sequence[float]) -> tuple[int, int]:
    """How many cases have the best throughput of the reference, and how many have more: values between the listed ones
    may be better."""
    return sum(abs(loss) <= ROUNDING for loss in losses), sum(loss < -ROUNDING for loss in losses)


def referee(problem: Problem, policy: str, *, most: float = math.inf, drawn: int = 0) -> Referee:
    """Tries all points that may fit the memory, or `drawn` random ones where there are more than `most`.

    They are drawn evenly over the variants, and over the logarithm of each control variable's position.
    """
    module = load_policy(policy)
    knobs = module.knobs(problem.workload, problem.max_seqs)
    lines = []
    for variant in variants(problem, module):
        grid = variant.grid(module, knobs, Limits(math.inf, 1.0))
        lines.append((grid, min(_fitting(grid), _different(grid, variant, module))))
    points = sum(line * math.prod(grid.shape[1:]) for grid, line in lines)
    found = _all(lines) if points <= most else _draws([(grid, line) for grid, line in lines if line], drawn)
    return Referee(whole=points <= most, points=points, outcomes=[grid(index) for grid, index in found])


def _fitting(grid: Grid) -> int:
    """Values of the first knob with which anything fits the memory, which rises with every knob."""
    low, high = 0, grid.shape[0]
    while low < high:
        middle = (low + high) // 2
        fits = grid((middle, *grid.bottom[1:])).memory <= 1
        low, high = (middle + 1, high) if fits else (low, middle)
    return low


def _different(grid: Grid, variant: Variant, policy: Policy) -> int:
    """Values of the first knob up to the last that changes the schedule: another variable may limit it."""

    def schedule(value: int) -> Schedule:
        variables = {**grid.point((value, *grid.bottom[1:])), **variant.enumerated}
        return policy.schedule(variables, variant.problem.workload)

    low, high = 0, grid.top[0]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if schedule(middle) == schedule(grid.top[0]) else (middle + 1, high)
    return low + 1


def _all(lines: list[tuple[Grid, int]]) -> Iterator[tuple[Grid, Index]]:
    for grid, line in lines:
        for index in itertools.product(range(line), *map(range, grid.shape[1:])):
            yield grid, index


def _draws(lines: list[tuple[Grid, int]], drawn: int) -> Iterator[tuple[Grid, Index]]:
    rng = np.random.default_rng(0)
    for _ in range(drawn):
        grid, line = lines[rng.integers(len(lines))]
        yield grid, tuple(int(n ** rng.random()) - 1 for n in (line, *grid.shape[1:]))
