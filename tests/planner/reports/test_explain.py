"""--explain says what limits the winner, the runner-up and its distance, and what more GPUs, latency or memory would
gain; no sentence contradicts an optimization that is done anew."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import exeplan
from exeplan.cli import main
from exeplan.core.bounds import Bound
from exeplan.core.cluster import Cluster, Link
from exeplan.core.profile import Measurement, Profile, save_profile
from exeplan.errors import Infeasible
from exeplan.planner.choice.answers import Optimum
from exeplan.planner.choice.optimize import optimize
from exeplan.planner.choice.pipelines import Effort
from exeplan.planner.problems.problem import Problem, make_problem
from exeplan.planner.reports.explain import NO_GAIN, Explanation, WhatIf, _what_limits, explain, larger, throughput
from exeplan.planner.reports.explain_text import as_json, explanation_lines
from exeplan.planner.reports.placement_text import show_equal
from exeplan.planner.solution import Solution
from exeplan.progress import SILENT, Told
from exeplan.workload.arrivals import Arrivals
from exeplan.workload.files import load_workload

LAW = "normal:in=40,10,80;out=12,5,24"
WIRE = Link(bytes_per_second=1e9, latency=1e-5)
NODES = Cluster(
    name="nodes", device="affine", num_nodes=2, gpus_per_node=4, memory_bytes=8 << 30, intra=WIRE, inter=WIRE
)


def explained(problem: Problem, *names: str, whole: Cluster | None = None, effort: Effort | None = None) -> Explanation:
    def again(other: Problem, *, policies: tuple[str, ...] | None = None, told: Told = SILENT) -> Optimum:
        return optimize(other, policies=policies or names, effort=effort, told=told)

    return explain(problem, optimize(problem, policies=names, effort=effort), again=again, whole=whole)


def problem(
    profile: Profile, seconds: float, *, gpus: int = 1, max_seqs: int | None = 32, one_pipeline: bool = False
) -> Problem:
    cluster = NODES.part(gpus) if gpus > 1 else None
    found = make_problem(profile, load_workload(LAW), Bound(seconds=seconds), cluster=cluster, max_seqs=max_seqs)
    return replace(found, one_pipeline=one_pipeline)


def test_a_tight_bound_limits_and_more_latency_buys_throughput(profile: Profile) -> None:
    found = explained(problem(profile, 0.1), "orca")
    assert found.more_latency.gain is not None
    assert found.more_latency.gain > NO_GAIN
    gain = f"{100 * found.more_latency.gain:.1f} %"
    assert found.limits[0] == f"the bound 100 ms on p99-length: 10 % more of it gains {gain}"
    tried = optimize(problem(profile, 0.11), policies=("orca",)).plan
    assert tried.replay is not None
    assert found.more_latency.schedule == tried.schedule
    assert found.more_latency.throughput == tried.replay.throughput


def test_residents_limit_where_nothing_else_does(profile: Profile) -> None:
    found = explained(problem(profile, 100.0, max_seqs=4), "rra")
    assert found.limits[0].startswith("the limit of 4 residents: 5 residents instead of 4 gains ")


def test_beyond_the_headroom_that_is_told_full_batches_are_compared(profile: Profile) -> None:
    asked = replace(problem(profile, 100.0, max_seqs=4), arrivals=Arrivals(rate=0.5))
    found = explained(asked, "orca", "static", effort=Effort(num_requests=300))
    assert found.of_full_batches
    assert found.more_memory.of_full_batches
    assert found.limits[0].startswith("the limit of 4 residents: 5 residents instead of 4 gains ")
    assert found.runner_up is not None
    assert found.runner_up.of_full_batches
    text = explanation_lines(found)
    assert text.startswith("what limits full batches: the limit of 4 residents")
    assert " req/s of full batches, " in text
    assert " req/s of full batches (+" in text
    assert as_json(found)["more_memory"]["of_full_batches"]


def test_the_device_limits_where_more_of_nothing_gains(profile: Profile) -> None:
    found = explained(problem(profile, float("inf"), max_seqs=200), "orca")
    assert found.limits[0] == "the device: 220 residents instead of 200 alone gains at most 1 %"
    assert found.more_latency.note == "there is no bound"


def test_what_gains_at_most_covers_the_noise_of_all_that_is_named() -> None:
    latency = WhatIf(change="10 % more of the bound", limit="the bound", gain=0.0, noise=0.01)
    memory = WhatIf(change="10 % more memory on each GPU", limit="KV memory", gain=0.01, noise=0.014)
    gpus = WhatIf(change="3 GPUs instead of 2", limit="the GPUs", gain=0.05, noise=0.08)
    assert _what_limits(latency, memory, gpus) == (
        "nothing alone: 10 % more of the bound or 10 % more memory on each GPU or 3 GPUs instead of 2 gains at most 8 %"
    )
    assert _what_limits(latency, memory, replace(gpus, gain=0.2)).endswith("memory on each GPU alone gains at most 2 %")


def test_the_runner_up_is_the_next_best_policy_by_its_replay(profile: Profile) -> None:
    asked = problem(profile, 0.1)
    found = explained(asked, "orca", "static", "rra")
    best = {name: optimize(asked, policies=(name,)).plan.replay for name in ("orca", "static", "rra")}
    rates = sorted((e.throughput for e in best.values() if e is not None), reverse=True)
    assert found.throughput == pytest.approx(rates[0], rel=NO_GAIN)  # Of more seeds than alone.
    assert found.runner_up is not None
    assert found.runner_up.throughput == pytest.approx(rates[1], rel=NO_GAIN)
    assert as_json(found)["runner_up"]["less"] == pytest.approx(1 - rates[1] / rates[0], abs=NO_GAIN)


def test_a_policy_whose_replays_break_a_bound_is_said_to_be_without_a_plan(profile: Profile) -> None:
    """It has a schedule by the closed form, which the table of policies shows."""
    asked, names = problem(profile, 0.1), ("orca", "rra")

    def again(other: Problem, *, policies: tuple[str, ...] | None = None, told: Told = SILENT) -> Optimum:
        if policies == ("orca",):
            raise Infeasible("latency bound 100 ms", nearest="the tightest latency bound found to work is 103 ms")
        return optimize(other, policies=policies or names, told=told)

    optimum = optimize(asked, policies=names)
    assert all(one.schedule for one in optimum.candidates)
    found = explain(asked, optimum, again=again)
    assert (found.schedule.policy, found.runner_up) == ("rra", None)
    text = explanation_lines(found)
    assert "another policy: none, no schedule of another policy keeps what is asked in its replays" in text
    assert "no plan of orca: by its replays the tightest latency bound found to work is 103 ms" in text
    assert as_json(found)["unplanned"] == list(found.unplanned)


def test_percentiles_and_joint_attainment_have_their_sentences(profile: Profile) -> None:
    found = exeplan.optimize(profile, LAW, ttft="p99:60ms", tpot="p95:10ms", policy="orca", max_num_seqs=32).explain()
    first, pace = found.bounds
    assert first.startswith("the first token of 99 % of requests: ")
    assert "in the replay, at most 60 ms; " in first
    assert pace.startswith("the pace of the further tokens of 95 % of requests: ")
    assert sum(sentence.endswith("the bound that binds") for sentence in found.bounds) == 1
    together = exeplan.optimize(
        profile, LAW, ttft="60ms", tpot="10ms", attainment="99%", policy="orca", max_num_seqs=32
    ).explain()
    (sentence,) = together.bounds
    assert "% of requests keep ttft 60 ms, tpot 10 ms in the replay, 99 % must; " in sentence


def solved(profile: Profile, *, gpus: int, bound: float, mean: int, tail: int, max_seqs: int) -> Solution:
    law = f"normal:in=40,10,80;out={mean},{max(1, mean // 3)},{mean + tail}"
    options = {"cluster": NODES, "gpus": gpus} if gpus > 1 else {}
    return exeplan.optimize(
        profile, law, latency_bound=bound, policy="orca", max_num_seqs=max_seqs, one_pipeline=False, **options
    )


def gains_of(solution: Solution, other: Problem) -> float:
    """What a search from nothing finds; the plan itself answers the wider problem too."""
    before = throughput(solution.optimum)
    return max(0.0, throughput(optimize(other, policies=("orca",))) / before - 1)


@settings(max_examples=8)
@given(
    gpus=st.sampled_from([1, 2, 3, 4]),
    slack=st.floats(1.05, 6.0),
    mean=st.integers(4, 16),
    tail=st.integers(2, 12),
    max_seqs=st.sampled_from([4, 16, 64]),
)
def test_no_sentence_contradicts_a_new_optimization(
    profile: Profile, gpus: int, slack: float, mean: int, tail: int, max_seqs: int
) -> None:
    lowest = solved(profile, gpus=gpus, bound=100.0, mean=mean, tail=tail, max_seqs=max_seqs)
    tightest = min(row.latency for row in lowest.frontier())
    solution = solved(profile, gpus=gpus, bound=slack * tightest, mean=mean, tail=tail, max_seqs=max_seqs)
    found, asked = solution.explain(), solution.problem

    wider = gains_of(solution, asked.limited_to(1.1 * asked.limit))
    assert found.more_latency.gain == pytest.approx(wider)
    check_sentence(found, found.more_latency, wider)
    residents = found.more_memory.limit.endswith("residents")
    more = {"max_seqs": -(-11 * max_seqs // 10)} if residents else {"memory": 1.1 * asked.memory}
    check_sentence(found, found.more_memory, gains_of(solution, replace(asked, **more)))
    if gpus > 1:
        other = solved(
            profile,
            gpus=larger(NODES, gpus).num_gpus,
            bound=slack * tightest,
            mean=mean,
            tail=tail,
            max_seqs=max_seqs,
        )
        check_sentence(found, found.more_gpus, max(0.0, throughput(other.optimum) / throughput(solution.optimum) - 1))

    # The frontier is the closed form's: it agrees as far as that agrees with the replay.
    rows = solution.frontier()
    here, there = (max(row.throughput for row in rows if row.latency <= factor * asked.limit) for factor in (1.0, 1.1))
    assert there / here - 1 <= wider + 0.1


def check_sentence(found: Explanation, what: WhatIf, gain: float) -> None:
    """The gain is that of the new optimization, and a limit that is named gains, one that is not does not."""
    assert what.gain is not None
    assert what.gain >= 0
    assert what.gain == pytest.approx(gain, abs=1e-9)
    first, text = found.limits[0], explanation_lines(found)
    if what.gains:
        assert f"({100 * gain:+.1f} %)" in text
    if first.startswith(f"{what.limit}: ") or f"; {what.limit}: " in first:
        assert gain > NO_GAIN
    if "alone gains at most" in first and what is not found.more_gpus:
        assert gain <= what.noise


@pytest.mark.parametrize("max_seqs", [32, None])
def test_one_more_gpu_is_optimized_for(max_seqs: int | None, profile: Profile) -> None:
    """Under the limit on residents that was asked for, or with the places that were measured on each GPU."""
    found = explained(problem(profile, 0.2, gpus=2, max_seqs=max_seqs), "orca", whole=NODES)
    assert found.more_gpus.change == "3 GPUs instead of 2"
    three = optimize(problem(profile, 0.2, gpus=3, max_seqs=max_seqs), policies=("orca",)).plan
    assert found.more_gpus.plan is not None
    assert found.more_gpus.plan.max_seqs == three.max_seqs == (max_seqs or 3 * 64)
    assert found.more_gpus.schedule == three.schedule
    assert len(found.breakdowns[0].stages) == len(found.groups[0].placement)


def linked(profile: Profile) -> Profile:
    """As of two processes, between which sends were timed."""
    sends = (Measurement(op="send", phase="intra", bytes=n, seconds=1e-4 + n * 1e-9) for n in (1, 1 << 20))
    return replace(profile, measurements=(*profile.measurements, *sends))


def test_one_more_process_on_the_profiled_host_shares_its_memory(profile: Profile) -> None:
    """60 MiB: two processes of 20 MiB of weights have room for few requests each, for three it is too little."""
    host = linked(replace(profile, device=replace(profile.device, memory_bytes=60 << 20)))
    solution = exeplan.optimize(host, LAW, latency_bound=10.0, policy="orca", gpus=2, max_num_seqs=64)
    found = solution.explain().more_gpus
    assert found.change == "3 GPUs instead of 2"
    three = exeplan.optimize(host, LAW, latency_bound=10.0, policy="orca", gpus=3, max_num_seqs=64)
    assert found.gain == pytest.approx(max(0.0, throughput(three.optimum) / throughput(solution.optimum) - 1))


def test_processes_that_no_profile_ran_at_once_are_remarked(profile: Profile) -> None:
    said = "8 processes on the profiled host are planned with, of which its profile shows 2 at once: "
    for gpus, remarked in ((2, False), (8, True)):
        solution = exeplan.optimize(linked(profile), LAW, latency_bound=10.0, policy="orca", gpus=gpus)
        assert (said in repr(solution)) is remarked


@pytest.mark.parametrize(("gpus", "more"), [(1, 2), (3, 4), (4, 8), (8, 12)])
def test_a_full_node_is_followed_by_a_whole_one(gpus: int, more: int) -> None:
    assert larger(NODES, gpus).num_gpus == more


def test_a_lone_node_grows_by_one() -> None:
    assert larger(NODES.part(4), 4).num_gpus == 5


def test_idle_stages_are_named_as_bubbles(profile: Profile) -> None:
    """One request at a time on three stages: two of them wait for it."""
    found = explained(problem(profile, 1.0, gpus=3, max_seqs=1, one_pipeline=True), "orca")
    assert found.breakdowns[0].mean["idle"] > 0.5
    assert any(limit.endswith("% of the GPUs' time goes to pipeline bubbles") for limit in found.limits)


def test_the_command_prints_it_and_has_it_for_programs(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_profile(profile, tmp_path / "p.json")
    argv = ["optimize", "--profile", "p.json", "--workload", LAW, "--latency-bound", "100ms", "--policy", "orca"]
    assert main([*argv, "--explain"]) == 0
    text = capsys.readouterr().out
    assert "what limits orca: the bound 100 ms on p99-length" in text
    assert "best plan of another policy: none, only orca was searched" in text
    assert "one more GPU: name a --cluster to see the gain" in text
    assert main([*argv, "--explain", "--json"]) == 0
    body = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["explanation"]
    assert set(body) == {
        "limits",
        "bounds",
        "stages",
        "mean",
        "phases",
        "groups",
        "runner_up",
        "refusals",
        "unplanned",
        "more_gpus",
        "more_latency",
        "more_memory",
    }
    assert sum(body["mean"].values()) == pytest.approx(1)
    assert body["phases"]["mixed"]["bound_by"] in ("compute", "memory bandwidth")
    assert body["more_latency"]["schedule"]["policy"] == "orca"
    assert main(argv) == 0
    assert "what limits" not in capsys.readouterr().out


def test_the_table_has_a_line_for_each_stage(profile: Profile) -> None:
    found = explained(problem(profile, 0.5, gpus=2, one_pipeline=True), "orca", whole=NODES)
    lines = explanation_lines(found).split("\n")
    header = next(i for i, line in enumerate(lines) if line.startswith("stage"))
    rows = [line.split()[0] for line in lines[header + 2 : header + 3 + len(found.groups[0].placement)]]
    assert rows == ["0", "1", "all"]


@pytest.fixture(scope="module")
def unequal() -> tuple[Profile, Solution]:
    """Too little memory for many requests on one GPU: two together are better, and the third one serves alone."""
    profile = exeplan.datasheet_profile("opt-13b", "a40-48gb", cluster="a40")
    return profile, exeplan.optimize(profile, "S", cluster="a40", gpus=3, latency_bound="6s", policy="orca", risk="1%")


def test_every_group_of_unequal_replicas_is_described(unequal: tuple[Profile, Solution]) -> None:
    profile, solution = unequal
    plan, found = solution.plan, solution.explain()
    assert len(plan.groups) == len(found.breakdowns) == len(solution.optimum.groups) == 2
    text, shown = explanation_lines(found), repr(solution)
    again = exeplan.simulate(plan, profile=profile)
    for group, body in zip(plan.groups, as_json(found)["groups"], strict=True):
        assert f"one replica of {show_equal(group)}" in text
        assert any(limit.startswith(show_equal(group)) for limit in found.limits)
        assert show_equal(group) in shown
        assert show_equal(group) in repr(again)
        assert sum(body["mean"].values()) == pytest.approx(1)
    assert again.plan.drift_headroom == plan.drift_headroom


def test_the_means_of_unequal_replicas_are_those_of_their_requests(unequal: tuple[Profile, Solution]) -> None:
    profile, solution = unequal
    plan = solution.plan
    for groups in (solution.optimum.groups, exeplan.simulate(plan, profile=profile).groups):
        for whole, each in ((plan.estimate, [g.estimate for g in groups]), (plan.replay, [g.replay for g in groups])):
            assert whole is not None
            rates = [g.group.num_replicas * one.throughput for g, one in zip(groups, each, strict=True)]
            assert whole.throughput == pytest.approx(sum(rates), rel=0.02)
            assert whole.ttft == pytest.approx(np.average([one.ttft for one in each], weights=rates), rel=0.02)
            assert whole.ttft < max(one.ttft for one in each)
            assert whole.tpot == pytest.approx(np.average([one.tpot for one in each], weights=rates), rel=0.02)
            assert whole.latency == pytest.approx(max(one.latency or 0.0 for one in each), rel=0.02)
    # At a rate both share one stream, behind the router.
    arrived = exeplan.simulate(replace(plan, arrival_rate=0.7 * sum(rates)), profile=profile)
    assert sum(one.replay.throughput for one in arrived.groups) == pytest.approx(arrived.replay.throughput, rel=0.05)
