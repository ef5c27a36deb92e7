"""The measurements that a plan for several devices needs beyond one device: shards, links, control and bursts.

Each step gets its share of the remaining time and is written at once, so that an interrupted run resumes with the steps
that its file lacks.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from exeplan.core.models.model import ModelSpec
from exeplan.core.profile import Measurement, Profile, save_profile
from exeplan.errors import InputError
from exeplan.profiler.measuring.campaign import Goal, measured_points, num_copies
from exeplan.profiler.measuring.measure import Rig
from exeplan.profiler.measuring.points import Range, Work, powers
from exeplan.profiler.multi_device.control import control_rows
from exeplan.profiler.multi_device.links import link_rows
from exeplan.profiler.multi_device.rank_job import RankJob
from exeplan.profiler.multi_device.shards import (
    Silent,
    expert_degrees,
    shard_rows,
    shard_work,
    shared_degrees,
    time_the_busiest,
)
from exeplan.profiler.multi_device.worker_passes import WORKER_SLOTS, WorkerPlan, pass_rows, remark
from exeplan.progress import Progress
from exeplan.runner.compute.reference_passes import with_own_weights

ONE_DEVICE_SHARE = 0.5
"""Share of the budget for the single-device part of a multi-device profile."""


class MeasuringStep(NamedTuple):
    """Rows of one op at one tensor-parallel size."""

    name: str
    op: str
    size: int
    weight: float
    """Its share of the time, relative to the other steps."""
    measure: Callable[[Profile, float], tuple[Measurement, ...]]
    """Called with the profile so far and the seconds that it may take."""
    parts: int = 1
    """Of whole experts (`Sharding`)."""

    def is_in(self, profile: Profile) -> bool:
        rows = ((m.op, m.tensor_parallel_size, m.expert_parallel_size) for m in profile.measurements)
        return (self.op, self.size, self.parts) in rows


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiDeviceProfiler:
    """Extends a single-device profile to `num_devices` devices of the same kind."""

    num_devices: int
    work: Work
    reach: Range
    device: str
    dummy_weights: bool

    def extend(self, profile: Profile, *, goal: Goal, output: Path, bar: Progress, complete: bool = True) -> Profile:
        """The whole profile, also written to `output`, `complete` unless more is to come.

        Bursts are measured anew where a run is resumed: their factor is over parts, which have changed since.
        Raises KeyboardInterrupt with a sentence on interruption.
        """
        profile = replace(profile, measurements=tuple(m for m in profile.measurements if m.op != "pass"))
        left = [part for part in self._parts() if not part.is_in(profile)]
        try:
            while left:
                seconds = max(goal.budget_seconds - goal.elapsed, 0.0)
                bar.round(left[0].name)
                bar.update(goal.elapsed / goal.budget_seconds, seconds, left[0].name)
                rows = left[0].measure(profile, seconds * left[0].weight / sum(part.weight for part in left))
                if left[0].op == "pass":
                    bar.note(f"{left[0].name}: {remark(rows)}")
                del left[0]
                profile = replace(profile, measurements=(*profile.measurements, *rows))
                save_profile(profile, output)
        except KeyboardInterrupt:
            names = ", ".join(part.name for part in left)
            raise KeyboardInterrupt(
                f"stopped; {output} lacks {names}, and the same command resumes from there"
            ) from None
        profile = replace(profile, complete=complete)
        save_profile(profile, output)
        bar.note(f"{self.num_devices} devices: {len(profile.measurements)} measurements in {goal.elapsed:.0f} s")
        return profile

    def _parts(self) -> list[MeasuringStep]:
        degrees = shared_degrees(self.work.spec, self.num_devices)
        return [
            *(MeasuringStep(f"shards of {t}", "rest", t, 3.0, partial(self._shard, t)) for t in degrees),
            *(
                MeasuringStep(f"experts divided among {t}", "rest", t, 2.0, partial(self._experts, t), parts=t)
                for t in expert_degrees(self.work.spec, degrees)
            ),
            *(
                MeasuringStep(f"sums of {t}", "all_reduce", t, 1.0, partial(self._link, "all_reduce", t))
                for t in degrees
            ),
            MeasuringStep("sends", "send", 1, 0.5, partial(self._link, "send", 2)),
            MeasuringStep("control", "control", 1, 1.0, partial(self._control, degrees)),
            *(MeasuringStep(f"bursts of {t}", "pass", t, 3.0, partial(self._pass, t)) for t in self._shared(degrees)),
        ]

    def _experts(self, size: int, known: Profile, seconds: float) -> tuple[Measurement, ...]:
        """Rows of a layer whose routed experts are whole ones, on the rank to which most tokens go; its attention and
        what is around the layers is as with all experts cut."""
        rows = self._shard(size, known, seconds, whole_experts=True)
        return tuple(replace(row, expert_parallel_size=size) for row in rows if row.op == "rest")

    def _shard(
        self, size: int, known: Profile, seconds: float, *, whole_experts: bool = False
    ) -> tuple[Measurement, ...]:
        work = shard_work(self.work, size)
        rig = Rig(
            self.work.spec,
            dtype=work.dtype,
            kv_dtype=work.kv_dtype,
            device=self.device,
            copies=num_copies(work),
            num_blocks=self.reach.num_blocks,
            dummy_weights=self.dummy_weights,
            group=Silent(size),
            whole_experts=whole_experts,
        )
        if whole_experts:
            time_the_busiest(rig.probe.model, size)
        points = measured_points(m for m in known.measurements if m.tensor_parallel_size == 1)
        reference = None
        if known.reference_passes:
            # The whole model's, as those that the profile's seconds are of.
            reference = with_own_weights(
                self.work.spec, known.reference_passes, dtype=known.dtype, kv_dtype=known.cache_dtype
            )
        return shard_rows(rig, work, self.reach, more=points, size=size, seconds=seconds, reference=reference)

    def _link(self, op: str, size: int, known: Profile, seconds: float) -> tuple[Measurement, ...]:
        longest = self.reach.max_prompt
        return link_rows(
            RankJob(
                op=op,
                size=size,
                spec=self.work.spec,
                dtype=self.work.dtype,
                device=self.device,
                num_threads=torch.get_num_threads(),
                num_tokens=(*powers(1, longest, 4), longest),
                seconds=seconds,
            )
        )

    def _shared(self, degrees: tuple[int, ...]) -> tuple[int, ...]:
        """Degrees at which workers run bursts: CPUs share their memory and caches, GPUs do not."""
        return (1, *degrees) if torch.device(self.device).type == "cpu" else ()

    def _pass(self, size: int, known: Profile, seconds: float) -> tuple[Measurement, ...]:
        spec, devices = self.work.spec, range(self.num_devices)
        stages = [tuple(range(size))] if size > 1 else [(number,) for number in devices[: spec.num_layers]]
        longest = min(self.reach.max_prompt, spec.max_context)
        slots = sorted({min(number, self.reach.max_seqs) for number in WORKER_SLOTS})
        plans = [WorkerPlan(spec=spec, stages=stages, slots=number, longest=longest) for number in slots]
        return pass_rows(known, plans, num_threads=torch.get_num_threads(), seconds=seconds)

    def _control(self, degrees: tuple[int, ...], known: Profile, seconds: float) -> tuple[Measurement, ...]:
        spec, most = self.work.spec, self.reach.max_seqs
        pipeline = [(number,) for number in range(min(self.num_devices, spec.num_layers))]
        return control_rows(
            spec,
            stages=[tuple(range(degrees[-1]))] if degrees else pipeline,
            dtype=self.work.dtype,
            kv_dtype=self.work.kv_dtype,
            device=self.device,
            num_threads=torch.get_num_threads(),
            num_seqs=(*powers(1, most, 4), most),
            seconds=seconds,
        )


def check_num_devices(spec: ModelSpec, num_devices: int, place: torch.device, num_threads: int) -> str:
    """A remark on that number of devices, '' for none. Raises InputError where the machine or the model lacks them."""
    if num_devices < 1:
        raise InputError(f"a profile is of at least one device, found {num_devices}")
    if num_devices > 1 and spec.num_layers < 2 and not shared_degrees(spec, num_devices):
        raise InputError(f"{spec.name} has one layer, whose heads cannot be shared by {num_devices} devices")
    if place.type == "cuda":
        if num_devices > torch.cuda.device_count():
            raise InputError(f"{num_devices} devices were asked for, this machine has {torch.cuda.device_count()} GPUs")
        return ""
    cores = os.cpu_count() or 1
    if num_devices > 1 and num_devices * num_threads > cores:
        return (
            f"{num_devices} devices of {num_threads} threads share {cores} cores: they are slower at once than alone, "
            "and times between them say little"
        )
    return ""
