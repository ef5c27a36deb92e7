"""The calibration is the time of whole engine steps over the prediction from their parts."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from exeplan.core.batch import Batch, SequenceState
from exeplan.core.machine_speed import MachineSpeed, SpeedSample
from exeplan.core.profile import Profile, ReferencePass
from exeplan.profiler.measuring.calibrate import BurstStep, Calibration, calibrate
from exeplan.runner.engine.engine import StepRecord
from exeplan.simulator.cost import CostModel


def decode_seconds(cost: CostModel, rows: int, tokens: int) -> float:
    batch = [SequenceState(request_id=str(i), num_prompt_tokens=tokens, max_output_tokens=1) for i in range(rows)]
    return cost.batch_seconds(Batch(decode=tuple(batch)))


def test_steps_twice_as_slow_as_their_parts_give_two(profile: Profile, cost: CostModel) -> None:
    steps = [
        BurstStep(StepRecord(0.0, 1.0, 0, rows, rows, rows * 100), 2 * decode_seconds(cost, rows, 100), 0.0)
        for rows in (1, 4, 16)
    ]
    assert calibrate([steps], profile, num_layers=profile.model.num_layers).factor == pytest.approx(2.0)


def test_long_steps_weigh_more_than_short_ones(profile: Profile, cost: CostModel) -> None:
    steps = [
        BurstStep(StepRecord(0.0, 1.0, 0, 1, 1, 100), 3 * decode_seconds(cost, 1, 100), 0.0),
        BurstStep(StepRecord(0.0, 1.0, 0, 64, 64, 6400), decode_seconds(cost, 64, 100), 0.0),
    ]
    assert 1.0 < calibrate([steps], profile, num_layers=profile.model.num_layers).factor < 1.5


def test_nothing_measured_changes_nothing(profile: Profile) -> None:
    assert calibrate([], profile, num_layers=1) == Calibration()


def test_a_burst_in_a_slow_minute_does_not_count(profile: Profile, cost: CostModel) -> None:
    record = StepRecord(0.0, 1.0, 0, 4, 4, 400)
    bursts = [[BurstStep(record, factor * decode_seconds(cost, 4, 100), 0.0)] for factor in (1.0, 1.1, 9.0)]
    assert calibrate(bursts, profile, num_layers=profile.model.num_layers).factor == pytest.approx(1.1)


def mixed_seconds(cost: CostModel, *, prefills: int) -> float:
    prompts = tuple(
        SequenceState(request_id=f"p{i}", num_prompt_tokens=100, max_output_tokens=1) for i in range(prefills)
    )
    rows = [SequenceState(request_id=str(i), num_prompt_tokens=100, max_output_tokens=1) for i in range(4)]
    return cost.batch_seconds(Batch(prefill=prompts, decode=tuple(rows)))


def bursts_of(cost: CostModel, seconds: Sequence[float]) -> list[list[BurstStep]]:
    """Bursts of a pass with a prefill and six that decode, 1.1 times slower than their parts; the prefill and the two
    passes after it take these seconds longer in all."""
    decode, mixed = StepRecord(0.0, 1.0, 0, 4, 4, 400), StepRecord(0.0, 1.0, 1, 4, 104, 400)
    both, each = 1.1 * mixed_seconds(cost, prefills=1), 1.1 * decode_seconds(cost, 4, 100)
    return [
        [
            BurstStep(mixed, both + 0.5 * more, 0.0),
            BurstStep(decode, each + 0.375 * more, 0.0),
            BurstStep(decode, each + 0.125 * more, 0.0),
            *4 * [BurstStep(decode, each, 0.0)],
        ]
        for more in seconds
    ]


def test_what_a_prefill_costs_the_passes_after_it_is_the_prefills(profile: Profile, cost: CostModel) -> None:
    found = calibrate(bursts_of(cost, (0.9e-3, 1e-3, 1.1e-3)), profile, num_layers=6)
    assert found.factor == pytest.approx(1.1)
    assert found.prefill_seconds == pytest.approx(1e-3 * profile.model.num_layers / 6)
    again = CostModel(replace(profile, calibration=1.1, prefill_seconds=1e-3))
    assert mixed_seconds(again, prefills=1) == pytest.approx(1.1 * mixed_seconds(cost, prefills=1) + 1e-3)
    assert decode_seconds(again, 4, 100) == pytest.approx(1.1 * decode_seconds(cost, 4, 100))


def test_bursts_that_disagree_give_prefills_no_seconds(profile: Profile, cost: CostModel) -> None:
    assert calibrate(bursts_of(cost, (-1e-3, 0.1e-3, 1e-3)), profile, num_layers=6).prefill_seconds == 0.0


def test_a_step_counts_with_its_seconds_at_the_speed_of_its_moment(profile: Profile, cost: CostModel) -> None:
    """The second burst ran while the engine was twice as slow."""
    passes = (ReferencePass(kind="decode", num_seqs=1, num_tokens=8, num_layers=6, seconds=0.01),)
    samples = [
        SpeedSample(number=0, time=time, seconds=0.01 * (1 if time < 50 else 2**1.25), cost=0.02)
        for time in (*range(0, 10), *range(100, 110))
    ]
    speed = MachineSpeed(passes=passes, samples=tuple(samples))
    record = StepRecord(0.0, 1.0, 0, 4, 4, 400)
    bursts = [
        [BurstStep(record, factor * decode_seconds(cost, 4, 100), time)] for factor, time in ((1.3, 5.0), (2.6, 105.0))
    ]
    found = calibrate(bursts, profile, num_layers=6, speed=speed)
    assert (found.factor, found.error) == (pytest.approx(1.3), pytest.approx(0.0, abs=1e-9))
