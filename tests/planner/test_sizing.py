"""`--gpus auto` finds the fewest GPUs that meet rate and bounds; a refusal says what more GPUs would give."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import exeplan
from exeplan.cli import main
from exeplan.core.cluster import Cluster, Link, load_cluster
from exeplan.core.profile import Profile
from exeplan.errors import Infeasible
from exeplan.planner import sizing
from exeplan.planner.choice import seeded_replays
from exeplan.planner.choice.answers import Optimum
from exeplan.planner.problems.replays import replay_estimate, routed_estimate
from exeplan.planner.sizing import Tried, fewest_gpus, never_worse, sizes, sizes_table, tried_size
from exeplan.planner.solution import Solution
from exeplan.progress import Told
from exeplan.units import seconds

WIRE = Link(bytes_per_second=1e10, latency=1e-5)

LAW = "normal:in=40,10,80;out=12,5,24"
FIGURES = ("plan", "most_rate", "latency")
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
    assert body["sizes"][0] == {"gpus": 1, "refusal": body["sizes"][0]["refusal"]} | dict.fromkeys(FIGURES)
    assert body["sizes"][1]["plan"]["schedule"] == body["schedule"]
    assert body["sizes"][1]["latency"] == body["replay"]["latency"]
    assert body["sizes"][1]["most_rate"] >= body["replay"]["throughput"]
    assert main(command("--gpus", "2", "--latency-bound", "200ms", *load)) == 0
    capsys.readouterr()
    refusal(capsys, "--gpus", "1", "--latency-bound", "200ms", *load)


def test_the_sizes_that_were_tried_are_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command("--gpus", "auto", "--latency-bound", "200ms", "--min-throughput", "200")) == 0
    text = capsys.readouterr().out
    assert text.startswith("fewest GPUs of cluster six.yaml: 2\n")
    assert re.search(r"GPUs +best plan +most req/s +latency", text)


def test_the_fewest_gpus_that_suffice_are_advised_and_suffice(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--latency-bound", "200ms", "--min-throughput", "350"]
    message = refusal(capsys, "--gpus", "1", *asked)
    assert "350 requests/s are required, but within the bounds the most is " in message
    advised = re.search(r"; (\d) GPUs are the fewest that suffice, by (.*) at (\d+) requests/s$", message)
    assert advised
    assert "GPUs: orca(" in advised[2] or "GPU: orca(" in advised[2]
    assert int(advised[3]) >= 350
    assert main(command("--gpus", advised[1], *asked)) == 0
    capsys.readouterr()
    refusal(capsys, "--gpus", str(int(advised[1]) - 1), *asked)


def test_what_is_only_advised_is_replayed_once_by_one_replica(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone: list[object] = []
    together: list[object] = []

    def counted(replays: Callable[..., object], seeds: list[object]) -> Callable[..., object]:
        def counting(*args: object, **options: object) -> object:
            seeds.append(options["seed"])
            return replays(*args, **options)

        return counting

    monkeypatch.setattr(seeded_replays, "replay_estimate", counted(replay_estimate, alone))
    monkeypatch.setattr(seeded_replays, "routed_estimate", counted(routed_estimate, together))
    monkeypatch.setattr("exeplan.forked.num_processes", lambda: 1)
    load = ["--arrival-rate", "180", "--latency-bound", "70ms"]
    assert "suffice" in refusal(capsys, *load, "--gpus", "1")
    assert set(alone) == {0}
    assert not together
    assert main(command(*load, "--gpus", "auto")) == 0
    assert len(set(together)) > 1


def test_the_rate_that_a_refusal_names_is_sustained(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By unequal replicas too: the best division of three GPUs counts."""
    message = refusal(capsys, "--gpus", "3", "--latency-bound", "200ms", "--min-throughput", "1e4")
    found = re.search(r"the most is ([\d.]+) requests/s, by (.*?): ", message)
    assert found
    assert main(command("--gpus", "3", "--latency-bound", "200ms", "--min-throughput", found[1])) == 0


def test_a_bound_that_more_gpus_do_not_keep_either_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(capsys, "--gpus", "3", "--latency-bound", "1ms")
    found = re.search(r"the tightest bound found to work is (\d.*ms); more GPUs, up to 6, do not lower it$", message)
    assert found
    assert main(command("--gpus", "3", "--latency-bound", found[1])) == 0
    capsys.readouterr()
    six = refusal(capsys, "--gpus", "6", "--latency-bound", "1ms")
    assert f"the tightest bound found to work is {found[1]}; more GPUs" in six


def test_more_gpus_are_never_shown_worse(profile: Profile) -> None:
    """A size whose own plan is worse, or that has none, has the plan of fewer GPUs, and idle ones."""
    one = exeplan.optimize(profile, LAW, latency_bound="200ms", policy="orca").optimum
    assert one.plan.replay is not None
    replayed, rates = one.plan.replay, {2: 25.0, 4: 24.0}

    def solve(cluster: Cluster, told: Told) -> Optimum:
        if (number := cluster.num_gpus) not in rates:
            raise Infeasible("too few", nearest="20 requests/s would be sustained")
        return replace(one, plan=replace(one.plan, gpus=number, replay=replace(replayed, throughput=rates[number])))

    four = Cluster(
        name="four", device="affine", num_nodes=1, gpus_per_node=4, memory_bytes=8 << 30, intra=WIRE, inter=WIRE
    )
    found, tried = fewest_gpus(replace(four, gpus_per_node=3), solve)
    assert found.num_gpus == 2
    assert [size.num_gpus for size in tried] == [1, 2]
    rates = {1: 20.0, 2: 25.0, 4: 24.0}
    rows = sizes_table(never_worse([tried_size(four.part(number), solve) for number in (1, 2, 3, 4)])).split("\n")[2:]
    assert [row.split()[-3] for row in rows] == ["20", "25", "25", "25"]
    assert [re.findall(r"(\d) idle", row) for row in rows] == [[], [], ["1"], ["2"]]


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


def test_following_the_advice_on_a_latency_succeeds() -> None:
    """Tensor parallelism lowers the latency of one request, down to what four GPUs need for it."""
    profile = exeplan.datasheet_profile("opt-13b", "a40-48gb", cluster="a40", tensor_parallel_sizes=(1, 2, 4))

    def ask(gpus: int, bound: float) -> Solution:
        return exeplan.optimize(profile, "S", latency_bound=bound, cluster="a40", gpus=gpus, policy="orca")

    with pytest.raises(Infeasible, match=r"; 4 GPUs are the fewest that suffice, by orca"):
        ask(3, 1.2)
    assert ask(4, 1.2).plan.gpus == 4
    with pytest.raises(Infeasible, match=r"; with 4 GPUs the tightest latency bound found to work is ") as refused:
        ask(3, 0.1)
    tightest = re.search(r"bound found to work is ([^;]*)$", str(refused.value))
    assert tightest
    assert ask(4, seconds(tightest[1])).plan.replay is not None
    with pytest.raises(Infeasible, match=r"; more GPUs, up to 48, do not lower it$"):
        ask(4, 0.1)


@pytest.mark.parametrize(
    ("nodes", "of_nodes", "words"),
    [
        (8, (1.2, 0.9, 0.8), "12 GPUs suffice"),
        (8, (0.9, 0.9, 0.8), "6 GPUs are the fewest that suffice"),
        (1, (1.2, 0.9, 0.8), "12 GPUs suffice"),
    ],
)
def test_the_fewest_are_named_only_where_all_fewer_were_tried(
    monkeypatch: pytest.MonkeyPatch, folder: Path, nodes: int, of_nodes: tuple[float, ...], words: str
) -> None:
    """Of nodes powers of two are tried: four suffice, three may, too."""
    whole = replace(load_cluster("six.yaml"), num_nodes=nodes)
    own, floors = whole.part(3), dict(zip((2, 3, 4), of_nodes, strict=True))

    def lowest(problem: object, cluster: Cluster, policies: object) -> sizing._Lowest:
        return sizing._Lowest(floors.get(cluster.num_nodes, 2.0 if cluster.num_nodes == 1 else 0.8), None, None)

    def solve(cluster: Cluster, told: Told) -> Any:
        if lowest(None, cluster, None).seconds > 1:
            raise Infeasible("too tight")
        return SimpleNamespace()

    monkeypatch.setattr(sizing, "_lowest", lowest)
    monkeypatch.setattr(sizing, "_suffices", lambda found, words, whole: f"{found.num_gpus} GPUs {words}")
    problem: Any = SimpleNamespace(cluster=own, required=0.0, limit=1.0, max_seqs=1)
    found = sizing.with_more_gpus(Infeasible("x", wider=2.0), problem, whole, solve, ("orca",), margins=True)
    assert str(found) == f"x; {words}"


def test_plans_for_a_trace_compare_by_what_they_sustain(profile: Profile) -> None:
    one = exeplan.optimize(profile, LAW, latency_bound="200ms", policy="orca").optimum
    assert one.plan.replay is not None

    def size(number: int, headroom: float, noise: float) -> Tried:
        replay = replace(one.plan.replay, throughput=noise)
        plan = replace(one.plan, trace_arrivals=True, rate_headroom=headroom, replay=replay)
        return Tried(num_gpus=number, optimum=replace(one, plan=plan))

    tried = (size(1, 0.1, 5.0), size(2, 0.5, 4.9))
    assert never_worse(tried) == tried


def test_plans_beyond_the_headroom_that_is_told_compare_by_full_batches(profile: Profile) -> None:
    one = exeplan.optimize(profile, LAW, latency_bound="200ms", arrival_rate=1.0, policy="orca").optimum
    assert one.full is not None
    plan, full = replace(one.plan, rate_headroom=4.0), one.full

    def size(number: int, served: float) -> Tried:
        return Tried(num_gpus=number, optimum=replace(one, plan=plan, full=replace(full, throughput=served)))

    more, less = (size(1, 20.0), size(2, 30.0)), (size(1, 30.0), size(2, 20.0))
    assert never_worse(more) == more
    assert never_worse(less) == (less[0], replace(less[0], num_gpus=2))
    assert re.findall(r" ([\d.]+ or more) ", sizes_table(more)) == ["5 or more", "5 or more"]


def test_gpus_beyond_the_cluster_need_another_cluster_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(capsys, "--gpus", "6", "--latency-bound", "200ms", "--min-throughput", "1000")
    found = re.search(r"(\d+) GPUs .*suffice, by .*raise `nodes` in the cluster file from 2 to (\d+)$", message)
    assert found
    assert int(found[1]) == 3 * int(found[2]) > 6


@pytest.mark.parametrize("load", [["--min-throughput", "1000"], ["--arrival-rate", "900"]])
def test_nodes_are_advised_in_proportion_and_not_by_doubling(
    load: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At a rate without a figure: what full batches serve is no rate at which the bounds hold."""
    bound = ["--latency-bound", "200ms"]
    message = refusal(capsys, "--gpus", "6", *bound, *load)
    found = re.search(r"the most is ([\d.]+) requests/s, .* suffice, by (.*?); .* from 2 to (\d+)$", message)
    assert found
    wanted, served = float(load[1]), re.search(r" at ([\de.+]+) requests/s$", found[2])
    assert float(served[1]) >= wanted if served else load[0] == "--arrival-rate"
    nodes = int(found[3])
    assert nodes <= 1.1 * (2 * wanted / float(found[1])) + 1
    (folder / "six.yaml").write_text(CLUSTER.replace("nodes: 2", f"nodes: {nodes}"))
    assert main(command(*bound, *load)) == 0
