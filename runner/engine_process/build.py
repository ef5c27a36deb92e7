"""An engine as a plan describes it: what its own process builds, and `exeplan bench` in this one.

A setup is a plan in plain values, as it goes to another process. One device needs no process of its own; several are
workers. torch is imported where it is used: the server makes a setup without it.
"""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exeplan.core.model import ModelSpec, model_spec
from exeplan.core.plan import Plan, placement_from, stage_json
from exeplan.planner.load_problem import engine_blocks
from exeplan.planner.problem import MEMORY_UTILIZATION
from exeplan.progress import OnProgress, Progress, no_progress

if TYPE_CHECKING:
    from exeplan.runner.distributed.launcher import Hosts
    from exeplan.runner.engine.engine import Engine
    from exeplan.runner.engine.executor import Executor

_DEADLINE_FACTOR, _LEAST_DEADLINE_SECONDS, _UNPLANNED_DEADLINE_SECONDS = 20.0, 5.0, 60.0


def engine_setup(
    plan: Plan,
    spec: ModelSpec,
    *,
    dummy_weights: bool = False,
    timeline: Path | None = None,
    deadline_seconds: float | None = None,
    hosts: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything an engine's process must know. `timeline` names a file for what runs when.

    `hosts` is what `python -m exeplan.runner` knows of the hosts of the plan; None where all devices are on this one.

    A batch may take `deadline_seconds` on any stage before its workers count as hanging; by default many times what the
    plan expects of a prefill.
    """
    return {
        "model": {"name": spec.name, "directory": spec.directory and str(spec.directory), "config": dict(spec.config)},
        "schedule": asdict(plan.schedule),
        "placement": [stage_json(stage) for stage in plan.placement],
        "engine": {
            "device": plan.device or "cpu",
            "dtype": plan.dtype or "float32",
            "kv_dtype": plan.kv_dtype,
            "num_blocks": engine_blocks(plan, spec),
            "dummy_weights": dummy_weights,
        },
        "gpu_memory_utilization": _utilization(plan),
        "num_threads": plan.num_threads,
        "deadline_seconds": deadline_seconds or _deadline(plan),
        "timeline": timeline and str(timeline),
        "hosts": hosts,
    }


def _utilization(plan: Plan) -> float | None:
    """Of a GPU's memory; a CPU's KV cache has the size that the plan says."""
    return plan.gpu_memory_utilization or MEMORY_UTILIZATION if plan.device == "cuda" else None


def _deadline(plan: Plan) -> float:
    estimate = plan.replay or plan.estimate
    if estimate is None:
        return _UNPLANNED_DEADLINE_SECONDS
    return max(_DEADLINE_FACTOR * max(estimate.ttft, estimate.tpot), _LEAST_DEADLINE_SECONDS)


def hosts_from(setup: Mapping[str, Any]) -> "Hosts | None":
    """The hosts of a setup, which listens for them; None where there is but this one. Raises InputError."""
    if not setup["hosts"]:
        return None
    from exeplan.runner.distributed.remote_launcher import Keepers
    from exeplan.runner.ipc.handshake import cluster_key

    return Keepers(setup["hosts"], cluster_key())


def build_engine(
    setup: Mapping[str, Any],
    *,
    hosts: "Hosts | None" = None,
    on_loss: Callable[[], None] = lambda: None,
    on_progress: OnProgress = no_progress,
) -> "Engine":
    """Loads the model and warms it up. Sets torch's compute threads to the plan's: a process has one engine.

    `on_loss` is called, in some thread, when a worker died: `step` raises WorkerError then. `on_progress` is called in
    this thread, also when workers load again. Raises InputError when the model cannot be loaded.
    """
    import torch

    from exeplan.runner.compute.kv_budget import schedule_of, warn_of_shortage
    from exeplan.runner.engine.engine import Engine
    from exeplan.runner.engine.tokenizer import Tokenizer

    spec = _spec(setup)
    torch.set_num_threads(setup["num_threads"])
    executor, schedule = _executor(setup, spec, hosts, on_loss, on_progress), schedule_of(setup)
    room, planned = executor.room, setup["engine"]["num_blocks"]
    if room:
        warn_of_shortage(room, planned)
    engine = Engine(
        executor,
        schedule,
        tokenizer=Tokenizer.load(spec),
        num_blocks=room.num_blocks if room else planned,
    )
    try:
        warm_up(engine, on_progress=on_progress)
    except BaseException:
        engine.close()
        raise
    return engine


def build_executor(
    setup: Mapping[str, Any], *, hosts: "Hosts | None" = None, on_loss: Callable[[], None] = lambda: None
) -> "Executor":
    """What `build_engine` runs batches on, without a timeline: for an engine that goes on with another plan."""
    return _executor({**setup, "timeline": None}, _spec(setup), hosts, on_loss)


def _spec(setup: Mapping[str, Any]) -> ModelSpec:
    from exeplan.runner.compute.kv_budget import with_finite_context

    model = setup["model"]
    spec = model_spec(model["config"], name=model["name"], directory=model["directory"] and Path(model["directory"]))
    return with_finite_context(spec) if setup["gpu_memory_utilization"] else spec


def _executor(
    setup: Mapping[str, Any],
    spec: ModelSpec,
    hosts: "Hosts | None",
    on_loss: Callable[[], None],
    on_progress: OnProgress = no_progress,
) -> "Executor":
    from exeplan.runner.engine.timeline import TimelineFile

    placement = placement_from(setup["placement"])
    timeline = TimelineFile(Path(setup["timeline"]), num_stages=len(placement)) if setup["timeline"] else None
    if sum(stage.tensor_parallel_size for stage in placement) > 1:
        from exeplan.runner.distributed.multiprocess_executor import Workers

        names = ("model", "placement", "engine", "num_threads", "schedule", "gpu_memory_utilization")
        shared = {name: setup[name] for name in names}
        deadline = setup["deadline_seconds"]
        return Workers(
            spec,
            placement,
            shared,
            deadline_seconds=deadline,
            timeline=timeline,
            on_loss=on_loss,
            on_progress=on_progress,
            hosts=hosts,
        )
    from exeplan.runner.compute.device import local_device
    from exeplan.runner.compute.gpu_memory import room_for
    from exeplan.runner.compute.kv_budget import most_rows, own_engine, schedule_of
    from exeplan.runner.compute.loading_bar import LoadingBar
    from exeplan.runner.compute.model_runner import ModelRunner
    from exeplan.runner.compute.precision import check_precision
    from exeplan.runner.compute.warm_up import make_ready
    from exeplan.runner.engine.async_executor import Ahead
    from exeplan.runner.engine.executor import Local

    place = local_device(setup["engine"]["device"])
    check_precision(setup["engine"]["dtype"], setup["engine"]["kv_dtype"], place)
    with LoadingBar(spec, placement, setup["engine"]["dtype"], on_progress=on_progress) as bar:
        runner = ModelRunner(spec, **own_engine(setup, str(place)), on_read=partial(bar.show, 0))
    room = room_for(runner, setup)
    if runner.kernels is None:
        return Local(runner, timeline=timeline, room=room)
    make_ready(runner, most_rows(schedule_of(setup)), shown=True, on_progress=on_progress)
    return Ahead(runner, timeline=timeline, room=room)


def warm_up(
    engine: "Engine", num_requests: int = 4, num_tokens: int = 8, *, on_progress: OnProgress = no_progress
) -> None:
    """Runs a few short requests, so that the first real one does not pay for torch's first calls."""
    from exeplan.runner.compute.sampling import SamplingParams
    from exeplan.runner.engine.requests import Request

    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    for index in range(num_requests):
        engine.add(Request(request_id=f"warm-up-{index}", prompt_token_ids=[0] * num_tokens, sampling=sampling))
    done, total, began = 0, num_requests * num_tokens, time.monotonic()
    with Progress("warming up", shown=sys.stderr.isatty(), on_progress=on_progress) as bar:
        while engine.has_work:
            done += sum(len(output.token_ids) for output in engine.step())
            left = (time.monotonic() - began) * (total / done - 1) if done else 0.0
            bar.update(done / total, left, f"{done} of {total} tokens")
    engine.census()  # Nobody asked for these.
