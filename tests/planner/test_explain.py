"""--explain says what limits the winner, the runner-up and its distance, and what more GPUs or latency would gain."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from exeplan.cli import main
from exeplan.core.bounds import Bound
from exeplan.core.cluster import Cluster, Link
from exeplan.core.profile import Profile, save_profile
from exeplan.planner.explain import Explanation, explain, larger
from exeplan.planner.explain_text import as_json, explanation_lines
from exeplan.planner.optimize import optimize
from exeplan.planner.problem import Problem, make_problem
from exeplan.workload.files import load_workload

LAW = "normal:in=40,10,80;out=12,5,24"
WIRE = Link(bytes_per_second=1e9, latency=1e-5)
NODES = Cluster(
    name="nodes", device="affine", num_nodes=2, gpus_per_node=4, memory_bytes=8 << 30, intra=WIRE, inter=WIRE
)


def explained(problem: Problem, *policies: str, whole: Cluster | None = None) -> Explanation:
    optimum = optimize(problem, policies=policies)
    again = partial(optimize, policies=(optimum.plan.schedule.policy,))
    return explain(problem, optimum, again=again, whole=whole)


def problem(
    profile: Profile, seconds: float, *, gpus: int = 1, max_seqs: int = 32, one_pipeline: bool = False
) -> Problem:
    cluster = NODES.part(gpus) if gpus > 1 else None
    found = make_problem(profile, load_workload(LAW), Bound(seconds=seconds), cluster=cluster, max_seqs=max_seqs)
    return replace(found, one_pipeline=one_pipeline)


def test_a_tight_bound_limits_and_more_latency_buys_throughput(profile: Profile) -> None:
    found = explained(problem(profile, 0.1), "orca")
    assert found.limits[0].startswith("the bound 100 ms on p99-length: one more step of a control variable breaks it")
    assert found.more_latency.change == "bound 110 ms on p99-length, 10 % more"
    assert found.more_latency.gain is not None
    assert found.more_latency.gain > 0
    tried = optimize(problem(profile, 0.11), policies=("orca",)).plan
    assert found.more_latency.schedule == tried.schedule


def test_residents_limit_where_nothing_else_does(profile: Profile) -> None:
    found = explained(problem(profile, float("inf"), max_seqs=4), "orca")
    assert found.limits[0] == "no limit: a larger batch brings no more throughput"
    assert found.more_latency.note == "there is no bound"
    found = explained(problem(profile, 100.0, max_seqs=4), "rra")
    assert found.limits[0].startswith("the limit of 4 residents: ")


def test_the_runner_up_is_the_next_best_policy(profile: Profile) -> None:
    asked = problem(profile, 0.1)
    found = explained(asked, "orca", "static", "rra")
    best = {name: optimize(asked, policies=(name,)).plan.estimate for name in ("orca", "static", "rra")}
    rates = sorted((e.throughput for e in best.values() if e is not None), reverse=True)
    assert found.throughput == pytest.approx(rates[0])
    assert found.runner_up is not None
    assert found.runner_up.estimate is not None
    assert found.runner_up.estimate.throughput == pytest.approx(rates[1])
    assert as_json(found)["runner_up"]["less"] == pytest.approx(1 - rates[1] / rates[0])


def test_one_more_gpu_is_optimized_for(profile: Profile) -> None:
    found = explained(problem(profile, 0.2, gpus=2), "orca", whole=NODES)
    assert found.more_gpus.change == "3 GPUs instead of 2"
    three = optimize(problem(profile, 0.2, gpus=3, max_seqs=48), policies=("orca",)).plan
    assert found.more_gpus.schedule == three.schedule
    assert len(found.breakdown.stages) == len(found.placement)


@pytest.mark.parametrize(("gpus", "more"), [(1, 2), (3, 4), (4, 8), (8, 12)])
def test_a_full_node_is_followed_by_a_whole_one(gpus: int, more: int) -> None:
    assert larger(NODES, gpus).num_gpus == more


def test_a_lone_node_grows_by_one() -> None:
    assert larger(NODES.part(4), 4).num_gpus == 5


def test_idle_stages_are_named_as_bubbles(profile: Profile) -> None:
    """One request at a time on three stages: two of them wait for it."""
    found = explained(problem(profile, 1.0, gpus=3, max_seqs=1, one_pipeline=True), "orca")
    assert found.breakdown.mean["idle"] > 0.5
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
    assert "runner-up: none, only orca was searched" in text
    assert "one more GPU: name a --cluster to see the gain" in text
    assert main([*argv, "--explain", "--json"]) == 0
    body = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["explanation"]
    assert set(body) == {
        "limits",
        "stages",
        "mean",
        "phases",
        "runner_up",
        "refusals",
        "more_gpus",
        "more_latency",
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
    rows = [line.split()[0] for line in lines[header + 2 : header + 3 + len(found.placement)]]
    assert rows == ["0", "1", "all"]
