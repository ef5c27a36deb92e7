"""Quantiles of Poisson variables are scipy's."""

import numpy as np
import pytest
from scipy.special import pdtr

from exeplan.simulator.rates.poisson import poisson_quantiles


@pytest.mark.parametrize("scale", [1e-9, 0.1, 1.0, 20.0, 300.0, 4000.0])
def test_they_are_the_least_numbers_with_that_chance(scale: float) -> None:
    rng = np.random.default_rng(0)
    chance, expected = rng.random(500), scale * rng.uniform(0.5, 2.0, 500)
    found = poisson_quantiles(chance, expected)
    assert (pdtr(found, expected) >= chance - 1e-12).all()
    assert ((found == 0) | (pdtr(found - 1, expected) < chance + 1e-12)).all()


def test_arguments_are_broadcast_and_certain_chances_end() -> None:
    assert poisson_quantiles(np.array([0.1, 0.9]), np.array([[2.0], [0.0], [30.0]])).tolist() == [
        [0, 4],
        [0, 0],
        [23, 37],
    ]
    assert poisson_quantiles(np.array([0.5]), 3.0).tolist() == [3]
    assert (poisson_quantiles(np.array([1.0, 1.0]), np.array([0.3, 500.0])) > [3, 600]).all()
