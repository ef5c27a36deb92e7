"""A trace of few requests leaves much open about the lengths to come; planned with the margin for that, the bound holds
on others of the same law."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from exeplan.core.bounds import Bound
from exeplan.core.profile import Profile
from exeplan.core.schedule import Estimate, Schedule
from exeplan.errors import Infeasible, InputError
from exeplan.planner.choice.optimize import optimize
from exeplan.planner.margins.margins import Risk, margins, profile_error
from exeplan.planner.margins.sampling_error import check_sample, resampled, sampling_error
from exeplan.planner.problems.problem import Problem, make_problem
from exeplan.planner.problems.replays import replay_estimate
from exeplan.simulator.run import Run
from exeplan.workload.arrivals import Arrivals
from exeplan.workload.files import load_workload
from exeplan.workload.workload import Trace, Workload

LAW = load_workload("lognormal:in=60,30,300;out=40,30,300")
SCHEDULE = Schedule("rra", {"prefill_batch": 8, "decode_steps": 16})
RISK = 0.01


def drawn(size: int, seed: int) -> Workload:
    return Workload.of_trace("drawn", Trace(*LAW.sample(size, seed=seed, stratified=False)))


def problem_of(profile: Profile, workload: Workload) -> Problem:
    return make_problem(profile, workload, Bound(seconds=100.0))


def margin_of(profile: Profile, workload: Workload, *, seed: int = 0) -> float:
    found = sampling_error(problem_of(profile, workload), SCHEDULE, risk=RISK, seed=seed)
    assert found is not None
    assert found.laws[0] is not None
    return found.laws[0].margin(RISK)


@pytest.mark.parametrize("size", [100, 1000])
def test_a_plan_on_few_requests_keeps_its_bound_on_others_of_the_same_law(size: int, profile: Profile) -> None:
    trials, kept, bold = 34, 0, 0  # One may fail.
    later = problem_of(profile, drawn(6000, seed=99_999)).estimate(SCHEDULE).latency or 0.0
    for seed in range(trials):
        workload = drawn(size, seed)
        latency = problem_of(profile, workload).estimate(SCHEDULE).latency or 0.0
        # The plan fills its bound: what comes later must not take longer than that.
        kept += later <= latency * (1 + margin_of(profile, workload, seed=seed))
        bold += later <= latency
    assert kept >= 0.97 * trials
    assert bold < 0.7 * trials


def test_more_requests_need_a_smaller_margin(profile: Profile) -> None:
    few, some, many = (margin_of(profile, drawn(size, seed=1)) for size in (100, 1000, 20_000))
    assert few > 1.5 * some > 2 * many > 0


@pytest.mark.parametrize("size", [1, 3, 39])
def test_a_trace_of_too_few_requests_to_tell_the_margin_is_refused(size: int, profile: Profile) -> None:
    message = rf"^--risk needs a trace of at least 40 requests .*, 'drawn' has {size}; give more requests"
    with pytest.raises(InputError, match=message):
        optimize(problem_of(profile, drawn(size, seed=0)), policies=("orca",), risk=Risk(share=RISK))
    check_sample(drawn(40, seed=0))
    check_sample(LAW)


def test_a_stated_law_has_no_sampling_error(profile: Profile) -> None:
    assert sampling_error(problem_of(profile, LAW), SCHEDULE, risk=RISK, seed=0) is None


def test_lengths_may_go_on_beyond_the_longest_but_not_beyond_a_limit_or_the_context() -> None:
    trace = drawn(100, seed=2)
    longest = trace.max_output
    assert max(workload.max_output for workload in resampled(trace, 100_000, seed=0)) > 1.2 * longest
    assert max(workload.longest for workload in resampled(trace, trace.longest, seed=0)) <= trace.longest + 1
    assert trace.trace is not None
    capped = Trace(trace.trace.inputs, np.minimum(trace.trace.outputs, 40))
    workloads = resampled(Workload.of_trace("capped", capped), 100_000, seed=0)
    assert max(workload.max_output for workload in workloads) == 40


def test_a_rate_that_other_samples_do_not_sustain_is_refused(profile: Profile) -> None:
    workload = drawn(100, seed=3)
    problem = problem_of(profile, workload)
    rate = 0.995 * problem.estimate(SCHEDULE).throughput
    busy = replace(problem, arrivals=Arrivals(rate=rate))
    with pytest.raises(Infeasible, match=r"sustains the rate for the 100 requests of the trace, but not in \d+ of 40"):
        sampling_error(busy, SCHEDULE, risk=RISK, seed=0)


def test_a_margin_names_the_size_of_the_trace_and_what_it_takes(profile: Profile) -> None:
    parts = {}
    for name, workload in (("law", LAW), ("trace", drawn(100, seed=4))):
        found = margins(problem_of(profile, workload), SCHEDULE, Risk(share=RISK), seed=0)
        parts[name] = {part.words.split(":")[0]: part for part in found.parts}, found.values[0]
    (of_law, without), (of_trace, margin) = parts["law"], parts["trace"]
    assert of_law["lengths"].words == "lengths: a stated law, no sample: no sampling error"
    assert "a trace of 100 requests, reweighted 40 times (throughput +-" in of_trace["lengths"].words
    assert of_trace["lengths"].count == 100
    assert margin > without + 0.5 * of_trace["lengths"].values[0]


def test_a_part_without_a_value_is_told_and_the_others_still_count(
    profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = problem_of(profile, drawn(100, seed=4))
    risk = Risk(share=RISK)
    whole = margins(problem, SCHEDULE, risk, seed=0)

    def without_latency(*args: Any, **options: Any) -> tuple[Run, Estimate]:
        run, estimate = replay_estimate(*args, **options)
        return run, replace(estimate, latency=None)

    monkeypatch.setattr("exeplan.planner.margins.margins.replay_estimate", without_latency)
    found = margins(problem, SCHEDULE, risk, seed=0)
    assert 0 < found.values[0] < whole.values[0]
    words = [part.words for part in found.parts]
    assert any(text.startswith("p99-length: only ") and "could be estimated" in text for text in words), words
    assert not any("could be estimated" in part.words for part in whole.parts)


def test_a_profile_is_as_sure_as_its_repeats(profile: Profile) -> None:
    rows = [replace(m, spread=0.1, repeats=25) for m in profile.measurements]
    law = profile_error(replace(profile, measurements=tuple(rows)), keeps_finished_rows=False)
    assert law is not None
    # Half the interquartile range is 0.6745 standard deviations, a median's error 1.2533 of them over the root of n.
    assert law.spread == pytest.approx(0.1 / 0.6745 * 1.2533 / 5, rel=1e-3)
    assert law.count == 25 * len(rows)
    alone = [replace(m, spread=0.0, repeats=1) for m in profile.measurements]
    assert profile_error(replace(profile, measurements=tuple(alone)), keeps_finished_rows=False) is None


@pytest.mark.parametrize(
    ("figures", "keeps_finished_rows", "error"),
    [
        ({"calibration_error": 0.05}, False, 0.05),
        ({"calibration_error": 0.05}, True, 0.05),
        ({"calibration_error": 0.05, "kept_rows_calibration": 1.1, "kept_rows_error": 0.08}, False, 0.05),
        ({"calibration_error": 0.05, "kept_rows_calibration": 1.1, "kept_rows_error": 0.08}, True, 0.08),
    ],
)
def test_the_error_of_a_policys_own_calibration_is_part_of_the_profiles(
    figures: dict[str, Any], keeps_finished_rows: bool, error: float, profile: Profile
) -> None:
    rows = tuple(replace(m, spread=0.1, repeats=25) for m in profile.measurements)
    alone = profile_error(replace(profile, measurements=rows), keeps_finished_rows=keeps_finished_rows)
    both = profile_error(replace(profile, measurements=rows, **figures), keeps_finished_rows=keeps_finished_rows)
    assert alone is not None
    assert both is not None
    assert both.spread == pytest.approx(np.hypot(alone.spread, error))
    assert both.source.endswith(f"whole steps +-{error:.1%}")


@pytest.mark.parametrize(("schedule", "error"), [(SCHEDULE, 0.02), (Schedule("static", {"batch_size": 8}), 0.3)])
def test_a_margin_counts_the_error_of_its_policys_own_calibration(
    schedule: Schedule, error: float, profile: Profile
) -> None:
    rows = tuple(replace(m, spread=0.001, repeats=25) for m in profile.measurements)
    known = replace(profile, measurements=rows, calibration_error=0.02, kept_rows_calibration=1.1, kept_rows_error=0.3)
    found = margins(problem_of(known, LAW), schedule, Risk(share=RISK), seed=0)
    assert any(part.words.endswith(f"whole steps +-{error:.1%}") for part in found.parts), found.parts
    assert (found.values[0] > 0.5) == (error == 0.3)
