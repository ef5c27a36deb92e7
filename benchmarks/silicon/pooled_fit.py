"""Variances of pooled effects, and the noise of single runs, by expectation and maximization.

Each variance is shrunk toward a stated one, with the weight of four effects: three engines and two devices cannot say
how far engines and devices differ. How large the stated ones of shared effects are is the strength of the pooling.
Runs, deployments and placements have Student's law (4 degrees of freedom): one that does not belong, as a run with
other options than it states, moves little of the rest.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.silicon.rows import Row
from exeplan.arrays import Floats
from exeplan.core.correction import THETA, Correction
from exeplan.profiler.calibration.law import (
    FREEDOM,
    CalibrationLaw,
    Observation,
    evidence_of,
    left_squares,
    own_evidence,
    run_weights,
)
from exeplan.profiler.calibration.pooled_effects import LEVELS, Effects, Evidence, PlacementName, Spread, pooled_effects
from exeplan.profiler.datasheets.engine_constants import EngineConstants

Strength = tuple[float, float, float]
STRENGTHS: tuple[Strength, ...] = ((0.003, 0.012, 0.05), (0.003, 0.012, 0.15), (0.003, 0.1, 0.1), (0.03, 0.1, 0.1))
"""Standard deviations of a shared effect that are tried: of level, of sums over GPUs, and of the first token's."""
_DEPLOYMENT, _PLACEMENT = (0.08, 0.32, 0.16), (0.04, 0.16, 0.08)
_PRIOR_COUNT, _ITERATIONS = 4.0, 12
_NOISE = (0.25, 0.06)
_SECONDS = 0.4
"""Added to a first token, for each unit of the logarithm of a factor on it: as of a prompt of 0.4 s."""
_OWN = ("deployment", "placement")


@dataclass(frozen=True, slots=True)
class Sample:
    """A measured run."""

    row: Row
    name: PlacementName
    observation: Observation


def fitted_law(samples: Sequence[Sample], strength: Strength, constants: EngineConstants) -> CalibrationLaw:
    """Of runs, at this strength of pooling."""
    groups: dict[PlacementName, list[int]] = defaultdict(list)
    for number, sample in enumerate(samples):
        groups[sample.name].append(number)
    stated = {level: _stated(*_deviations(level, strength)) ** 2 for level in LEVELS}
    variances, weights = dict(stated), {}
    noise, of_runs = np.array(_NOISE) ** 2, np.ones((len(samples), 2))
    for _ in range(_ITERATIONS):
        evidence = _evidence(samples, groups, of_runs / noise)
        effects = pooled_effects(evidence, Spread(variances=variances, weights=weights))
        variances, weights = _moved(effects, stated, variances)
        squares = _squares(samples, groups, effects)
        of_runs = run_weights(squares, np.sqrt(noise))
        noise = (of_runs * squares).mean(0)
    return CalibrationLaw(
        constants=constants,
        noise=np.sqrt(noise),
        spread=Spread(variances=variances, weights=weights),
        evidence=_evidence(samples, groups, of_runs / noise),
    )


def _deviations(level: str, strength: Strength) -> Strength:
    return {"deployment": _DEPLOYMENT, "placement": _PLACEMENT}.get(level, strength)


def _stated(passes: float, sums: float, first: float) -> Floats:
    """By theta: a slope moves a pass of e^2 times the rows twice as far, and prompts are a part of a pass."""
    return np.array([passes, 0.6 * passes, 2 * passes, sums, first, _SECONDS * first])


def _evidence(
    samples: Sequence[Sample], groups: Mapping[PlacementName, Sequence[int]], precision: Floats
) -> tuple[Evidence, ...]:
    return tuple(
        evidence_of(name, [samples[i].observation for i in numbers], precision[list(numbers)])
        for name, numbers in groups.items()
    )


def _moved(
    effects: Effects, stated: Mapping[str, Floats], variances: Mapping[str, Floats]
) -> tuple[dict[str, Floats], dict[tuple[str, tuple[object, ...]], float]]:
    """Variances by level, and the weights of the effects that are no outliers' by as much."""
    sums, counts = {level: _PRIOR_COUNT * stated[level] for level in LEVELS}, dict.fromkeys(LEVELS, _PRIOR_COUNT)
    weights = {}
    for (level, key), column in effects.columns.items():
        square = effects.means[column] ** 2 + np.diagonal(effects.covariances[column, :, column])
        weight = 1.0
        if level in _OWN:
            weight = (FREEDOM + len(square)) / (FREEDOM + float((square / variances[level]).sum()))
            weights[level, key] = weight
        sums[level] = sums[level] + weight * square
        counts[level] += 1
    return {level: sums[level] / counts[level] for level in LEVELS}, weights


def _squares(samples: Sequence[Sample], groups: Mapping[PlacementName, Sequence[int]], effects: Effects) -> Floats:
    """Of what is left of each run's errors [runs, 2], with the variance of what was taken off."""
    found = np.empty((len(samples), 2))
    for name, numbers in groups.items():
        found[list(numbers)] = left_squares([samples[i].observation for i in numbers], *effects.of(name))
    return found


def with_own(law: CalibrationLaw, own: Sequence[Sample]) -> Correction:
    """Of the deployment of these runs, as `exeplan calibrate` finds it from them."""
    groups: dict[PlacementName, list[Observation]] = defaultdict(list)
    for one in own:
        groups[one.name].append(one.observation)
    return law.correction(own[0].name, own_evidence(law, groups))


def linear_ratios(sample: Sample, correction: Correction) -> tuple[float, float, float]:
    """Predicted over measured TTFT, TPOT and E2E, without another replay."""
    row, found = sample.row, sample.observation
    of_passes = replace(correction, first=0.0, first_seconds=0.0)
    ratios = np.exp(found.sensitivities @ _theta(of_passes) - found.logs)
    ttft, tpot = correction.first_token(ratios[0] * row.ttft), ratios[1] * row.tpot
    return ttft / row.ttft, tpot / row.tpot, (ttft + tpot * (row.output_tokens - 1)) / row.e2e


def _theta(correction: Correction) -> Floats:
    return np.array([getattr(correction, name) for name in THETA])
