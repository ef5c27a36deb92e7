"""`exeplan bench` of requests that arrive at a rate: the replay at the speed that the machine had meanwhile."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from exeplan.cli import main
from exeplan.commands import bench
from exeplan.core.models.model import ModelSpec
from exeplan.core.plan import Plan
from exeplan.core.profile import Profile, ReferencePass, save_profile
from exeplan.runner import load
from exeplan.runner.load import EngineRun, Load, draw_load
from exeplan.simulator.routed import RoutedRun
from exeplan.workload.files import load_workload
from exeplan.workload.workload import Workload

PLAN = """
model: demo
profile: p.json
workload: 'fixed:in=12;out=20'
schedule: {policy: orca, max_num_seqs: 4}
placement: [{devices: [0], layers: [0, 6]}]
kv_cache_tokens: 1024
"""
WORDS = ["bench", "plan.yaml", "--weights", "dummy", "--rate", "10", "--requests", "25"]


@pytest.fixture
def watched(folder: Path, profile: Profile) -> Path:
    """The working folder, whose profile says how long a decode of one row took: as fast as no machine is."""
    decode = ReferencePass(kind="decode", num_seqs=1, num_tokens=16, num_layers=6, seconds=1e-4, error=0.01)
    save_profile(replace(profile, reference_passes=(decode,)), folder / "p.json")
    (folder / "plan.yaml").write_text(PLAN)
    return folder


def test_requests_of_a_plan_that_serves_alike_ones_together_are_random(
    watched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []

    def draw(workload: Workload, number: int, **how: object) -> Load:
        drawn.append(how["stratified"])
        return draw_load(workload, number, **how)  # type: ignore[arg-type]  # Passed on as they are.

    monkeypatch.setattr(load, "draw_load", draw)
    for schedule in ("policy: orca, max_num_seqs: 4", "policy: turbo, batch_size: 4"):
        (watched / "plan.yaml").write_text(PLAN.replace("policy: orca, max_num_seqs: 4", schedule))
        assert main(WORDS) == 0
    assert drawn == [True, False]


def test_a_second_replay_has_passes_that_take_as_long_as_the_machine_did(
    watched: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    slowness = body["speed"]["slowness"]
    assert body["speed"]["number"] > 0
    assert slowness > 2
    slowed, planned = body["replay_at_measured_speed"], body["replay"]
    ratio = slowed["tpot"] / planned["tpot"]
    assert 0.99 * slowness <= ratio <= 2 * slowness  # More requests are there at a time.


def test_requests_of_the_replay_come_when_they_came_by_a_clock_without_reference_passes(
    watched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    came, replayed = list[list[float]](), list[list[float]]()
    play, predict = load.play_engine, bench._prediction

    def playing(*args: Any, **how: Any) -> EngineRun:
        run = play(*args, **how)
        came.append([record.arrival for record in run.records])
        return run

    def predicting(plan: Plan, profile: Profile, spec: ModelSpec, load: Load) -> RoutedRun:
        assert load.arrivals is not None
        replayed.append(load.arrivals.tolist())
        return predict(plan, profile, spec, load)

    monkeypatch.setattr(load, "play_engine", playing)
    monkeypatch.setattr(bench, "_prediction", predicting)
    assert main(WORDS) == 0
    assert replayed == [pytest.approx(came[0])] * 2
    asked = draw_load(load_workload("fixed:in=12;out=20"), 25, rate=10.0)
    assert asked.arrivals is not None
    assert came[0][-1] < asked.arrivals[-1]


def test_it_stands_beside_what_was_measured(watched: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(WORDS) == 0
    first, second = capsys.readouterr().out.split(" reference passes the machine took ")
    assert "mean tpot" in first
    assert "other processes on its cores included; for these passes the engine waited " in second
    assert "mean tpot" in second


def test_without_reference_passes_nothing_is_said_of_the_speed(
    watched: Path, profile: Profile, capsys: pytest.CaptureFixture[str]
) -> None:
    save_profile(profile, watched / "p.json")
    assert main(WORDS) == 0
    assert "and no reference pass told its speed" in capsys.readouterr().out
