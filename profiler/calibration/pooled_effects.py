"""Pooled effects: what measured deployments say of the errors of one that was not measured, or not often.

    placement    one model in one dtype on one device, run by one engine on one number of devices
    theta [K]    logarithms by which a placement's predictions are corrected (`Correction`)
    evidence     all that a placement's runs say of its theta, as long as errors are normal and small:
                 information [K, K] = sum of J' W J and vector [K] = sum of J' W y, over its runs, where y are
                 logarithms of measured / predicted, J what each does when theta moves, and W one over the variance of y

theta is a sum of effects: of all placements, and of the engine, the device, the engine on the device, the dtype, the
model's family, its kind (dense or a mixture of experts), the deployment (without the number of devices) and the
placement. Each effect is normal about 0 with the variance of its level (random effects; Laird and Ware 1982, Biometrics
38), so that all are found by one linear system, in closed form: an effect that few runs show is shrunk toward 0, and
one that none shows keeps its level's whole variance. A placement's own runs are evidence like that of others.

Not here: the variances, which `benchmarks/silicon/pooling.py` estimates (`plans/calibration`), and how a theta changes
a profile (`profiler/calibration`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from exeplan.arrays import Floats

ALL = "all"
LEVELS = (ALL, "engine", "device", "engine_device", "dtype", "family", "kind", "deployment", "placement")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementName:
    """What runs where, as far as effects are shared."""

    engine: str
    device: str
    model: str
    dtype: str
    family: str
    """The model's, such as qwen3."""
    kind: str
    """`dense` or `mixture`."""
    tensor_parallel_size: int

    def key(self, level: str) -> tuple[object, ...]:
        """Two placements share the effect of a level if their keys are equal."""
        keys: dict[str, tuple[object, ...]] = {
            ALL: (),
            "engine_device": (self.engine, self.device),
            "deployment": self.deployment,
            "placement": (*self.deployment, self.tensor_parallel_size),
        }
        return keys[level] if level in keys else (getattr(self, level),)

    @property
    def deployment(self) -> tuple[str, str, str, str]:
        """What is left out together where a prediction is judged."""
        return self.engine, self.device, self.model, self.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Of the runs of one placement."""

    name: PlacementName
    num_runs: int
    information: Floats
    """[K, K]."""
    vector: Floats
    """[K]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How far effects lie about 0."""

    variances: Mapping[str, Floats]
    """[K] by level."""
    weights: Mapping[tuple[str, tuple[object, ...]], float] = field(default_factory=dict)
    """By level and key, where it is not 1: one effect's precision over that of its level. Below 1 for what was an
    outlier, so that it moves little of what others share (a scale mixture: Student's law instead of the normal one)."""

    def precision(self, level: str, key: tuple[object, ...]) -> Floats:
        return self.weights.get((level, key), 1.0) / self.variances[level]


@dataclass(frozen=True, slots=True)
class Effects:
    """All effects together, jointly normal."""

    columns: Mapping[tuple[str, tuple[object, ...]], int]
    """By level and key."""
    means: Floats
    """[effects, K]."""
    covariances: Floats
    """[effects, K, effects, K]."""

    def of(self, name: PlacementName) -> tuple[Floats, Floats]:
        """The mean [K] and the covariance [K, K] of a placement's theta. All its effects must be among the columns."""
        thetas = self.thetas([name])
        return thetas.means[0], thetas.covariances[0, :, 0]

    def thetas(self, names: Sequence[PlacementName]) -> "Thetas":
        """Of several placements, as `of`."""
        design = np.zeros((len(names), len(self.columns)))
        for row, name in zip(design, names, strict=True):
            row[[self.columns[level, name.key(level)] for level in LEVELS]] = 1.0
        covariances = np.einsum("ni,ikjl,mj->nkml", design, self.covariances, design, optimize=True)
        return Thetas(design @ self.means, covariances)


class Thetas(NamedTuple):
    """Of some placements, jointly normal."""

    means: Floats
    """[placements, K]."""
    covariances: Floats
    """[placements, K, placements, K]."""

    def after(self, found: Sequence[Evidence]) -> "Thetas":
        """With more evidence, a piece for each placement: what `pooled_effects` of all evidence together says."""
        size, before = self.means.size, self.means.ravel()
        told = np.zeros(self.covariances.shape)
        for number, one in enumerate(found):
            told[number, :, number] = one.information
        information, known = told.reshape(size, size), self.covariances.reshape(size, size)
        covariance = np.asarray(np.linalg.solve(np.eye(size) + known @ information, known), dtype=float)
        vector = np.concatenate([one.vector for one in found])
        means = before + covariance @ (vector - information @ before)
        return Thetas(means.reshape(self.means.shape), covariance.reshape(self.covariances.shape))


def pooled_effects(found: Sequence[Evidence], spread: Spread) -> Effects:
    """The effects that evidence shows, at least one piece of it."""
    columns: dict[tuple[str, tuple[object, ...]], int] = {}
    chosen = [[columns.setdefault((lv, one.name.key(lv)), len(columns)) for lv in LEVELS] for one in found]
    design = np.zeros((len(found), len(columns)))
    for row, of_row in zip(design, chosen, strict=True):
        row[of_row] = 1.0
    information, vector = np.stack([one.information for one in found]), np.stack([one.vector for one in found])
    size = information.shape[-1]
    precision = np.einsum("ei,ej,ekl->ikjl", design, design, information, optimize=True)
    precision = precision.reshape(len(columns) * size, -1)
    precision += np.diag(np.concatenate([spread.precision(*column) for column in columns]))
    covariance = np.linalg.inv(precision)
    means = covariance @ (design.T @ vector).ravel()
    return Effects(columns, means.reshape(-1, size), covariance.reshape(len(columns), size, len(columns), size))


def theta_of(name: PlacementName, found: Sequence[Evidence], spread: Spread) -> tuple[Floats, Floats]:
    """The mean [K] and covariance [K, K] of a placement's theta, whether or not some of the evidence is of it."""
    thetas = thetas_of([name], found, spread)
    return thetas.means[0], thetas.covariances[0, :, 0]


def thetas_of(names: Sequence[PlacementName], found: Sequence[Evidence], spread: Spread) -> Thetas:
    """As `theta_of`, of several placements."""
    size = len(spread.variances[ALL])
    nothing = [Evidence(name=n, num_runs=0, information=np.zeros((size, size)), vector=np.zeros(size)) for n in names]
    return pooled_effects([*found, *nothing], spread).thetas(names)
