"""A plan holds its cluster, so that it replays alone; contradictory options are one sentence and exit status 2."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from exeplan.cli import main
from exeplan.core.cluster import Link
from exeplan.core.profile import Measurement, load_profile, save_profile
from exeplan.core.schedule import ReplicaGroup
from exeplan.errors import InputError
from exeplan.planner.load_problem import load_plan, plan_problem, plan_problems, profiled_host

LAW = "normal:in=40,10,80;out=12,5,24"
CLUSTER = """
device: affine
nodes: 2
gpus_per_node: 2
memory: 8GiB
intra: {bandwidth: 1GB, latency: 10us}
inter: {bandwidth: 100MB, latency: 50us}
"""
BY_HAND = """
model: demo
schedule: {policy: rra, prefill_batch: 4, decode_steps: 6, micro_batches: 2}
placement: [{devices: [0], layers: [0, 3]}, {devices: [1], layers: [3, 6]}]
cluster: pair.yaml
profile: p.json
workload: "normal:in=40,10,80;out=12,5,24"
"""


@pytest.fixture
def folder(folder: Path) -> Path:
    """The working folder, with a profile, a cluster of its device and a plan by hand."""
    (folder / "pair.yaml").write_text(CLUSTER)
    (folder / "hand.yaml").write_text(BY_HAND)
    return folder


def replayed(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, dict[str, float]]:
    """The JSON of `exeplan simulate`."""
    assert main(["simulate", *argv, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert isinstance(body, dict)
    return body


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line on stderr of a command that is refused."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err.strip()


def test_a_profile_that_is_not_the_one_of_the_plan_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "hand.yaml", "-o", "plan.yaml"]) == 0
    assert main(["simulate", "plan.yaml"]) == 0
    assert "note:" not in capsys.readouterr().err
    own = load_plan(folder / "plan.yaml").profile_fingerprint
    slower = replace(load_profile(folder / "p.json"), calibration=2.0)
    save_profile(slower, folder / "p.json")
    changed = f"p.json is not as it was when the plan was made (fingerprint {slower.fingerprint}, then {own})"
    (folder / "trace.csv").write_text("input_tokens,output_tokens\n" + "40,12\n" * 50)
    for argv in (["simulate", "plan.yaml"], ["drift", "trace.csv", "--plan", "plan.yaml"]):
        assert main(argv) == 0
        assert changed in capsys.readouterr().err
    assert main(["simulate", "plan.yaml", "--profile", "p.json"]) == 0
    assert "note:" not in capsys.readouterr().err


def test_a_cache_that_no_device_has_the_memory_for_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "large.yaml").write_text(f"{BY_HAND}kv_cache_tokens: 99999999\ndtype: float32\n")
    for argv in (["simulate", "large.yaml"], ["export", "large.yaml", "--to", "vllm", "--model", "a/b"]):
        said = refused(capsys, *argv)
        assert "the plan's kv_cache_tokens, 99999999, take " in said
        assert "of a device with its weights; affine has 8.00 GiB, enough for at most " in said
    most = int(said.split()[-1])
    (folder / "large.yaml").write_text(f"{BY_HAND}kv_cache_tokens: {most // 2}\n")
    assert main(["simulate", "large.yaml"]) == 0
    capsys.readouterr()
    without = BY_HAND.replace("profile: p.json\n", "")
    (folder / "bare.yaml").write_text(f"{without}kv_cache_tokens: 99999999\ndtype: float32\n")
    bare = refused(capsys, "export", "bare.yaml", "--to", "vllm", "--model", "a/b")
    assert "of a device; affine has 8.00 GiB, enough for at most " in bare


def test_a_plan_for_a_cluster_replays_the_same_from_another_folder(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--profile", "p.json", "--workload", LAW, "--latency-bound", "1s", "--policy", "rra"]
    assert main(["optimize", *argv, "--cluster", "pair.yaml", "--gpus", "2", "-o", "plans/plan.yaml"]) == 0
    text = capsys.readouterr().out
    assert "2 GPUs of cluster pair, " in text
    assert "memory per GPU: " in text
    plan = load_plan(folder / "plans" / "plan.yaml")
    assert (plan.cluster, plan.gpus) == ("../pair.yaml", 2)
    body = replayed(capsys, "plans/plan.yaml")
    assert plan.replay is not None
    assert body["replay"]["throughput"] == plan.replay.throughput
    assert body["replay"]["latency"] == plan.replay.latency


def test_a_plan_by_hand_runs_on_all_its_stages(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = replayed(capsys, "hand.yaml", "--timeline", "t.json")
    assert body["estimate"]["throughput"] == pytest.approx(body["replay"]["throughput"], rel=0.1)
    events = json.loads((folder / "t.json").read_text())["traceEvents"]
    assert {event["tid"] for event in events if event["ph"] == "X"} == {0, 1}


def test_without_a_cluster_the_profile_must_know_the_links(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "alone.yaml").write_text(BY_HAND.replace("cluster: pair.yaml\n", ""))
    message = refused(capsys, "simulate", "alone.yaml")
    assert message == (
        "exeplan simulate: the profile times no send (intra node); give a cluster whose links can stand in"
    )
    assert replayed(capsys, "alone.yaml", "--cluster", "pair.yaml") == {
        **replayed(capsys, "hand.yaml"),
        "cluster": "pair.yaml",
    }


def test_a_link_between_nodes_costs_more(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "far.yaml").write_text(BY_HAND.replace("devices: [1]", "devices: [2]"))
    near, far = (replayed(capsys, name)["replay"]["throughput"] for name in ("hand.yaml", "far.yaml"))
    assert far < near


def test_what_simulate_fills_in_keeps_the_cluster(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "hand.yaml", "-o", "sub/full.yaml"]) == 0
    capsys.readouterr()
    assert load_plan(folder / "sub" / "full.yaml").cluster == "../pair.yaml"
    assert replayed(capsys, "sub/full.yaml")["replay"] == replayed(capsys, "hand.yaml")["replay"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("pair.yaml", "a100"), "cluster a100 has a100-80gb GPUs, the profile is of affine; profile the model for"),
        (("pair.yaml", "nowhere"), "no cluster file or shipped cluster 'nowhere'; shipped are a100, "),
        (("devices: [1]", "devices: [4]"), "stage 1 is on device 4, cluster pair has 4 GPUs, 0 to 3"),
        (("devices: [1]", "devices: [0]"), "device 0 is in stage 0 and again in stage 1"),
        (("devices: [1]", "devices: [1, 2]"), "the profile has tensor-parallel sizes 1, not 2"),
        (("[3, 6]", "[4, 6]"), "the plan places layers [0, 3], [4, 6]; demo needs 0 to 6 in order"),
        (("yaml\n", "yaml\ngpus: 3\n"), "3 GPUs of cluster pair are neither part of a node nor whole nodes of 2"),
        (("yaml\n", "yaml\ngpus: 8\n"), "cluster pair has 4 GPUs, not 8"),
        (("yaml\n", "yaml\ngpus: 0\n"), "hand.yaml: gpus must be a positive integer, found 0"),
        (("cluster: pair.yaml", "cluster: [2]"), "hand.yaml: cluster must be text, found [2]"),
    ],
)
def test_simulate_says_what_does_not_go_together(
    folder: Path, capsys: pytest.CaptureFixture[str], change: tuple[str, str], message: str
) -> None:
    (folder / "hand.yaml").write_text(BY_HAND.replace(*change))
    assert refused(capsys, "simulate", "hand.yaml").startswith(f"exeplan simulate: {message}")


def test_a_placement_without_room_names_the_shortfall(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "pair.yaml").write_text(CLUSTER.replace("8GiB", "8MiB"))
    message = refused(capsys, "simulate", "hand.yaml")
    assert message.startswith("exeplan simulate: one GPU of the plan needs 12.3 MiB")
    assert " for weights, workspace and one request of 104 tokens, affine has 7.2 MiB for it; place fewer" in message


def test_devices_of_the_profiled_host_need_no_cluster_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_links(folder)
    argv = ["--profile", "linked.json", "--workload", LAW, "--latency-bound", "1s", "--policy", "rra"]
    assert main(["optimize", *argv, "--gpus", "2", "--one-pipeline", "-o", "plan.yaml"]) == 0
    assert "2 GPUs of cluster host" in capsys.readouterr().out
    plan = load_plan(folder / "plan.yaml")
    assert (plan.cluster, plan.gpus, len(plan.placement)) == (None, 2, 2)
    assert plan.estimate
    assert replayed(capsys, "plan.yaml")["estimate"]["throughput"] == pytest.approx(plan.estimate.throughput)


def test_a_profile_of_one_device_knows_no_host_of_two(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--profile", "p.json", "--workload", LAW, "--latency-bound", "1s", "--gpus", "2"]
    assert "the profile times no links for 2 devices; profile with --devices 2" in refused(capsys, "optimize", *argv)


def test_the_devices_of_a_cpu_share_its_memory_and_its_measured_link(folder: Path) -> None:
    with_links(folder)
    host = profiled_host(load_profile(folder / "linked.json"), 4)
    assert (host.device, host.num_gpus, host.memory_bytes) == ("affine", 4, 2 << 30)
    assert host.intra == Link(bytes_per_second=pytest.approx(1e9), latency=pytest.approx(1e-4))


def with_links(folder: Path) -> None:
    """A profile that times sends: 100 us and a nanosecond a byte."""
    profile = load_profile(folder / "p.json")
    sends = (Measurement(op="send", phase="intra", bytes=n, seconds=1e-4 + (n - 1) * 1e-9) for n in (1, 1 << 20))
    save_profile(replace(profile, measurements=(*profile.measurements, *sends)), folder / "linked.json")


def test_unequal_replicas_are_refused_with_a_remedy(folder: Path) -> None:
    plan = load_plan(folder / "hand.yaml")
    other = ReplicaGroup(
        schedule=replace(plan.schedule, order="sjf"), placement=plan.placement, first_devices=(2,), kv_cache_tokens=None
    )
    unequal = replace(plan, more_replicas=(other,))
    with pytest.raises(InputError, match=r"not equal; .* plan with --one-pipeline, or with --arrival-rate"):
        plan_problem(unequal)
    with pytest.raises(InputError, match=r"not equal, and requests that come at a rate; .* leave arrival_rate"):
        plan_problems(replace(unequal, arrival_rate=3.0))
    problems = plan_problems(unequal)
    assert [one.cost.placement for one in problems] == [plan.placement, plan.placement]
