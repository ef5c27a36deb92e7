"""The calibration is what whole steps of the engine took over what the parts predict for them."""

import pytest

from exeplan.core.batch import Batch, SequenceState
from exeplan.core.profile import Profile
from exeplan.profiler.measuring.calibrate import BurstStep, calibration
from exeplan.runner.engine.engine import StepRecord
from exeplan.simulator.cost import CostModel


def decode_seconds(cost: CostModel, rows: int, tokens: int) -> float:
    batch = [SequenceState(request_id=str(i), num_prompt_tokens=tokens, max_output_tokens=1) for i in range(rows)]
    return cost.batch_seconds(Batch(decode=tuple(batch)))


def test_steps_twice_as_slow_as_their_parts_give_two(profile: Profile, cost: CostModel) -> None:
    steps = [
        BurstStep(StepRecord(0.0, 1.0, 0, rows, rows, rows * 100), 2 * decode_seconds(cost, rows, 100))
        for rows in (1, 4, 16)
    ]
    assert calibration([steps], profile, num_layers=profile.model.num_layers) == pytest.approx(2.0)


def test_long_steps_weigh_more_than_short_ones(profile: Profile, cost: CostModel) -> None:
    steps = [
        BurstStep(StepRecord(0.0, 1.0, 0, 1, 1, 100), 3 * decode_seconds(cost, 1, 100)),
        BurstStep(StepRecord(0.0, 1.0, 0, 64, 64, 6400), decode_seconds(cost, 64, 100)),
    ]
    assert 1.0 < calibration([steps], profile, num_layers=profile.model.num_layers) < 1.5


def test_nothing_measured_changes_nothing(profile: Profile) -> None:
    assert calibration([], profile, num_layers=1) == 1.0


def test_a_burst_in_a_slow_minute_does_not_count(profile: Profile, cost: CostModel) -> None:
    record = StepRecord(0.0, 1.0, 0, 4, 4, 400)
    bursts = [[BurstStep(record, factor * decode_seconds(cost, 4, 100))] for factor in (1.0, 1.1, 9.0)]
    assert calibration(bursts, profile, num_layers=profile.model.num_layers) == pytest.approx(1.1)
