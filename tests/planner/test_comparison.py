"""A comparison has a row for each combination, with the plan of optimize or the reason why there is none."""

import csv
import json
from pathlib import Path

import pytest

from exeplan import api
from exeplan.cli import main
from exeplan.core.bounds import Bound
from exeplan.core.profile import Profile
from exeplan.planner.choice.optimize import optimize
from exeplan.planner.problems.problem import make_problem
from exeplan.workload.files import load_workload

SHORT, LONG = "fixed:in=20;out=6", "normal:in=40,10,80;out=12,5,24"
CLUSTER = """
device: affine
nodes: 1
gpus_per_node: 4
memory: 8GiB
intra: {bandwidth: 1GB, latency: 10us}
inter: {bandwidth: 100MB, latency: 50us}
"""


@pytest.fixture
def folder(folder: Path) -> Path:
    """The working folder, with a profile and a cluster of its device."""
    (folder / "four.yaml").write_text(CLUSTER)
    return folder


def compare(**options: str | tuple[str, ...] | None) -> list[str]:
    """`exeplan compare` with these options in place of good ones; None leaves one out."""
    chosen = {"profile": "p.json", "workload": SHORT, "latency_bound": "100ms", "policy": "orca", **options}
    words: list[str] = ["compare"]
    for name, value in chosen.items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}", *([value] if isinstance(value, str) else value)]
    return words


def test_every_combination_has_a_row_with_the_plan_of_optimize(
    folder: Path, profile: Profile, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = compare(workload=(SHORT, LONG), latency_bound="100ms,inf", cluster="four.yaml", gpus="1,2")
    assert main([*argv, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["rows"]
    assert [(row["gpus"], row["workload"], row["bound"]["seconds"]) for row in rows] == [
        (gpus, workload, bound) for gpus in (1, 2) for workload in (SHORT, LONG) for bound in (0.1, None)
    ]
    alone = optimize(make_problem(profile, load_workload(SHORT), Bound(seconds=0.1)), policies=("orca",)).plan
    assert alone.estimate is not None
    assert rows[0]["schedule"] == {"policy": "orca", **alone.schedule.variables}
    assert rows[0]["estimate"]["throughput"] == pytest.approx(alone.estimate.throughput)
    assert rows[4]["throughput_per_gpu"] == pytest.approx(rows[4]["estimate"]["throughput"] / 2)


def test_a_row_without_a_plan_says_what_would_do(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*compare(latency_bound="1ms,100ms"), "--csv", "rows.csv"]) == 0
    header, _, refused, found = capsys.readouterr().out.split("\n")[:4]
    assert header.split()[:4] == ["model", "engine", "cluster", "GPUs"]
    assert "none  the tightest latency bound found to work is " in refused
    assert " orca " in found
    with (folder / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["policy"] for row in rows] == ["", "orca"]
    assert rows[0]["refusal"].startswith(
        "latency bound 1 ms, but the lowest-latency schedule, orca(max_num_seqs=1), needs"
    )
    assert rows[0]["throughput"] == ""
    assert float(rows[1]["latency"]) <= float(rows[1]["bound_seconds"]) == 0.1
    assert float(rows[1]["replay_latency"]) <= 0.1
    assert float(rows[1]["replay_throughput"]) == pytest.approx(float(rows[1]["throughput"]), rel=0.1)
    assert [(row["replay_latency"], row["breaks_bound"]) for row in rows] == [
        ("", ""),
        (rows[1]["replay_latency"], "False"),
    ]


def test_what_was_done_to_a_workload_is_told_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"input_length": 20, "output_length": 6, "timestamp": 0}
    (folder / "t.jsonl").write_text("\n".join(json.dumps({**row, "output_length": n}) for n in (6, 0, 6)))
    source = "t.jsonl, 2 requests; a trace of Mooncake; 1 without input or output left out"
    assert main([*compare(workload=("t.jsonl", SHORT), latency_bound="100ms,1s"), "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == f"note: workload t.jsonl: {source}\n"
    found = [row["workload_source"] for row in json.loads(captured.out)["rows"]]
    assert found == [source, source, None, None]


def test_without_any_plan_the_status_is_2_and_the_table_says_why(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "four.yaml").write_text(CLUSTER.replace("8GiB", "2MiB"))
    assert main(compare(cluster="four.yaml")) == 2
    out = capsys.readouterr().out
    assert "see (1)" in out
    assert "\n(1) demo does not fit cluster four: each of its 4 GPUs lacks " in out


def test_profiles_meet_clusters_of_their_device(
    folder: Path, profile: Profile, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "other.yaml").write_text(CLUSTER.replace("device: affine", "device: steep"))
    other = (folder / "p.json").read_text().replace('"name": "affine"', '"name": "steep"')
    (folder / "steep.json").write_text(other)
    assert main([*compare(profile=("p.json", "steep.json"), cluster=("other.yaml", "four.yaml")), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["cluster"] for row in rows] == ["four", "other"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"profile": "none.json"}, "no file none.json"),
        ({"profile": "four.yaml"}, "four.yaml is not valid JSON:"),
        (
            {"cluster": "a100"},
            "the profile of demo is of affine, the clusters have a100-80gb; give a cluster of affine",
        ),
        ({"cluster": ("four.yaml", "a100")}, "cluster a100 has a100-80gb GPUs, the profiles are of affine; profile a"),
        ({"cluster": "nowhere"}, "no cluster file or shipped cluster 'nowhere'; shipped are "),
        ({"gpus": "2"}, "--gpus needs a --cluster"),
        ({"cluster": "four.yaml", "gpus": "2,x"}, "--gpus must be whole numbers such as 2,4,8, found '2,x'"),
        ({"cluster": "four.yaml", "gpus": "0"}, "--gpus must be whole numbers such as 2,4,8, found '0'"),
        ({"cluster": "four.yaml", "gpus": "5"}, "cluster four has 4 GPUs, not 5"),
        ({"latency_bound": "1s,,2s"}, "--latency-bound must be a duration such as 2s, 500ms or 1m, found ''"),
        ({"latency_bound": "1s,-2s"}, "--latency-bound must be above zero, found '-2s'"),
        ({"bound_on": "ttft"}, "the first bound must be on p99-length or pNN-requests"),
        ({"bound_on": "mean"}, "a bound can be on p99-length or pNN-requests"),
        ({"policy": "best"}, "no policy 'best'; there are "),
        ({"workload": "nothing.csv"}, "no workload 'nothing.csv'"),
        ({"workload": "fixed:in=600;out=500"}, "workload 'fixed:in=600;out=500' has requests of 1100 tokens"),
        ({"workload": None}, "the following arguments are required: --workload; see `exeplan compare --help`"),
    ],
)
def test_a_mistake_is_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], options: dict[str, str], message: str
) -> None:
    try:
        status: int | str | None = main(compare(**options))
    except SystemExit as end:  # argparse ends by itself.
        status = end.code
    captured = capsys.readouterr()
    assert (status, captured.out) == (2, "")
    assert captured.err.count("\n") == 1
    assert captured.err.startswith(f"exeplan compare: {message}")


def test_replicas_are_shown_group_by_group(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = compare(cluster="four.yaml")
    assert main([*argv, "--csv", "rows.csv"]) == 0
    assert "4 x 1 GPU: orca(max_num_seqs=" in capsys.readouterr().out
    with (folder / "rows.csv").open() as file:
        assert next(csv.DictReader(file))["variables"].startswith("4 x 1 GPU: orca(")
    assert main([*argv, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["replicas"], row["more_replicas"]) == ([0, 1, 2, 3], [])


def two_gpus(path: Path, speed: str) -> Path:
    """Neither of them holds llama-3.1-8b alone."""
    path.write_text(
        f"device: a100-80gb\nnodes: 1\ngpus_per_node: 2\nmemory: 16GiB\nintra: {{bandwidth: {speed}, latency: 8us}}\n"
        "inter: {bandwidth: 1GB, latency: 15us}\n"
    )
    return path


def test_clusters_of_one_device_have_each_its_own_links(tmp_path: Path) -> None:
    clusters = [two_gpus(tmp_path / f"{name}.yaml", speed) for name, speed in (("fast", "240GB"), ("slow", "100MB"))]
    options = {"models": ["llama-3.1-8b"], "clusters": clusters, "policy": "orca"}
    fast, slow = api.compare([], ["fixed:in=512;out=32"], ["inf"], **options)  # type: ignore[arg-type]
    assert (fast.cluster, slow.cluster) == ("fast", "slow")
    assert fast.estimate
    assert slow.estimate
    assert fast.estimate.throughput > 1.2 * slow.estimate.throughput


def test_links_of_a_profile_that_are_not_the_cluster_s_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    two_gpus(tmp_path / "slow.yaml", "1GB")
    assert main(["profile", "llama-3.1-8b", "--datasheet", "a100-80gb", "-o", "p.json"]) == 0
    asked = ["--profile", "p.json", "--cluster", "slow.yaml", "--workload", SHORT, "--policy", "orca"]
    for command in ("compare", "optimize"):
        capsys.readouterr()
        assert main([command, *asked, "--latency-bound", "inf"]) == 0
        said = "note: the times of links are the profile's (datasheet a100-80gb), not those of cluster slow; "
        assert capsys.readouterr().err.count(said) == 1


def test_engines_stand_side_by_side_each_with_its_defaults(tmp_path, monkeypatch, capsys):
    """vLLM's defaults are on the placement of its best settings and in the KV cache; exeplan's own has none."""
    monkeypatch.chdir(tmp_path)
    words = ["compare", "--model", "qwen3-8b", "--engine", "vllm,exeplan", "--cluster", "h100", "--gpus", "1,2"]
    assert main([*words, "--workload", "azure-2023-conv", "--fit-context", "--latency-bound", "10s", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["engine"], row["defaults"], row["gpus"]) for row in rows] == [
        ("vllm", False, 1), ("vllm", True, 1), ("vllm", False, 2), ("vllm", True, 2), ("", False, 1), ("", False, 2)
    ]  # fmt: skip
    best, default = rows[:2]
    assert default["placement"] == best["placement"]
    assert (best["breaks_bound"], default["breaks_bound"]) == (False, True)
    assert default["schedule"]["max_num_batched_tokens"] == 8192
    assert best["schedule"]["max_num_seqs"] < default["schedule"]["max_num_seqs"] < 1024
    assert best["estimate"]["latency"] <= 10 < default["estimate"]["latency"]
    assert rows[2]["estimate"]["throughput"] >= 1.99 * best["estimate"]["throughput"]
    assert rows[3]["estimate"]["throughput"] == pytest.approx(2 * default["estimate"]["throughput"], rel=0.01)
    words[words.index("vllm,exeplan")], words[words.index("1,2")] = "vllm", "1"
    assert main([*words, "--workload", "azure-2023-conv", "--fit-context", "--latency-bound", "10s"]) == 0
    assert "(breaks the bound)" in capsys.readouterr().out


def test_sglang_without_options_has_a_row(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["compare", "--model", "qwen3-8b", "--engine", "sglang", "--cluster", "h100", "--gpus", "1", "--json"]
    assert main([*words, "--workload", "azure-2023-conv", "--fit-context", "--latency-bound", "10s"]) == 0
    best, default = json.loads(capsys.readouterr().out)["rows"]
    assert (best["defaults"], default["defaults"]) == (False, True)
    assert default["schedule"]["policy"] == "sglang"
    assert default["schedule"]["max_num_batched_tokens"] == 8192
    assert 1 < default["schedule"]["max_num_seqs"] < 4096
    assert best["estimate"]["latency"] <= 10


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give --profile FILE, or --model"),
        (["--model", "qwen3-8b"], "--model needs a --cluster"),
        (["--profile", "p.json", "--engine", "vllm"], "--engine goes with --model"),
        (["--model", "qwen3-8b", "--cluster", "h100", "--engine", "vllm,tgi"], "no engine 'tgi'"),
    ],
)
def test_engines_with_wrong_words(folder, capsys, words, said):
    assert main(["compare", *words, "--workload", SHORT, "--latency-bound", "1s"]) == 2
    assert said in capsys.readouterr().err
