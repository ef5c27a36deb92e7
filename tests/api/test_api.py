"""`import exeplan` plans from paths and objects alike, as the command line does, and its results suit notebooks."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from matplotlib.figure import Figure

import exeplan
from exeplan.cli import main
from exeplan.core.profile import Profile, save_profile
from exeplan.files import read_yaml
from exeplan.units import seconds, show_seconds

LAW = "normal:in=40,10,80;out=12,5,24"
LENGTHS = {"input_tokens": [10, 40, 20, 30], "output_tokens": [5, 9, 7, 12]}
CLUSTER = """
device: affine
nodes: 1
gpus_per_node: 2
memory: 8GiB
intra: {bandwidth: 1GB, latency: 10us}
inter: {bandwidth: 100MB, latency: 50us}
"""


def unchanging(plan: exeplan.Plan) -> dict[str, Any]:
    """The plan without what its search took."""
    body = exeplan.Plan.__dataclass_fields__
    return {name: getattr(plan, name) for name in body if name != "search"}


@pytest.fixture(scope="module")
def solution(profile: Profile) -> exeplan.Solution:
    return exeplan.optimize(profile, LAW, latency_bound=0.1, policy="orca")


def test_every_public_name_is_there_and_no_other_is_promised() -> None:
    assert {name: getattr(exeplan, name) is not None for name in exeplan.__all__} == dict.fromkeys(
        exeplan.__all__, True
    )
    assert set(exeplan.__all__) <= set(dir(exeplan))
    with pytest.raises(AttributeError, match="module 'exeplan' has no attribute 'optimise'"):
        exeplan.optimise  # noqa: B018


def test_numbers_text_and_objects_mean_the_same(folder: Path, profile: Profile, solution: exeplan.Solution) -> None:
    bound = exeplan.Bound(seconds=0.1)
    for asked in (
        exeplan.optimize("p.json", LAW, latency_bound="100ms", policy="orca"),
        exeplan.optimize(Path("p.json"), exeplan.load_workload(LAW), latency_bound=bound, policy="orca"),
        exeplan.optimize(exeplan.load_profile("p.json"), LAW, latency_bound=np.float64(0.1), policy="orca"),
    ):
        assert unchanging(asked.optimum.plan) == unchanging(solution.optimum.plan)


def test_the_command_line_writes_the_plan_that_python_saves(folder: Path) -> None:
    options = ["--latency-bound", "300ms", "--ttft", "0.1", "--risk", "5%", "--policy", "orca", "--max-num-seqs", "8"]
    assert main(["optimize", "--profile", "p.json", "--workload", LAW, *options, "-o", "there/plan.yaml"]) == 0
    asked = exeplan.optimize("p.json", LAW, latency_bound=0.3, ttft="100ms", risk=0.05, policy="orca", max_num_seqs=8)
    asked.save("here/plan.yaml")
    there, here = (read_yaml(folder / name / "plan.yaml") for name in ("there", "here"))
    assert there.pop("search").keys() == here.pop("search").keys()
    assert there == here
    assert here["profile"] == "../p.json"


def test_a_saved_plan_replays_as_it_was_promised(folder: Path, solution: exeplan.Solution) -> None:
    exeplan.optimize("p.json", LAW, latency_bound=0.1, policy="orca").save(folder / "plan.yaml")
    replayed = exeplan.simulate("plan.yaml")
    assert replayed.replay == solution.plan.replay
    assert replayed.estimate == solution.plan.estimate
    assert replayed.broken_bound is None
    replayed.save("again.yaml")
    assert exeplan.load_plan("again.yaml").replay == solution.plan.replay


def test_a_plan_that_was_never_saved_replays_with_its_inputs(profile: Profile) -> None:
    workload = exeplan.load_workload(LENGTHS, name="four")
    asked = exeplan.optimize(profile, workload, latency_bound=math.inf, policy="static", max_num_seqs=4)
    assert asked.plan.workload is None
    replayed = exeplan.simulate(asked.plan, profile=profile, workload=workload)
    assert replayed.replay == asked.plan.replay
    with pytest.raises(exeplan.InputError, match="the plan names no profile"):
        exeplan.simulate(asked.plan)


def test_a_plan_for_a_cluster_keeps_its_name_and_its_number_of_gpus(folder: Path) -> None:
    (folder / "pair.yaml").write_text(CLUSTER)
    asked = exeplan.optimize("p.json", LAW, latency_bound=1, policy="orca", cluster="pair.yaml", gpus=1)
    assert (asked.plan.cluster, asked.plan.gpus) == ("pair.yaml", 1)
    fewest = exeplan.optimize(
        "p.json", LAW, latency_bound=1, policy="orca", cluster=Path("pair.yaml"), gpus="auto", min_throughput=1
    )
    assert [size.num_gpus for size in fewest.tried] == [1]
    assert fewest.plan.schedule == asked.plan.schedule
    other = exeplan.simulate(asked.plan, cluster="pair.yaml")
    assert other.plan.gpus is None


@pytest.mark.parametrize("make", [dict, pandas.DataFrame], ids=["mapping", "frame"])
def test_a_workload_comes_from_a_table_or_from_arrays(make: Any) -> None:
    timed = {**LENGTHS, "arrival_s": [0.0, 0.5, 0.5, 2.0]}
    table, arrays = exeplan.load_workload(make(timed)), exeplan.load_workload(**timed)
    assert table.fingerprint == arrays.fingerprint
    assert table.mean_output == 8.25
    assert table.trace is not None
    assert table.trace.arrival_s is not None
    assert table.trace.arrival_s.tolist() == [0.0, 0.5, 0.5, 2.0]
    assert exeplan.load_workload(make(LENGTHS)).trace.arrival_s is None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "a workload needs a file, a name, a law or a table, or input_tokens and output_tokens"),
        ({"source": {"input_tokens": [1]}}, "needs the columns input_tokens and output_tokens; found input_tokens"),
        ({"source": 5}, "needs the columns input_tokens and output_tokens; found int"),
        ({"input_tokens": [1, 2], "output_tokens": [1]}, "there are 2 input_tokens and 1 output_tokens"),
        ({"input_tokens": [0], "output_tokens": [1]}, "input_tokens must be whole numbers from 1 to .*, found 0"),
        ({"input_tokens": [1], "output_tokens": [1.5]}, "output_tokens must be whole numbers from 1 to .*, found 1.5"),
        ({"input_tokens": [], "output_tokens": []}, "input_tokens must be one finite number a request, and at least"),
        ({"input_tokens": ["x"], "output_tokens": [1]}, "input_tokens must be numbers, found list"),
        ({**LENGTHS, "arrival_s": [0, 2, 1, 3]}, "arrival_s must not be negative and must not fall"),
        ({**LENGTHS, "arrival_s": [0, 1]}, "there are 4 requests and 2 arrival_s"),
        ({**LENGTHS, "arrival_s": [0, 1, math.nan, 3]}, "arrival_s must be one finite number a request"),
    ],
)
def test_requests_that_cannot_be_are_refused_in_one_sentence(given: dict[str, Any], message: str) -> None:
    with pytest.raises(exeplan.InputError, match=message):
        exeplan.load_workload(**given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give --latency-bound"),
        ({"latency_bound": -1}, "--latency-bound must be above zero, found '-1'"),
        ({"latency_bound": exeplan.Bound(seconds=1), "bound_on": "p99-requests"}, "leave --bound-on out"),
        ({"latency_bound": 1, "gpus": "many"}, "--gpus must be a number of GPUs or auto, found 'many'"),
        ({"latency_bound": 1, "max_num_seqs": 0}, "--max-num-seqs must lie between 1 and 65536, found 0"),
        ({"latency_bound": 1, "errors": "e.json"}, "--errors needs a --risk"),
        ({"latency_bound": 1, "deadline_share": 0.9}, "--deadline-share needs a --deadline"),
    ],
)
def test_wrong_options_are_refused_as_on_the_command_line(
    profile: Profile, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(exeplan.InputError, match=message):
        exeplan.optimize(profile, LAW, **options)


def test_an_impossible_bound_says_what_would_be_possible(profile: Profile) -> None:
    with pytest.raises(exeplan.Infeasible) as refused:
        exeplan.optimize(profile, LAW, latency_bound="1ms", policy="orca")
    assert refused.value.nearest.startswith("the tightest latency bound found to work is")
    assert isinstance(refused.value, ValueError)


def test_a_solution_is_a_table_a_text_and_a_picture(solution: exeplan.Solution) -> None:
    frame = solution.to_frame()
    assert frame.index.tolist() == ["orca"]
    assert solution.plan.estimate is not None
    assert frame.loc["orca", "throughput"] == solution.plan.estimate.throughput
    for text in (repr(solution), solution._repr_html_()):
        for word in ("bound 100 ms on p99-length", "throughput", "replay", "max_num_seqs="):
            assert word in text
    axes = Figure().add_subplot()
    assert solution.plot(axes) is axes
    latencies = [row.latency for row in solution.frontier() if row.latency <= 0.4]
    assert axes.lines[0].get_xdata().tolist() == latencies
    assert "what limits orca" not in repr(solution)
    assert solution.explain().schedule == solution.plan.schedule


def test_html_shows_names_as_text(profile: Profile) -> None:
    named = exeplan.load_workload(LENGTHS, name="<b>mine</b>")
    html = exeplan.optimize(profile, named, latency_bound=1, policy="orca")._repr_html_()
    assert "<b>" not in html
    assert "&lt;b&gt;mine" in html


def test_a_simulation_is_a_table_a_text_and_a_picture(profile: Profile, solution: exeplan.Solution) -> None:
    done = exeplan.simulate(solution.plan, profile=profile, requests=50, seed=1)
    assert done.to_frame().index.tolist() == ["closed form", "replay"]
    assert done.to_frame().loc["replay", "throughput"] == done.replay.throughput
    requests = done.requests()
    assert len(requests) == 50
    assert (requests["start"] <= requests["first_token"]).all()
    assert (requests["first_token"] <= requests["end"]).all()
    assert "50 requests" in repr(done)
    assert "50 requests" in done._repr_html_()
    axes = Figure().add_subplot()
    assert done.plot(axes) is axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["stage 0"]


def test_a_broken_bound_is_said(profile: Profile, solution: exeplan.Solution) -> None:
    done = exeplan.simulate(solution.plan, profile=profile, workload="fixed:in=80;out=300")
    assert done.broken_bound == exeplan.Bound(seconds=0.1)
    assert repr(done).endswith("the replay breaks the bound 100 ms on p99-length")


def test_a_bound_that_is_hardly_broken_is_said_with_the_digits_that_show_it(
    profile: Profile, solution: exeplan.Solution
) -> None:
    latency = exeplan.simulate(solution.plan, profile=profile).replay.latency
    assert latency is not None
    plan = replace(solution.plan, bound=exeplan.Bound(seconds=latency * (1 - 1e-6)))
    text = repr(exeplan.simulate(plan, profile=profile))
    found = re.search(r"the replay breaks the bound (.*) on p99-length, by (.*)$", text)
    assert found
    bound, needed = found.groups()
    assert bound == show_seconds(latency) != needed
    assert seconds(needed) == pytest.approx(latency, rel=1e-6)


def test_a_comparison_has_a_row_for_each_pair_and_bound(profile: Profile) -> None:
    rows = exeplan.compare([profile], [LAW, exeplan.load_workload(LENGTHS)], [0.1, "1ms"], policy="orca")
    assert [(row.workload, row.bound.seconds) for row in rows] == [
        (LAW, 0.1),
        (LAW, 0.001),
        ("requests", 0.1),
        ("requests", 0.001),
    ]
    assert [row.schedule is not None for row in rows] == [True, False, True, False]
    frame = rows.to_frame()
    assert frame["bound_seconds"].tolist() == [0.1, 0.001, 0.1, 0.001]
    assert "the tightest latency bound found to work is" in repr(rows)
    assert rows._repr_html_().count("<tr>") == 5


def test_a_workload_draws_its_lengths() -> None:
    workload = exeplan.load_workload(LENGTHS, name="four")
    axes = Figure().add_subplot()
    assert workload.plot(axes) is axes
    inputs, outputs = axes.lines
    assert inputs.get_xdata().tolist() == [0, 10, 20, 30, 40]
    assert inputs.get_ydata().tolist() == pytest.approx([1, 0.75, 0.5, 0.25, 0])
    assert outputs.get_xdata().tolist() == [0, 5, 7, 9, 12]
    assert "output: mean 8.25" in repr(workload)


def test_a_datasheet_gives_the_profile_that_the_command_writes(folder: Path) -> None:
    wanted = ["--cluster", "a40", "--tensor-parallel-sizes", "1,2", "--set", "gemm_efficiency=0.5"]
    assert main(["profile", "opt-13b", "--datasheet", "a40-48gb", "-o", "o.json", *wanted]) == 0
    made = exeplan.datasheet_profile(
        exeplan.load_model("opt-13b"),
        "a40-48gb",
        cluster=exeplan.load_cluster("a40"),
        tensor_parallel_sizes=[2, 1],
        constants={"gemm_efficiency": 0.5},
    )
    exeplan.save_profile(made, folder / "made.json")
    assert json.loads((folder / "made.json").read_text()) == json.loads((folder / "o.json").read_text())
    assert exeplan.load_profile("made.json").reference == "made.json"


def test_loading_takes_what_is_loaded_already(profile: Profile, tmp_path: Path) -> None:
    save_profile(profile, tmp_path / "p.json")
    workload, cluster, model = exeplan.load_workload("S"), exeplan.load_cluster("a40"), exeplan.load_model("demo")
    assert exeplan.load_workload(workload) is workload
    assert exeplan.load_cluster(cluster) is cluster
    assert exeplan.load_model(model) is model
    assert exeplan.load_profile(profile) is profile
