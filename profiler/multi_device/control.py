"""Control: the time of an iteration beyond its parts where worker processes run it, measured on real engines.

With one batch in flight nothing computes between the end of its last stage and the start of the next batch: the tokens
go to the engine, it schedules, and its message goes to the workers. An in-process engine does the same without
messages, and a profile's `overhead` contains that, so it is subtracted here. Both are read from engine timelines.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from exeplan.core.batch import BLOCK_SIZE, num_blocks_for
from exeplan.core.models.model import ModelSpec
from exeplan.core.plan import Plan
from exeplan.core.profile import Measurement
from exeplan.core.schedule import Schedule
from exeplan.planner.problems.layouts import placed
from exeplan.runner.compute.device import local_device
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.tokens.sampling import SamplingParams
from exeplan.runner.compute.warm_up import warm_up_runner
from exeplan.runner.engine.async_executor import AsyncExecutor
from exeplan.runner.engine.engine import Engine, Request
from exeplan.runner.engine.executor import InProcessExecutor
from exeplan.runner.engine.timeline import TimelineFile, read_events
from exeplan.runner.engine.tokenizer import Tokenizer
from exeplan.runner.engine_process.build import build_engine, engine_setup, warm_up
from exeplan.runner.ipc.messages import EngineSetup
from exeplan.scheduling.largest_passes import most_rows

_LAYERS = 4
"""Layers of a stage: enough that idle processes sleep as deeply as with a whole model."""
_PROMPT, _STEPS = 8, 24
_ROUNDS = 6
"""Upper limit; fewer when the time is up."""
_LEAST_SECONDS = 1e-7


def control_rows(
    spec: ModelSpec,
    *,
    stages: Sequence[tuple[int, ...]],
    dtype: str,
    kv_dtype: str | None = None,
    device: str,
    num_threads: int,
    num_seqs: Sequence[int],
    seconds: float,
) -> tuple[Measurement, ...]:
    """Rows of an engine whose stages are on these devices."""
    ended = time.monotonic() + seconds
    plan = Plan(
        model=spec.name,
        schedule=Schedule("orca", {"max_num_seqs": max(num_seqs)}),
        placement=(),
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=device,
        num_threads=num_threads,
        kv_cache_tokens=max(num_seqs) * num_blocks_for(_PROMPT + _STEPS) * BLOCK_SIZE,
    )
    together: dict[int, list[float]] = {rows: [] for rows in num_seqs}
    alone: dict[int, list[float]] = {rows: [] for rows in num_seqs}
    with _watched(plan, spec, stages) as workers, _watched(plan, spec, [(0,)]) as local:
        for number in range(_ROUNDS):
            if number and time.monotonic() > ended:
                break
            for rows in num_seqs:
                together[rows] += workers.gaps(rows)
                alone[rows] += local.gaps(rows)
    return tuple(_row(rows, together[rows], alone[rows]) for rows in num_seqs)


def _row(num_seqs: int, together: Sequence[float], alone: Sequence[float]) -> Measurement:
    beyond = statistics.median(together) - statistics.median(alone)
    low, _, high = statistics.quantiles(together, n=4)
    seconds = max(beyond, _LEAST_SECONDS)
    return Measurement(
        op="control",
        num_seqs=num_seqs,
        seconds=float(f"{seconds:.4g}"),
        spread=float(f"{(high - low) / 2 / seconds:.3g}"),
        repeats=len(together),
    )


@dataclass(frozen=True, slots=True)
class _Watched:
    """An engine and its timeline file."""

    engine: Engine
    timeline: Path
    num_stages: int

    def gaps(self, num_seqs: int) -> list[float]:
        """Seconds between consecutive passes of a batch of `num_seqs` decode rows."""
        before = len(self._passes(self.num_stages - 1))
        for index in range(num_seqs):
            sampling = SamplingParams(temperature=0.0, max_tokens=_STEPS, ignore_eos=True)
            self.engine.add(Request(request_id=f"{index}", prompt_token_ids=[0] * _PROMPT, sampling=sampling))
        while self.engine.has_work:
            self.engine.step()
        first, last = (self._passes(stage)[before:] for stage in (0, self.num_stages - 1))
        return [
            (after["ts"] - end["ts"] - end["dur"]) * 1e-6
            # Stages report independently: the latest pass of the first stage may not have arrived.
            for (begin, end), (after, _) in pairwise(zip(first, last, strict=False))
            if len(begin["args"]["decode"]) == len(after["args"]["decode"]) == num_seqs
        ]

    def _passes(self, stage: int) -> list[dict[str, Any]]:
        return [event for event in read_events(self.timeline) if "dur" in event and event["tid"] == stage]


@contextmanager
def _watched(plan: Plan, spec: ModelSpec, stages: Sequence[tuple[int, ...]]) -> Iterator[_Watched]:
    """An engine on these devices, with a few of the model's layers."""
    layers = [max(1, min(_LAYERS, spec.num_layers // len(stages)))] * len(stages)
    few = replace(spec, num_layers=sum(layers), num_encoder_layers=min(spec.num_encoder_layers, sum(layers)))
    alone = len(stages) == len(stages[0]) == 1
    with tempfile.TemporaryDirectory() as folder:
        timeline = Path(folder) / "timeline.json"
        setup = _setup(replace(plan, placement=placed(few, stages, layers)), spec, timeline)
        with closing(_local_engine(setup, few, timeline) if alone else build_engine(setup)) as engine:
            yield _Watched(engine, timeline, len(stages))


def _setup(plan: Plan, spec: ModelSpec, timeline: Path) -> EngineSetup:
    """With the plan's KV cache on a GPU too: none of two engines that share it may fill it."""
    setup = engine_setup(plan, spec, dummy_weights=True, timeline=timeline)
    return msgspec.structs.replace(setup, gpu_memory_utilization=None)


def _local_engine(setup: EngineSetup, few: ModelSpec, timeline: Path) -> Engine:
    """An engine in this process with the layers of `few`; one that is built by the setup has all of the model's."""
    options, schedule = setup.engine, setup.schedule
    runner = ModelRunner(
        few,
        dtype=options.dtype,
        kv_dtype=options.kv_dtype,
        device=str(local_device(options.device, setup.placement[0].devices[0])),
        num_blocks=options.num_blocks,
        dummy_weights=True,
    )
    if runner.kernels is not None:
        warm_up_runner(runner, most_rows(schedule))
    kind = InProcessExecutor if runner.kernels is None else AsyncExecutor
    executor = kind(runner, timeline=TimelineFile(timeline, num_stages=1))
    engine = Engine(executor, schedule, tokenizer=Tokenizer.load(few), num_blocks=options.num_blocks)
    warm_up(engine)
    engine.switch_plan(schedule)  # Its queues are as new then.
    return engine
