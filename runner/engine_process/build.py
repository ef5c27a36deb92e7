"""Builds the engine that a plan describes, in the engine process and in `exeplan bench`.

A plan on one device runs in this process; one on several has a worker process for each. torch is imported where it is
used: the server makes an EngineSetup without it.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from exeplan.core.batch import BLOCK_SIZE
from exeplan.core.contract import is_number
from exeplan.core.models.layer_costs import layer_parameters_used
from exeplan.core.models.model import ModelSpec, model_spec
from exeplan.core.pass_memory import MEMORY_UTILIZATION
from exeplan.core.plan import Plan
from exeplan.core.profile import ReferencePass, load_profile
from exeplan.core.schedule import needs_other_engine
from exeplan.errors import InputError
from exeplan.planner.load_problem import engine_blocks
from exeplan.policies import load_policy, pass_limits, prefill_between_tokens
from exeplan.progress import OnProgress, Progress, no_progress, note
from exeplan.runner.ipc.messages import EngineOptions, EngineSetup, ModelSource, RaySetup
from exeplan.scheduling.largest_passes import pass_sizes, with_finite_context

if TYPE_CHECKING:
    from exeplan.runner.distributed.launcher import Launcher, OnLeft
    from exeplan.runner.engine.engine import Engine
    from exeplan.runner.engine.executor import Executor
    from exeplan.runner.engine.timeline import TimelineFile

_DEADLINE_FACTOR, _LEAST_DEADLINE_SECONDS, _UNPLANNED_DEADLINE_SECONDS = 20.0, 5.0, 60.0
_LARGEST_PASS_FACTOR = 5.0
"""How many times as long as predicted the largest pass of all may take."""


def engine_setup(
    plan: Plan,
    spec: ModelSpec,
    *,
    dummy_weights: bool = False,
    timeline: Path | None = None,
    deadline_seconds: float | None = None,
    ray: RaySetup | None = None,
    reference_passes: tuple[ReferencePass, ...] = (),
) -> EngineSetup:
    """Everything that an engine must know. `timeline` names a file for what runs when, and `reference_passes` are
    repeated while it works.

    `ray` says which cluster has the plan's devices; None where all of them are on this host.

    A batch may take `deadline_seconds` on any stage before its workers count as hanging; by default a multiple of the
    prefill time that the plan predicts, and of what the largest pass takes that requests may lead to. Raises InputError
    for a plan of another engine's shape.
    """
    if needs_other_engine(plan.placement):
        raise InputError(
            "the plan has attention data parallelism, or experts that are both divided and cut, which the engine here "
            "does not run; other engines do; plan without --engine for this one"
        )
    return EngineSetup(
        model=model_source(spec),
        schedule=plan.schedule,
        placement=plan.placement,
        engine=EngineOptions(
            device=plan.device or "cpu",
            dtype=plan.dtype or "float32",
            kv_dtype=plan.kv_dtype,
            num_blocks=engine_blocks(plan, spec),
            dummy_weights=dummy_weights,
        ),
        gpu_memory_utilization=_utilization(plan),
        num_threads=plan.num_threads,
        deadline_seconds=deadline_seconds or _deadline(plan, spec),
        timeline=str(timeline) if timeline else None,
        capacity=plan.capacity,
        ray=ray,
        reference_passes=reference_passes,
        cpu_kernels=_profiled_kernels(plan),
    )


def _profiled_kernels(plan: Plan) -> str | None:
    """By the plan's profile, where that is still at its place and says it."""
    if plan.profile is None or plan.device == "cuda" or not Path(plan.profile).is_file():
        return None
    try:
        return load_profile(Path(plan.profile)).versions.get("cpu_kernels")
    except InputError:  # It is of another version, or half written: a plan is served without it.
        return None


def model_source(spec: ModelSpec) -> ModelSource:
    """The model as a message names it; another process reads it with `exeplan.core.models.model.model_spec`."""
    directory = str(spec.directory) if spec.directory else None
    return ModelSource(name=spec.name, directory=directory, config=dict(spec.config))


def _utilization(plan: Plan) -> float | None:
    """Of a GPU's memory; a CPU's KV cache has the size that the plan gives."""
    return plan.gpu_memory_utilization or MEMORY_UTILIZATION if plan.device == "cuda" else None


def _deadline(plan: Plan, spec: ModelSpec) -> float:
    estimate = plan.replay or plan.estimate
    if estimate is None:
        return _UNPLANNED_DEADLINE_SECONDS
    usual = max(_DEADLINE_FACTOR * max(estimate.ttft, estimate.tpot), _LEAST_DEADLINE_SECONDS)
    stall: list[Any] = [plan.longest_stall.get(name) for name in ("seconds", "num_prompts", "num_tokens")]
    if all(is_number(value) and value > 0 for value in stall):  # A policy may prefill nothing between two tokens.
        return max(usual, _LARGEST_PASS_FACTOR * _largest_pass_seconds(plan, spec, *stall))
    return usual if _cuts_prompts(plan, spec) else max(usual, _UNPLANNED_DEADLINE_SECONDS)


def _cuts_prompts(plan: Plan, spec: ModelSpec) -> bool:
    return prefill_between_tokens(plan.schedule).cuts and not spec.is_encoder_decoder


def _largest_pass_seconds(plan: Plan, spec: ModelSpec, seconds: float, num_prompts: float, num_tokens: float) -> float:
    """What the largest pass takes that requests may lead to, by what these prompts take with as many tokens in all: in
    proportion to the tokens, and to what each is multiplied with, the tokens before it included."""
    spec, limits = with_finite_context(spec), pass_limits(plan.schedule)
    longest, slots = spec.max_context, engine_blocks(plan, spec) * BLOCK_SIZE
    most = pass_sizes(spec, plan.schedule)[0]  # A GPU's cache may have more slots than planned, and has this limit.
    if plan.device != "cuda":
        longest, most = min(longest, slots), slots
    if _cuts_prompts(plan, spec):
        tokens = limits.tokens or most
    else:
        all_prompts = longest * (limits.prompts or most)
        pads = load_policy(plan.schedule.policy).PADS_PROMPTS
        tokens = all_prompts if pads and plan.device != "cuda" else min(all_prompts, most)
        tokens = tokens if limits.tokens is None else min(tokens, max(limits.tokens, longest))
    growth = tokens / num_tokens * _products(spec, longest) / _products(spec, num_tokens / num_prompts)
    return seconds * max(growth, 1.0)


def _products(spec: ModelSpec, context: float) -> float:
    """Of one token in one layer: with the weights, and with the keys and values of as many tokens."""
    return layer_parameters_used(spec) + 2 * spec.num_heads * spec.head_dim * context


def open_launcher(
    setup: EngineSetup,
    *,
    on_progress: OnProgress = no_progress,
    on_left: "OnLeft" = lambda by_node, silent: None,
    on_back: Callable[[bool], None] = lambda there: None,
) -> "Launcher | None":
    """The launcher of a plan on several hosts; None on one host. Raises InputError where there are none.

    `on_left` and `on_back` are `RayLauncher`'s.
    """
    if setup.ray is None:
        return None
    from exeplan.runner.distributed.ray_agent import ModelOfPlan
    from exeplan.runner.distributed.ray_launcher import RayLauncher

    spec, options = _spec(setup), setup.engine
    directory = str(spec.directory) if spec.directory and not options.dummy_weights else None
    model = ModelOfPlan(name=spec.name, directory=directory, fingerprint=spec.fingerprint)
    return RayLauncher(
        setup.ray, model, options, setup.num_threads, on_progress=on_progress, on_left=on_left, on_back=on_back
    )


def build_engine(
    setup: EngineSetup,
    *,
    launcher: "Launcher | None" = None,
    on_loss: Callable[[], None] = lambda: None,
    on_progress: OnProgress = no_progress,
) -> "Engine":
    """Loads the model and warms it up. Sets torch's compute threads to the plan's: a process has one engine.

    `on_loss` is called, in some thread, when a worker died: `step` raises WorkerError then. `on_progress` is called in
    this thread, also when workers load again. Raises InputError when the model cannot be loaded.
    """
    import torch

    from exeplan.runner.compute.kv_budget import warn_if_below_plan
    from exeplan.runner.compute.weights.precision import holding_remarks, other_kernels
    from exeplan.runner.engine.engine import Engine
    from exeplan.runner.engine.tokenizer import Tokenizer

    spec = _spec(setup)
    torch.set_num_threads(setup.num_threads)
    place = torch.device(setup.engine.device)
    note([*holding_remarks(spec, setup.engine.dtype, place), *other_kernels(setup.cpu_kernels, place)])
    executor = _executor(setup, spec, launcher, on_loss, on_progress)
    kv_budget, planned = executor.kv_budget, setup.engine.num_blocks
    if kv_budget:
        warn_if_below_plan(kv_budget, planned)
    engine = Engine(
        executor,
        setup.schedule,
        tokenizer=Tokenizer.load(spec),
        num_blocks=kv_budget.num_blocks if kv_budget else planned,
    )
    try:
        warm_up(engine, on_progress=on_progress)
        engine.switch_plan(setup.schedule)  # Its queues are as new then: the first batch is the one planned.
    except BaseException:
        engine.close()
        raise
    return engine


def build_executor(
    setup: EngineSetup, *, launcher: "Launcher | None" = None, on_loss: Callable[[], None] = lambda: None
) -> "Executor":
    """What `build_engine` runs batches on, without a timeline: for an engine that switches to another plan."""
    return _executor(replace(setup, timeline=None), _spec(setup), launcher, on_loss)


def _spec(setup: EngineSetup) -> ModelSpec:
    """The model, with a finite context where its KV cache is measured."""
    model = setup.model
    spec = model_spec(model.config, name=model.name, directory=Path(model.directory) if model.directory else None)
    return with_finite_context(spec) if setup.gpu_memory_utilization else spec


def _executor(
    setup: EngineSetup,
    spec: ModelSpec,
    launcher: "Launcher | None",
    on_loss: Callable[[], None],
    on_progress: OnProgress = no_progress,
) -> "Executor":
    from exeplan.runner.engine.timeline import TimelineFile

    placement = setup.placement
    timeline = TimelineFile(Path(setup.timeline), num_stages=len(placement)) if setup.timeline else None
    if launcher is None and sum(stage.tensor_parallel_size for stage in placement) == 1:
        return _single_device_executor(setup, spec, timeline, on_progress)
    from exeplan.runner.distributed.multiprocess_executor import MultiprocessExecutor

    return MultiprocessExecutor(
        spec, setup, timeline=timeline, on_loss=on_loss, on_progress=on_progress, launcher=launcher
    )


def _single_device_executor(
    setup: EngineSetup, spec: ModelSpec, timeline: "TimelineFile | None", on_progress: OnProgress
) -> "Executor":
    from exeplan.runner.compute.device import local_device
    from exeplan.runner.compute.gpu_memory import measure_kv_budget
    from exeplan.runner.compute.model_runner import ModelRunner
    from exeplan.runner.compute.warm_up import warm_up_runner
    from exeplan.runner.compute.weights.loading_bar import LoadingBar
    from exeplan.runner.compute.weights.precision import check_precision
    from exeplan.runner.engine.async_executor import AsyncExecutor
    from exeplan.runner.engine.executor import InProcessExecutor
    from exeplan.scheduling.largest_passes import most_rows

    options = setup.engine
    device = local_device(options.device, setup.placement[0].devices[0])
    check_precision(options.dtype, options.kv_dtype, device)
    with LoadingBar(spec, setup.placement, options.dtype, on_progress=on_progress) as bar:
        runner = ModelRunner(
            spec,
            dtype=options.dtype,
            kv_dtype=options.kv_dtype,
            device=str(device),
            num_blocks=1 if setup.gpu_memory_utilization else options.num_blocks,  # One until memory is measured.
            dummy_weights=options.dummy_weights,
            on_read=partial(bar.show, 0),
        )
    kv_budget = measure_kv_budget(runner, setup.schedule, setup.gpu_memory_utilization)
    if runner.kernels is not None:
        warm_up_runner(runner, most_rows(setup.schedule), shown=True, on_progress=on_progress)
    kind = InProcessExecutor if runner.kernels is None else AsyncExecutor
    executor = kind(runner, timeline=timeline, kv_budget=kv_budget)
    executor.structures.load()
    return executor


def warm_up(
    engine: "Engine", num_requests: int = 4, num_tokens: int = 8, *, on_progress: OnProgress = no_progress
) -> None:
    """Runs a few short requests, so that the first real one does not pay for torch's first calls."""
    from exeplan.runner.compute.tokens.sampling import SamplingParams
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
    engine.length_stats()  # These requests are no traffic.
