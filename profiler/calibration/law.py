"""CalibrationLaw: what measured serving runs say of an engine's runs that are predicted from a datasheet.

`plans/calibration/serving.yaml` holds the constants of an engine before any correction, the spread of a single run, the
variances of the effects by level, and for each measured placement the number of its runs and their evidence
(`exeplan/profiler/calibration/pooled_effects.py`). Written by `benchmarks/silicon/pooling.py`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from exeplan.arrays import Floats
from exeplan.core.correction import THETA, Correction
from exeplan.core.models.model import ModelSpec, shipped_twin
from exeplan.core.profile import Profile
from exeplan.files import read_yaml, shipped
from exeplan.profiler.calibration.pooled_effects import (
    LEVELS,
    Evidence,
    PlacementName,
    Spread,
    theta_of,
    thetas_of,
)
from exeplan.profiler.calibration.predict import predicted_by_passes, with_theta
from exeplan.profiler.calibration.serving_run import ServingRun
from exeplan.profiler.datasheets.engine_constants import EngineConstants, engine_of

QUANTITIES = ("ttft", "tpot")
_SHARED = ("engine", "device", "family", "kind", "dtype")
_STEPS = {"slope": 0.1, "prefill": 0.2, "links": -0.4}
"""Of the differences by which a run's sensitivities are found."""
_OF_FIRST = ("first", "first_seconds")
_ANY_SIZE = 0
FREEDOM = 4.0
"""Of Student's law, of the errors of runs, deployments and placements."""
_ROUNDS = 8
_PROMPTS, _SUMS, _FIRST = 0.15, 0.1, 0.1
"""Shares of a request's time: prompts in its passes, sums over GPUs, before its first token; where a spread is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationLaw:
    """`spread` is of effects, `noise` [2] the standard deviation of a single run's TTFT and TPOT."""

    constants: EngineConstants
    noise: Floats
    spread: Spread
    evidence: tuple[Evidence, ...]
    reach: float = 1.0
    """Factor on the spread of a new error of a latency."""

    @property
    def engines(self) -> set[str]:
        return {one.name.engine for one in self.evidence}

    def without(self, deployment: tuple[str, str, str, str]) -> "CalibrationLaw":
        """As if none of its runs had been measured, at unchanged variances."""
        return replace(self, evidence=tuple(one for one in self.evidence if one.name.deployment != deployment))

    def correction(self, name: PlacementName, own: Sequence[Evidence] = ()) -> Correction:
        """Of a placement's deployment on any number of devices, from all evidence and that of its own runs; where those
        are of one number of devices, of that."""
        found = [*self.evidence, *own]
        sizes = {one.name.tensor_parallel_size for one in own}
        here = replace(name, tensor_parallel_size=sizes.pop() if len(sizes) == 1 else _ANY_SIZE)
        theta, covariance = theta_of(here, found, self.spread)
        own_runs = sum(one.num_runs for one in found if one.name.deployment == name.deployment)
        others = [one for one in found if one.name.deployment != name.deployment]
        spreads = _spreads(covariance, self.noise)
        spreads["latency"] *= self.reach
        return Correction(
            **{key: round(float(value), 5) for key, value in zip(THETA, theta, strict=True)},
            own_runs=own_runs,
            other_runs=sum(one.num_runs for one in others),
            deployments=len({one.name.deployment for one in found}),
            shared=tuple(level for level in _SHARED if any(o.name.key(level) == name.key(level) for o in others)),
            spreads={name: round(value, 5) for name, value in spreads.items()},
        )


def _spreads(covariance: Floats, noise: Floats) -> dict[str, float]:
    """Of a new run of 16 times e rows; of the seconds that are added to the first token apart, in seconds."""
    moves = {"ttft": np.array([1.0, 0.0, 1.0, 0.0, 1.0, 0.0]), "tpot": np.array([1.0, 1.0, _PROMPTS, _SUMS, 0.0, 0.0])}
    moves["latency"] = _FIRST * moves["ttft"] + (1 - _FIRST) * moves["tpot"]
    runs = {"ttft": noise[0], "tpot": noise[1], "latency": math.hypot(_FIRST * noise[0], (1 - _FIRST) * noise[1])}
    spreads = {name: math.sqrt(float(move @ covariance @ move) + runs[name] ** 2) for name, move in moves.items()}
    seconds = THETA.index("first_seconds")
    return {**spreads, "first_seconds": math.sqrt(covariance[seconds, seconds])}


def placement_name(
    spec: ModelSpec, *, engine: str, device: str, dtype: str, tensor_parallel_size: int
) -> PlacementName:
    """With the family that a model's type begins with, such as qwen3; a model of a shipped one's sizes is that one."""
    return PlacementName(
        engine=engine,
        device=device,
        model=shipped_twin(spec),
        dtype=dtype,
        family=spec.family.split("_")[0],
        kind="mixture" if spec.experts else "dense",
        tensor_parallel_size=tensor_parallel_size,
    )


@dataclass(frozen=True, slots=True)
class Observation:
    """A run's logarithms of measured / predicted [2], and what each does when theta moves [2, K]."""

    logs: Floats
    sensitivities: Floats


def observation(profile: Profile, run: ServingRun, at: Correction | None = None) -> Observation:
    """Of a run and the profile that is to be corrected, without any correction that it has; linear near `at`."""
    theta = np.array([getattr(at, name) if at and name not in _OF_FIRST else 0.0 for name in THETA])
    base = with_theta(profile, tuple(theta.tolist())) if at else replace(profile, correction=None)
    found = predicted_by_passes(base, run)
    columns = {"level": (1.0, 1.0), "first": (1.0, 0.0)}
    # Exact where nothing else is off: the logarithmic mean, between the measured time and the predicted one.
    columns["first_seconds"] = (1 / _logarithmic_mean(run.ttft, found.ttft), 0.0)
    steps = {name: step for name, step in _STEPS.items() if name != "links" or run.tensor_parallel_size > 1}
    columns["links"] = (0.0, 0.0)
    for name, step in steps.items():
        there = theta + [step if key == name else 0.0 for key in THETA]
        moved = predicted_by_passes(with_theta(base, tuple(there.tolist())), run)
        columns[name] = math.log(moved.ttft / found.ttft) / step, math.log(moved.tpot / found.tpot) / step
    sensitivities = np.array([columns[name] for name in THETA]).T
    logs = np.log([run.ttft / found.ttft, run.tpot / found.tpot]) + sensitivities @ theta
    return Observation(logs, sensitivities)


def _logarithmic_mean(one: float, other: float) -> float:
    return one if math.isclose(one, other, rel_tol=1e-6) else (one - other) / math.log(one / other)


def evidence_of(name: PlacementName, found: Sequence[Observation], precision: Floats) -> Evidence:
    """Of at least one run of a placement; `precision` [runs, 2]: one over the variances of TTFT and TPOT."""
    logs, moves = np.stack([one.logs for one in found]), np.stack([one.sensitivities for one in found])
    return Evidence(
        name=name,
        num_runs=len(found),
        information=np.einsum("nqk,nq,nql->kl", moves, precision, moves),
        vector=np.einsum("nqk,nq,nq->k", moves, precision, logs),
    )


def own_evidence(law: CalibrationLaw, runs: Mapping[PlacementName, Sequence[Observation]]) -> tuple[Evidence, ...]:
    """Of a deployment's own runs. Their errors have Student's law, as those of the law's runs had: of a run that lies
    far off what the others and the law say, as one that waits for memory that was predicted to be free, little is
    learned."""
    before = thetas_of(list(runs), law.evidence, law.spread)  # The law's evidence stays as it is, the rounds long.
    weights = [np.ones((len(found), len(QUANTITIES))) for found in runs.values()]
    for _ in range(_ROUNDS):
        own = tuple(
            evidence_of(name, found, weight / law.noise**2)
            for (name, found), weight in zip(runs.items(), weights, strict=True)
        )
        thetas = before.after(own)
        weights = [
            run_weights(left_squares(found, thetas.means[n], thetas.covariances[n, :, n]), law.noise)
            for n, found in enumerate(runs.values())
        ]
    return own


def left_squares(found: Sequence[Observation], theta: Floats, covariance: Floats) -> Floats:
    """Of what is left of each run's errors [runs, 2], with the variance of what was taken off."""
    logs, moves = np.stack([one.logs for one in found]), np.stack([one.sensitivities for one in found])
    taken: Floats = np.einsum("nqk,kl,nql->nq", moves, covariance, moves)
    return (logs - moves @ theta) ** 2 + taken


def run_weights(squares: Floats, noise: Floats) -> Floats:
    """Of runs whose errors have Student's law: below 1 for outliers."""
    return (FREEDOM + 1) / (FREEDOM + squares / noise**2)


# --- files ------------------------------------------------------------------------------------------------------------


@cache
def shipped_law() -> CalibrationLaw:
    """That of `plans/calibration`."""
    return read_law(shipped("calibration", "serving"))


def read_law(path: Path) -> CalibrationLaw:
    """The law of a YAML file, as `law_lines` writes it."""
    body = read_yaml(path)
    weights = {}
    for row in body["placements"]:
        name = _name(row)
        for level, weight in zip(("deployment", "placement"), row["weights"], strict=True):
            weights[level, name.key(level)] = float(weight)
    return CalibrationLaw(
        constants=engine_of(body["constants"], path),
        noise=np.array([body["noise"][quantity] for quantity in QUANTITIES]),
        spread=Spread(variances={level: np.array(body["deviations"][level]) ** 2 for level in LEVELS}, weights=weights),
        evidence=tuple(map(_evidence, body["placements"])),
        reach=float(body["reach"]),
    )


def _name(row: Mapping[str, Any]) -> PlacementName:
    return PlacementName(**{name: row[name] for name in PlacementName.__dataclass_fields__})


def _evidence(row: Mapping[str, Any]) -> Evidence:
    size = len(THETA)
    upper = np.zeros((size, size))
    upper[np.triu_indices(size)] = row["information"]
    information = upper + np.triu(upper, 1).T
    return Evidence(name=_name(row), num_runs=row["runs"], information=information, vector=np.array(row["vector"]))
