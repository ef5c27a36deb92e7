"""Calibration: what the engine takes over the sum of its parts, when it really runs.

Parts are medians of passes of one kind. A run also has slow passes and mixes kinds: a prefill evicts the decode rows'
keys and values from the cache. Short bursts of real load between the measuring rounds give the mean ratio: one factor
for all predictions. Where bursts over few slots and over many show that it is not the same for short and long passes,
every pass has seconds of its own beside it, and prefills a factor of their own where the bursts show that. A burst ends
when half of its slots are empty, as those of a plan seldom are.

Batches that keep their rows until all are done run faster than those that requests join and leave: rows lie in an empty
cache in their order, products have one shape, and the host has nothing to do for finished ones. Bursts of such batches
have a factor of their own.
"""

import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from exeplan.arrays import Floats
from exeplan.core.batch import Batch, SequenceState, num_blocks_for
from exeplan.core.profile import Profile
from exeplan.core.runs.machine_speed import MachineSpeed
from exeplan.core.schedule import Schedule
from exeplan.profiler.measuring.measure import Rig
from exeplan.runner.compute.tokens.sampling import SamplingParams
from exeplan.runner.engine.engine import Request, StepRecord
from exeplan.simulator.cost import CostModel

FEW_SLOTS = 16
LATER_REQUESTS = 16
"""Requests that join when others have left."""
_LONGEST_PROMPT, _LONGEST_OUTPUT = 192, 128
_WARM_STEPS = 12
_LEAST_BURSTS, _SURE = 3, 2.5
"""Bursts, and standard errors, below which prefills have no factor of their own."""
_BURSTS_OF_PASSES, _SURE_OF_PASSES = 6, 2.0
"""The same for the seconds of a pass, which are never below zero."""
_APART = 1.5
"""Times that the longest passes must be as long as the shortest to tell what every pass takes."""
_MIDDLE_ERROR = 1.15
"""The standard error of the mean of the middle half over that of the mean: 1.16 of three, 1.09 of many."""
_BLOCK, _LEAST_BLOCKS = 8, 16
"""Passes that are timed together for that, as one alone is mostly noise, and how often at least."""


@dataclass(frozen=True, slots=True)
class BurstStep:
    """One step of a burst: what ran, and its seconds."""

    record: StepRecord
    seconds: float
    time: float
    """When it began, on the performance counter."""


def burst(
    rig: Rig,
    *,
    seed: int,
    longest: int,
    num_slots: int = FEW_SLOTS,
    keeps_rows: bool = False,
    between: Callable[[], None] = lambda: None,
) -> list[BurstStep]:
    """A short load of ragged requests that join and leave; the first passes, which warm up, are left out.

    No request has more than `longest` tokens; where few short ones fit the cache, no pass may be left. With
    `keeps_rows` one batch, its finished rows kept until all are done. Calls `between` before each step. On a CPU with
    one thread steps count with their CPU time.
    """
    steps: list[BurstStep] = []
    schedule = Schedule("static", {"batch_size": num_slots}) if keeps_rows else _joined_and_left(num_slots)
    most = num_slots + (0 if keeps_rows else LATER_REQUESTS)
    requests = _requests(rig, random.Random(seed), most, longest=longest)
    with rig.engine(schedule) as engine:
        for request in requests:
            engine.add(request)
        least = 0 if keeps_rows else min(num_slots, len(requests)) // 2
        while engine.has_work and (len(steps) < 2 * _WARM_STEPS or engine.num_waiting + engine.num_running > least):
            between()
            rig.probe.use_layers(rig.copies)
            began = time.perf_counter()
            before = rig.now()
            engine.step()
            seconds = (rig.now() - before) * 1e-9
            steps += [BurstStep(step, seconds, began) for step in engine.last_steps]
        for request in requests:
            engine.abort(request.request_id)
    return steps[_WARM_STEPS:]


def _joined_and_left(num_slots: int) -> Schedule:
    return Schedule("orca", {"max_num_seqs": num_slots})


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Measured over predicted seconds of bursts; 1 without any."""

    factor: float = 1.0
    prefill_factor: float = 1.0
    """On what prefills add to their passes, beside `factor`; 1 unless the bursts show another one (`_SURE`)."""
    pass_seconds: float = 0.0
    """That every pass takes beside its parts, before `factor`; 0 unless the bursts show them (`_SURE_OF_PASSES`)."""
    error: float = 0.0
    """The standard error of the factor, relative."""
    kept_rows_factor: float | None = None
    """`factor` of batches that keep their rows; None without bursts of them, where it is the same."""
    kept_rows_error: float = 0.0
    """Its standard error, relative: of a single burst that of the other ones alone, as if it were one of them."""


def calibrate(
    bursts: Iterable[Sequence[BurstStep]],
    profile: Profile,
    *,
    num_layers: int,
    speed: MachineSpeed | None = None,
    kept: Iterable[Sequence[BurstStep]] = (),
) -> Calibration:
    """Of bursts that ran `num_layers` layers: means of the middle half of them, by their ratios.

    `kept` are those of batches that keep their rows. With a `speed` each step counts with its seconds at the speed of
    the profile, and errors are at least those with which reference passes between the steps tell it: two or three
    bursts may agree by chance.
    """
    bursts, kept = list(bursts), list(kept)
    models = [_cost(profile, num_layers, prefill_factor=factor) for factor in (1.0, 2.0)]
    found = [_burst_times(steps, speed, models) for steps in bursts if steps]
    if not found:
        return Calibration()
    pass_seconds = _pass_seconds(found)
    found = [times.with_pass_seconds(pass_seconds) for times in found]
    prefill_factor = _prefill_factor(found)
    logs = np.log([times.ratio(prefill_factor) for times in found])
    kept_times = [_burst_times(steps, speed, models).with_pass_seconds(pass_seconds) for steps in kept if steps]
    kept_logs = np.log([times.ratio(prefill_factor) for times in kept_times])
    return Calibration(
        factor=math.exp(_middle(logs)),
        prefill_factor=prefill_factor,
        pass_seconds=pass_seconds,
        error=_error(logs, least=_speed_error(bursts, speed)),
        kept_rows_factor=math.exp(_middle(kept_logs)) if kept_times else None,
        kept_rows_error=_error(kept_logs, like=logs, least=_speed_error(kept, speed)),
    )


def _middle(logs: Floats) -> float:
    """The mean of the middle half: a disturbed burst does not count, and more of the others do than in a median."""
    cut = (len(logs) + 1) // 4
    return float(np.sort(logs)[cut : len(logs) - cut].mean())


def _error(logs: Floats, *, least: float, like: Floats | None = None) -> float:
    """The standard error of their middle; of a single one by the spread of those that it is like. `least` is the
    deviation that each has at least."""
    spread = logs if len(logs) > 1 or like is None else like
    if not len(logs) or len(spread) < 2:
        return 0.0
    return _MIDDLE_ERROR * max(float(spread.std(ddof=1)), least) / math.sqrt(len(logs))


def _speed_error(bursts: Sequence[Sequence[BurstStep]], speed: MachineSpeed | None) -> float:
    """The relative error with which reference passes tell the mean speed of a burst."""
    if speed is None or not any(bursts):
        return 0.0
    return float(np.mean([speed.error_between(steps[0].time, steps[-1].time) for steps in bursts if steps]))


@dataclass(frozen=True, slots=True, kw_only=True)
class _BurstTimes:
    """Seconds of one burst: of its passes that only decode, and of those with prefills."""

    decode: float
    with_prefills: float
    num_decode: int
    num_with_prefills: int
    predicted_decode: float
    predicted: float
    """Of those with prefills."""
    by_prefills: float
    """The part of it on which the prefill factor is."""
    blocks: Floats
    """[blocks, 2] The same of consecutive passes that only decode, `_BLOCK` at a time: seconds, predicted."""

    def with_pass_seconds(self, seconds: float) -> "_BurstTimes":
        """The same where a prediction has these seconds a pass, too."""
        return replace(
            self,
            predicted_decode=self.predicted_decode + self.num_decode * seconds,
            predicted=self.predicted + self.num_with_prefills * seconds,
        )

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
        num_decode=int(decodes.sum()),
        num_with_prefills=int((~decodes).sum()),
        predicted_decode=float(once[decodes].sum()),
        predicted=float(once[~decodes].sum()),
        by_prefills=float((twice - once)[~decodes].sum()),
        blocks=_blocks(np.column_stack([seconds, once])[decodes]),
    )


def _blocks(passes: Floats) -> Floats:
    """[blocks, columns] Sums of `_BLOCK` rows; the last ones that fill none are left out."""
    whole = len(passes) // _BLOCK
    return passes[: whole * _BLOCK].reshape(whole, _BLOCK, passes.shape[1]).sum(axis=1)


def _pass_seconds(bursts: Sequence[_BurstTimes]) -> float:
    """By how much the ratio of passes that only decode rises with one over their seconds, where it surely does.

    How sure it is, the bursts say (Liang and Zeger, 1986): blocks of one are not independent, as the machine was faster
    or slower than its reference passes say for all of them.
    """
    blocks = [times.blocks for times in bursts if len(times.blocks)]
    if len(blocks) < _BURSTS_OF_PASSES:
        return 0.0
    seconds, predicted = np.concatenate(blocks).T
    if len(predicted) < _LEAST_BLOCKS or predicted.max() < _APART * predicted.min():
        return 0.0
    inverse, ratios = _BLOCK / predicted, seconds / predicted
    slope, intercept = np.polyfit(inverse, ratios, 1)
    about = inverse - inverse.mean()
    pulls = np.split(about * (ratios - intercept - slope * inverse), np.cumsum([len(own) for own in blocks]))
    error = math.sqrt(sum(float(pull.sum()) ** 2 for pull in pulls)) / float(about @ about)
    sure = slope > _SURE_OF_PASSES * error * math.sqrt(len(blocks) / (len(blocks) - 2)) and intercept > 0
    return float(slope / intercept) if sure else 0.0


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
    # A probe's last layer spares nothing.
    plain = replace(profile, calibration=1.0, pass_seconds=0.0, last_layer_saving=0.0)
    return CostModel(replace(plain, model=model, prefill_calibration=prefill_factor))


def _at_profile_speed(steps: Sequence[BurstStep], speed: MachineSpeed | None) -> list[float]:
    """[steps] Seconds."""
    if speed is None:
        return [step.seconds for step in steps]
    slow = speed.slowness(np.array([step.time for step in steps]))
    return [step.seconds / float(factor) for step, factor in zip(steps, slow, strict=True)]


def _requests(rig: Rig, draw: random.Random, most: int, *, longest: int) -> list[Request]:
    longest_prompt, longest_output = min(_LONGEST_PROMPT, longest // 2), min(_LONGEST_OUTPUT, longest // 3)
    fitting = rig.runner.cache.num_blocks // num_blocks_for(longest_prompt + longest_output)
    requests = []
    for index in range(min(most, 2 * fitting)):
        prompt = [draw.randrange(rig.runner.spec.vocab_size) for _ in range(draw.randint(1, longest_prompt))]
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
