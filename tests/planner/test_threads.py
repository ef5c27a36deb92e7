"""A request is planned with every number of threads that was profiled, and the best plan by measured times is taken."""

from dataclasses import replace
from pathlib import Path

import pytest

from exeplan import api
from exeplan.core.profile import Measurement, Profile, load_profile, save_profile
from exeplan.errors import InputError
from exeplan.planner.comparison import as_json, comparison_table
from exeplan.planner.load_problem import load_plan, plan_request
from exeplan.planner.reports.thread_table import thread_table
from exeplan.profiler.thread_counts import parse_threads

LAW = "normal:in=40,10,80;out=12,5,24"
LINKS = tuple(
    Measurement(op="send", phase="intra", bytes=size, seconds=1e-4 + size / 1e9) for size in (1 << 10, 1 << 20)
)

CLUSTER = """device: {device}
nodes: 1
gpus_per_node: 1
memory: 1GiB
intra: {{bandwidth: 10GB, latency: 10us}}
inter: {{bandwidth: 1GB, latency: 10us}}
"""


def with_two_threads(profile: Profile, speed: float) -> Profile:
    """The device with links between two processes, and one process of two threads that is so many times as fast."""
    rows = tuple(replace(row, seconds=row.seconds / speed) for row in profile.measurements)
    two = replace(profile, device=replace(profile.device, num_threads=2), measurements=rows)
    return replace(profile, measurements=(*profile.measurements, *LINKS), more_threads=(two,))


def best(profile: Profile, *, gpus: int | None = None) -> api.Solution:
    return api.optimize(profile, LAW, latency_bound="inf", gpus=gpus, policy="orca", max_num_seqs=16)


@pytest.mark.parametrize(("speed", "threads"), [(1.2, 1), (3.0, 2)])
def test_two_cores_are_two_processes_or_one_of_two_threads(speed: float, threads: int, profile: Profile) -> None:
    found = best(with_two_threads(profile, speed), gpus=2)
    assert found.plan.num_threads == threads
    assert [(one.num_threads, one.num_devices) for one in found.threads] == [(1, 2), (2, 1)]
    rates = {one.num_threads: one.throughput or 0.0 for one in found.threads}
    assert found.plan.replay is not None
    assert found.plan.replay.throughput == max(rates.values())
    assert "chosen" in thread_table(found.threads).splitlines()[1 + threads]


def test_without_a_number_of_devices_one_process_of_each_is_compared(profile: Profile) -> None:
    found = best(with_two_threads(profile, 1.2))
    assert found.plan.num_threads == 2
    assert [one.num_devices for one in found.threads] == [1, 1]


def test_threads_that_have_no_room_are_said_and_the_others_planned(profile: Profile) -> None:
    four = with_two_threads(profile, 3.0)
    four = replace(
        four, more_threads=tuple(replace(one, device=replace(one.device, num_threads=4)) for one in four.more_threads)
    )
    found = best(four, gpus=2)
    assert found.plan.num_threads == 1
    assert "no room" in found.threads[1].refusal


def test_on_a_cluster_the_numbers_that_are_not_tried_are_said(profile: Profile, tmp_path: Path) -> None:
    cluster = tmp_path / "host.yaml"
    cluster.write_text(CLUSTER.format(device=profile.device.name))
    several = with_two_threads(profile, 3.0)
    found = api.optimize(several, LAW, latency_bound="inf", cluster=cluster, policy="orca", max_num_seqs=16)
    assert found.plan.num_threads == 1
    assert "not tried: devices of a cluster have the profile's first number, 1" in thread_table(found.threads)


def test_a_comparison_has_the_best_number_of_threads(profile: Profile, tmp_path: Path) -> None:
    cluster = tmp_path / "host.yaml"
    cluster.write_text(CLUSTER.format(device=profile.device.name))
    several = with_two_threads(profile, 3.0)
    rows = [
        row
        for clusters in ((), (cluster,))
        for row in api.compare([several], [LAW], ["inf"], clusters=clusters, policy="orca")
    ]
    assert [row.plan.num_threads for row in rows if row.plan] == [2, 1]
    assert as_json(rows[0])["num_threads"] == 2
    assert "all layers on GPU 0, 2 threads" in comparison_table(rows)


def test_a_profile_of_one_number_is_planned_as_before(profile: Profile) -> None:
    found = best(profile)
    assert found.threads == ()
    assert found.plan.num_threads == 1


def test_the_file_keeps_all_of_them(profile: Profile, tmp_path: Path) -> None:
    several = with_two_threads(profile, 3.0)
    save_profile(several, tmp_path / "p.json")
    again = load_profile(tmp_path / "p.json")
    assert again.thread_counts == (1, 2)
    assert again.fingerprint == several.fingerprint
    assert again.with_threads(2).fingerprint == several.more_threads[0].fingerprint
    with pytest.raises(InputError, match="has 1, 2 threads a process, the plan 3"):
        again.with_threads(3)


def test_a_plan_is_replayed_with_the_times_of_its_own_threads(profile: Profile, folder: Path) -> None:
    save_profile(with_two_threads(profile, 3.0), folder / "p.json")
    found = best(load_profile(Path("p.json")))
    found.save(folder / "plan.yaml")
    plan = load_plan(folder / "plan.yaml")
    assert plan.num_threads == 2
    assert plan_request(plan).profile.fingerprint == plan.profile_fingerprint


@pytest.mark.parametrize("text", ["0", "1,", "two", "1,1", "-1"])
def test_other_numbers_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--threads"):
        parse_threads(text)
