"""The share of bounds that break stays under the stated risk, the pick of the best included, at a margin that is not
absurd; and what is no list of errors is answered with one sentence."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from exeplan.cli import main
from exeplan.core.bounds import Bound
from exeplan.core.cluster import load_cluster
from exeplan.core.models.model import load_model_spec
from exeplan.core.profile import Profile
from exeplan.errors import InputError
from exeplan.planner.choice.optimize import optimize
from exeplan.planner.load_problem import load_plan
from exeplan.planner.margins.margins import Risk
from exeplan.planner.margins.risk import compound, error_law, load_errors, parse_risk
from exeplan.planner.problems.problem import make_problem
from exeplan.planner.reports.report import binding_bound, promise_report
from exeplan.profiler.datasheets.datasheet import load_datasheet, profile_from_datasheet, with_links
from exeplan.workload.files import load_workload

LAW = "normal:in=40,10,80;out=12,5,24"
SPREAD = 0.05
Z99 = 2.326


def lognormal(rng: np.random.Generator, size: int) -> NDArray[np.float64]:
    return np.exp(rng.normal(0.01, SPREAD, size))


def heavy_tailed(rng: np.random.Generator, size: int) -> NDArray[np.float64]:
    """One error in twenty is three times as large."""
    return np.exp(rng.normal(0.0, SPREAD, size) * np.where(rng.random(size) < 0.05, 3.0, 1.0))


@pytest.mark.parametrize("count", [5, 18, 200])
@pytest.mark.parametrize("risk", [0.01, 0.05])
def test_the_share_of_broken_bounds_stays_under_the_risk(count: int, risk: float) -> None:
    rng, trials = np.random.default_rng(0), 4000
    broken = 0
    for _ in range(trials):
        law = error_law(lognormal(rng, count).tolist(), "synthetic")
        # The bound is 1 and the plan is predicted right at the margin below it.
        broken += float(lognormal(rng, 1)[0]) / (1 + law.margin(risk)) > 1
    assert broken / trials <= risk + 2 * math.sqrt(risk / trials)


@pytest.mark.parametrize("num_compared", [2, 6, 20])
def test_the_best_of_many_that_share_their_error_breaks_no_more_than_one(num_compared: int) -> None:
    """What it has of its own is measured on it, after it was selected."""
    rng, trials, risk = np.random.default_rng(1), 4000, 0.05
    broken = 0
    for _ in range(trials):
        measured = error_law(lognormal(rng, 18).tolist(), "deployment")
        shared = float(lognormal(rng, 1)[0])
        # The closed forms of candidates on a curve where more throughput is more latency, and their own errors.
        predicted, own = np.sort(rng.uniform(0.5, 1.3, num_compared)), rng.normal(0.0, 0.05, num_compared)
        for winner in reversed(range(num_compared)):
            fresh = np.exp(own[winner] + rng.normal(0.0, 0.01, 8))
            law = compound(measured, error_law(fresh.tolist(), "closed form"))
            if predicted[winner] * (1 + law.margin(risk)) <= 1:
                broken += predicted[winner] * math.exp(own[winner] + rng.normal(0.0, 0.01)) * shared > 1
                break
    assert broken / trials <= risk


@pytest.mark.parametrize("risk", [0.01, 0.05])
def test_errors_that_are_not_normal_are_covered_where_the_sample_shows_them(risk: float) -> None:
    rng, trials = np.random.default_rng(2), 2000
    broken = 0
    for _ in range(trials):
        law = error_law(heavy_tailed(rng, 300).tolist(), "synthetic")
        broken += float(heavy_tailed(rng, 1)[0]) > 1 + law.margin(risk)
    assert broken / trials <= risk + 2 * math.sqrt(risk / trials)


@pytest.mark.parametrize(("count", "most"), [(5, 3.0), (18, 1.6), (200, 1.3)])
def test_the_margin_is_not_absurdly_large(count: int, most: float) -> None:
    # Knowing the law exactly, 2.33 standard deviations are what 1 % takes.
    margins = [
        error_law(lognormal(np.random.default_rng(seed), count).tolist(), "synthetic").margin(0.01)
        for seed in range(50)
    ]
    assert np.median(margins) <= most * math.expm1(0.01 + Z99 * SPREAD)


def test_two_independent_errors_are_compounded() -> None:
    rng = np.random.default_rng(3)
    one, other = (error_law(lognormal(rng, 100).tolist(), name) for name in ("closed form", "replay"))
    both = compound(one, other)
    assert both.spread == pytest.approx(math.hypot(one.spread, other.spread))
    assert np.mean(both.logs) == pytest.approx(np.mean(one.logs) + np.mean(other.logs))
    assert both.source == "closed form; replay"
    assert max(one.margin(0.01), other.margin(0.01)) < both.margin(0.01) < one.margin(0.01) + other.margin(0.01)


def test_an_error_that_never_varies_adds_its_bias_alone() -> None:
    law = compound(error_law([1.1, 1.1], "always slower"), error_law([0.99, 1.0, 1.01], "replay"))
    assert law.margin(0.01) > 0.1
    assert error_law([1.1, 1.1], "always slower").margin(0.01) == pytest.approx(0.1)
    assert error_law([0.9, 0.9], "always faster").margin(0.01) == 0.0


def test_less_risk_needs_a_larger_margin() -> None:
    law = error_law(lognormal(np.random.default_rng(4), 18).tolist(), "synthetic")
    assert law.margin(0.05) < law.margin(0.01) < law.margin(0.001)


def test_one_error_says_nothing_of_the_spread() -> None:
    with pytest.raises(InputError, match="x: 1 of the at least 2 errors that a spread needs"):
        error_law([1.0], "x")


@pytest.mark.parametrize("text", ["1%", "0.01", "1.0%"])
def test_a_risk_is_a_share(text: str) -> None:
    assert parse_risk(text) == pytest.approx(0.01)


PAIRS = [
    {"predicted": {"latency": 2.0, "ttft": 0.1}, "measured": {"latency": m, "ttft": None}} for m in (2.0, 2.1, 1.9)
]


def test_errors_come_from_a_list_of_pairs_or_a_record(tmp_path: Path) -> None:
    (tmp_path / "pairs.json").write_text(json.dumps(PAIRS))
    record = {"rows": [{"runs": [{"replay": p["predicted"], "measured": p["measured"]}]} for p in PAIRS]}
    (tmp_path / "record.json").write_text(json.dumps(record))
    pairs, recorded = load_errors(tmp_path / "pairs.json"), load_errors(tmp_path / "record.json")
    assert set(pairs) == {"latency"}
    assert pairs["latency"].logs == recorded["latency"].logs == pytest.approx(np.log([0.95, 1.0, 1.05]))
    assert pairs["latency"].source == "3 pairs in pairs.json"


@pytest.mark.parametrize("policy", ["orca", "rra", "static"])
def test_a_plan_at_a_risk_keeps_its_margin_below_every_bound(policy: str, profile: Profile) -> None:
    problem = make_problem(profile, load_workload(LAW), Bound(seconds=0.15), max_seqs=32)
    bold = optimize(problem, policies=(policy,)).plan
    careful = optimize(problem, policies=(policy,), risk=Risk(share=0.01)).plan
    assert bold.estimate is not None
    assert careful.estimate is not None
    assert careful.estimate.latency is not None
    margin = careful.promise["margin"]["p99-length"]
    assert 0.05 < margin < 0.4
    assert careful.estimate.latency * (1 + margin) <= 0.15 * 1.0001
    found = binding_bound(problem, careful)
    assert found is not None
    assert found[1] == pytest.approx(careful.estimate.latency * (1 + margin) / 0.15)
    assert found[2] == "by the closed form with its margin"
    assert careful.estimate.throughput > 0.5 * bold.estimate.throughput
    parts = {part["from"].split(":")[0]: part for part in careful.promise["parts"]}
    assert list(parts) == ["closed form", "deployment", "lengths", "profile"]
    assert parts["closed form"]["from"] == "closed form: 8 replays of the winner"
    assert parts["closed form"]["observations"] == 8
    assert parts["lengths"] == {"from": "lengths: a stated law, no sample: no sampling error"}
    assert "no run of this deployment" in parts["deployment"]["from"]
    # A closed form that is too slow takes some of it back.
    assert 0 < parts["deployment"]["margin"]["p99-length"] < 1.1 * margin


@pytest.mark.parametrize("bound", [0.1, 0.3])
def test_the_best_of_all_policies_is_no_worse_than_any_alone_at_a_risk(bound: float, profile: Profile) -> None:
    problem = make_problem(profile, load_workload(LAW), Bound(seconds=bound), max_seqs=32)
    names, risk = ("orca", "chunked", "rra", "static"), Risk(share=0.01)
    alone = {name: optimize(problem, policies=(name,), risk=risk).plan for name in names}
    best = optimize(problem, policies=names, risk=risk).plan
    # Replays of more seeds, which compare the best, move a throughput by their noise.
    assert best.replay.throughput >= 0.99 * max(plan.replay.throughput for plan in alone.values())
    same = alone[best.schedule.policy]
    assert (best.schedule, best.promise) == (same.schedule, same.promise)


def test_every_group_of_replicas_keeps_its_own_margin() -> None:
    # Too little memory for many requests on one GPU: two together are better, and the third one serves alone.
    gpus = load_cluster("a40").part(3)
    sheet = with_links(load_datasheet("a40-48gb"), gpus)
    sheet_profile = profile_from_datasheet(load_model_spec("opt-13b"), sheet, dtype="bfloat16")
    problem = make_problem(sheet_profile, load_workload("S"), Bound(seconds=6.0), cluster=gpus)
    optimum = optimize(problem, policies=("orca",), risk=Risk(share=0.01))
    plan = optimum.plan
    assert len(plan.groups) == 2
    assert plan.replay is not None
    assert optimum.candidates[0].replayed == pytest.approx(plan.replay.throughput)  # What is counted is shown.
    promised = [plan.promise["margin"], *(group["margin"] for group in plan.promise["more_groups"])]
    assert promised[0] != promised[1]
    for group, margin in zip(plan.groups, promised, strict=True):
        latency = problem.at(group.placement).estimate(group.schedule).latency
        assert latency is not None
        assert latency * (1 + margin["p99-length"]) <= 6.0 * 1.0001
    text = "\n".join(promise_report(problem, plan))
    for number, margin in enumerate(promised, 1):
        assert f"margin in replicas of group {number}: the closed form keeps every bound with" in text
        assert f"{100 * margin['p99-length']:.1f} % on p99-length added" in text


def command(*options: str) -> list[str]:
    chosen = ["--workload", LAW, "--policy", "orca", "--latency-bound", "200ms", "--max-num-seqs", "32"]
    return ["optimize", "--profile", "p.json", *chosen, *options]


def test_a_plan_prints_and_stores_its_margin(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "errors.json").write_text(json.dumps(PAIRS))
    assert main(command("--risk", "5%", "--errors", "errors.json", "-o", "plan.yaml")) == 0
    text = capsys.readouterr().out
    assert "on p99-length added, so that a bound breaks" in text
    assert "with a chance of at most 5 %" in text
    plan = load_plan(folder / "plan.yaml")
    assert plan.promise["risk"] == 0.05
    deployment = next(part for part in plan.promise["parts"] if part["from"].startswith("deployment"))
    assert "3 runs of this deployment" in deployment["from"]
    assert deployment["from"] in text
    assert f"{deployment['observations']} observations" in text


def test_a_refusal_says_that_its_figures_have_the_margin_in_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tight = command("--latency-bound", "1ms")
    assert main(tight) == 2
    assert "margin" not in capsys.readouterr().err
    assert main([*tight, "--risk", "1%"]) == 2
    text = capsys.readouterr().err
    assert re.search(
        r"latency bound 1 ms, but with the margin of --risk, \d+\.\d %, the lowest-latency schedule, orca", text
    )
    assert "the tightest bound found to work with that margin is " in text
    fast = command("--latency-bound", "10s", "--arrival-rate", "1e5", "--risk", "1%")
    assert main(fast) == 2
    assert "arrive, but within the bounds less the margin of --risk the most is " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--risk", "some"], "--risk must be a share such as 1% or 0.01, found 'some'"),
        (["--risk", "0"], "--risk must lie above 0 % and below 50 %, found '0'"),
        (["--risk", "-1%"], "--risk must lie above 0 % and below 50 %, found '-1%'"),
        (["--risk", "nan"], "--risk must lie above 0 % and below 50 %, found 'nan'"),
        (["--risk", "100%"], "--risk must lie above 0 % and below 50 %, found '100%'"),
        (["--errors", "e.json"], "--errors needs a --risk, such as 1%"),
        (["--risk", "1%", "--errors", "nothing.json"], "no file nothing.json"),
        (["--risk", "1%", "--errors", "half.json"], "half.json is not valid JSON:"),
        (["--risk", "1%", "--errors", "five.json"], "five.json must hold a list of predicted and measured pairs"),
        (["--risk", "1%", "--errors", "odd.json"], "odd.json: pair 1 is not of the form"),
        (["--risk", "1%", "--errors", "empty.json"], "empty.json pairs no predicted with a measured latency, ttft"),
        (["--risk", "1%", "--errors", "negative.json"], "negative.json: pair 1: latency must be seconds between"),
        (
            ["--risk", "1%", "--errors", "one.json"],
            "1 pair in one.json: 1 of the at least 2 errors that a spread needs",
        ),
    ],
)
def test_a_wrong_risk_is_answered_with_one_sentence(
    options: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {
        "half": "[{",
        "five": "5",
        "odd": "[5]",
        "empty": "[]",
        "negative": '[{"predicted": {"latency": -1.0}, "measured": {"latency": 1.0}}]',
        "one": '[{"predicted": {"latency": 1.0}, "measured": {"latency": 1.0}}]',
    }
    for name, text in files.items():
        (folder / f"{name}.json").write_text(text)
    assert main(command(*options)) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"exeplan optimize: {message}")
    assert captured.err.count("\n") == 1
