"""The plan for the observed lengths: a safe one, or the one with the lowest latency where none keeps the bound.

    safe             made for a law whose tail is as heavy as the sample allows
    lowest-latency   where no plan keeps the bounds: the best one under the tightest bounds, all wider by one factor,
                     that some plan keeps, so that the bound is missed by as little as possible

Where requests take longer than predicted, plans are made for bounds that are tighter by as much. Not here: whether
moving to the plan pays (`watch.py`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from exeplan.core.batch import BLOCK_SIZE
from exeplan.core.bounds import scaled, share_of_requests, utilizations
from exeplan.core.plan import Plan
from exeplan.core.schedule import Estimate
from exeplan.drift.evidence import tail_within
from exeplan.drift.length_monitor import Observed
from exeplan.errors import Infeasible
from exeplan.planner.choice.optimize import optimize
from exeplan.planner.choice.pipelines import Effort
from exeplan.planner.load_problem import engine_blocks
from exeplan.planner.problems.problem import Problem
from exeplan.planner.problems.replicas import together
from exeplan.simulator.closed_form import steady_state
from exeplan.workload.workload import Workload

STEP = 0.03
"""The precision of the tightest bounds; predictions are not better than that."""
_RIVALS = 0.9
"""A policy whose closed form has less of the best one's throughput is not searched to the end: the active one first."""
_ARRIVING = 3000
"""Requests of a replay with arrivals: a third of those of `exeplan optimize`, as the lengths are less certain too."""
_MOST_STEPS = 128
"""Of the factor: bounds at most 44 times as wide."""
_ASKED = (
    *("model", "profile", "engine", "cluster", "gpus", "replicas", "router"),
    *("max_seqs", "bound", "more_bounds", "deadline"),
)
"""Fields of a plan that state the request and its devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A plan with the requested bounds, and the factor on them that it keeps."""

    plan: Plan
    missed: float = 1.0
    """The tightest bounds that some plan keeps, over the requested ones; 1 where a plan keeps those."""


def best_plan(
    problem: Problem,
    observed: Observed,
    plan: Plan,
    *,
    policies: tuple[str, ...],
    confidence: float,
    slowdown: float = 1.0,
) -> Found:
    """The best plan for the observed law on the devices of the active one, `plan`.

    The problem is that of one replica, and all replicas get its plan, which has the figures of all together and no
    headroom yet. Raises InputError; Infeasible where no plan fits or sustains the rate under any bounds.
    """
    share = share_of_requests(problem.bound.metric) or 0.99
    law = cautious(observed, problem.workload, share=share, confidence=confidence)
    tight = problem.held_to(scaled(problem.bounds, [1 / slowdown] * len(problem.bounds)))
    effort = Effort(
        rivals=_RIVALS, num_requests=_ARRIVING if problem.arrivals else None, close_ones=False, report=False
    )
    own = plan.schedule.policy
    names = (*(name for name in policies if name == own), *(name for name in policies if name != own))

    def make(asked: Problem) -> Plan:
        return optimize(asked, policies=names, advise=False, effort=effort).plan

    try:
        found = Found(plan=make(replace(tight, workload=law)))
    except Infeasible:
        found = tightest(tight, make)
    made = replace(
        found.plan,
        **{name: getattr(plan, name) for name in _ASKED},
        arrival_rate=problem.arrivals.rate * plan.num_replicas if problem.arrivals else None,
        trace_arrivals=False,
        workload=None,
        kv_cache_tokens=_kv_cache_tokens(plan, found.plan, replace(problem, workload=law)),
        estimate=_of_all(found.plan.estimate, plan),
        replay=_of_all(found.plan.replay, plan),
    )
    return replace(found, plan=made)


def _of_all(figures: Estimate | None, plan: Plan) -> Estimate | None:
    return None if figures is None else together([figures], [plan.num_replicas])


def tightest(problem: Problem, make: Callable[[Problem], Plan]) -> Found:
    """What `make` finds under the tightest bounds that it accepts, to within a step, from the problem's own upwards.

    A refusal that names how much wider bounds suffice is followed; else the steps double until a plan is found, and
    the interval is bisected. With an arrival rate the plan may keep tighter bounds than it was made for. Raises the
    first refusal where no plan is found.
    """
    refused, number = -1, 0
    found = first = _attempt(problem, make, number)
    while isinstance(found, Infeasible):
        refused = _refused(number, found)
        number = refused + 1 if found.wider else max(1, 2 * number)
        if number > _MOST_STEPS or math.isinf(problem.limit):
            assert isinstance(first, Infeasible)
            raise first
        found = _attempt(problem, make, number)
    number = _steps(found.missed)
    while number - refused > 1:
        middle = (number + refused) // 2
        tighter = _attempt(problem, make, middle)
        if isinstance(tighter, Infeasible):
            refused = _refused(middle, tighter)
        else:
            found, number = tighter, _steps(tighter.missed)
    return found


def _attempt(problem: Problem, make: Callable[[Problem], Plan], number: int) -> Found | Infeasible:
    factor = (1 + STEP) ** number
    try:
        plan = make(problem.held_to(scaled(problem.bounds, [factor] * len(problem.bounds))))
    except Infeasible as refusal:
        return refusal
    figures = [one for one in (plan.estimate, plan.replay) if one]
    own = max((share for one in figures for share in utilizations(problem.bounds, one)), default=factor)
    return Found(plan=plan, missed=max(1.0, min(factor, own)))


def _refused(number: int, refusal: Infeasible) -> int:
    """The widest bounds, in steps, that a refusal of the bounds of this number covers."""
    return number + max(1, _steps(refusal.wider)) - 1 if refusal.wider else number


def _steps(factor: float) -> int:
    """Steps that make bounds wider by this, rounded up."""
    return math.ceil(math.log(factor) / math.log(1 + STEP) - 1e-9)


def _kv_cache_tokens(plan: Plan, found: Plan, problem: Problem) -> int | None:
    """KV cache of the new plan: that of the engine, where it suffices."""
    there = engine_blocks(plan, problem.profile.model) * BLOCK_SIZE
    if found.placement != plan.placement:
        return found.kv_cache_tokens
    placed = problem.at(found.placement)
    needed = steady_state(found.schedule, placed.workload, placed.cost).kv_tokens
    return there if needed <= there else found.kv_cache_tokens


def cautious(observed: Observed, workload: Workload, *, share: float, confidence: float) -> Workload:
    """The law with a heavier tail, which with this confidence is not exceeded.

    The quantile at `share` becomes a length that the sample supports with this confidence.
    """
    beyond = 1.0 - share
    kept = tail_within(beyond, size=observed.size, confidence=confidence)
    order = np.argsort(workload.outputs, kind="stable")
    tail = np.concatenate([[1.0], 1.0 - np.cumsum(workload.weights[order])])[:-1]  # From this point on.
    in_tail = np.zeros(len(order), bool)
    in_tail[order] = tail <= max(kept, tail[-1]) + 1e-12
    mass = float(workload.weights[in_tail].sum())
    if not 0 < mass < beyond:
        return workload
    factors = np.where(in_tail, beyond / mass, (1 - beyond) / (1 - mass))
    heavier = Workload.of(
        workload.name, inputs=workload.inputs, outputs=workload.outputs, weights=workload.weights * factors
    )
    return replace(heavier, deadlines=workload.deadlines)
