"""What an arrival of an uneven stream meets, against drawn streams and single servers."""

import numpy as np
import pytest
from scipy.optimize import brentq

from exeplan.workload.arrivals import residents
from exeplan.workload.bursts import clustered, residents_in_bursts

ONE = np.array([1.0])


@pytest.mark.parametrize("variability", [0.25, 0.5, 2.0, 4.0])
@pytest.mark.parametrize("come", [0.05, 0.5, 5.0, 100.0])
def test_others_come_near_an_arrival_as_in_a_drawn_stream(variability: float, come: float) -> None:
    times = np.cumsum(np.random.default_rng(0).gamma(1 / variability, variability, 400_000))
    counts = np.bincount((times / come).astype(int))[:-1]
    beside = float(counts @ counts) / counts.sum() - 1 - counts.mean()
    assert clustered(come, variability) == pytest.approx(beside, abs=0.01 + 0.002 * come)


def test_a_poisson_stream_has_no_clusters() -> None:
    assert clustered(3.0, 1.0) == 0.0


@pytest.mark.parametrize("load", [0.3, 0.8, 0.95])
def test_without_bursts_it_is_the_poisson_chain(load: float) -> None:
    sizes, throughputs = np.array([1.0, 12.0]), np.array([1.0, 5.0])
    bursts = residents_in_bursts(5 * load, sizes, throughputs, 1.0 + 1e-9)
    chance = residents(5 * load, sizes, throughputs)
    short = min(len(chance), len(bursts.chance))
    assert bursts.chance[:short] == pytest.approx(chance[:short], abs=1e-6)
    assert bursts.met[:short] == pytest.approx(chance[:short], abs=1e-6)  # Poisson arrivals see time averages.


@pytest.mark.parametrize("load", [0.6, 0.9])
def test_bursts_meet_a_single_server_as_gi_m_1_says(load: float) -> None:
    """Of a queue of gamma gaps an arrival meets n with probability (1 - x) x^n, x the root of x = E[e^(-(1 - x) gap)];
    the chain has the gaps' first three moments."""
    variability = 4.0
    root = brentq(lambda x: (1 + (1 - x) / load * variability) ** (-1 / variability) - x, 1e-9, 1 - 1e-6)
    chance, met = residents_in_bursts(load, ONE, ONE, variability)
    number = np.arange(len(met))
    assert number @ met == pytest.approx(root / (1 - root), rel=0.08)
    assert number @ chance == pytest.approx(load / (1 - root), rel=0.05)
    assert chance[0] == pytest.approx(1 - load, rel=1e-4)
    assert number @ met > 0.5 + number @ chance


def test_servers_without_end_hold_a_number_as_peaked_as_the_gaps() -> None:
    """Exponential times much longer than the gaps: the variance is (1 + c) / 2 times the mean."""
    sizes = np.array([1.0, 3000.0])
    chance, met = residents_in_bursts(500.0, sizes, sizes, 3.0)
    number = np.arange(len(chance))
    assert number @ chance == pytest.approx(500.0, rel=1e-3)
    assert number**2 @ chance - (number @ chance) ** 2 == pytest.approx(1000.0, rel=0.01)
    assert number @ met == pytest.approx(501.0, rel=1e-3)
