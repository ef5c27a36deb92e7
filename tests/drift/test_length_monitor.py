"""LengthMonitor: the law of all requests from those that have ended and those that still run, without a bias."""

import numpy as np
import pytest

from exeplan.drift.length_monitor import LengthMonitor
from exeplan.drift.state import RequestLengths

TOKENS_A_SECOND = 20.0


def lengths(count: int, seed: int, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and outputs that hang together, both far from normal."""
    one, other = np.random.default_rng(seed).normal(size=(2, count))
    outputs = np.exp(3.5 + 0.9 * (0.8 * one + 0.6 * other)) * scale
    return np.exp(4 + 0.7 * one).astype(int) + 1, outputs.astype(int) + 1


def watch(monitor: LengthMonitor, inputs: np.ndarray, outputs: np.ndarray, *, rate: float, until: float) -> None:
    """Requests that start at a rate and get their tokens one after the other, as they stand after `until` seconds."""
    starts = np.arange(len(inputs)) / rate
    rows = zip(starts.tolist(), inputs.tolist(), outputs.tolist(), strict=True)
    begun = [(start, i, o, (until - start) * TOKENS_A_SECOND) for start, i, o in rows if start <= until]
    ended = [RequestLengths(start, i, o, True) for start, i, o, tokens in begun if tokens >= o]
    running = [RequestLengths(start, i, int(tokens), False) for start, i, o, tokens in begun if tokens < o]
    monitor.note(sorted(ended, key=lambda seen: seen.start + seen.output_tokens / TOKENS_A_SECOND), running)


def mean_bias(name: str, *, until: float, complete_only: bool = False) -> float:
    """Of the mean over many samples, relative to the law's own."""
    found, true = [], []
    for seed in range(30):
        monitor = LengthMonitor(half_life=200)
        inputs, outputs = lengths(1500, seed)
        watch(monitor, inputs, outputs, rate=60.0, until=until)
        if complete_only:
            monitor.note([], [])
        observed = monitor.observe()
        assert observed is not None
        found.append(getattr(observed.workload, name))
        true.append(getattr(monitor_of(inputs, outputs), name))
    return float(np.mean(found) / np.mean(true) - 1)


def monitor_of(inputs: np.ndarray, outputs: np.ndarray):
    monitor = LengthMonitor(half_life=1e9)
    monitor.note(
        [RequestLengths(n, int(i), int(o), True) for n, (i, o) in enumerate(zip(inputs, outputs, strict=True))], []
    )
    observed = monitor.observe()
    assert observed is not None
    return observed.workload


@pytest.mark.parametrize("name", ["mean_input", "mean_output"])
def test_the_means_are_unbiased_though_a_third_of_the_requests_still_run(name):
    assert abs(mean_bias(name, until=20.0)) < 0.04


def test_without_those_that_still_run_the_outputs_would_seem_much_shorter():
    assert mean_bias("mean_output", until=20.0, complete_only=True) < -0.1


def test_both_sides_stay_correlated():
    inputs, outputs = lengths(3000, seed=1)
    monitor = LengthMonitor(half_life=1e9)
    watch(monitor, inputs, outputs, rate=60.0, until=45.0)
    observed = monitor.observe()
    assert observed is not None
    law = observed.workload
    centred = [np.log(side) - np.log(side) @ law.weights for side in (law.inputs, law.outputs)]
    covariance = np.array([[law.weights @ (one * other) for one in centred] for other in centred])
    found = covariance[0, 1] / np.sqrt(covariance[0, 0] * covariance[1, 1])
    assert found == pytest.approx(np.corrcoef(np.log(inputs), np.log(outputs))[0, 1], abs=0.06)
    assert observed.num_censored > 50


def test_a_request_that_runs_is_longer_than_it_is_now():
    """By hand: of four that started, two ended after 10, one runs at 5 and one at 20, so none is shorter than 10."""
    monitor = LengthMonitor(half_life=1e9)
    ended = [RequestLengths(0.0, 3, 10, True), RequestLengths(1.0, 3, 10, True)]
    monitor.note(ended, [RequestLengths(2.0, 3, 5, False), RequestLengths(3.0, 3, 20, False)])
    observed = monitor.observe()
    assert observed is not None
    # The one at 5 becomes a 10 with 2 in 3, longer than 20 with 1 in 3.
    assert observed.workload.outputs.tolist() == [10, 21]
    assert observed.workload.weights.tolist() == pytest.approx([2 / 3, 1 / 3], abs=1 / 32)
    assert observed.size == 0.0  # All that are as long as the tail still run.


def test_what_came_lately_counts_more():
    monitor = LengthMonitor(half_life=10)
    monitor.note([RequestLengths(float(n), 5, 1 if n < 20 else 3, True) for n in range(30)], [])
    observed = monitor.observe()
    assert observed is not None
    assert observed.workload.weights[-1] == pytest.approx(0.5 / (1 - 0.5**3), rel=1e-6)


def test_another_law_displaces_the_old_one_at_once():
    monitor = LengthMonitor(half_life=1000)
    inputs, outputs = lengths(1000, seed=3)
    later = lengths(200, seed=4, scale=3.0)
    inputs, outputs = np.concatenate([inputs, later[0]]), np.concatenate([outputs, later[1]])
    monitor.note(
        [RequestLengths(float(n), int(i), int(o), True) for n, (i, o) in enumerate(zip(inputs, outputs, strict=True))],
        [],
    )
    observed = monitor.observe()
    assert observed is not None
    assert observed.since > 900
    assert observed.workload.mean_output == pytest.approx(later[1].mean(), rel=0.25)


def test_memory_is_bounded():
    monitor = LengthMonitor(most_kept=500)
    monitor.note([RequestLengths(float(n), 10, 10 + n % 7, True) for n in range(5000)], [])
    observed = monitor.observe()
    assert observed is not None
    assert (monitor.num_complete, observed.since) == (500, 4500.0)


def test_nothing_is_known_before_a_request_has_ended():
    monitor = LengthMonitor()
    monitor.note([], [RequestLengths(0.0, 10, 3, False)])
    assert monitor.observe() is None
