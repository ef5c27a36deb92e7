"""Replays of a candidate by several seeds: how many decide whether it keeps the bounds at a rate, and what is known.

Candidates have the same seeds, and so the same requests. Not here: one replay (`exeplan/planner/problems/replays.py`),
and which candidates are replayed (`pipelines.py`).
"""

from collections.abc import Hashable

from exeplan.core.bounds import utilizations
from exeplan.core.schedule import ROUTERS, Estimate, ReplicaGroup, Schedule, num_devices
from exeplan.planner.problems.problem import Problem
from exeplan.planner.problems.ranking import MOST_SEEDS, decided, mean_estimate
from exeplan.planner.problems.replays import replay_estimate, routed_estimate
from exeplan.simulator.run import Run

MOST_ADDED = 40_000
"""Requests of further seeds, after which an order may stay uncertain, and the means of one schedule's seeds decide
whether it keeps the bounds."""

_TOLD = 0.25
"""How long the replay of a policy that loses is, over that of one that may win."""

Replayed = tuple[Run, tuple[Estimate, ...]]
"""The first replay, of several replicas that of the first, and an Estimate by each seed, of all replicas together where
requests come at a rate."""


class Replays:
    """Of one problem of a whole cluster; what was replayed is not replayed again."""

    def __init__(self, problem: Problem, *, seed: int, num_requests: int | None, further: bool) -> None:
        """`further` seeds may be added; `num_requests` is None for as many as a steady state needs."""
        self.problem, self.seed, self.num_requests, self.further = problem, seed, num_requests, further
        self._known: dict[Hashable, Replayed] = {}
        """Searches under other bounds may find the same schedule again."""
        self._told: dict[Hashable, Estimate] = {}

    def of(self, placed: Problem, schedule: Schedule, *, replicas: int) -> Replayed:
        """By one seed and as many further ones as bounds at a rate need; `placed` is the problem of one of so many."""
        of = _key(placed, schedule, replicas)
        if of not in self._known:
            run, first = self._together(placed, schedule, replicas)
            found, added = [first], 0
            while len(found) < MOST_SEEDS and added < MOST_ADDED and self._needs_more(found):
                another, replayed = self._together(placed, schedule, replicas, more=len(found))
                found.append(replayed)
                added += len(another.requests) * replicas
            self._known[of] = run, tuple(found)
        return self._known[of]

    def told(self, placed: Problem, schedule: Schedule, *, replicas: int) -> Estimate:
        """What is told of a policy that loses: its replays where it has any, else a shorter one."""
        of = _key(placed, schedule, replicas)
        if of in self._known:
            return mean_estimate(self._known[of][1])
        if of not in self._told:
            of_trace = self.problem.arrivals is not None and self.problem.arrivals.of_trace
            _, self._told[of] = self._together(placed, schedule, replicas, length=1.0 if of_trace else _TOLD)
        return self._told[of]

    def alone(self, placed: Problem, schedule: Schedule, *, more: int = 0, length: float = 1.0) -> tuple[Run, Estimate]:
        """One pipeline, by the `more`-th further seed; `length` is the share of the usual requests."""
        return replay_estimate(
            placed, schedule, seed=self.seed + more, num_requests=self.num_requests, length=length, record_passes=False
        )

    def _needs_more(self, replays: list[Estimate]) -> bool:
        """Whether another seed may decide if the bounds hold at the rate; a trace comes at its own times, always."""
        arrivals = self.problem.arrivals
        if arrivals is None or arrivals.of_trace or not self.further:
            return False
        return not decided([utilizations(self.problem.bounds, one) for one in replays])

    def _together(
        self, placed: Problem, schedule: Schedule, replicas: int, *, more: int = 0, length: float = 1.0
    ) -> tuple[Run, Estimate]:
        """At a rate all replicas behind the router, by the `more`-th further seed."""
        if not self.problem.arrivals or replicas == 1:
            return self.alone(placed, schedule, more=more, length=length)
        size = num_devices(placed.cost.placement)
        devices = tuple(size * number for number in range(replicas))
        group = ReplicaGroup(schedule=schedule, placement=placed.cost.placement, first_devices=devices)
        num_requests = self.num_requests and replicas * self.num_requests
        run, replayed = routed_estimate(
            self.problem,
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
