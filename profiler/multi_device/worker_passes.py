"""Passes of worker processes: how much longer they take than the sum of their parts, which one process measured.

Workers share memory, caches and power; a stage that waits for another finds its weights gone from the cache; and each
prepares its own part of a pass. So bursts of real load run on workers, as `measuring/calibrate.py` has them run in one
process, and their replay says what the parts add up to: the ratio of a device's seconds slows down every plan for
several devices. Other programs are taken out by the workers' reference passes. Bursts over few slots and over many take
turns, as what workers add is partly the same for every pass; they count until the last request has begun, as plans
seldom have empty slots.
"""

import math
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np

from exeplan.core.batch import BLOCK_SIZE, num_blocks_for
from exeplan.core.models.model import ModelSpec
from exeplan.core.plan import Plan
from exeplan.core.profile import Measurement, Profile
from exeplan.core.runs.metrics import Requests
from exeplan.core.schedule import Placement, Schedule
from exeplan.planner.problems.layouts import placed
from exeplan.runner.engine_process.build import build_engine, engine_setup
from exeplan.runner.load import Load, play_engine
from exeplan.simulator.cost import CostModel
from exeplan.simulator.replay import replay
from exeplan.simulator.run import Run

WORKER_SLOTS = (16, 48)
"""Of a micro-batch, in bursts of few rows and of many."""
_REQUESTS, _MORE_REQUESTS = 3, 48
"""Of a burst: so many a slot, and these."""
_LONGEST_PROMPT, _LONGEST_OUTPUT = 192, 128
_LEAST_ROUNDS, _MOST_ROUNDS = 2, 10
_LEAST_FACTOR, _MOST_FACTOR = 0.5, 4.0
_USUAL_SPREAD, _BURST_ERROR = 0.1, 0.08
"""Standard deviations of logarithms: of the factor over quiet hosts, about 1, and of a burst of a few seconds about
what longer runs have, at least (LOG.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """Orca on workers: one tensor-parallel stage of several devices, or a pipeline with a micro-batch a stage."""

    spec: ModelSpec
    stages: Sequence[tuple[int, ...]]
    slots: int
    """Of a micro-batch."""
    longest: int
    """Tokens of a sequence."""

    @property
    def size(self) -> int:
        return len(self.stages[0])

    @property
    def placement(self) -> Placement:
        layers, stages = self.spec.num_layers, len(self.stages)
        shares = [layers // stages + (number < layers % stages) for number in range(stages)]
        return placed(self.spec, self.stages, shares)

    @property
    def schedule(self) -> Schedule:
        stages = len(self.stages)
        return Schedule("orca", {"max_num_seqs": self.slots * stages, "micro_batches": stages})

    @property
    def limits(self) -> tuple[int, int]:
        """Tokens of the longest prompt and of the longest output."""
        return min(_LONGEST_PROMPT, self.longest // 2), min(_LONGEST_OUTPUT, self.longest // 3)

    @property
    def num_blocks(self) -> int:
        return self.slots * len(self.stages) * num_blocks_for(sum(self.limits) + 1)

    def load(self, seed: int) -> Load:
        """Requests of evenly drawn lengths, all at once."""
        draw, number = random.Random(seed), (_REQUESTS * self.slots + _MORE_REQUESTS) * len(self.stages)
        inputs, outputs = ([draw.randint(1, most) for _ in range(number)] for most in self.limits)
        return Load(input_tokens=np.array(inputs), output_tokens=np.array(outputs), seed=seed)


def pass_rows(
    known: Profile, plans: Sequence[WorkerPlan], *, num_threads: int, seconds: float
) -> tuple[Measurement, ...]:
    """The rows `alone`, the mean pass of the bursts as the profile's parts add up to it, and `together`, as they ran.

    `plans` of the same workers take turns, those with more slots later; `known` has all other rows that the placement
    needs. Where a burst is slow, the least number of them, one of each plan, takes longer than `seconds`.
    """
    largest = plans[-1]
    setup = engine_setup(
        Plan(
            model=largest.spec.name,
            schedule=largest.schedule,
            placement=largest.placement,
            dtype=known.dtype,
            kv_dtype=known.kv_dtype,
            device="cpu",
            num_threads=num_threads,
            kv_cache_tokens=largest.num_blocks * BLOCK_SIZE,
        ),
        largest.spec,
        dummy_weights=True,
    )
    factors, alone = list[float](), list[float]()
    with closing(build_engine(setup)) as engine:
        reference = engine.reference_passes(known.reference_passes)
        ended = time.monotonic() + seconds
        while len(factors) < _LEAST_ROUNDS or (len(factors) < _MOST_ROUNDS and time.monotonic() < ended):
            plan = plans[len(factors) % len(plans)]
            load = plan.load(len(factors))
            engine.switch_plan(plan.schedule)
            run = play_engine(engine, load, vocab_size=plan.spec.vocab_size, reference=reference)
            once, twice = (_replayed(_slowed(known, plan.size, factor), plan, load) for factor in (1.0, 2.0))
            measured = last_start(Requests.of(run.at_profile_speed(one_thread=False)))
            parts = last_start(once.requests)
            factors.append(1.0 + (measured - parts) / (last_start(twice.requests) - parts))
            alone.append(float(once.requests.last_tokens.max()) / once.num_passes)
    return _rows(plans[0], statistics.median(alone), factors)


def _rows(plan: WorkerPlan, alone: float, factors: Sequence[float]) -> tuple[Measurement, ...]:
    factor = min(max(_likely(factors), _LEAST_FACTOR), _MOST_FACTOR)
    spread = (max(factors) - min(factors)) / 2 / factor / math.sqrt(len(factors))
    context = plan.slots * (sum(plan.limits) // 2)
    return tuple(
        Measurement(
            op="pass",
            phase=phase,
            num_seqs=plan.slots,
            context_tokens=context,
            tensor_parallel_size=plan.size,
            seconds=float(f"{seconds:.4g}"),
            spread=float(f"{spread:.3g}"),
            repeats=len(factors),
        )
        for phase, seconds in (("alone", alone), ("together", alone * factor))
    )


def _likely(factors: Sequence[float]) -> float:
    """Their geometric mean, in which bursts of few rows and of many weigh alike, drawn toward 1 by what so few bursts
    may be off: the posterior mean of a normal law."""
    logs = [math.log(max(factor, _LEAST_FACTOR / 2)) for factor in factors]
    error = max(statistics.stdev(logs) if len(logs) > 2 else 0.0, _BURST_ERROR) ** 2 / len(logs)
    return math.exp(statistics.fmean(logs) * _USUAL_SPREAD**2 / (_USUAL_SPREAD**2 + error))


def remark(rows: Sequence[Measurement]) -> str:
    """What a pair of rows says, and whether a limit stands in for what bursts showed."""
    alone, together = rows
    factor = together.seconds / alone.seconds
    said = (
        f"passes on workers take {factor:.3f} times the sum of their parts (+-{together.spread:.1%}), the mean of "
        f"{together.repeats} bursts drawn toward 1, as so few may be off"
    )
    if _LEAST_FACTOR * 1.001 < factor < _MOST_FACTOR * 0.999:
        return said
    return f"{said}, a limit: the bursts were beyond it, as beside other programs; profile again"


def _slowed(known: Profile, size: int, factor: float) -> Profile:
    """The profile with its devices so many times slower where several compute."""
    rows = [m for m in known.measurements if m.op != "pass"]
    alone = Measurement(op="pass", phase="alone", num_seqs=1, context_tokens=1, tensor_parallel_size=size, seconds=1.0)
    rows += [alone, replace(alone, phase="together", seconds=factor)]
    return replace(known, measurements=tuple(rows))


def _replayed(profile: Profile, plan: WorkerPlan, load: Load) -> Run:
    return replay(
        plan.schedule,
        CostModel(profile, plan.placement),
        input_tokens=load.input_tokens,
        output_tokens=load.output_tokens,
        num_blocks=plan.num_blocks,
    )


def last_start(requests: Requests) -> float:
    """When the last request begins, seconds from when the first did; until then no slot is empty."""
    return float(requests.starts.max() - requests.starts.min())
