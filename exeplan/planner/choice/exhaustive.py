"""How long an exhaustive search takes, said before it starts, and how far a search of either kind is.

Every point of every variant is evaluated; a few hundred of them, spread over all, are timed first. Not here: the search
(`search_space.py`).
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from exeplan.planner.choice.candidates import num_workers
from exeplan.planner.choice.search_progress import SearchProgress
from exeplan.planner.choice.search_space import Variant, variants
from exeplan.planner.problems.problem import Problem
from exeplan.policies import load_policy
from exeplan.policies.interface import Knob, Policy
from exeplan.progress import Told, show_left

_TIMED = 300
"""Points that are timed, at most."""
_TIMED_SECONDS = 2.0
"""Seconds for that, at most."""
_WORTH_WARNING = 2.0
"""Seconds from which the estimate is shown."""


@dataclass(frozen=True, slots=True)
class _Group:
    """The variants of one policy on pipelines of one size: all have the same knobs."""

    policy: Policy
    knobs: tuple[Knob, ...]
    variants: tuple[Variant, ...]

    @property
    def num_points(self) -> int:
        return len(self.variants) * math.prod(len(knob.values) for knob in self.knobs)


def search_progress(
    problem: Problem, parts: Mapping[int, Problem], policies: Sequence[str], method: str, told: Told
) -> SearchProgress:
    """The progress of these searches. Warns first of an exhaustive one that takes long."""
    if method != "exhaustive":
        return SearchProgress(told, tuple(parts), policies)
    groups = groups_of(parts, policies)
    num_points = sum(group.num_points for group in groups)
    seconds = seconds_of(groups, num_points) / num_workers(problem, policies)
    if seconds >= _WORTH_WARNING:
        told.note(
            f"exhaustive search of {num_points:,} points, about {show_left(seconds)}; branch-and-bound, the default, "
            "needs a small part of them; --policy, --max-num-seqs or --one-pipeline leave fewer"
        )
    return SearchProgress(told, tuple(parts), policies, all_points=num_points)


def groups_of(parts: Mapping[int, Problem], policies: Sequence[str]) -> list[_Group]:
    found = []
    for name in policies:
        policy = load_policy(name)
        for part in parts.values():
            if listed := tuple(variants(part, policy)):
                found.append(_Group(policy, tuple(policy.knobs(part.workload, part.max_seqs)), listed))
    return found


def seconds_of(
    groups: Sequence[_Group], num_points: int, *, seed: int = 0, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds of all points on one core, by a sample in which every point is equally likely."""
    if not groups:
        return 0.0
    draw = np.random.default_rng(seed)
    chances = np.array([group.num_points for group in groups]) / num_points
    began, timed = clock(), 0
    for number in draw.choice(len(groups), size=min(_TIMED, num_points), p=chances).tolist():
        group = groups[number]
        variant = group.variants[draw.integers(len(group.variants))]
        point = {knob.name: knob.values[draw.integers(len(knob.values))] for knob in group.knobs}
        variant.problem.evaluate(group.policy.schedule({**point, **variant.enumerated}, variant.problem.workload))
        timed += 1
        if clock() - began > _TIMED_SECONDS:
            break
    return (clock() - began) / timed * num_points
