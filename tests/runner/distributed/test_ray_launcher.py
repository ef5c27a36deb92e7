"""Where agents are placed anew, without a cluster: on another node where one refuses, and for other threads."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import pytest

from exeplan.core.models.model import load_model_spec
from exeplan.core.plan import Plan
from exeplan.core.schedule import Placement, Schedule, single_stage
from exeplan.errors import InputError
from exeplan.runner.distributed.ray_agent import ModelOfPlan
from exeplan.runner.distributed.ray_bundles import Bundle
from exeplan.runner.engine_process.build import engine_setup
from exeplan.runner.ipc.messages import RaySetup

if find_spec("ray") is None:
    pytest.skip("Ray is not installed: pip install 'exeplan[ray]'", allow_module_level=True)

from exeplan.runner.distributed import ray_launcher
from exeplan.runner.distributed.ray_launcher import RayLauncher, _NodeRefusesError

SPEC = load_model_spec("demo")
PLACEMENT = single_stage(SPEC)
OPTIONS = engine_setup(Plan(model="demo", schedule=Schedule("orca", {"max_num_seqs": 3}), placement=PLACEMENT), SPEC)


class Agent:
    """One that runs on a node."""

    gone = silent = False
    address = ray_launcher.DeviceAddress(host="a node", address="127.0.0.1", local_device=0)

    def release(self) -> None:
        pass


class Launcher(RayLauncher):
    """Its cluster is what the test says: of each attempt the node that refuses, or none."""

    def __init__(self, *refusing: str | None, started: bool = False) -> None:
        super().__init__(
            RaySetup(address="auto", replica=0, started=started),
            ModelOfPlan(name="demo", directory=None, fingerprint="any"),
            OPTIONS.engine,
            1,
        )
        self.refusing, self.avoided, self.asked = list(refusing), list[list[str]](), list[dict[str, float]]()

    def _await_room(self, placement: Placement) -> tuple[Bundle, ...]:
        self.avoided.append(list(self._silent))
        self.asked.append(dict(self._worker))
        return (Bundle(devices=(0,), resources=dict(self._worker)),)

    def _place(self, wanted: Sequence[Bundle]) -> dict[int, Any]:
        if node := self.refusing.pop(0):
            raise _NodeRefusesError(f"the node {node} of the Ray cluster has no model", node)
        return {0: Agent()}


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_launcher, "connect", lambda address: None)
    monkeypatch.setattr(ray_launcher.ray.util, "get_node_ip_address", lambda: "127.0.0.1")


def test_a_node_that_refuses_ends_the_first_start() -> None:
    with pytest.raises(InputError, match="the node b of the Ray cluster has no model"):
        Launcher("b").prepare(PLACEMENT, num_threads=1)


def test_a_pipeline_that_has_run_goes_on_on_other_nodes_than_one_that_refuses() -> None:
    launcher = Launcher("b", "c", None, started=True)
    launcher.prepare(PLACEMENT, num_threads=1)
    assert launcher.avoided == [[], ["b"], ["b", "c"]]
    launcher._agents[0].gone = True
    launcher.refusing = ["d", None]
    launcher.prepare(PLACEMENT, num_threads=1)
    assert launcher.avoided[3:] == [["b", "c"], ["b", "c", "d"]]


def test_workers_with_more_threads_are_placed_anew_with_more_cores() -> None:
    launcher = Launcher(None, None, None)
    for num_threads in (1, 1, 2, 2, 1):
        launcher.prepare(PLACEMENT, num_threads=num_threads)
    assert launcher.asked == [{"CPU": 1.0}, {"CPU": 2.0}, {"CPU": 1.0}]
