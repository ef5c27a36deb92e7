"""Replays of a candidate by several seeds: how many decide whether it keeps the bounds at a rate, and what is known.

Candidates have the same seeds, and so the same requests. Not here: one replay (`exeplan/planner/problems/replays.py`),
and which candidates are replayed (`pipelines.py`).
"""

import math
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from exeplan.core.bounds import utilizations
from exeplan.core.schedule import ROUTERS, Estimate, ReplicaGroup, Schedule, num_devices
from exeplan.forked import forked
from exeplan.planner.problems.problem import Problem
from exeplan.planner.problems.ranking import decided, known_well, mean_estimate, seeds_to_decide
from exeplan.planner.problems.replays import replay_estimate, routed_estimate
from exeplan.planner.problems.replicas import part_of, together
from exeplan.simulator.run import Run

MOST_ADDED = 40_000
"""Requests of further seeds, after which an order may stay uncertain, and the means of one schedule's seeds decide
whether it keeps the bounds."""

TOLD = 0.25
"""How long the replay of a policy that loses is, over that of one that may win."""

_SHORTER = 0.3
"""The same of one of several replicas that share a stream, where the number of requests of a lone one is given."""

_LIKELY = 0.3
"""Seconds that a first replay of several policies at a rate takes, about."""

Asked = tuple[Problem, Schedule, int]
"""The problem of one of so many replicas, the schedule, and their number."""

Replayed = tuple[Run, tuple[Estimate, ...]]
"""The first replay, of several replicas that of the first, and an Estimate by each seed, of all replicas together where
requests come at a rate."""


class Replays:
    """Of one problem of a whole cluster; what was replayed is not replayed again."""

    def __init__(
        self, problem: Problem, *, seed: int, num_requests: int | None, further: bool, one_replica: bool
    ) -> None:
        """`further` seeds may be added; `num_requests` is None for as many as a steady state needs. `one_replica` as
        of the search's effort."""
        self.problem, self.seed, self.num_requests, self.further = problem, seed, num_requests, further
        self.one_replica = one_replica
        self._known: dict[Hashable, Replayed] = {}
        """Searches under other bounds may find the same schedule again."""
        self._begun: dict[Hashable, tuple[Run, Estimate]] = {}
        """By the first seed, of what is to be replayed next."""
        self._told: dict[Hashable, Estimate] = {}
        self._seconds = 0.0
        """That the first replays took which were begun last."""

    def of(self, placed: Problem, schedule: Schedule, *, replicas: int) -> Replayed:
        """By one seed and as many further ones as bounds at a rate need, and as a mean ttft that is known well does;
        `placed` is the problem of one of so many."""
        of = _key(placed, schedule, replicas)
        if of not in self._known:
            if of not in self._begun:
                self.begin((placed, schedule, replicas), [])
            run, first = self._begun.pop(of)
            found, each = [first], len(run.requests) * replicas * self._sharing
            while self._needs_more(found) and (left := MOST_ADDED - (len(found) - 1) * each) > 0:
                last = min(seeds_to_decide(len(found)), len(found) + math.ceil(left / each))
                seeds = range(len(found), last)
                calls = [partial(self._estimate, placed, schedule, replicas, more=more) for more in seeds]
                found += forked(calls, seconds=self._seconds)
            self._known[of] = run, tuple(found)
        return self._known[of]

    def begin(self, first: Asked, losing: Sequence[Asked]) -> None:
        """Replays what is asked for next by its first seed, and at the same time what is told of policies that seem to
        lose."""
        since, new = time.perf_counter(), self._not_told(losing)
        calls: list[Callable[[], Any]] = [partial(self._together, *first), *self._telling(new.values())]
        self._begun[_key(*first)], *told = forked(calls, seconds=_LIKELY)
        self._told |= zip(new, told, strict=True)
        self._seconds = time.perf_counter() - since

    def tell(self, candidates: Sequence[Asked]) -> None:
        """Replays what is told of policies that lose."""
        new = self._not_told(candidates)
        told = forked(self._telling(new.values()), seconds=self._seconds * self._length)
        self._told |= zip(new, told, strict=True)

    @property
    def _length(self) -> float:
        """Of the replay of a policy that loses."""
        return 1.0 if self.problem.arrivals and self.problem.arrivals.of_trace else TOLD

    def _not_told(self, candidates: Sequence[Asked]) -> dict[Hashable, Asked]:
        return {key: one for one in candidates if (key := _key(*one)) not in self._known and key not in self._told}

    def _telling(self, candidates: Iterable[Asked]) -> list[Callable[[], Estimate]]:
        return [partial(self._estimate, *one, length=self._length) for one in candidates]

    def told(self, placed: Problem, schedule: Schedule, *, replicas: int) -> Estimate:
        """What is told of a policy that loses: of its replays where it has any."""
        self.tell([(placed, schedule, replicas)])
        of = _key(placed, schedule, replicas)
        return mean_estimate(self._known[of][1]) if of in self._known else self._told[of]

    def alone(self, placed: Problem, schedule: Schedule, *, more: int = 0, length: float = 1.0) -> tuple[Run, Estimate]:
        """One pipeline, by the `more`-th further seed; `length` is the share of the usual requests."""
        return replay_estimate(
            placed, schedule, seed=self.seed + more, num_requests=self.num_requests, length=length, record_passes=False
        )

    def _needs_more(self, replays: list[Estimate]) -> bool:
        """Whether another seed may decide if the bounds hold at the rate, or tell how long requests wait; a trace comes
        at its own times, always."""
        arrivals = self.problem.arrivals
        if arrivals is None or arrivals.of_trace or not self.further:
            return False
        if seeds_to_decide(len(replays)) == len(replays):
            return False
        if not decided([utilizations(self.problem.bounds, one) for one in replays]):
            return True
        kept = max(utilizations(self.problem.bounds, mean_estimate(replays))) <= 1
        return kept and not known_well(replays)

    def _estimate(
        self, placed: Problem, schedule: Schedule, replicas: int, *, more: int = 0, length: float = 1.0
    ) -> Estimate:
        return self._together(placed, schedule, replicas, more=more, length=length)[1]

    def _together(
        self, placed: Problem, schedule: Schedule, replicas: int, *, more: int = 0, length: float = 1.0
    ) -> tuple[Run, Estimate]:
        """At a rate all replicas behind the router, by the `more`-th further seed."""
        if self._sharing > 1:
            return self._one_of(placed, schedule, more=more, length=length)
        if not self.problem.arrivals or replicas == 1:
            return self.alone(placed, schedule, more=more, length=length)
        if self.one_replica and not self.problem.arrivals.of_trace:
            alone, found = self.alone(placed, schedule, more=more, length=length)
            if max(utilizations(self.problem.bounds, found)) <= 1:
                return alone, together([found], [replicas])
        num_requests = self.num_requests and replicas * self.num_requests
        return self._routed(
            self.problem, placed, schedule, replicas, more=more, num_requests=num_requests, length=length
        )

    @property
    def _sharing(self) -> int:
        """Replicas that share a stream of which the problem's arrivals are the part of one."""
        arrivals = self.problem.arrivals
        return 1 if arrivals is None or arrivals.of_trace else arrivals.sharing

    def _one_of(self, placed: Problem, schedule: Schedule, *, more: int, length: float) -> tuple[Run, Estimate]:
        """One of the replicas that share a stream: all of them behind the router, which makes the streams of each more
        even, and the part of one in what they serve."""
        arrivals, count = self.problem.arrivals, self._sharing
        assert arrivals is not None
        whole = replace(self.problem, arrivals=replace(arrivals, rate=count * arrivals.rate, sharing=1, share=1.0))
        length *= _SHORTER if self.num_requests else 1.0
        run, replayed = self._routed(whole, placed, schedule, count, more=more, num_requests=None, length=length)
        return run, part_of(replayed, 1 / count)

    def _routed(
        self,
        whole: Problem,
        placed: Problem,
        schedule: Schedule,
        replicas: int,
        *,
        more: int,
        num_requests: int | None,
        length: float,
    ) -> tuple[Run, Estimate]:
        """All replicas under the arrivals of the `whole`; the first one's run, and the Estimate of all."""
        size = num_devices(placed.cost.placement)
        devices = tuple(size * number for number in range(replicas))
        group = ReplicaGroup(schedule=schedule, placement=placed.cost.placement, first_devices=devices)
        run, replayed = routed_estimate(
            whole,
            [(placed, group)],
            ROUTERS[0],
            seed=self.seed + more,
            num_requests=num_requests,
            length=length,
            record_passes=False,
        )
        return run.replicas[0], replayed


def _key(placed: Problem, schedule: Schedule, replicas: int) -> Hashable:
    variables = tuple(sorted(schedule.variables.items()))
    return replicas, placed.cost.placement, schedule.policy, schedule.order, variables
