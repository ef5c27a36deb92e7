"""A generation of workers, by default of the demo model; as a program, its supervisor, until it is killed.

python supervisor.py
"""

import time
from collections.abc import Callable

from exeplan.core.models.model import load_model_spec
from exeplan.core.plan import Plan
from exeplan.core.schedule import Placement, Schedule, Stage
from exeplan.runner.distributed.launcher import Launcher
from exeplan.runner.distributed.worker_group import WorkerGroup
from exeplan.runner.engine_process.build import engine_setup

PIPELINE = (Stage(devices=(0,), layers=(0, 2)), Stage(devices=(1,), layers=(2, 6)))
WIDE = (Stage(devices=(0, 1), layers=(0, 6)),)
MIXED = (Stage(devices=(0, 1), layers=(0, 4)), Stage(devices=(2,), layers=(4, 6)))


def begin(
    placement: Placement,
    *,
    model: str = "demo",
    generation: int = 1,
    on_loss: Callable[[], None] = lambda: None,
    dummy_weights: bool = True,
    launcher: Launcher | None = None,
) -> WorkerGroup:
    schedule = Schedule("orca", {"max_num_seqs": 4})
    plan = Plan(model=model, schedule=schedule, placement=placement, kv_cache_tokens=1024)
    setup = engine_setup(plan, load_model_spec(model), dummy_weights=dummy_weights, deadline_seconds=120.0)
    return WorkerGroup(setup, generation=generation, on_loss=on_loss, launcher=launcher)


if __name__ == "__main__":
    group = begin(MIXED)
    print("ready", flush=True)
    time.sleep(600)
