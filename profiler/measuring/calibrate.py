"""Calibration: what the engine takes over the sum of its parts, when it really runs.

Parts are medians of undisturbed passes of one kind. A run also has slow passes and mixes kinds: a prefill evicts the
decode rows' keys and values from the cache. Short bursts of real load between the measuring rounds give the mean ratio:
one factor for all predictions, and one more for what prefills add where the bursts show that it is another.
"""

import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from exeplan.core.batch import Batch, SequenceState, num_blocks_for
from exeplan.core.machine_speed import MEDIAN_ERROR, MachineSpeed
from exeplan.core.profile import Profile
from exeplan.core.schedule import Schedule
from exeplan.profiler.measuring.measure import Rig
from exeplan.runner.compute.sampling import SamplingParams
from exeplan.runner.engine.engine import Request, StepRecord
from exeplan.simulator.cost import CostModel

_SLOTS = 16
_REQUESTS = 32
_LONGEST_PROMPT, _LONGEST_OUTPUT = 192, 128
_WARM_STEPS = 12
_MAX_WALL_OVER_CPU = 1.05
_LEAST_BURSTS, _SURE = 3, 2.5
"""Bursts, and standard errors from 1, below which prefills have no factor of their own."""


@dataclass(frozen=True, slots=True)
class BurstStep:
    """One step of a burst: what ran, and its seconds."""

    record: StepRecord
    seconds: float
    time: float
    """When it began, on the performance counter."""


def burst(rig: Rig, *, seed: int, between: Callable[[], None] = lambda: None) -> list[BurstStep]:
    """A short load of ragged requests that join and leave; the first passes, which warm up, are left out.

    Calls `between` before each step. On a CPU with one thread a step that was disturbed by other processes counts with
    its CPU time.
    """
    rig.probe.use_layers(rig.copies)
    steps = []
    with rig.engine(Schedule("orca", {"max_num_seqs": _SLOTS})) as engine:
        for request in _requests(rig, random.Random(seed)):
            engine.add(request)
        while engine.has_work:
            between()
            rig.probe.use_layers(rig.copies)
            began = time.perf_counter()
            cpu, wall = time.thread_time(), time.perf_counter()
            engine.step()
            wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
            disturbed = rig.checks_cpu and wall > _MAX_WALL_OVER_CPU * cpu
            steps += [BurstStep(step, cpu if disturbed else wall, began) for step in engine.last_steps]
    return steps[_WARM_STEPS:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Measured over predicted seconds of bursts; 1 without any."""

    factor: float = 1.0
    prefill_factor: float = 1.0
    """On what prefills add to their passes, beside `factor`; 1 unless the bursts show another one (`_SURE`)."""
    error: float = 0.0
    """The standard error of the factor, relative."""


def calibrate(
    bursts: Iterable[Sequence[BurstStep]], profile: Profile, *, num_layers: int, speed: MachineSpeed | None = None
) -> Calibration:
    """Of bursts that ran `num_layers` layers: medians over them, as the parts are medians over the rounds.

    With a `speed` each step counts with its seconds at the speed of the profile.
    """
    bursts = [steps for steps in bursts if steps]
    if not bursts:
        return Calibration()
    models = [_cost(profile, num_layers, prefill_factor=factor) for factor in (1.0, 2.0)]
    found = [_burst_times(steps, speed, models) for steps in bursts]
    prefill_factor = _prefill_factor(found)
    logs = np.log([times.ratio(prefill_factor) for times in found])
    error = MEDIAN_ERROR * float(logs.std(ddof=1)) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0
    return Calibration(factor=math.exp(np.median(logs)), prefill_factor=prefill_factor, error=error)


@dataclass(frozen=True, slots=True, kw_only=True)
class _BurstTimes:
    """Seconds of one burst: of its passes that only decode, and of those with prefills."""

    decode: float
    with_prefills: float
    predicted_decode: float
    predicted: float
    """Of those with prefills."""
    by_prefills: float
    """The part of it on which the prefill factor is."""

    def ratio(self, prefill_factor: float) -> float:
        predicted = self.predicted_decode + self.predicted + (prefill_factor - 1) * self.by_prefills
        return (self.decode + self.with_prefills) / predicted

    @property
    def prefill_factor(self) -> float:
        """With which passes with prefills are as slow, measured over predicted, as those without."""
        slower = self.decode / self.predicted_decode
        return (self.with_prefills / slower - (self.predicted - self.by_prefills)) / self.by_prefills


def _burst_times(steps: Sequence[BurstStep], speed: MachineSpeed | None, models: Sequence[CostModel]) -> _BurstTimes:
    begin = 0 if models[0].first_token_from_prefill else 1
    seconds = np.array(_at_profile_speed(steps, speed))
    once, twice = (np.array([model.batch_seconds(_batch(step.record, begin)) for step in steps]) for model in models)
    decodes = np.array([step.record.kind == "decode" for step in steps])
    return _BurstTimes(
        decode=float(seconds[decodes].sum()),
        with_prefills=float(seconds[~decodes].sum()),
        predicted_decode=float(once[decodes].sum()),
        predicted=float(once[~decodes].sum()),
        by_prefills=float((twice - once)[~decodes].sum()),
    )


def _prefill_factor(bursts: Sequence[_BurstTimes]) -> float:
    """The median over the bursts where it is surely not 1; 1 elsewhere: a factor more would fit noise."""
    found = [times.prefill_factor for times in bursts if times.decode and times.by_prefills]
    if len(found) < _LEAST_BURSTS or min(found) <= 0:
        return 1.0
    logs = np.log(found)
    sure = abs(logs.mean()) > _SURE * logs.std(ddof=1) / math.sqrt(len(logs))
    return math.exp(np.median(logs)) if sure else 1.0


def _cost(profile: Profile, num_layers: int, *, prefill_factor: float) -> CostModel:
    encoder_layers = min(num_layers, profile.model.num_encoder_layers)
    model = replace(profile.model, num_layers=num_layers, num_encoder_layers=encoder_layers)
    return CostModel(replace(profile, model=model, calibration=1.0, prefill_calibration=prefill_factor))


def _at_profile_speed(steps: Sequence[BurstStep], speed: MachineSpeed | None) -> list[float]:
    """[steps] Seconds."""
    if speed is None:
        return [step.seconds for step in steps]
    slow = speed.slowness(np.array([step.time for step in steps]))
    return [step.seconds / float(factor) for step, factor in zip(steps, slow, strict=True)]


def _requests(rig: Rig, draw: random.Random) -> list[Request]:
    longest, longest_output = min(_LONGEST_PROMPT, rig.longest // 2), min(_LONGEST_OUTPUT, rig.longest // 3)
    fitting = rig.runner.cache.num_blocks // num_blocks_for(longest + longest_output)
    requests = []
    for index in range(min(_REQUESTS, 2 * fitting)):
        prompt = [draw.randrange(rig.runner.spec.vocab_size) for _ in range(draw.randint(1, longest))]
        sampling = SamplingParams(temperature=0.0, max_tokens=draw.randint(1, longest_output), ignore_eos=True)
        requests.append(Request(request_id=f"burst-{index}", prompt_token_ids=prompt, sampling=sampling))
    return requests


def _batch(record: StepRecord, begin: int) -> Batch:
    """A batch with the step's rows and tokens, shared evenly among its rows.

    Of each row's tokens `begin` are the decoder's start, which a prediction does not count.
    """
    prefilled = record.num_new_tokens - record.num_decode
    return Batch(
        prefill=_rows(record.num_prefill, prefilled - begin * record.num_prefill),
        decode=_rows(record.num_decode, record.context_tokens - begin * record.num_decode),
    )


def _rows(number: int, tokens: int) -> tuple[SequenceState, ...]:
    return tuple(
        SequenceState(
            request_id=str(index),
            num_prompt_tokens=tokens // number + (index < tokens % number),
            max_output_tokens=1,
        )
        for index in range(number)
    )
