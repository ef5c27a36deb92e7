"""Plans side by side on one engine: slices of load in the order A B C C B A, and their replays.

The machine's speed drifts; in this order each plan has the same mean of a drift that is even. A slice is cut after its
seconds, and its replay after as many passes: both are summarized by the same estimator from the same requests, so that
what is between them is the plan's error and the machine's, not the sample's.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from exeplan.core.models.model import ModelSpec
from exeplan.core.plan import Plan
from exeplan.core.profile import Profile
from exeplan.core.runs.estimators import NORMAL_90
from exeplan.core.runs.metrics import summarize
from exeplan.core.schedule import Estimate
from exeplan.planner.load_problem import engine_blocks
from exeplan.policies import load_policy
from exeplan.runner.compute.reference_passes import RepeatedPasses
from exeplan.runner.engine.engine import Engine
from exeplan.runner.engine_process.build import build_engine, engine_setup
from exeplan.runner.fidelity.pass_comparison import PassComparison, compare_passes
from exeplan.runner.load import cut_at, draw_load, play_engine
from exeplan.simulator.cost import CostModel
from exeplan.simulator.replay import replay
from exeplan.workload.workload import Workload

_MORE_REQUESTS = 3.0
"""Over what the plan serves in a slice, so that a fast machine has a backlog as well."""
_LEAST_REQUESTS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Error:
    """Predicted over measured, less 1, with the interval that holds the true one with 90 %; None: too short for one."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """One slice of a plan."""

    predicted: Estimate
    measured: Estimate
    at_profile_speed: Estimate
    """As measured where there are no reference passes."""
    passes: PassComparison | None
    """None where the first pass was not the planned one."""

    @property
    def estimates(self) -> tuple[Estimate, ...]:
        return self.predicted, self.measured, self.at_profile_speed


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A plan and its slices."""

    plan: Plan
    slices: tuple[Slice, ...]
    profile_error: float
    """The standard error of the profile's times, relative, common to all plans of policies that keep finished rows, and
    to those of the others."""

    def mean(self, column: str, figure: str) -> float | None:
        """Of a figure of `predicted`, `measured` or `at_profile_speed`, over the slices in which all three have it.

        None where there is no such slice.
        """
        values = [
            getattr(getattr(one, column), figure)
            for one in self.slices
            if None not in (getattr(estimate, figure) for estimate in one.estimates)
        ]
        return sum(values) / len(values) if values else None

    def error(self, figure: str, *, column: str = "at_profile_speed") -> Error | None:
        """Of `throughput` or a time; its interval is that of the seconds that passes took, and of the profile's."""
        predicted, measured = self.mean("predicted", figure), self.mean(column, figure)
        if not predicted or not measured:
            return None
        ratio = predicted / measured
        half = self._half(column)
        if half is None:
            return Error(value=ratio - 1, low=None, high=None)
        return Error(value=ratio - 1, low=ratio * (1 - half) - 1, high=ratio * (1 + half) - 1)

    def sustained(self) -> float:
        """Requests/s at the speed of the profile in a run without end: the plan's own, less the error of the slices.

        The slices are short samples; their replays are of the same requests, so that only the error is left.
        """
        planned = self.plan.replay or self.plan.estimate
        assert planned is not None
        error = self.error("throughput")
        return planned.throughput / (1 + error.value) if error else 0.0

    def half_interval(self, column: str = "at_profile_speed") -> float | None:
        """Half the relative interval of the mean over the slices, without the profile's error; None: too short."""
        squares = []
        for one in self.slices:
            found = one.passes and (one.passes.left if column == "at_profile_speed" else one.passes.took)
            if not found or found.low is None or found.high is None:
                return None
            squares.append(((found.high - found.low) / 2 / found.value) ** 2)
        return math.sqrt(sum(squares)) / len(squares)

    def _half(self, column: str) -> float | None:
        own = self.half_interval(column)
        return None if own is None else math.hypot(own, NORMAL_90 * self.profile_error)


def differ(one: Measured, other: Measured) -> bool | None:
    """Whether what the two sustain is apart by more than the intervals of both; None where one has none, or served
    nothing."""
    halves, rates = [m.half_interval() for m in (one, other)], [m.sustained() for m in (one, other)]
    if None in halves or not all(rates):
        return None
    gap = abs(math.log(rates[0] / rates[1]))
    return gap > math.hypot(*(half for half in halves if half is not None))


def play_interleaved(
    plans: Sequence[Plan],
    *,
    spec: ModelSpec,
    profile: Profile,
    workload: Workload,
    seconds: float,
    seed: int = 0,
    on_slice: Callable[[int, int, Plan], None] = lambda number, of, plan: None,
) -> list[Measured]:
    """Runs each plan twice for these seconds, on one engine that is loaded once, in this process.

    The plans are of one device. Calls `on_slice` before each. Raises InputError where the model cannot be loaded.
    """
    order = [*range(len(plans)), *reversed(range(len(plans)))]
    found: list[list[Slice]] = [[] for _ in plans]
    largest = max(plans, key=lambda plan: engine_blocks(plan, spec))
    engine = build_engine(engine_setup(largest, spec))
    try:
        reference = engine.reference_passes(profile.reference_passes)
        for number, index in enumerate(order):
            plan = plans[index]
            on_slice(number, len(order), plan)
            engine.switch_plan(plan.schedule, num_blocks=engine_blocks(plan, spec))
            draw = seed + len(found[index])
            found[index].append(
                _slice(engine, plan, spec, profile, workload, seconds=seconds, seed=draw, reference=reference)
            )
    finally:
        engine.close()
    return [
        Measured(plan=plan, slices=tuple(slices), profile_error=_profile_error(profile, plan))
        for plan, slices in zip(plans, found, strict=True)
    ]


def _profile_error(profile: Profile, plan: Plan) -> float:
    return profile.error_of(keeps_finished_rows=load_policy(plan.schedule.policy).KEEPS_FINISHED_ROWS)


def _slice(
    engine: Engine,
    plan: Plan,
    spec: ModelSpec,
    profile: Profile,
    workload: Workload,
    *,
    seconds: float,
    seed: int,
    reference: RepeatedPasses | None,
) -> Slice:
    load = draw_load(workload, _num_requests(plan, seconds), seed=seed)
    run = play_engine(engine, load, vocab_size=spec.vocab_size, reference=reference, seconds=seconds)
    planned = replay(
        plan.schedule,
        CostModel(profile, plan.placement),
        input_tokens=load.input_tokens,
        output_tokens=load.output_tokens,
        num_blocks=engine_blocks(plan, spec),
    )
    num_passes = sum(step is not None for step in run.steps)
    until = planned.passes[min(num_passes, len(planned.passes)) - 1].end
    one_thread = plan.num_threads == 1 and (plan.device or "cpu") == "cpu"
    bounds = tuple(filter(None, (plan.bound, *plan.more_bounds)))
    summary = partial(summarize, p99_output=workload.output_quantile(0.99), bounds=bounds)
    even = run.profile_seconds(one_thread=one_thread) if run.speed else np.diff(run.wall)
    measured = (
        summary(run.on_clock(seconds), until=run.end(seconds) if run.cut else math.inf)
        for seconds in (np.diff(run.wall), even)
    )
    return Slice(
        predicted=summary(cut_at(planned.requests, until), until=until) if run.cut else summary(planned.requests),
        measured=next(measured),
        at_profile_speed=next(measured),
        passes=compare_passes(run, planned.passes, one_thread=one_thread),
    )


def _num_requests(plan: Plan, seconds: float) -> int:
    assert plan.estimate is not None
    return max(_LEAST_REQUESTS, round(_MORE_REQUESTS * plan.estimate.throughput * seconds))
