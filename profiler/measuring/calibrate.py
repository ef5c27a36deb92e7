"""Calibration: what the engine takes over the sum of its parts, when it really runs.

Parts are medians of undisturbed passes of one kind. A run also has slow passes and mixes kinds: a prefill evicts the
weights and the decode rows' keys and values from the cache. Short bursts of real load between the measuring rounds give
the mean ratio: one factor for all predictions, and where the bursts show them, seconds for each pass with prefills, by
which it and the passes soon after it are longer than others. A batch that decodes for hundreds of passes has them once:
as a part of the factor they were 5 % on each of its passes, as a factor on prefills 9 % on those of 50,000 tokens.
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
"""Bursts, and standard errors, below which prefills have no seconds of their own."""
_SOON = 2
"""Passes after a prefill that find the cache without what it evicted."""


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
    """What bursts took; without any, what the parts add up to."""

    factor: float = 1.0
    """Measured over predicted seconds."""
    prefill_seconds: float = 0.0
    """More for each pass of the whole model with prefills; 0 unless the bursts show them (`_SURE`)."""
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
    encoder_layers = min(num_layers, profile.model.num_encoder_layers)
    model = replace(profile.model, num_layers=num_layers, num_encoder_layers=encoder_layers)
    cost = CostModel(replace(profile, model=model, calibration=1.0, prefill_seconds=0.0))
    found = [_burst_times(steps, speed, cost) for steps in bursts]
    more = _prefill_seconds(found)
    logs = np.log([times.ratio(more) for times in found])
    error = MEDIAN_ERROR * float(logs.std(ddof=1)) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0
    more *= profile.model.num_layers / num_layers
    return Calibration(factor=math.exp(np.median(logs)), prefill_seconds=more, error=error)


@dataclass(frozen=True, slots=True, kw_only=True)
class _BurstTimes:
    """Seconds of one burst, measured and predicted."""

    measured: float
    predicted: float
    measured_later: float
    """Of passes that decode, not soon after one with prefills."""
    predicted_later: float
    num_prefills: int
    """Passes with prefills."""

    def ratio(self, prefill_seconds: float) -> float:
        return (self.measured - self.num_prefills * prefill_seconds) / self.predicted

    @property
    def prefill_seconds(self) -> float:
        """More than if all passes were as slow as those not soon after one with prefills, for each of these."""
        slower = self.measured_later / self.predicted_later
        return (self.measured - slower * self.predicted) / self.num_prefills


def _burst_times(steps: Sequence[BurstStep], speed: MachineSpeed | None, cost: CostModel) -> _BurstTimes:
    begin = 0 if cost.first_token_from_prefill else 1
    measured = np.array(_at_profile_speed(steps, speed))
    predicted = np.array([cost.batch_seconds(_batch(step.record, begin)) for step in steps])
    decodes = np.array([step.record.kind == "decode" for step in steps])
    later = np.array([decodes[max(number - _SOON, 0) : number + 1].all() for number in range(len(steps))])
    return _BurstTimes(
        measured=float(measured.sum()),
        predicted=float(predicted.sum()),
        measured_later=float(measured[later].sum()),
        predicted_later=float(predicted[later].sum()),
        num_prefills=int((~decodes).sum()),
    )


def _prefill_seconds(bursts: Sequence[_BurstTimes]) -> float:
    """The median over the bursts where it is surely above 0; 0 elsewhere: seconds more would fit noise."""
    found = np.array([times.prefill_seconds for times in bursts if times.num_prefills and times.predicted_later])
    if len(found) < _LEAST_BURSTS:
        return 0.0
    sure = found.mean() > _SURE * found.std(ddof=1) / math.sqrt(len(found))
    return max(float(np.median(found)), 0.0) if sure else 0.0


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
