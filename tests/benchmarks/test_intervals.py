"""The intervals that records and documentation state hold what they say."""

import numpy as np
import pytest

from benchmarks.lib.intervals import half_width, of_median, wilson


def test_the_interval_of_a_share() -> None:
    assert wilson(0, 420) == pytest.approx((0, 0.0091), abs=1e-4)
    assert wilson(6, 528) == pytest.approx((0.0052, 0.0246), abs=1e-4)


def test_the_interval_of_a_median_is_the_sign_tests() -> None:
    """Of twelve values the third and the tenth, outside of which the median lies in 3.9 % of cases; of five, none."""
    assert of_median(range(12)) == (2, 9)
    assert of_median(range(6)) == (0, 5)
    assert of_median(range(5)) is None


def test_the_interval_of_a_mean_is_students() -> None:
    """Two values 1 apart: 12.706 times a standard error of one half."""
    assert half_width([1.0, 2.0]) == pytest.approx(12.706 / 2)
    with pytest.raises(ValueError, match="at least 2 values, found 1"):
        half_width([1.0])


def test_intervals_of_means_and_medians_cover() -> None:
    drawn = np.random.default_rng(0).normal(size=(2000, 12))
    means = np.mean([abs(row.mean()) <= half_width(row) for row in drawn])
    medians = np.mean([low <= 0 <= high for low, high in (of_median(row.tolist()) or (1, 0) for row in drawn)])
    assert means == pytest.approx(0.95, abs=0.015)
    assert medians == pytest.approx(0.961, abs=0.015)
