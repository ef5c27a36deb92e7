"""The drift benchmark's simulated device serves a whole trace, and drifted lengths are met with another plan."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.drift.figures import figures_of
from exeplan.core.bounds import Bound
from exeplan.core.plan import Plan, save_plan
from exeplan.core.profile import Profile, save_profile
from exeplan.drift.state import Rules
from exeplan.planner.choice.optimize import optimize
from exeplan.planner.load_problem import read_plan
from exeplan.planner.problems.problem import make_problem
from exeplan.workload.files import load_workload
from exeplan.workload.workload import Trace

RULES = Rules(dwell=5.0, every=1.0)


@pytest.fixture
def plan(profile: Profile, tmp_path: Path) -> Plan:
    """Of short outputs, under a bound that longer ones need smaller batches for."""
    lengths, file = tmp_path / "planned.csv", tmp_path / "plan.yaml"
    trace = _trace(2000, scale=1.0)
    rows = "\n".join(f"{i},{o}" for i, o in zip(trace.inputs, trace.outputs, strict=True))
    lengths.write_text(f"input_tokens,output_tokens\n{rows}\n")
    save_profile(profile, tmp_path / "profile.json")
    problem = make_problem(profile, load_workload(str(lengths)), Bound(seconds=0.45))
    found = optimize(problem, policies=("rra", "orca"), advise=False).plan
    save_plan(replace(found, workload=str(lengths), profile=str(tmp_path / "profile.json")), file)
    return read_plan(file)


def played(plan: Plan, trace: Trace, rules: Rules | None, slowdown: float = 1.0) -> Any:
    """Imported here: it imports the kernels, which tests of theirs must be the first to do."""
    from benchmarks.drift.predicted import play_predicted

    return play_predicted(plan, trace, rules=rules, slowdown=slowdown)


def _trace(count: int, *, scale: float) -> Trace:
    draw = np.random.default_rng(count)
    outputs = np.minimum((draw.gamma(2.0, 30.0, count) * scale).astype(int) + 1, 400)
    return Trace(draw.integers(8, 60, count), outputs)


def test_every_request_is_served_and_a_slower_device_keeps_fewer_within_the_bound(plan: Plan) -> None:
    trace = _trace(900, scale=1.0)
    shares = []
    for slowdown in (1.0, 2.0):
        served, replans = played(plan, trace, None, slowdown)
        assert (len(served), replans) == (len(trace.inputs), [])
        shares.append(figures_of(served, plan.bound.seconds, RULES.dwell)["in_bound"])
    assert shares[0] > 0.9 > shares[1]


def test_longer_outputs_are_met_with_another_plan(plan: Plan) -> None:
    short, long = _trace(400, scale=1.0), _trace(2200, scale=1.8)
    trace = Trace(np.append(short.inputs, long.inputs), np.append(short.outputs, long.outputs))
    _, replans = played(plan, trace, RULES)
    assert replans[0][1] != str(plan.schedule)
