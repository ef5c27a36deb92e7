"""An engine's scheduling options and constants from one half of the measured rows.

Options first, one variable after the other at approximate constants: the value of the least mean error.
Then the constants by least squares (soft L1) of the logarithms of TPOT and E2E (TTFT chooses options only), while the
passes stay those of a replay; then once more on the passes of a replay with these constants.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.silicon.engines import PassCosts, Setting, is_crowded, pass_costs, predict, start_setting
from benchmarks.silicon.rows import Pair, Row
from exeplan.profiler.datasheets.engine_constants import EngineConstants

_OPTIONS = {"max_num_prefills": (1, 2, None), "think_seconds": (0.002, 0.01, 0.025)}
_MEMORY_SHARES = tuple(np.arange(0.78, 0.87, 0.01).round(2).tolist())
_RESERVED = (0.0, 0.5, 1.0)
_IDLE_SLOTS = (0, 1)
_MOST_ROWS = 24
"""Rows of an engine and half by which its options are chosen."""
_LEAST = {"layer": -25e-6, "row": 0.1e-6, "all_reduce_skew": 0.0, "uncaptured_layer": 50e-6, "prefill_factor": 0.9}
"""The constants that are fitted."""
_SCALES = (20e-6, 10e-6, 3e-6, 0.3e-3, 0.1)
_STEP, _OUTLIER, _MOST_STEPS = 0.05, 0.03, 12
_FAR = 0.5
"""Logarithm of an error beyond which a row is an outlier in a choice."""

Settings = Mapping[tuple[str, ...], Setting]
"""By deployment."""


class Pool(Protocol):
    """What is used of the executors of `concurrent.futures`."""

    def map(self, fn: Callable[..., Any], *iterables: Iterable[Any], chunksize: int = 1) -> Iterator[Any]:
        """The results in order."""


@dataclass(frozen=True, slots=True)
class Replays:
    """Predictions of rows, several at a time."""

    data: Path
    pool: Pool

    def pairs(self, rows: Sequence[Row], settings: Settings) -> list[Pair]:
        of_rows = [settings[row.deployment] for row in rows]
        return list(zip(rows, self.pool.map(partial(predict, self.data), rows, of_rows, chunksize=4), strict=True))

    def pass_costs(self, rows: Sequence[Row], settings: Settings) -> list[PassCosts]:
        of_rows = [settings[row.deployment] for row in rows]
        return list(self.pool.map(partial(pass_costs, self.data), rows, of_rows, chunksize=4))


def fitted_settings(data: Path, rows: Sequence[Row], pool: Pool) -> dict[int, dict[tuple[str, ...], Setting]]:
    """By half and deployment, each from the rows of that half alone.

    A deployment that only the other half has takes its engine's, with no idle slots.
    """
    settings: dict[int, dict[tuple[str, ...], Setting]] = {0: {}, 1: {}}
    for half, found in settings.items():
        for engine in sorted({row.engine for row in rows}):
            of_engine = [row for row in rows if row.engine == engine]
            own = [row for row in of_engine if row.half == half]
            found |= _fitted(own, {row.deployment for row in of_engine}, Replays(data, pool))
    return settings


def settings_without(left: Collection[Row], rows: Sequence[Row], replays: Replays) -> Settings:
    """Of the engine that ran all these rows, from those that are not left out; where it started, if there are none."""
    fitted_on = [row for row in rows if row not in left]
    deployments = {row.deployment for row in rows}
    if not fitted_on:
        return dict.fromkeys(deployments, start_setting(rows[0].engine))
    return _fitted(fitted_on, deployments, replays)


def _fitted(rows: Sequence[Row], deployments: Collection[tuple[str, ...]], replays: Replays) -> Settings:
    """Constants with the engine's known options, then its options, then the constants again."""
    settings = _with_constants(dict.fromkeys(deployments, start_setting(rows[0].engine)), rows, replays)
    return _with_constants(_with_conduct(settings, rows, replays), rows, replays)


def _with_conduct(settings: Settings, rows: Sequence[Row], replays: Replays) -> Settings:
    some, everywhere = _some(rows), set(settings)
    for name, values in _OPTIONS.items():
        if any(getattr(setting.options, name) is not None for setting in settings.values()):
            settings = _best(settings, everywhere, partial(_conducted, name), values, some, replays)
    for deployment in sorted({row.deployment for row in rows}):
        own = _some([row for row in rows if row.deployment == deployment])
        settings = _best(settings, {deployment}, partial(_conducted, "idle_slots"), _IDLE_SLOTS, own, replays)
    crowded = [row for row in rows if is_crowded(replays.data, row, settings[row.deployment], min(_MEMORY_SHARES))]
    if crowded:
        settings = _best(settings, everywhere, partial(_conducted, "reserved"), _RESERVED, crowded, replays)
        settings = _best(settings, everywhere, _with_memory, _MEMORY_SHARES, crowded, replays)
    return settings


def _some(rows: Sequence[Row]) -> Sequence[Row]:
    return rows[:: -(-len(rows) // _MOST_ROWS)]


def _conducted(name: str, value: Any, setting: Setting) -> Setting:
    return replace(setting, options=replace(setting.options, **{name: value}))


def _with_memory(share: float, setting: Setting) -> Setting:
    return replace(setting, constants=replace(setting.constants, memory_share=share))


def _best(
    settings: Settings,
    deployments: set[tuple[str, ...]],
    changed: Callable[[Any, Setting], Setting],
    values: Sequence[Any],
    rows: Sequence[Row],
    replays: Replays,
) -> dict[tuple[str, ...], Setting]:
    """The settings with the value for these deployments that errs least on the rows."""
    trials = [{d: changed(v, s) if d in deployments else s for d, s in settings.items()} for v in values]
    return min(trials, key=lambda trial: _error(replays.pairs(rows, trial)))


def _error(pairs: Sequence[Pair]) -> float:
    """The mean size of the logarithms of predicted over measured TTFT, TPOT and E2E, but for outliers."""
    logs = [np.log([p.ttft / r.ttft, p.tpot / r.tpot, p.e2e(r) / r.e2e]) for r, p in pairs]
    return float(np.minimum(np.abs(logs), _FAR).mean())


def _with_constants(settings: Settings, rows: Sequence[Row], replays: Replays) -> Settings:
    costs = replays.pass_costs(rows, settings)
    found = _fitted_constants(next(iter(settings.values())).constants, rows, costs, replays.data)
    return {d: replace(s, constants=found) for d, s in settings.items()}


def _fitted_constants(
    start: EngineConstants, rows: Sequence[Row], costs: Sequence[PassCosts], data: Path
) -> EngineConstants:
    from scipy.optimize import least_squares

    def changed(point: np.ndarray) -> EngineConstants:
        values = {name: least + x * s for (name, least), x, s in zip(_LEAST.items(), point, _SCALES, strict=True)}
        return replace(start, **values)

    def logs(point: np.ndarray) -> np.ndarray:
        constants = changed(point)
        found = [passes.prediction(data, row, constants) for row, passes in zip(rows, costs, strict=True)]
        return np.log([(p.tpot / r.tpot, p.e2e(r) / r.e2e) for r, p in zip(rows, found, strict=True)]).ravel()

    first = [(getattr(start, name) - least) / s for (name, least), s in zip(_LEAST.items(), _SCALES, strict=True)]
    found = least_squares(
        logs, first, bounds=(0, np.inf), loss="soft_l1", f_scale=_OUTLIER, diff_step=_STEP, max_nfev=_MOST_STEPS
    )
    return changed(found.x)
