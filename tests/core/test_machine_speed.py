"""The machine's speed is that of its reference passes: by kind, near each moment, with its error."""

import math
from dataclasses import replace

import numpy as np
import pytest

from exeplan.core.profile import ReferencePass
from exeplan.core.runs.machine_speed import MachineSpeed, Restlessness, SpeedSample, levelled, slowness_between

PASSES = (
    ReferencePass(kind="decode", num_seqs=1, num_tokens=8, num_layers=2, seconds=0.01),
    ReferencePass(kind="decode", num_seqs=16, num_tokens=8, num_layers=2, seconds=0.02),
    ReferencePass(kind="prefill", num_seqs=1, num_tokens=8, num_layers=2, seconds=0.05),
)


def sample(number: int, time: float, slow: float) -> SpeedSample:
    return SpeedSample(number=number, time=time, seconds=slow * PASSES[number].seconds, cost=0.1)


def speed(*slow: float) -> MachineSpeed:
    samples = [sample(n % 3, float(n), slow[n * len(slow) // 30]) for n in range(30)]
    return MachineSpeed(passes=PASSES, samples=tuple(samples))


def test_each_moment_has_what_the_reference_passes_near_it_mean_for_the_engine() -> None:
    found = speed(1.2, 1.5)
    assert found.slowness(np.array([3.0, 26.0])) == pytest.approx([1.2**0.9, 1.5**0.9])
    assert found.spread == pytest.approx((1.5**0.9 - 1.2**0.9) / 2)


def test_without_samples_nothing_is_slower() -> None:
    found = MachineSpeed(passes=PASSES, samples=())
    assert found.slowness(np.array([0.0, 1.0])).tolist() == [1.0, 1.0]
    assert (found.error, found.spread, found.cost) == (0.0, 0.0, 0.0)


def test_one_sample_that_is_far_off_counts_as_twice_as_slow() -> None:
    slow = [1.0] * 20 + [90.0] + [1.0] * 20
    found = MachineSpeed(passes=PASSES, samples=tuple(sample(0, float(t), s) for t, s in enumerate(slow)))
    assert found.slowness(np.array([20.0, 10.0])) == pytest.approx([2.0 ** (1 / 5), 1.0])


def test_the_error_is_that_of_both_means() -> None:
    noisy = [sample(0, float(n), 1.1 if n % 2 else 1 / 1.1) for n in range(50)]
    alone = MachineSpeed(passes=PASSES[:1], samples=tuple(noisy))
    assert alone.error == pytest.approx(0.9 * np.log(1.1) / 50**0.5, rel=0.02)
    levels = levelled(PASSES[:1], noisy)
    both = MachineSpeed(passes=levels, samples=tuple(noisy))
    assert both.error == pytest.approx(np.hypot(alone.error, 0.9 * levels[0].error))


def test_levels_are_means_and_a_pass_without_samples_stays() -> None:
    samples = [sample(0, 0.0, slow) for slow in (1.0, 2.0, 2.0, 400.0)]
    levels = levelled(PASSES, samples)
    assert levels[0].seconds == pytest.approx(0.01 * (1 * 2 * 2 * 4) ** (1 / 4))
    assert levels[1:] == PASSES[1:]
    assert levels[0].error > 0


def test_what_other_processes_took_is_the_wall_clock_over_the_own_seconds_of_all_samples() -> None:
    samples = (
        SpeedSample(number=0, time=0.0, seconds=1.0, cost=2.0, others=1.0),
        SpeedSample(number=0, time=1.0, seconds=3.0, cost=6.0, others=2.0),
    )
    speed = MachineSpeed(passes=PASSES, samples=samples)
    assert speed.others == pytest.approx(7 / 4)
    assert speed.others_error == pytest.approx(math.log(2) / 2)
    assert (replace(speed, samples=()).others, replace(speed, samples=()).others_error) == (1.0, 0.0)
    assert replace(speed, samples=()).mean == 1.0
    assert speed.mean == pytest.approx((100 * 300) ** 0.45)


def test_two_profiles_are_compared_by_their_reference_passes() -> None:
    slower = tuple(
        replace(one, seconds=one.seconds * factor) for one, factor in zip(PASSES, (1.0, 2.0, 4.0), strict=True)
    )
    assert slowness_between(PASSES, slower) == pytest.approx(2.0**0.9)
    assert slowness_between((), ()) == 1.0


def test_passes_are_due_sooner_where_they_differ_from_their_last_repetition() -> None:
    steady, restless = Restlessness(), Restlessness()
    assert restless.share == 1.0  # Nothing is known yet.
    for n in range(30):
        steady.add(n % 3, (1.0 + n % 3) * (1.02 if n % 2 else 1.0))
        restless.add(n % 3, (1.0 + n % 3) * (1.15 if n % 2 else 1.0))
    assert steady.share == 1.0
    assert restless.share == pytest.approx(0.05 / (math.log(1.15) / 2**0.5))
    for n in range(30):
        restless.add(n % 3, (1.0 + n % 3) * (9.0 if n % 2 else 1.0))
    assert restless.share == 0.3
    for n in range(40):
        restless.add(n % 3, 1.0 + n % 3)
    assert restless.share == 1.0


def test_a_short_time_is_known_as_well_as_the_passes_in_it_agree() -> None:
    found = MachineSpeed(
        passes=PASSES[:1], samples=tuple(sample(0, float(n), 1.1 if n % 2 else 1.0) for n in range(40))
    )
    assert found.error_between(10.0, 13.0) == pytest.approx(1.4826 * 0.9 * math.log(1.1) / 8**0.5)
    assert found.error_between(100.0, 103.0) == pytest.approx(1.4826 * 0.9 * math.log(1.1) / 2**0.5)
    assert replace(found, samples=()).error_between(0.0, 1.0) == 0.0
