"""Quantiles are scipy's, without importing it."""

import math

import numpy as np
import pytest
from scipy.special import ndtri, pdtrik, stdtrit

from exeplan.core.quantiles import poisson_quantiles, student_quantile


@pytest.mark.parametrize("freedom", [1.0, 1.5, 2.0, 3.7, 11.0, 30.0, 250.0, 999.0, 1000.0, 1e6, 1e9])
@pytest.mark.parametrize("share", [0.6, 0.9, 0.95, 0.975, 0.999, 0.9999, 0.3, 0.01])
def test_students_are_scipys(freedom: float, share: float) -> None:
    assert student_quantile(freedom, share) == pytest.approx(float(stdtrit(freedom, share)), rel=1e-11)


def test_infinite_freedom_is_the_normal_law() -> None:
    assert student_quantile(math.inf, 0.95) == pytest.approx(float(ndtri(0.95)), rel=1e-14)
    assert student_quantile(5.0, 0.5) == 0.0


@pytest.mark.parametrize("mean", [1e-9, 0.3, 1.0, 7.5, 31.0, 31.5, 400.0, 20_000.0])
def test_poissons_are_scipys_for_one_mean_and_for_many(mean: float) -> None:
    rng = np.random.default_rng(0)
    chance = rng.permutation((np.arange(1024) + 0.5) / 1024)
    many = np.maximum(rng.exponential(mean, 1024), 1e-9)
    assert poisson_quantiles(chance, mean).tolist() == np.maximum(np.ceil(pdtrik(chance, mean)), 0).tolist()
    assert poisson_quantiles(chance, many).tolist() == np.maximum(np.ceil(pdtrik(chance, many)), 0).tolist()
