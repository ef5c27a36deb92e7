"""The wanted number of replicas rises at once with the load, and falls when a start later nothing needs them."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exeplan.errors import InputError
from exeplan.scheduling.scaling import Demand, RateCurve, ScalingRule, look, parse_replicas, to_drain

CURVE = RateCurve((10.0, 21.0, 32.0))
RULE = ScalingRule(curve=CURVE, most=8, start_seconds=40.0)


def after(rule: ScalingRule, rates: list[int], *, waiting: int = 0) -> list[Demand]:
    """The demand at each second of a load with so many requests in each, evenly spread."""
    demand, count, found = Demand(), 0, []
    for second, rate in enumerate(rates, 1):
        count += rate
        demand = look(rule, demand, now=float(second), num_arrived=count, num_waiting=waiting)
        found.append(demand)
    return found


@pytest.mark.parametrize(
    ("rate", "needed", "share"),
    [(0.0, 0, 0.0), (5.0, 1, 0.5), (10.0, 1, 1.0), (10.1, 2, 1 + 0.1 / 11), (32.0, 3, 3.0), (48.0, 5, 4.5)],
)
def test_the_fewest_replicas_that_serve_a_rate(rate: float, needed: int, share: float) -> None:
    assert CURVE.needed(rate) == needed
    assert CURVE.share_needed(rate) == pytest.approx(share)


def test_a_rate_that_doubles_is_answered_within_seconds_and_one_that_falls_a_start_after_the_window() -> None:
    found = after(RULE, [9] * 120 + [18] * 120 + [9] * 180)
    wanted = [demand.wanted for demand in found]
    assert set(wanted[60:120]) == {1}
    assert wanted[120 + 8] == 2
    assert set(wanted[130:240]) == {2}
    falls = wanted.index(1, 240) - 240
    mean_of_window_fits = 54  # Of 60 s those at 18/s may be 6: (6 * 18 + 54 * 9) / 60 is below 10.
    assert falls == pytest.approx(mean_of_window_fits + RULE.hold_seconds, abs=2)


def test_what_waits_is_to_begin_within_the_window_and_adds_to_the_rate() -> None:
    assert after(RULE, [9] * 90)[-1].wanted == 1
    assert after(RULE, [9] * 90, waiting=120)[-1].wanted == 2


@given(st.lists(st.integers(0, 60), min_size=1, max_size=200), st.integers(1, 3), st.integers(0, 4))
def test_the_wanted_number_is_within_its_limits_and_none_falls_within_a_start(
    rates: list[int], least: int, more: int
) -> None:
    rule = ScalingRule(curve=CURVE, least=least, most=least + more, start_seconds=7.0)
    found = after(rule, rates)
    assert all(least <= demand.wanted <= least + more for demand in found)
    for before, later in pairwise(found):
        if later.wanted < before.wanted:
            recent = [one.looks[-1].needed for one in found if later.looks[-1].time - one.looks[-1].time <= 7.0]
            assert later.wanted == min(max(*recent, least), least + more)


def test_one_that_is_soonest_empty_is_drained_and_of_equal_ones_the_last() -> None:
    assert to_drain({0: 3, 1: 2, 4: 2}) == 4


@pytest.mark.parametrize(("text", "found"), [("1:8", (1, 8)), ("3", (3, 3))])
def test_limits_are_two_numbers_or_one(text: str, found: tuple[int, int]) -> None:
    assert parse_replicas(text) == found


@pytest.mark.parametrize("text", ["0:2", "3:1", "a:2", "2:", ":2", "1:2:3", "-1:2"])
def test_other_limits_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--replicas must be MIN:MAX"):
        parse_replicas(text)
