"""A policy from outside the package is one file: planned, replayed and run, and never named by the network."""

import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
import yaml

from exeplan import policies
from exeplan.core.plan import as_json, parse_plan
from exeplan.core.profile import Profile, save_profile
from exeplan.core.schedule import Schedule
from exeplan.errors import InputError
from exeplan.planner.load_problem import load_plan
from exeplan.policies import load_policy, policy_names, policy_reference
from exeplan.simulator.cost import CostModel
from exeplan.simulator.replay import replay

TOY = Path(__file__).with_name("toy_policy.py")
ASKED = ["--profile", "p.json", "--workload", "fixed:in=20;out=10", "--latency-bound", "1s"]


@pytest.fixture
def folder(tmp_path: Path, profile: Profile) -> Path:
    save_profile(profile, tmp_path / "p.json")
    shutil.copy(TOY, tmp_path / "mine.py")
    (tmp_path / "plans").mkdir()
    return tmp_path


def exeplan(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "exeplan", *words], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_policy_file_is_planned_and_replayed_in_other_processes(folder: Path) -> None:
    plan = folder / "plans" / "plan.yaml"
    made = exeplan("optimize", *ASKED, "--policy", "./mine.py", "-o", str(plan), folder=folder)
    assert made.returncode == 0, made.stderr
    schedule = yaml.safe_load(plan.read_text())["schedule"]
    assert schedule["policy"] == "../mine.py"
    assert schedule["seats"] > 1
    played = exeplan("simulate", "plan.yaml", folder=folder / "plans")
    assert played.returncode == 0, played.stderr
    assert f"mine.py(seats={schedule['seats']})" in played.stdout


def test_a_plan_finds_its_policy_from_its_own_folder_only_where_it_is_a_file(folder: Path) -> None:
    path = folder / "plan.yaml"
    path.write_text("model: demo\nschedule: {policy: mine.py, seats: 3}\nplacement: [{devices: [0], layers: [0, 6]}]\n")
    plan = load_plan(path)
    assert plan.schedule == Schedule(str(folder / "mine.py"), {"seats": 3})
    with pytest.raises(InputError, match="this plan cannot name a policy file, which is code"):
        parse_plan(as_json(plan))
    path.write_text(path.read_text().replace("mine.py", "gone.py"))
    with pytest.raises(InputError, match=r"no policy file .*gone\.py"):
        load_plan(path)


def test_a_policy_file_that_is_none_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "half.py").write_text("def check(schedule): ...")
    with pytest.raises(InputError, match=r"broken\.py cannot be loaded: ZeroDivisionError: division by zero"):
        policy_reference(str(tmp_path / "broken.py"))
    with pytest.raises(InputError, match=r"half\.py lacks KEEPS_FINISHED_ROWS, .*next_batch; .*interface\.py says"):
        policy_reference(str(tmp_path / "half.py"))


def test_a_policy_that_leaves_requests_waiting_ends_the_replay_with_its_name(tmp_path: Path, cost: CostModel) -> None:
    idle = TOY.read_text().replace("    if queue.busy:\n", "    if queue.busy or queue.num_admissions == 2:\n")
    (tmp_path / "idle.py").write_text(idle)
    schedule = Schedule(str(tmp_path / "idle.py"), {"seats": 2})
    with pytest.raises(InputError, match=r"idle\.py\(seats=2\) starts nothing more, and 5 requests are not finished"):
        replay(schedule, cost, input_tokens=np.full(5, 20), output_tokens=np.full(5, 4), num_blocks=100)


def test_the_engine_gives_the_same_tokens_under_a_policy_file() -> None:
    from exeplan.core.models.model import load_model_spec
    from exeplan.runner.compute.model_runner import ModelRunner
    from exeplan.runner.compute.tokens.sampling import SamplingParams
    from exeplan.runner.engine.engine import Engine, Request
    from exeplan.runner.engine.executor import InProcessExecutor

    spec = load_model_spec("demo")

    def answers(schedule: Schedule) -> dict[str, list[int]]:
        engine = Engine(InProcessExecutor(ModelRunner(spec, num_blocks=40)), schedule, num_blocks=40)
        for number in range(5):
            sampling = SamplingParams(temperature=0.0, max_tokens=3 + number, ignore_eos=True)
            engine.add(Request(request_id=str(number), prompt_token_ids=[7] * (4 + number), sampling=sampling))
        found: dict[str, list[int]] = {str(number): [] for number in range(5)}
        while engine.has_work:
            for output in engine.step():
                found[output.request_id] += output.token_ids
        return found

    assert answers(Schedule(str(TOY), {"seats": 2})) == answers(Schedule("orca", {"max_num_seqs": 2}))


def test_the_network_names_no_policy_file_but_that_of_the_active_plan(folder: Path) -> None:
    from exeplan.runner.server.openai.errors import RequestError
    from exeplan.runner.server.plan_control import plan_from_network

    path = folder / "plan.yaml"
    path.write_text("model: demo\nschedule: {policy: mine.py, seats: 3}\nplacement: [{devices: [0], layers: [0, 6]}]\n")
    active = load_plan(path)
    given = as_json(active)
    assert plan_from_network(active, given) == active
    ran = folder / "ran"
    (folder / "other.py").write_text(f"open({str(ran)!r}, 'w')")
    for named in (str(folder / "other.py"), "other.py", "./other.py", "../plans/../other.py"):
        with pytest.raises(RequestError, match="a plan from the network cannot name a policy file, which is code"):
            plan_from_network(active, {**given, "schedule": {"policy": named, "seats": 3}})
    assert not ran.exists()


@pytest.fixture
def forgetting() -> Iterator[None]:
    """Policies are looked up again before and after."""
    for found in (load_policy, policy_names):
        found.cache_clear()
    yield
    for found in (load_policy, policy_names):
        found.cache_clear()


def test_adding_a_policy_is_adding_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch, forgetting: None) -> None:
    added = folder / "added"
    added.mkdir()
    shutil.copy(TOY, added / "toy_policy.py")
    monkeypatch.setattr(policies, "__path__", [*policies.__path__, str(added)])
    assert "toy-policy" in policy_names()
    from exeplan.cli import main

    monkeypatch.chdir(folder)
    assert main(["optimize", *ASKED, "--policy", "auto", "-o", "auto.yaml"]) == 0
    assert main(["optimize", *ASKED, "--policy", "toy-policy", "-o", "plan.yaml"]) == 0
    assert load_plan(folder / "plan.yaml").schedule.policy == "toy-policy"


def test_an_installed_package_can_bring_a_policy(monkeypatch: pytest.MonkeyPatch, forgetting: None) -> None:
    monkeypatch.syspath_prepend(str(TOY.parent))
    point = EntryPoint("brought", TOY.stem, policies.ENTRY_POINTS)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: (point,) if group == point.group else ())
    schedule = load_policy("brought").knobs  # Loaded by its name; `auto` does not know it.
    assert schedule is not None
    assert "brought" not in policy_names()
    with pytest.raises(InputError, match=r"no policy 'best'; there are .*, brought$"):
        load_policy("best")
