"""Three engines with the tables that time their kernels, SGLang with vLLM's; how they admit requests says
`exeplan/profiler/calibration/predict.py`."""

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.silicon.rows import DEVICES, Prediction, Row
from exeplan.arrays import Floats
from exeplan.core.models.model import load_model_spec
from exeplan.core.pass_memory import MEMORY_UTILIZATION
from exeplan.core.profile import Profile
from exeplan.core.schedule import Stage
from exeplan.policies.interface import Cycle
from exeplan.profiler.calibration.predict import OPTIONS, EngineOptions, replayed, replayed_means
from exeplan.profiler.datasheets.engine_constants import EngineConstants, load_engine, with_engine
from exeplan.profiler.importing import import_profile
from exeplan.simulator.cost import CostModel
from exeplan.simulator.memory import kv_capacity_tokens
from exeplan.simulator.run import Run
from exeplan.workload.laws import fixed

ENGINES = ("trtllm", "vllm", "sglang")
_TABLES = {"trtllm": "trtllm", "vllm": "vllm", "sglang": "vllm"}
_FEW_REQUESTS = 3
"""Requests of a client: enough for every kind of pass."""


@dataclass(frozen=True, slots=True)
class Setting:
    """An engine with all that is fitted and chosen."""

    constants: EngineConstants
    options: EngineOptions


_START: dict[str, Any] = {
    "layer": 5e-6,
    "row": 15e-6,
    "all_reduce_skew": 3e-6,
    "uncaptured_layer": 0.3e-3,
    "prefill_factor": 1.05,
}


def start_setting(engine: str) -> Setting:
    """Where the fit begins: the same constants for every engine."""
    return Setting(EngineConstants(name=engine, memory_share=0.83, **_START), OPTIONS[engine])


def shipped_setting(engine: str) -> Setting:
    return Setting(load_engine(engine), OPTIONS[engine])


def has_tables(data: Path, row: Row) -> bool:
    """Whether the folder times the row's engine on its machine."""
    return (
        row.engine in _TABLES and row.system in DEVICES and (data / row.system / "gemm" / _TABLES[row.engine]).is_dir()
    )


def predict(data: Path, row: Row, setting: Setting, cost: CostModel | None = None) -> Prediction:
    """Means over all requests of a replay, timed by this cost model or by the engine's tables and constants."""
    return replayed_means(replayed(cost or _cost(data, row, setting.constants), row, setting.options))


@dataclass(frozen=True, slots=True)
class PassCosts:
    """What a replay's means are made of: kinds of passes, and how much each kind's seconds weigh in TPOT and TTFT."""

    kinds: Cycle
    weights: Floats
    """[TPOT and TTFT, kinds]; over all passes of a kind."""

    def prediction(self, data: Path, row: Row, constants: EngineConstants) -> Prediction:
        """With other constants, if the passes stayed the same."""
        tpot, ttft = self.weights @ _cost(data, row, constants).seconds(self.kinds)[0]
        return Prediction(float(ttft), float(tpot))


def pass_costs(data: Path, row: Row, setting: Setting) -> PassCosts:
    """Of a replay of the row; a pass's context is taken for the mean one of its rows."""
    run = replayed(_cost(data, row, setting.constants), row, setting.options, _FEW_REQUESTS)
    sizes = np.stack([run.passes.num_prefill, run.passes.num_decode, run.passes.num_new_tokens], axis=1)
    found, kind = np.unique(sizes, axis=0, return_inverse=True)
    prefill, decode, tokens = found.T.astype(float)
    kinds = Cycle(
        num_prefill=prefill,
        num_decode=decode,
        context_tokens=decode * (row.input_tokens + row.output_tokens / 2),
        prompt_law=fixed(row.input_tokens),
        prompt_tokens=tokens - decode,
        kv_tokens=0.0,
        kv_tokens_std=0.0,
        num_seqs=0.0,
    )
    return PassCosts(kinds, np.stack([np.bincount(kind.ravel(), weight, len(found)) for weight in _weights(row, run)]))


def _weights(row: Row, run: Run) -> tuple[Floats, Floats]:
    """Of each pass: the requests that get a token but the first from it, and those that wait for their first, as shares
    of the mean."""
    starts, ends, arrivals = run.passes.starts, run.passes.ends, run.requests.arrivals
    first, last = (np.searchsorted(ends, times) for times in (run.requests.first_tokens, run.requests.last_tokens))
    came = np.searchsorted(ends, arrivals, side="right")
    generating = np.cumsum(
        np.bincount(first + 1, minlength=len(ends) + 1) - np.bincount(last + 1, minlength=len(ends) + 1)
    )
    waiting = np.cumsum(np.bincount(came, minlength=len(ends) + 1) - np.bincount(first + 1, minlength=len(ends) + 1))
    # A request that arrives during a pass waits for the rest of it only.
    missed = np.maximum(arrivals - starts[came], 0.0) / (ends - starts)[came]
    waited = waiting[:-1] - np.bincount(came, missed, len(ends))
    return generating[:-1] / len(arrivals) / max(row.output_tokens - 1, 1), waited / len(arrivals)


def is_crowded(data: Path, row: Row, setting: Setting, memory_share: float) -> bool:
    """Whether requests would wait for KV blocks if an engine had only this share of the memory."""
    constants = replace(setting.constants, memory_share=memory_share)
    cost = _cost(data, row, constants)
    room = kv_capacity_tokens(cost.profile, cost.placement, MEMORY_UTILIZATION * cost.profile.device.memory_bytes)
    return room < row.concurrency * (row.input_tokens + row.output_tokens)


def _cost(data: Path, row: Row, constants: EngineConstants) -> CostModel:
    return _cost_model(data, row.system, row.model, row.dtype, row.tensor_parallel_size, constants)


@lru_cache(maxsize=64)
def _cost_model(data: Path, system: str, model: str, dtype: str, size: int, constants: EngineConstants) -> CostModel:
    profile = kernels(data, system, constants.name, model, dtype)
    rows = [m for m in profile.measurements if m.tensor_parallel_size == size]
    profile = with_engine(replace(profile, measurements=tuple(rows)), constants)
    return CostModel(profile, (Stage(devices=tuple(range(size)), layers=(0, profile.model.num_layers)),))


@cache
def kernels(data: Path, system: str, engine: str, model: str, dtype: str) -> Profile:
    """The tables of the engine's kernels, imported."""
    folders = [data / system / kind / _TABLES[engine] for kind in ("gemm", "attention", "comm")]
    return import_profile(
        folders,
        spec=load_model_spec(model),
        device=DEVICES[system],
        dtype=dtype,
    )[0]
