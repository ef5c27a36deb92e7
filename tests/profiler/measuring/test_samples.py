"""Samples add up to measurements: medians, attention as a layer's time beyond its rest, and back when resumed."""

import numpy as np
import pytest

from exeplan.core.profile import Measurement, ReferencePass
from exeplan.core.runs.machine_speed import MachineSpeed, SpeedSample
from exeplan.profiler.measuring.samples import Key, Samples, resumed

LAYER: Key = ("layer", "decode", 4, 0, 64)
ATTENTION: Key = ("attention", "decode", 4, 0, 64)


@pytest.fixture
def samples() -> Samples:
    """Rest is 10 at 1 token and 40 at 16, so 16 at 4; the layer is 30."""
    samples = Samples()
    for noise in (-1, 0, 1):
        samples.add({("rest", "", 0, 1, 0): 10.0, ("rest", "", 0, 16, 0): 40.0 + noise})
        samples.add({LAYER: 30.0 + noise, ATTENTION: 12.0 + noise, ("head", "", 4, 0, 0): 5.0 + noise})
    return samples


def row(samples: Samples, op: str) -> Measurement:
    return next(m for m in samples.measurements() if m.op == op)


def test_a_measurement_is_the_median_of_its_visits(samples: Samples) -> None:
    assert row(samples, "head") == Measurement(op="head", num_seqs=4, seconds=5.0, spread=0.1, repeats=3)


def test_attention_and_interpolated_rest_add_up_to_the_layer(samples: Samples) -> None:
    assert row(samples, "attention").seconds == pytest.approx(30.0 - 16.0)


def test_where_the_difference_is_noise_the_attention_alone_stands(samples: Samples) -> None:
    for _ in range(9):
        samples.add({LAYER: 15.0})
    assert row(samples, "attention").seconds == 12.0


def test_whole_layers_are_not_reported(samples: Samples) -> None:
    assert {m.op for m in samples.measurements()} == {"attention", "rest", "head"}


def test_a_resumed_run_starts_from_the_same_measurements(samples: Samples) -> None:
    before = samples.measurements()
    after = resumed(before).measurements()
    assert [(m.op, m.seconds, m.repeats) for m in after] == [(m.op, m.seconds, m.repeats) for m in before]
    assert [m.spread for m in after] == pytest.approx([m.spread for m in before])


def test_more_visits_move_a_resumed_median_by_their_weight(samples: Samples) -> None:
    again = resumed(samples.measurements())
    again.add({("head", "", 4, 0, 0): 9.0})
    assert row(again, "head").repeats == 4
    assert 5.0 < row(again, "head").seconds < 6.0


def test_a_slow_round_leaves_no_mark_on_what_only_it_has_seen() -> None:
    samples = Samples()
    for number in range(1, 6):
        slow = 1.5 if number == 5 else 1.0
        samples.add({("rest", "", 0, n, 0): 10.0 * n * slow for n in (1, 2, 4)}, number)
        if number == 5:
            samples.add({("rest", "", 0, 3, 0): 30.0 * slow}, number)
    assert samples.curve("rest", "") == pytest.approx({1: 10.0, 2: 20.0, 3: 30.0, 4: 40.0})


def test_a_sample_counts_with_its_seconds_at_the_speed_of_its_moment() -> None:
    """The engine became twice as slow half-way; a sample without a time stays as it is."""
    one = ReferencePass(kind="decode", num_seqs=1, num_tokens=8, num_layers=2, seconds=1.0)
    samples = [
        SpeedSample(number=0, time=time, seconds=1.0 if time < 50 else 2.0 ** (1 / 0.9), cost=0.0)
        for time in range(100)
    ]
    found = Samples()
    for time in (10.0, 90.0):
        found.add({("rest", "prefill", 0, 8, 0): 10.0 if time < 50 else 20.0}, time=time)
    found.add({("head", "", 1, 0, 0): 5.0})
    found.pair_with(MachineSpeed(passes=(one,), samples=tuple(samples)))
    assert found.seconds(("rest", "prefill", 0, 8, 0)) == pytest.approx([10.0, 10.0])
    assert found.seconds(("head", "", 1, 0, 0)) == [5.0]


def test_what_a_layer_is_known_to_is_the_spread_of_all_its_points_over_their_visits() -> None:
    rng = np.random.default_rng(3)
    found = Samples()
    for point in range(1, 41):
        for number in range(5):
            seconds = 0.01 * point * float(np.exp(0.1 * rng.normal()))
            found.add({("layer", "decode", point, 0, 512): seconds}, number=5 * point + number)
    assert found.error("decode") == pytest.approx(0.1 / 10**0.5, rel=0.15)
    assert found.error("prefill") == 0.0
