"""The calibration is the time of whole engine steps over the prediction from their parts."""

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from exeplan.core.batch import Batch, SequenceState
from exeplan.core.profile import Profile, ReferencePass
from exeplan.core.runs.machine_speed import MachineSpeed, SpeedSample
from exeplan.profiler.measuring.calibrate import BurstStep, Calibration, _requests, calibrate
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


def bursts_of(cost: CostModel, factors: Sequence[float], *, with_prefills: float) -> list[list[BurstStep]]:
    """Bursts of a decode and a pass with a prefill, these many times slower than their parts."""
    decode, mixed = StepRecord(0.0, 1.0, 0, 4, 4, 400), StepRecord(0.0, 1.0, 1, 4, 104, 400)
    return [
        [
            BurstStep(decode, factor * decode_seconds(cost, 4, 100), 0.0),
            BurstStep(mixed, with_prefills * factor * mixed_seconds(cost, prefills=1), 0.0),
        ]
        for factor in factors
    ]


def test_prefills_have_a_factor_of_their_own_where_all_bursts_say_so(profile: Profile, cost: CostModel) -> None:
    found = calibrate(bursts_of(cost, (1.1, 1.2, 1.3), with_prefills=1.2), profile, num_layers=6)
    again = replace(profile, calibration=found.factor, prefill_calibration=found.prefill_factor)
    assert mixed_seconds(CostModel(again), prefills=1) == pytest.approx(1.2 * 1.2 * mixed_seconds(cost, prefills=1))
    assert decode_seconds(CostModel(again), 4, 100) == pytest.approx(1.2 * decode_seconds(cost, 4, 100))
    assert found.error == pytest.approx(1.15 * np.log([1.1, 1.2, 1.3]).std(ddof=1) / 3**0.5)


def test_bursts_that_disagree_give_prefills_no_factor(profile: Profile, cost: CostModel) -> None:
    bursts = [
        burst
        for factor, prefills in ((1.0, 1.3), (1.0, 0.8), (1.0, 1.1))
        for burst in bursts_of(cost, [factor], with_prefills=prefills)
    ]
    assert calibrate(bursts, profile, num_layers=6).prefill_factor == 1.0


def bursts_with(
    cost: CostModel, *, pass_seconds: float, factor: float, common: float = 0.0, seed: int = 0, pairs: int = 4
) -> list[list[BurstStep]]:
    """Bursts of few rows and of many, whose passes take these seconds and these times their parts, and 1 % of noise.

    `common` is the deviation of what all passes of a burst are slower by.
    """
    draw = np.random.default_rng(seed)
    noise = draw.normal(1.0, 0.01, (2 * pairs, 32)) * np.exp(common * draw.normal(size=(2 * pairs, 1)))
    return [
        [
            BurstStep(
                StepRecord(0.0, 1.0, 0, rows, rows, rows * 100),
                noise[number, step] * factor * (pass_seconds + decode_seconds(cost, rows, 100)),
                0.0,
            )
            for step in range(32)
        ]
        for number, rows in enumerate((4, 64) * pairs)
    ]


def test_short_passes_that_take_more_over_their_parts_give_every_pass_its_seconds(
    profile: Profile, cost: CostModel
) -> None:
    few, many = (decode_seconds(cost, rows, 100) for rows in (4, 64))
    own = few / 10
    found = calibrate(bursts_with(cost, pass_seconds=own, factor=1.05), profile, num_layers=profile.model.num_layers)
    assert found.pass_seconds == pytest.approx(own, rel=0.15)
    again = CostModel(replace(profile, calibration=found.factor, pass_seconds=found.pass_seconds))
    assert decode_seconds(again, 4, 100) == pytest.approx(1.05 * (few + own), rel=0.01)
    assert decode_seconds(again, 64, 100) == pytest.approx(1.05 * (many + own), rel=0.01)


def test_passes_that_are_all_as_slow_have_no_seconds_of_their_own(profile: Profile, cost: CostModel) -> None:
    found = calibrate(bursts_with(cost, pass_seconds=0.0, factor=1.05), profile, num_layers=profile.model.num_layers)
    assert found.pass_seconds == 0.0
    assert found.factor == pytest.approx(1.05, rel=0.01)


@pytest.mark.parametrize("pairs", [1, 2, 3, 4])
def test_what_all_passes_of_a_burst_have_in_common_is_not_taken_for_seconds_of_every_pass(
    pairs: int, profile: Profile, cost: CostModel
) -> None:
    found = [
        calibrate(
            bursts_with(cost, pass_seconds=0.0, factor=1.05, common=0.06, seed=seed, pairs=pairs),
            profile,
            num_layers=profile.model.num_layers,
        )
        for seed in range(60)
    ]
    assert sum(one.pass_seconds > 0 for one in found) <= 6


def test_a_step_counts_with_its_seconds_at_the_speed_of_its_moment(profile: Profile, cost: CostModel) -> None:
    """The second burst ran while the engine was twice as slow."""
    passes = (ReferencePass(kind="decode", num_seqs=1, num_tokens=8, num_layers=6, seconds=0.01),)
    samples = [
        SpeedSample(number=0, time=time, seconds=0.01 * (1 if time < 50 else 2 ** (1 / 0.9)), cost=0.02)
        for time in (*range(0, 10), *range(100, 110))
    ]
    speed = MachineSpeed(passes=passes, samples=tuple(samples))
    record = StepRecord(0.0, 1.0, 0, 4, 4, 400)
    bursts = [
        [BurstStep(record, factor * decode_seconds(cost, 4, 100), time)] for factor, time in ((1.3, 5.0), (2.6, 105.0))
    ]
    found = calibrate(bursts, profile, num_layers=6, speed=speed)
    assert (found.factor, found.error) == (pytest.approx(1.3), pytest.approx(0.0, abs=1e-9))


def test_batches_that_keep_their_rows_have_a_factor_of_their_own(profile: Profile, cost: CostModel) -> None:
    record = StepRecord(0.0, 1.0, 0, 4, 4, 400)
    joined, kept = ([[BurstStep(record, factor * decode_seconds(cost, 4, 100), 0.0)]] for factor in (1.3, 1.1))
    found = calibrate(joined, profile, num_layers=profile.model.num_layers, kept=kept)
    assert found.factor == pytest.approx(1.3)
    assert found.kept_rows_factor == pytest.approx(1.1)


def test_a_single_burst_of_kept_rows_has_the_error_of_one_of_the_others(profile: Profile, cost: CostModel) -> None:
    record = StepRecord(0.0, 1.0, 0, 4, 4, 400)
    seconds = decode_seconds(cost, 4, 100)
    joined = [[BurstStep(record, factor * seconds, 0.0)] for factor in (1.1, 1.2, 1.3)]
    kept = [[BurstStep(record, factor * seconds, 0.0)] for factor in (1.0, 1.1)]
    layers, spread = profile.model.num_layers, np.log([1.1, 1.2, 1.3]).std(ddof=1)
    one = calibrate(joined, profile, num_layers=layers, kept=kept[:1])
    assert (one.error, one.kept_rows_error) == pytest.approx((1.15 * spread / 3**0.5, 1.15 * spread))
    two = calibrate(joined, profile, num_layers=layers, kept=kept)
    assert two.kept_rows_error == pytest.approx(1.15 * np.log([1.0, 1.1]).std(ddof=1) / 2**0.5)


def test_without_bursts_of_kept_rows_their_factor_is_not_known(profile: Profile, cost: CostModel) -> None:
    steps = [BurstStep(StepRecord(0.0, 1.0, 0, 4, 4, 400), decode_seconds(cost, 4, 100), 0.0)]
    assert calibrate([steps], profile, num_layers=profile.model.num_layers).kept_rows_factor is None


def test_bursts_that_agree_by_chance_are_no_surer_than_the_speed_of_their_time(
    profile: Profile, cost: CostModel
) -> None:
    passes = (ReferencePass(kind="decode", num_seqs=1, num_tokens=8, num_layers=6, seconds=0.01),)
    samples = [
        SpeedSample(number=0, time=float(time), seconds=0.011 if time % 2 else 0.01, cost=0.02) for time in range(40)
    ]
    speed = MachineSpeed(passes=passes, samples=tuple(samples))
    record, seconds = StepRecord(0.0, 1.0, 0, 4, 4, 400), decode_seconds(cost, 4, 100)
    bursts = [
        [BurstStep(record, seconds * float(speed.slowness(np.array([time]))[0]), time) for time in (begin, begin + 7.0)]
        for begin in (5.0, 25.0)
    ]
    found = calibrate(bursts, profile, num_layers=6, speed=speed)
    assert found.error == pytest.approx(1.15 * speed.error_between(5.0, 12.0) / 2**0.5)
    assert calibrate(bursts, profile, num_layers=6).error < 0.1 * found.error


@pytest.mark.parametrize(("longest", "num_blocks"), [(15, 2), (63, 5), (63, 20), (127, 72)])
def test_requests_of_a_burst_stay_within_the_measured_contexts(longest: int, num_blocks: int) -> None:
    """Of a model that reaches much further, in a cache for the measured ones."""
    spec = SimpleNamespace(vocab_size=50, max_context=4096)
    rig = SimpleNamespace(longest=4096, runner=SimpleNamespace(spec=spec, cache=SimpleNamespace(num_blocks=num_blocks)))
    requests = _requests(rig, random.Random(0), 32, longest=longest)
    assert len(requests) >= 2
    assert max(len(one.prompt_token_ids) + one.sampling.max_tokens for one in requests) <= longest
