"""The speed of the machine is told by the passes and the threads of the plan that runs now."""

import time
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from exeplan.core.models.model import load_model_spec
from exeplan.core.plan import Plan
from exeplan.core.profile import ReferencePass
from exeplan.core.runs.machine_speed import MachineSpeed, SpeedSample
from exeplan.core.schedule import Schedule, single_stage
from exeplan.runner.engine_process.build import engine_setup
from exeplan.runner.engine_process.speed_watch import SpeedWatch
from exeplan.runner.ipc.messages import EngineSetup

SPEC = load_model_spec("demo")
ONE, TWO = (ReferencePass(kind="decode", num_seqs=1, num_tokens=8, num_layers=2, seconds=x) for x in (0.2, 0.1))


def setup(num_threads: int, reference: ReferencePass) -> EngineSetup:
    plan = Plan(
        model="demo",
        schedule=Schedule("orca", {"max_num_seqs": 3}),
        placement=single_stage(SPEC),
        num_threads=num_threads,
    )
    return replace(engine_setup(plan, SPEC), reference_passes=(reference,))


class Passes:
    """They always take 0.1 s, and three times as long by the wall clock."""

    def __init__(self, passes: tuple[ReferencePass, ...]) -> None:
        self._passes = passes

    def repeat_if_due(self) -> bool:
        return True

    def take(self) -> MachineSpeed:
        sample = SpeedSample(number=0, time=0.0, seconds=0.1, cost=0.1, others=3.0)
        return MachineSpeed(passes=self._passes, samples=(sample,))


def slowness(first: EngineSetup, then: EngineSetup) -> float:
    """Of an iteration that waits for 50 ms, under the second of two plans."""
    watch = SpeedWatch(SimpleNamespace(reference_passes=Passes), first)
    watch.renew(then)
    watch.timed(lambda: time.sleep(0.05))
    return watch.look()["slowness"]


def test_others_are_told_by_the_cpu_clock_where_the_plan_that_runs_has_one_thread() -> None:
    one, two = setup(1, ONE), setup(2, TWO)
    assert slowness(one, two) == pytest.approx(3.0)
    assert slowness(two, one) > 10  # Most of the iteration was none of this thread's.
