"""A gate that lets all in that wait: its waits are those of Pollaczek and Khinchine, and of simulated batches."""

import numpy as np
import pytest

from exeplan.errors import Infeasible
from exeplan.simulator.rates.gate import Gate, _arrivals, gate

LOADS = (0.5, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999, 0.99999)

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


def mean_wait(rate: float, seconds: np.ndarray, *, batches: int) -> float:
    """Seconds, by Little's law, at 400 gates with Poisson arrivals, each from no queue on; the first third is left
    out."""
    rng = np.random.default_rng(0)
    waiting, shut, queue = 0.0, 0.0, np.zeros(400, dtype=int)
    for number in range(batches):
        entered = np.clip(queue, 1, len(seconds))
        held = seconds[entered - 1, rng.integers(seconds.shape[1], size=400)]
        left = np.maximum(queue - len(seconds), 0)
        if number > batches / 3:
            waiting += float((left * held + rate * held**2 / 2).sum())
            shut += float((held + (queue == 0) / rate).sum())
        queue = left + rng.poisson(rate * held)
    return waiting / shut / rate


def found(most: int, load: float) -> tuple[Gate, float, np.ndarray]:
    """A gate whose batches take one second and a fiftieth for each request."""
    seconds = (1 + 0.02 * np.arange(1, most + 1))[:, None] * UNEVEN
    rate = load * most / float(seconds[-1].mean())
    return gate(rate, seconds), rate, seconds


@pytest.mark.parametrize("load", [0.2, *LOADS])
def test_one_at_a_time_waits_as_pollaczek_and_khinchine_say(load: float) -> None:
    one, rate, seconds = found(1, load)
    assert one.wait == pytest.approx(rate * float((seconds**2).mean()) / (2 * (1 - load)), rel=1e-3)


@pytest.mark.parametrize("load", LOADS)
def test_with_times_all_alike_as_well(load: float) -> None:
    one = gate(load, np.ones((1, 2)))
    assert one.wait == pytest.approx(load / (2 * (1 - load)), rel=1e-3)
    assert one.weights @ one.waits == pytest.approx(one.wait)


@pytest.mark.parametrize("load", [0.5, 0.9, 0.99])
def test_with_a_few_times_far_longer_than_the_others_too(load: float) -> None:
    seconds = np.append(np.full(19, 0.1), 18.1)[None, :]
    one = gate(load, seconds)
    assert one.wait == pytest.approx(load * float((seconds**2).mean()) / (2 * (1 - load)), rel=0.01)


@pytest.mark.parametrize(("most", "load"), [(4, 0.5), (4, 0.9), (37, 0.3), (37, 0.9), (300, 0.5), (400, 0.7)])
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


@pytest.mark.parametrize(
    ("most", "load", "batches"),
    [(4, 0.97, 5000), (4, 0.99, 24_000), (300, 0.9, 500), (300, 0.97, 2000), (300, 0.99, 20_000)],
)
def test_close_to_the_capacity_the_wait_is_that_of_many_simulated_gates(most: int, load: float, batches: int) -> None:
    one, rate, seconds = found(most, load)
    assert one.wait == pytest.approx(mean_wait(rate, seconds, batches=batches), rel=0.08)


@pytest.mark.parametrize("variability", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("most", [1, 3, 4, 37, 201, 300])
def test_waits_rise_with_the_rate(most: int, variability: float) -> None:
    seconds = np.array([0.9, 1.1]) * np.ones((most, 1))
    waits = [gate(load * most, seconds, variability=variability).wait for load in LOADS]
    assert waits == sorted(waits)
    assert waits[-1] > 20 * waits[0]


@pytest.mark.parametrize("step", [1.0, 1.5, 3.0, 5.0, 20.0])
@pytest.mark.parametrize("variability", [0.3, 1.0, 3.0])
def test_arrivals_have_their_mean_in_steps_of_any_size(step: float, variability: float) -> None:
    means = np.array([0.4, 2.985, 11.0, 170.0])
    law = _arrivals(means[:, None], variability, 400, step)
    assert law.sum(axis=1) == pytest.approx(np.ones(4))
    assert law @ np.arange(400) * step == pytest.approx(means, rel=1e-3)


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


@pytest.mark.parametrize("rate", [1.0, 1.1, 50.0])
def test_at_the_capacity_and_above_the_queue_grows_without_end(rate: float) -> None:
    with pytest.raises(Infeasible, match=f"^1 requests/s are sustained, {rate:.6g} come$"):
        gate(rate, np.ones((1, 2)))
