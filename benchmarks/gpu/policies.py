"""`static`, `orca`, `chunked` and `rra` on ExeGPT's five tasks at four bounds: predicted against measured.

The model is profiled in the same run. A task's bounds are shares of the latency that the best plan without a bound has;
each policy is planned under each of them, and its plan is played by the engine on the same GPU as a backlog. Plans that
come out alike are played once. Predicted is the replay of the very requests that are played.
"""

import math
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.setting import Clock, Section, Setting, give_back
from exeplan.core.batch import BLOCK_SIZE
from exeplan.core.bounds import Bound
from exeplan.core.models.model import ModelSpec, load_model_spec
from exeplan.core.plan import Plan
from exeplan.core.profile import Profile, load_profile
from exeplan.core.runs.metrics import summarize
from exeplan.core.schedule import Estimate
from exeplan.errors import Infeasible
from exeplan.planner.choice.optimize import optimize
from exeplan.planner.load_problem import fitted
from exeplan.planner.problems.problem import make_problem
from exeplan.profiler.profile_model import profile_model
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.warm_up import warm_up_runner
from exeplan.runner.engine.async_executor import AsyncExecutor
from exeplan.runner.engine.engine import Engine
from exeplan.runner.load import Load, draw_load, play_engine
from exeplan.simulator.cost import CostModel
from exeplan.simulator.replay import replay
from exeplan.workload.files import load_workload
from exeplan.workload.workload import Workload

POLICIES = ("static", "orca", "chunked", "rra")
TASKS = ("S", "T", "G", "C1", "C2")
SHARES = (math.inf, 0.7, 0.4, 0.2)
MODELS = ("llama-3.1-8b", "opt-13b", "t5-11b")
_MAX_SEQS, _MAX_CONTEXT = 256, 16_384
_SHORTEST = 1.0
"""Seconds of a run, at least."""
_ROOM = 0.6
"""Of the memory that is free, for keys and values."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan for a task under a bound, or why there is none."""

    task: str
    policy: str
    bound: float
    plan: Plan | None


def profiles(setting: Setting, folder: Path, clock: Clock, *, more: bool) -> tuple[Section, Path]:
    """Writes profiles into the folder, the benchmark's model first, and returns that one's path."""
    section = Section(title="profiles", header=("model", "rows", "whole steps over parts", "file"))
    names = ("toy",) if setting.smoke else MODELS if more else MODELS[:1]
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        budget = clock.left / (len(names) - number)
        path = folder / f"{name}-{_device(setting)}.json"
        try:
            profile = _profiled(setting.spec if setting.smoke else load_model_spec(name), setting, path, budget)
            cells = (name, str(len(profile.measurements)), f"{profile.calibration:.3f}", path.name)
            section.add(cells, model=name, rows=len(profile.measurements), calibration=profile.calibration)
        except Exception as error:
            section.failures.append(f"{name}: {type(error).__name__}: {error}")
        give_back(setting)
    return section, folder / f"{names[0]}-{_device(setting)}.json"


def _device(setting: Setting) -> str:
    if setting.smoke:
        return "smoke"
    return torch.cuda.get_device_name(setting.place).split()[-1].lower()


def _profiled(spec: ModelSpec, setting: Setting, path: Path, budget: float) -> Profile:
    path.unlink(missing_ok=True)
    return profile_model(
        spec,
        dtype=setting.dtype,
        device=setting.place.type,
        output=path,
        budget_seconds=max(budget, 1.0),
        max_num_seqs=setting.size(_MAX_SEQS, 8),
        max_context=None if spec.is_encoder_decoder else min(spec.max_context, _MAX_CONTEXT),
        dummy_weights=True,
        progress=False,
        captured=True,
    )


def run(setting: Setting, clock: Clock, profile: Profile) -> Section:
    header = ("task", "bound", "plan", "req/s predicted", "measured", "error", "latency predicted", "measured", "error")
    section = Section(title="policies on ExeGPT's tasks", header=header)
    cases = _cases(profile, TASKS[:1], SHARES[:2]) if setting.smoke else _cases_by_many(profile)
    driver = _Driver(setting, profile)
    known: dict[Any, tuple[Estimate, Estimate]] = {}
    alike = {(case.task, str(case.plan.schedule)) for case in cases if case.plan}
    for case in cases:
        bound = "none" if math.isinf(case.bound) else f"{case.bound:.3g} s"
        if case.plan is None:
            section.rows.append((case.task, bound, f"{case.policy}: none keeps it", *["-"] * 6))
            continue
        key = (case.task, str(case.plan.schedule))
        if key not in known:
            if clock.left < 0:
                section.notes.append(f"out of time before {case.task} {case.plan.schedule}")
                break
            seconds = max(_SHORTEST, clock.left / (len(alike) - len(known)))
            known[key] = driver.play(case, 0.2 if setting.smoke else seconds)
        _add(section, case, bound, *known[key])
    return section


def _cases(profile: Profile, tasks: tuple[str, ...], shares: tuple[float, ...], plans: Any = map) -> list[Case]:
    """A plan of each policy for each task under each bound; `plans` is how a function is mapped over jobs."""
    free = [(task, math.inf, policy) for task in tasks for policy in POLICIES]
    unbounded = dict(zip(free, plans(partial(_plan, profile), free), strict=True))
    latency = {task: max(_latency(plan) for (own, *_), plan in unbounded.items() if own == task) for task in tasks}
    wanted = [(share, task, policy) for share in shares for task in tasks for policy in POLICIES]
    bounded = [(task, share * latency[task], policy) for share, task, policy in wanted if not math.isinf(share)]
    found = unbounded | dict(zip(bounded, plans(partial(_plan, profile), bounded), strict=True))
    return [
        Case(task=task, policy=policy, bound=bound, plan=found[task, bound, policy])
        for share, task, policy in wanted
        for bound in (math.inf if math.isinf(share) else share * latency[task],)
    ]


def _cases_by_many(profile: Profile) -> list[Case]:
    """The same by a process a core: planning takes longer than playing."""
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        return _cases(profile, TASKS, SHARES, pool.map)


def _latency(plan: Plan | None) -> float:
    return plan.estimate.latency or 0.0 if plan and plan.estimate else 0.0


def _plan(profile: Profile, job: tuple[str, float, str]) -> Plan | None:
    task, bound, policy = job
    law = fitted(load_workload(task), profile.model, fit=True)
    try:
        return optimize(make_problem(profile, law, Bound(seconds=bound)), policies=(policy,), advise=False).plan
    except Infeasible:
        return None


class _Driver:
    """One runner for all plans."""

    def __init__(self, setting: Setting, profile: Profile) -> None:
        self._profile, self._cost = profile, CostModel(profile)
        paged_with = setting.kernels if setting.smoke else None
        options: dict[str, Any] = {"dtype": profile.dtype, "device": str(setting.place), "dummy_weights": True}
        self._runner = ModelRunner(profile.model, num_blocks=1, paged_with=paged_with, **options)
        blocks = 1024
        if setting.place.type == "cuda":
            blocks = int(_ROOM * torch.cuda.mem_get_info()[0]) // self._runner.cache.num_bytes
        self._runner.use_blocks(blocks)
        warm_up_runner(self._runner, setting.size(_MAX_SEQS, 8))

    def play(self, case: Case, seconds: float) -> tuple[Estimate, Estimate]:
        """The predicted and the measured run of the same requests."""
        plan = case.plan
        assert plan is not None
        assert plan.estimate is not None
        law = fitted(load_workload(case.task), self._profile.model, fit=True)
        load = draw_load(law, max(8, round(plan.estimate.throughput * seconds)))
        blocks = (plan.kv_cache_tokens or 0) // BLOCK_SIZE
        blocks = min(blocks, self._runner.cache.num_blocks)
        engine = Engine(AsyncExecutor(self._runner), plan.schedule, num_blocks=blocks)
        records = play_engine(engine, load, vocab_size=self._profile.model.vocab_size).records
        return self._summary(law, self._replayed(plan, load, blocks)), self._summary(law, records)

    def _replayed(self, plan: Plan, load: Load, blocks: int) -> Any:
        lengths: dict[str, Any] = {"input_tokens": load.input_tokens, "output_tokens": load.output_tokens}
        return replay(plan.schedule, self._cost, num_blocks=blocks, **lengths).requests

    def _summary(self, law: Workload, records: Any) -> Estimate:
        return summarize(records, p99_output=law.output_quantile(0.99), backlog=True)


def _add(section: Section, case: Case, bound: str, predicted: Estimate, measured: Estimate) -> None:
    latency = (predicted.latency, measured.latency)
    cells = [case.task, bound, str(case.plan.schedule if case.plan else "")]
    for before, after in ((predicted.throughput, measured.throughput), latency):
        if before is None or after is None:
            cells += ["-"] * 3
            continue
        cells += [f"{before:.3g}", f"{after:.3g}", f"{100 * (before / after - 1):+.1f} %"]
    section.add(
        tuple(cells),
        task=case.task,
        bound=None if math.isinf(case.bound) else case.bound,
        schedule=str(case.plan.schedule if case.plan else ""),
        throughput=[predicted.throughput, measured.throughput],
        latency=latency,
    )


def temporary() -> "tempfile.TemporaryDirectory[str]":
    """A folder for profiles that `--profiles` does not keep."""
    return tempfile.TemporaryDirectory()


def read(path: Path) -> Profile:
    return load_profile(path)
