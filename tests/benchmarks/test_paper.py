"""The papers' reproductions: packed prompts cost less, a batch of FasterTransformer is one after the other, and claims
without a figure of the paper say so."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest

import exeplan
from benchmarks.paper.claims import Claim, Part
from benchmarks.paper.drift import _kept, skewed
from benchmarks.paper.orca import Served, _most, _served
from benchmarks.paper.systems import Point, bounds, fastest, static_point
from exeplan.core.bounds import Bound
from exeplan.core.schedule import Schedule
from exeplan.planner.problems.problem import Problem, make_problem
from exeplan.workload.files import load_workload


@pytest.fixture(scope="module")
def problem() -> Problem:
    return make_problem(exeplan.datasheet_profile("opt-13b", "a40-48gb"), load_workload("S"), Bound(seconds=inf))


def test_a_batch_that_packs_prompts_is_faster_and_decodes_as_long(problem: Problem) -> None:
    schedule = Schedule("static", {"batch_size": 8})
    packed, padded = (static_point(schedule, problem.workload, problem.cost, pads=pads) for pads in (False, True))
    assert packed.throughput > padded.throughput
    assert packed.latency < padded.latency
    fixed = load_workload("fixed:in=64;out=16")
    alike, same = (static_point(schedule, fixed, problem.cost, pads=pads) for pads in (False, True))
    assert alike.throughput == pytest.approx(same.throughput)


def test_bounds_are_shares_of_the_latencies_and_the_fastest_point_keeps_its_bound() -> None:
    points = [Point(Schedule("static", {"batch_size": n}), float(n), 10.0 * n) for n in range(1, 11)]
    assert bounds(points) == (10.0, 30.0, 70.0, inf)
    kept = fastest(points, 35.0)
    assert kept is not None
    assert kept.throughput == 3.0
    assert fastest(points, 5.0) is None


def test_latency_a_token_is_the_median_over_requests() -> None:
    served = _served(np.array([0.0, 1.0, 2.0]), np.array([4.0, 5.0, 12.0]), np.array([4, 2, 5]))
    assert served == Served(2.0, 0.25)


def test_the_highest_rate_within_a_latency_is_found_or_zero() -> None:
    assert _most(lambda rate: Served(rate, rate), 3.0) == pytest.approx(3.0, rel=0.05)
    assert _most(lambda rate: Served(9.0, rate), 3.0) == 0.0


def test_the_prefill_batch_of_waa_stays_and_its_decode_batch_follows_the_outputs() -> None:
    waa = Schedule("waa-c", {"prefill_batch": 2, "decode_batch": 200})
    assert _kept(waa, 1.15) == replace(waa, variables={"prefill_batch": 2, "decode_batch": 230})
    rra = Schedule("rra", {"prefill_batch": 8, "decode_steps": 4})
    assert _kept(rra, 1.15) == rra


def test_a_skewed_law_keeps_mean_and_deviation() -> None:
    law = skewed(128.0, 68.0, 320, 0.4)
    assert (law.mean, law.std) == (pytest.approx(128, abs=1e-3), pytest.approx(68, abs=1e-3))


def test_a_claim_says_how_far_it_is_off_and_why_beyond_a_quarter() -> None:
    near, far = (Claim(what="w", paper=2.0, ours=ours, reason="why") for ours in (2.2, 3.0))
    assert near.cells() == ["w", "2", "2.2", "+10 %", ""]
    assert far.cells() == ["w", "2", "3", "+50 %", "why"]
    assert Claim(what="w", paper=None, ours=3.0, reason="not said").cells() == ["w", "-", "3", "", "not said"]


def test_the_record_of_a_part_has_rows_by_column_and_claims_with_their_difference() -> None:
    part = Part(
        title="t", header=("a", "b"), rows=[(1, inf)], claims=[Claim(what="w", paper=2.0, ours=1.0, reason="r")]
    )
    assert part.as_json() == {
        "title": "t",
        "rows": [{"a": 1, "b": "inf"}],
        "claims": [{"what": "w", "paper": 2.0, "ours": 1.0, "reason": "r", "difference": -0.5}],
        "notes": [],
    }
