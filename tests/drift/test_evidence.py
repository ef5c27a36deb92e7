"""evidence(): equal laws are not reported as different, and different ones are, in the tail too."""

import math

import numpy as np
import pytest

from exeplan.drift.evidence import Known, come_faster, dependence, divergence, evidence, tail_within
from exeplan.workload.workload import Workload


def workload(inputs: np.ndarray, outputs: np.ndarray) -> Workload:
    return Workload.of("w", inputs=inputs, outputs=outputs, weights=np.ones(len(inputs)))


def draw(count: int, seed: int, *, scale: float = 1.0, tail: float = 0.0) -> Workload:
    rng = np.random.default_rng(seed)
    outputs = (rng.exponential(60.0, count) * scale).astype(int) + 1
    outputs[rng.random(count) < tail] += 400
    return workload(rng.integers(10, 200, count), outputs)


TRUE = Known(draw(200_000, seed=99), math.inf)


def test_a_sample_of_the_law_is_no_evidence_against_it():
    """A thousand samples at one in a thousand: as many alarms as one would expect at most, so the bound holds."""
    far = [evidence(Known(draw(300, seed), 300), TRUE, false_alarm=1e-3) for seed in range(1000)]
    assert sum(value > 1 for value in far) <= 3


def test_nor_are_two_samples_against_each_other():
    pairs = [(Known(draw(300, seed), 300), Known(draw(500, seed + 5000), 500)) for seed in range(300)]
    assert sum(evidence(*pair, false_alarm=1e-3) > 1 for pair in pairs) <= 2


@pytest.mark.parametrize("change", [{"scale": 1.3}, {"scale": 0.75}, {"tail": 0.04}])
def test_a_change_of_the_mean_or_of_the_tail_is_evidence(change):
    assert evidence(Known(draw(1200, 1, **change), 1200), TRUE, false_alarm=1e-6) > 1


def test_a_sample_known_from_few_requests_is_weaker():
    law = draw(1200, 1, scale=1.3)
    strong, weak = (evidence(Known(law, size), TRUE, false_alarm=1e-6) for size in (1200, 120))
    assert weak == pytest.approx(strong / 10, rel=0.1)


def test_a_length_that_a_certain_law_excludes_may_happen_once():
    law = workload(np.full(1000, 10), np.array([20] * 999 + [500]))
    certain = workload(np.full(2, 10), np.array([20, 20]))
    assert evidence(Known(law, 1000), Known(certain, math.inf), false_alarm=1e-6) < 1


def test_only_lengths_that_both_know_are_compared():
    """Nothing is known of those that became longer than 30, so nothing is said of them."""
    law = draw(1000, 2, tail=0.3)
    known = Known(law, 1000, lengths=np.array([1, 30]), sizes=np.array([1000.0, 0.0]))
    assert evidence(known, TRUE, false_alarm=1e-6) < 1 < evidence(Known(law, 1000), TRUE, false_alarm=1e-6)


def test_divergence_of_equal_coins_is_zero_and_of_an_impossible_one_infinite():
    assert divergence(0.3, 0.3) == 0.0
    assert divergence(0.5, 0.25) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert math.isinf(divergence(0.1, 0.0))


def test_a_tail_that_the_sample_may_hold_leaves_the_true_one_within_its_share():
    """Of 2,000 samples the length that so few exceed is too short in no more than one in five."""
    rng = np.random.default_rng(5)
    kept = tail_within(0.01, size=800, confidence=0.8)
    assert 0 < kept < 0.01
    lengths = np.sort(rng.random((2000, 800)), axis=1)[:, 800 - int(800 * kept) - 1]
    assert np.mean(1 - lengths > 0.01) < 0.2
    assert tail_within(0.01, size=100, confidence=0.8) == 0.0


def test_independent_requests_are_not_taken_for_dependent_ones():
    found = [dependence(np.random.default_rng(seed).integers(1, 500, 1000)) for seed in range(100)]
    assert np.mean(found) < 1.4


def test_requests_in_bursts_of_a_kind_are_worth_fewer():
    rng = np.random.default_rng(0)
    bursts = np.repeat(rng.integers(1, 500, 100), 10)
    assert 4 < dependence(bursts) < 20


def starts(count: int, seed: int, *, rate: float = 1.0, bursty: bool = False) -> np.ndarray:
    """Of a Poisson stream, or of one whose gaps have 5.5 times the variance."""
    rng = np.random.default_rng(seed)
    scale = np.where(rng.random(count) < 0.1, 5.5, 0.5) if bursty else 1.0
    return np.cumsum(scale * rng.exponential(1 / rate, count))


@pytest.mark.parametrize("bursty", [False, True])
def test_a_stream_does_not_come_faster_than_its_own_rate(bursty):
    """A thousand streams at one in a thousand."""
    found = [come_faster(starts(1000, seed, bursty=bursty), 1.0, false_alarm=1e-3) for seed in range(1000)]
    assert sum(found) <= 3


def test_a_third_more_requests_are_more_than_chance_and_a_few_are_too_few_to_know():
    assert all(come_faster(starts(1000, seed, rate=1.35), 1.0, false_alarm=1e-6) for seed in range(20))
    assert not come_faster(starts(100, 0, rate=3.0), 1.0, false_alarm=1e-6)
    assert not come_faster(np.zeros(1000), 1.0, false_alarm=1e-6)
