"""`--gpus auto` finds the fewest GPUs that meet rate and bounds; a refusal says what more would buy."""

import json
import re
from pathlib import Path

import pytest

from exeplan.cli import main
from exeplan.core.cluster import Cluster, load_cluster
from exeplan.planner.sizing import sizes

LAW = "normal:in=40,10,80;out=12,5,24"
CLUSTER = """
device: affine
nodes: 2
gpus_per_node: 3
memory: 8GiB
intra: {bandwidth: 10GB, latency: 10us}
inter: {bandwidth: 1GB, latency: 20us}
"""


@pytest.fixture
def folder(folder: Path) -> Path:
    (folder / "six.yaml").write_text(CLUSTER)
    return folder


def command(*options: str) -> list[str]:
    chosen = ["--workload", LAW, "--policy", "orca", "--cluster", "six.yaml", "--max-num-seqs", "64"]
    return ["optimize", "--profile", "p.json", *chosen, *options]


def refusal(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(command(*options)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("exeplan optimize: ").strip()


def test_parts_are_some_gpus_of_a_node_or_whole_nodes(folder: Path) -> None:
    cluster: Cluster = load_cluster("six.yaml")
    assert sizes(cluster) == [1, 2, 3, 6]
    assert [cluster.part(size).num_gpus for size in sizes(cluster)] == [1, 2, 3, 6]


@pytest.mark.parametrize("load", [["--min-throughput", "200"], ["--arrival-rate", "180"]])
def test_no_smaller_part_would_do(load: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command("--gpus", "auto", "--latency-bound", "200ms", *load, "--json")) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["gpus"] == 2
    assert [(size["gpus"], size["refusal"] is None) for size in body["sizes"]] == [(1, False), (2, True)]
    assert "requests/s would be sustained" in body["sizes"][0]["refusal"]
    assert main(command("--gpus", "2", "--latency-bound", "200ms", *load)) == 0
    capsys.readouterr()
    refusal(capsys, "--gpus", "1", "--latency-bound", "200ms", *load)


def test_the_sizes_that_were_tried_are_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command("--gpus", "auto", "--latency-bound", "200ms", "--min-throughput", "200")) == 0
    text = capsys.readouterr().out
    assert text.startswith("fewest GPUs of cluster six.yaml: 2\n")
    assert re.search(r"GPUs +best schedule +req/s +latency", text)


def test_a_refusal_says_what_more_gpus_would_gain(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(capsys, "--gpus", "1", "--latency-bound", "200ms", "--min-throughput", "200")
    assert "200 requests/s are required, but within the bounds the most is " in message
    assert re.search(r"; 2 GPUs suffice, by orca\(.*\) at 2\d\d requests/s$", message)


def test_a_bound_that_more_gpus_do_not_keep_either_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(capsys, "--gpus", "3", "--latency-bound", "1ms")
    assert "the tightest possible bound is " in message
    assert re.search(r"; with 6 GPUs the tightest latency bound would be \d.*ms$", message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpus", "auto"], "--gpus auto needs an --arrival-rate, --arrivals trace or --min-throughput to meet"),
        (["--gpus", "some"], "--gpus must be a number of GPUs or auto, found 'some'"),
        (["--gpus", "-2"], "--gpus must be a number of GPUs or auto, found '-2'"),
        (["--gpus", "0"], "cluster six has 6 GPUs, not 0"),
        (["--gpus", "5"], "5 GPUs of cluster six are neither part of a node nor whole nodes of 3"),
        (["--gpus", "auto", "--min-throughput", "1e5"], "all 6 GPUs of cluster six do not suffice: "),
    ],
)
def test_wrong_sizes_are_answered_with_one_sentence(
    options: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(capsys, "--latency-bound", "200ms", *options).startswith(message)
