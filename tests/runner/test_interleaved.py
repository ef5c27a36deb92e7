"""Plans side by side: errors are of slices that have the figure, intervals of their passes, and noise is called so."""

from dataclasses import replace

import pytest

from exeplan.core.plan import Plan
from exeplan.core.schedule import Estimate, Figure, Schedule, Stage
from exeplan.runner.fidelity.interleaved import Measured, Slice, differ
from exeplan.runner.fidelity.pass_comparison import PassComparison


def estimate(throughput: float, latency: float | None = 2.0) -> Estimate:
    return Estimate(
        throughput=throughput,
        token_throughput=10 * throughput,
        ttft=0.1,
        tpot=0.01,
        latency=latency,
        latency_p50=1.0,
        latency_p99=2.0,
        kv_tokens=0.0,
        memory_bytes_per_gpu=0.0,
    )


def ratio(value: float, half: float | None) -> Figure:
    low, high = (None, None) if half is None else (value - half, value + half)
    return Figure(value=value, low=low, high=high, num_observations=9, of="passes")


def passes(half: float | None) -> PassComparison:
    return PassComparison(
        num_passes=9,
        first_other=None,
        took=ratio(2.0, half and 4 * half),
        others=1.5,
        reference=4 / 3,
        left=ratio(1.0, half),
        num_reference=5,
        reference_share=0.05,
    )


def measured(rates: tuple[float, ...], *, half: float | None = 0.04, planned: float = 10.0) -> Measured:
    """A plan of 10 requests/s, whose slices' replays have 12, measured at these rates at the speed of the profile."""
    plan = Plan(
        model="demo",
        schedule=Schedule("orca", {"max_num_seqs": 2}),
        placement=(Stage(layers=(0, 6)),),
        kv_cache_tokens=1024,
        estimate=estimate(planned),
    )
    slices = tuple(
        Slice(
            predicted=estimate(12.0),
            measured=estimate(rate / 2),
            at_profile_speed=estimate(rate),
            passes=passes(half),
        )
        for rate in rates
    )
    return Measured(plan=plan, slices=slices, profile_error=0.0)


def test_an_error_is_predicted_over_measured_in_the_mean_over_slices() -> None:
    found = measured((10.0, 14.0)).error("throughput")
    assert found is not None
    assert found.value == pytest.approx(0.0)
    half = (0.04**2 * 2) ** 0.5 / 2
    assert (found.low, found.high) == (pytest.approx(-half), pytest.approx(half))


def test_the_profiles_error_widens_the_interval_once() -> None:
    found = replace(measured((12.0, 12.0)), profile_error=0.1).error("throughput")
    assert found is not None
    assert found.high == pytest.approx((0.04**2 / 2 + (1.645 * 0.1) ** 2) ** 0.5)


def test_as_measured_has_the_interval_of_what_the_passes_took() -> None:
    found = measured((12.0,)).error("throughput", column="measured")
    assert found is not None
    assert (found.value, found.high) == (pytest.approx(1.0), pytest.approx(2 * (1 + 0.16 / 2) - 1))


def test_a_slice_without_the_figure_does_not_count() -> None:
    some = measured((12.0, 12.0))
    without = replace(some.slices[0], measured=estimate(6.0, None))
    assert replace(some, slices=(without, some.slices[1])).mean("predicted", "latency") == 2.0
    assert replace(some, slices=(without,)).error("latency") is None


def test_what_a_plan_sustains_is_its_own_figure_less_the_error_of_the_slices() -> None:
    assert measured((6.0,)).sustained() == pytest.approx(5.0)


def test_within_noise_is_what_the_intervals_cover() -> None:
    assert differ(measured((12.0,)), measured((12.5,))) is False
    assert differ(measured((12.0,)), measured((14.0,))) is True
    assert differ(measured((12.0,)), measured((14.0,), half=None)) is None
    assert differ(measured((12.0,)), measured((14.0,), planned=0.0)) is None
