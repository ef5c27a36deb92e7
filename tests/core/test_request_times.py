"""Percentiles, joint attainment and goodput of requests, against records and counts that can be checked by hand."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exeplan.core.bounds import Bound, percentile, targets_of
from exeplan.core.runs.metrics import RequestRecord, request_times, summarize
from exeplan.core.runs.request_times import quantile

NONE = Bound(seconds=math.inf)


def record(ttft: float, pace: float, tokens: int, **more: float) -> RequestRecord:
    """From 0: the first token after `ttft` seconds, each later one after `pace`."""
    times = tuple(ttft + pace * number for number in range(tokens))
    return RequestRecord(input_tokens=4, arrival=0.0, start=0.0, token_times=times, **more)


FOUR = [record(0.1, 0.25, 3), record(0.2, 0.5, 5), record(0.3, 0.125, 9), record(0.9, 0.25, 1)]
"""Whole requests take 0.6, 2.2, 1.3 and 0.9 s; the last one is a single token and has no pace."""


def joint(share: str, **targets: float) -> Bound:
    return Bound(seconds=next(iter(targets.values())), metric=f"p{share}-all", targets=tuple(targets.items()))


def measured(*bounds: Bound, records: list[RequestRecord] = FOUR):
    return summarize(records, p99_output=5, bounds=(NONE, *bounds), backlog=False)


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        ("p50-ttft", 0.2),
        ("p51-ttft", 0.3),
        ("p75-ttft", 0.3),
        ("p76-ttft", 0.9),
        ("p66-tpot", 0.25),
        ("p67-tpot", 0.5),
        ("p33-tpot", 0.125),
    ],
)
def test_a_percentile_is_the_smallest_time_that_enough_requests_do_not_exceed(metric: str, value: float) -> None:
    found = measured(Bound(seconds=1.0, metric=metric))
    assert found.percentiles == {metric: pytest.approx(value)}


@pytest.mark.parametrize(
    ("bounds", "kept"),
    [
        ([Bound(seconds=0.3, metric="p99-ttft")], 3),
        ([Bound(seconds=0.3, metric="ttft")], 3),
        ([Bound(seconds=0.3, metric="p99-ttft"), Bound(seconds=0.25, metric="p95-tpot")], 2),
        ([Bound(seconds=0.2, metric="tpot")], 2),
        ([Bound(seconds=1.0, metric="p99-requests")], 2),
        ([joint("50", ttft=0.3, tpot=0.25, latency=1.0)], 1),
        ([joint("50", ttft=0.9, latency=1.3)], 3),
    ],
)
def test_a_request_counts_when_it_keeps_every_bound_with_its_own_times(bounds: list[Bound], kept: int) -> None:
    found = measured(*bounds)
    assert found.attainment == kept / 4
    assert found.goodput == pytest.approx(found.throughput * kept / 4)


def test_of_a_long_output_the_first_part_counts_for_the_bound_on_the_planned_length() -> None:
    found = summarize(FOUR, p99_output=5, bounds=(Bound(seconds=0.9),), backlog=False)
    assert found.attainment == 3 / 4  # The third has its fifth token after 0.8 s, its last one after 1.3 s.


def test_without_bounds_there_is_no_goodput() -> None:
    found = measured()
    assert (found.attainment, found.goodput, found.percentiles) == (None, None, {})
    assert not {"attainment", "goodput", "percentiles"} & set(found.to_dict())


def test_an_expired_request_keeps_nothing() -> None:
    expired = RequestRecord(input_tokens=4, arrival=0.0, start=1.0, token_times=(), deadline=1.0)
    found = measured(Bound(seconds=0.3, metric="p99-ttft"), records=[*FOUR, expired])
    assert found.attainment == pytest.approx(3 / 5)
    assert found.goodput == pytest.approx(found.throughput * 3 / 4)
    assert measured(Bound(seconds=0.3, metric="p99-ttft"), records=[expired]).goodput == 0.0


def test_what_a_joint_bound_limits_is_the_scale_at_which_enough_keep_all() -> None:
    # Time over target, the largest of each request: 1, 2, 1, 3.
    bound = joint("75", ttft=0.3, tpot=0.25)
    assert request_times(FOUR, 5).utilizations(bound.targets) == pytest.approx([1, 2, 1, 3])
    assert measured(bound).percentiles == {"p75-all": pytest.approx(2 * 0.3)}


@given(
    times=st.lists(st.tuples(st.floats(0.01, 2), st.floats(0.01, 2), st.integers(1, 6)), min_size=1, max_size=30),
    share=st.integers(1, 99),
)
@settings(max_examples=100, derandomize=True)
def test_a_joint_bound_is_kept_exactly_when_the_share_is(times: list[tuple[float, float, int]], share: int) -> None:
    records = [record(*row) for row in times]
    bound = joint(str(share), ttft=0.7, tpot=0.5, latency=3.0)
    found = request_times(records, 5)
    counted = sum(
        r.token_times[0] <= 0.7
        and r.token_times[-1] <= 3.0
        and (r.output_tokens == 1 or (r.token_times[-1] - r.token_times[0]) / (r.output_tokens - 1) <= 0.5)
        for r in records
    )
    assert found.attainment([bound]) == counted / len(records)
    assert (found.value(bound) <= bound.seconds) == (counted / len(records) >= share / 100 - 1e-9)


def test_no_values_have_the_quantile_zero() -> None:
    assert quantile(np.array([]), 0.5) == 0.0


def test_deadlines_are_kept_by_the_time_from_the_arrival() -> None:
    records = [record(0.1, 0.25, 3, deadline=0.5), record(0.1, 0.25, 3, deadline=1.5)]
    due = Bound(seconds=1.0, metric="p90-deadline")
    found = summarize(records, p99_output=3, bounds=(due,), waiting=True)
    assert found.attainment == found.deadline_share == 0.5


def test_bounds_are_named_by_percentage_and_quantity() -> None:
    assert percentile("p99.9-ttft") == ("ttft", pytest.approx(0.999))
    assert [percentile(name) for name in ("p0-ttft", "p100-tpot", "p99-requests", "ttft", "p-1-all", 5)] == [None] * 6
    several = (Bound(seconds=9.0), Bound(seconds=1.0, metric="p99-ttft"), joint("90", tpot=0.5, latency=2.0))
    assert targets_of(several) == (("length", 9.0), ("ttft", 1.0), ("tpot", 0.5), ("latency", 2.0))
