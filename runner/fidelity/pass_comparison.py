"""Why a run took longer, or less, than its plan says: other passes, the machine's speed, or wrong times.

took       seconds of the engine's passes over the predicted seconds of the same passes
others     of that, what other processes took of the core
reference  of that, how much slower the machine was than in the profile, by its reference passes
left       took / others / reference: what the plan itself is wrong by
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from exeplan.arrays import Floats
from exeplan.core.runs.estimators import MOST_BLOCKS, NORMAL_90, figure
from exeplan.core.schedule import Figure
from exeplan.runner.engine.engine import StepRecord
from exeplan.runner.load import EngineRun
from exeplan.simulator.run import PassRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class PassComparison:
    """Ratios of seconds; see the module."""

    num_passes: int
    first_other: int | None
    """The first pass that was not the planned one; those before it are compared. None where all were."""
    took: Figure
    others: float
    reference: float
    left: Figure
    num_reference: int
    reference_share: float
    """Of the run's time that reference passes took; no figure counts it."""

    @property
    def same(self) -> bool:
        return self.first_other is None

    def __str__(self) -> str:
        n = self.num_passes
        what = f"all {n:,} passes as planned" if self.same else f"pass {self.first_other:,} was not the planned one"
        parts = [f"{what}; they took {self.took.value:.2f} times what was predicted"]
        parts += [f"other processes on its cores {self.others:.2f}"] if self.others > 1.005 else []
        if self.num_reference:
            cost = f"{self.num_reference} reference passes, {self.reference_share:.1%} of the time, not counted"
            parts.append(f"the machine's own slowness {self.reference:.2f} ({cost})")
        return ", ".join([*parts, f"left {_interval(self.left)}"])


def compare_passes(run: EngineRun, planned: Sequence[PassRecord], *, one_thread: bool) -> PassComparison | None:
    """The passes of a run against those of its replay, up to the first that differs; None where that is the first.

    In the order of their ends: passes of a pipeline overlap, and each takes from the end of the one before to its own.
    """
    ran = np.flatnonzero([step is not None for step in run.steps])
    steps = [step for step in run.steps if step is not None]
    planned = sorted(planned, key=lambda record: record.end)
    alike = [_alike(step, record) for step, record in zip(steps, planned, strict=False)]
    number = len(alike) if all(alike) else alike.index(False)
    if not number:
        return None
    same = number == len(steps) and (run.cut or number == len(planned))
    predicted = np.diff([record.end for record in planned[:number]], prepend=0.0)

    def each(seconds: Floats) -> Floats:
        return np.diff(np.cumsum(run.apart(seconds))[ran[:number]], prepend=0.0)

    wall = np.diff(run.wall)
    own = np.diff(run.cpu) if one_thread else wall / (run.speed.others if run.speed else 1.0)
    alone = float(each(own).sum() / predicted.sum())
    took = _ratio(each(wall), predicted)
    even = each(run.profile_seconds(one_thread=one_thread))
    left = _ratio(even, predicted, more_error=_speed_error(run, one_thread=one_thread))
    spent = float((wall - run.apart(wall)).sum())
    return PassComparison(
        num_passes=number,
        first_other=None if same else number + 1,
        took=took,
        others=took.value / alone,
        reference=alone / left.value,
        left=left,
        num_reference=len(run.speed.samples) if run.speed else 0,
        reference_share=spent / float(run.wall[-1]),
    )


def _speed_error(run: EngineRun, *, one_thread: bool) -> float:
    if run.speed is None:
        return 0.0
    return run.speed.error if one_thread else math.hypot(run.speed.error, run.speed.others_error)


def _alike(step: StepRecord, planned: PassRecord) -> bool:
    return (step.num_prefill, step.num_decode, step.num_new_tokens) == (
        planned.num_prefill,
        planned.num_decode,
        planned.num_new_tokens,
    )


def _ratio(measured: Floats, predicted: Floats, *, more_error: float = 0.0) -> Figure:
    """Measured over predicted seconds: batch means over blocks of equal predicted time, and another relative error."""
    ratio = float(measured.sum() / predicted.sum())
    until = np.cumsum(predicted)
    blocks = np.minimum((MOST_BLOCKS * (until - predicted) / until[-1]).astype(int), MOST_BLOCKS - 1)
    influences = np.bincount(blocks, measured - ratio * predicted) / predicted.sum()
    found = figure(ratio, influences[np.unique(blocks)], num_observations=len(measured), of="passes")
    if found.low is None or found.high is None:
        return found
    half = math.hypot((found.high - found.low) / 2, NORMAL_90 * more_error * ratio)
    return Figure(value=ratio, low=ratio - half, high=ratio + half, num_observations=len(measured), of="passes")


def _interval(found: Figure) -> str:
    if found.low is None or found.high is None:
        return f"{found.value:.2f} (too few passes for an interval)"
    return f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})"
