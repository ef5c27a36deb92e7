"""Products of any size follow measured ones: exactly where they were measured, smoothly between."""

import numpy as np
import pytest

from exeplan.profiler.importing.gemm import Gemms, gemms, roofline_seconds

FLOPS, BANDWIDTH = 300e12, 2e12
SIZES = (1024.0, 2048.0, 4096.0, 8192.0)


def table(slowness: float = 1.5, without: tuple[tuple[float, float], ...] = ()) -> Gemms:
    """A device whose products take `slowness` * (n / 1024)^0.1 times their roofline."""
    cells = [(m, n, k) for m in (1.0, 64.0, 512.0) for n in SIZES for k in SIZES if (n, k) not in without]
    m, n, k = (np.array(axis) for axis in zip(*cells, strict=True))
    seconds = roofline_seconds(m, n, k, FLOPS, BANDWIDTH) * slowness * (n / 1024) ** 0.1
    return gemms(m, n, k, seconds, flops=FLOPS, bandwidth=BANDWIDTH)


def test_a_measured_product_keeps_its_time() -> None:
    found = table()
    assert found.measured(2048, 4096)
    assert found.seconds(2048, 4096) == pytest.approx(
        roofline_seconds(found.m, 2048, 4096, FLOPS, BANDWIDTH) * 1.5 * 2**0.1
    )


def test_a_product_between_follows_its_roofline() -> None:
    found = table()
    assert not found.measured(3000, 5000)
    expected = roofline_seconds(found.m, 3000, 5000, FLOPS, BANDWIDTH) * 1.5 * (3000 / 1024) ** 0.1
    assert found.seconds(3000, 5000) == pytest.approx(expected)


def test_beyond_the_table_the_excess_of_the_border_holds() -> None:
    found = table()
    expected = roofline_seconds(found.m, 128256, 4096, FLOPS, BANDWIDTH) * 1.5 * 8**0.1
    assert found.seconds(128256, 4096) == pytest.approx(expected)


def test_a_missing_cell_is_bridged_by_the_corners_that_are_there() -> None:
    found = table(without=((8192.0, 8192.0),))
    assert not found.measured(8192, 8192)
    assert np.isfinite(found.seconds(6000, 6000)).all()
    assert found.seconds(6000, 6000) == pytest.approx(table().seconds(6000, 6000), rel=0.05)


def test_products_timed_again_count_with_their_median() -> None:
    one = np.ones(4)
    seconds = np.array([1e-5, 2e-5, 4e-5, 1e-3])
    found = gemms(one, 64 * one, 64 * one, seconds, flops=FLOPS, bandwidth=BANDWIDTH)
    assert found.seconds(64, 64) == pytest.approx([np.sqrt(2e-5 * 4e-5)])


def test_leaving_sizes_out_of_a_smooth_table_misses_nothing() -> None:
    assert table().misses == pytest.approx(0.0, abs=1e-12)
    assert len(table().misses) == 2 * 2 * len(SIZES) * 3
