"""The silicon rows predicted in four ways, each deployment left out whole where anything is fitted.

    tables with an engine       the engine's kernel times and constants; the constants fitted without the deployment
    tables                      kernel times alone
    datasheet with an engine    the device's datasheet and `plans/engines`, which were fitted on the tables' residuals
    datasheet                   the datasheet alone

A deployment is an engine, a model, its dtype and a tensor parallel size, in all versions. Without an engine's constants
nothing says how much memory it leaves for keys and values, which a plan sets: rows that wait for it are left out there.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.silicon.engines import DEVICES, is_crowded, kernels, predict, shipped_setting
from benchmarks.silicon.fit import Replays, settings_without
from benchmarks.silicon.rows import Pair, Row
from exeplan.core.models.model import load_model_spec
from exeplan.core.profile import Profile
from exeplan.core.schedule import Stage
from exeplan.errors import InputError
from exeplan.planner.margins.deployments import Deployment, errors_of
from exeplan.profiler.datasheets.datasheet import load_datasheet, profile_from_datasheet
from exeplan.profiler.datasheets.engine_constants import load_engine, with_engine
from exeplan.simulator.cost import CostModel

FITTED = "tables with an engine"
KINDS = (FITTED, "tables", "datasheet with an engine", "datasheet")
_LEAST_MEMORY_SHARE = 0.78


class _Alone:
    """An executor within a process of a pool."""

    def map(self, fn: Callable[..., Any], *iterables: Iterable[Any], chunksize: int = 1) -> Iterator[Any]:
        return map(fn, *iterables)


def deployment_name(row: Row) -> tuple[object, ...]:
    """What is left out together."""
    return row.engine, row.model, row.dtype, row.tensor_parallel_size


def left_out_pairs(data: Path, rows: Sequence[Row], pool: Executor) -> list[Pair]:
    """Every row with constants that were fitted without its deployment."""
    groups = _grouped(rows, deployment_name)
    parts = pool.map(partial(_without, data, rows), groups.values())
    return [pair for part in parts for pair in part]


def _without(data: Path, rows: Sequence[Row], left: Sequence[Row]) -> list[Pair]:
    of_engine = [row for row in rows if row.engine == left[0].engine]
    settings = settings_without(set(left), of_engine, Replays(data, _Alone()))
    return [(row, predict(data, row, settings[row.deployment])) for row in left]


def pairs_of(data: Path, rows: Sequence[Row], kind: str, pool: Executor) -> list[Pair]:
    """The rows of another kind of prediction, without those whose dtype a datasheet does not know."""
    usable = [row for row in rows if _usable(data, row, kind)]
    return list(zip(usable, pool.map(partial(_predicted, data, kind), usable, chunksize=8), strict=True))


def _usable(data: Path, row: Row, kind: str) -> bool:
    if kind.startswith("datasheet") and not _has_sheet(row):
        return False
    waits = is_crowded(data, row, shipped_setting(row.engine), _LEAST_MEMORY_SHARE)
    return kind.endswith("an engine") or not waits


@cache
def _sheet(system: str, model: str, dtype: str) -> Profile:
    return profile_from_datasheet(load_model_spec(model), load_datasheet(DEVICES[system]), dtype=dtype)


def _has_sheet(row: Row) -> bool:
    try:
        _sheet(row.system, row.model, row.dtype)
    except (InputError, KeyError):  # A dtype that the sheet has no peak for.
        return False
    return True


def _predicted(data: Path, kind: str, row: Row) -> Any:
    setting = shipped_setting(row.engine)
    return predict(data, row, setting, _cost(data, kind, row.system, row.engine, row.model, row.dtype, _size(row)))


def _size(row: Row) -> int:
    return row.tensor_parallel_size


@cache
def _cost(data: Path, kind: str, system: str, engine: str, model: str, dtype: str, size: int) -> CostModel:
    sheet = kind.startswith("datasheet")
    profile = _sheet(system, model, dtype) if sheet else kernels(data, system, engine, model, dtype)
    if kind.endswith("an engine"):
        rows = [m for m in profile.measurements if m.tensor_parallel_size == size]
        profile = with_engine(replace(profile, measurements=tuple(rows)), load_engine(engine))
    return CostModel(profile, (Stage(devices=tuple(range(size)), layers=(0, profile.model.num_layers)),))


def deployments_of(pairs: Sequence[Pair], kind: str) -> dict[tuple[object, ...], Deployment]:
    """The errors of each deployment, by its name."""
    found = {}
    for name, group in _grouped(pairs, lambda pair: deployment_name(pair[0])).items():
        row = group[0][0]
        ratios = {
            "latency": [r.e2e / p.e2e(r) for r, p in group],
            "ttft": [r.ttft / p.ttft for r, p in group],
            "tpot": [r.tpot / p.tpot for r, p in group],
        }
        found[name] = Deployment(
            kind=kind,
            engine=row.engine,
            device=DEVICES[row.system],
            model=row.model,
            dtype=row.dtype,
            tensor_parallel_size=row.tensor_parallel_size,
            errors={quantity: errors_of(np.log(values).tolist()) for quantity, values in ratios.items()},
        )
    return found


def _grouped(items: Iterable[Any], key: Callable[[Any], tuple[object, ...]]) -> Mapping[tuple[object, ...], list[Any]]:
    groups: dict[tuple[object, ...], list[Any]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups
