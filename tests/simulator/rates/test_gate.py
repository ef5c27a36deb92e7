"""A gate that lets all in that wait: its waits are those of Pollaczek and Khinchine, and of simulated batches."""

import numpy as np
import pytest

from exeplan.simulator.rates.gate import Gate, gate

UNEVEN = np.array([0.6, 0.8, 0.9, 1.0, 1.1, 1.6])
"""Equally likely times over their mean."""


def simulated(rate: float, seconds: np.ndarray, *, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Waits of Poisson arrivals, and with how many each enters."""
    rng = np.random.default_rng(0)
    arrivals, most = np.cumsum(rng.exponential(1 / rate, count)), len(seconds)
    waits, together = np.zeros(count), np.zeros(count)
    now, first = 0.0, 0
    while first < count:
        now = max(now, arrivals[first])
        last = min(int(np.searchsorted(arrivals, now, side="right")), first + most)
        waits[first:last], together[first:last] = now - arrivals[first:last], last - first
        now += seconds[last - first - 1, rng.integers(seconds.shape[1])]
        first = last
    return waits, together


def found(most: int, load: float) -> tuple[Gate, float, np.ndarray]:
    """A gate whose batches take one second and a fiftieth for each request."""
    seconds = (1 + 0.02 * np.arange(1, most + 1))[:, None] * UNEVEN
    rate = load * most / float(seconds[-1].mean())
    return gate(rate, seconds), rate, seconds


@pytest.mark.parametrize("load", [0.2, 0.5, 0.9])
def test_one_at_a_time_waits_as_pollaczek_and_khinchine_say(load: float) -> None:
    one, rate, seconds = found(1, load)
    assert one.wait == pytest.approx(rate * float((seconds**2).mean()) / (2 * (1 - load)), rel=0.03)


@pytest.mark.parametrize(("most", "load"), [(4, 0.5), (4, 0.9), (37, 0.3), (37, 0.9), (400, 0.7)])
def test_waits_and_batches_are_those_of_a_simulation(most: int, load: float) -> None:
    one, rate, seconds = found(most, load)
    waits, together = simulated(rate, seconds, count=150_000)
    assert one.wait == pytest.approx(waits.mean(), rel=0.05)
    assert float(one.chance @ one.sizes) == pytest.approx(together.mean(), rel=0.03)
    order = np.argsort(one.waits)
    reached = np.cumsum(one.weights[order])
    for share in (0.5, 0.95, 0.99):
        own = one.waits[order][np.searchsorted(reached, share)]
        assert own == pytest.approx(np.quantile(waits, share), rel=0.1)


def test_what_requests_meet_is_a_distribution_with_the_mean_wait() -> None:
    one, _, _ = found(12, 0.8)
    assert one.weights.sum() == pytest.approx(1.0)
    assert one.weights @ one.waits == pytest.approx(one.wait)
    assert one.chance.sum() == pytest.approx(1.0)
    assert 1.0 <= one.together.min() <= one.together.max() <= 12.0


def test_even_arrivals_wait_less_and_bursts_longer() -> None:
    seconds = np.ones((4, 1))
    waits = [gate(3.2, seconds, variability=variability).wait for variability in (0.5, 1.0, 4.0)]
    assert waits == sorted(waits)
    assert waits[2] > 1.5 * waits[1]
