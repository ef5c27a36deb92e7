"""Pooled effects are the posterior of a linear model with normal effects: what few runs show is shrunk, and what none
shows stays as uncertain as its level."""

from dataclasses import replace

import numpy as np
import pytest

from exeplan.profiler.calibration.pooled_effects import (
    LEVELS,
    Evidence,
    PlacementName,
    Spread,
    pooled_effects,
    theta_of,
    thetas_of,
)

NAME = PlacementName(
    engine="vllm",
    device="h100",
    model="m",
    dtype="fp8",
    family="qwen3",
    kind="dense",
    tensor_parallel_size=1,
)
SPREAD = Spread(variances={level: np.array([0.01, 0.04]) for level in LEVELS})
NOISE = 0.05**2


def evidence(name: PlacementName, theta: tuple[float, float], num_runs: int) -> Evidence:
    information = np.eye(2) * num_runs / NOISE
    return Evidence(name=name, num_runs=num_runs, information=information, vector=information @ theta)


def names() -> list[PlacementName]:
    return [
        replace(NAME, engine=engine, model=model, family=model, tensor_parallel_size=size)
        for engine in ("vllm", "sglang")
        for model in ("a", "b")
        for size in (1, 2)
    ]


def test_agrees_with_least_squares_of_runs_and_effects_together() -> None:
    found = [evidence(name, (0.02 * i, -0.01 * i), i + 1) for i, name in enumerate(names())]
    effects = pooled_effects(found, SPREAD)
    design = np.zeros((len(found), len(effects.columns)))
    for row, one in zip(design, found, strict=True):
        row[[effects.columns[level, one.name.key(level)] for level in LEVELS]] = 1
    runs = np.array([one.num_runs for one in found])
    for k, variance in enumerate((0.01, 0.04)):
        left = np.vstack([design * np.sqrt(runs / NOISE)[:, None], np.eye(design.shape[1]) / np.sqrt(variance)])
        told = np.array([(0.02 * i, -0.01 * i)[k] for i in range(len(found))])
        right = np.concatenate([told * np.sqrt(runs / NOISE), np.zeros(design.shape[1])])
        assert effects.means[:, k] == pytest.approx(np.linalg.lstsq(left, right)[0], abs=1e-9)


def test_evidence_that_comes_later_says_what_it_says_together_with_the_rest() -> None:
    known = [evidence(name, (0.02 * i, -0.01 * i), i + 1) for i, name in enumerate(names())]
    new = [replace(NAME, model="c", tensor_parallel_size=size) for size in (1, 2)]
    own = [evidence(name, (0.3, -0.2 * i), 2 + i) for i, name in enumerate(new)]
    together, later = pooled_effects([*known, *own], SPREAD), thetas_of(new, known, SPREAD).after(own)
    for number, name in enumerate(new):
        mean, covariance = together.of(name)
        assert later.means[number] == pytest.approx(mean, abs=1e-12)
        assert later.covariances[number, :, number] == pytest.approx(covariance, abs=1e-12)


def test_own_runs_move_a_placement_the_more_of_them_there_are() -> None:
    known = [evidence(name, (0.0, 0.0), 20) for name in names()]
    new = replace(NAME, model="c", family="c")
    moved, spreads = [], []
    for count in (0, 1, 3, 100):
        theta, covariance = theta_of(new, [*known, evidence(new, (0.3, 0.3), count)], SPREAD)
        moved.append(theta[0])
        spreads.append(covariance[0, 0])
    assert moved == sorted(moved)
    assert moved[0] == pytest.approx(0)
    assert moved[-1] == pytest.approx(0.3, rel=0.01)
    assert spreads == sorted(spreads, reverse=True)


def test_what_shares_less_with_the_measured_ones_is_less_sure() -> None:
    known = [evidence(name, (0.2, 0.2), 20) for name in names()]
    same_engine = theta_of(replace(NAME, model="c", family="c"), known, SPREAD)
    stranger = replace(NAME, engine="x", device="x", model="x", dtype="x", family="x", kind="x")
    other = theta_of(stranger, known, SPREAD)
    assert abs(other[0][0]) < abs(same_engine[0][0])
    assert other[1][0, 0] > same_engine[1][0, 0]


def test_an_outlier_says_little_of_the_others() -> None:
    outlier = replace(NAME, model="o")
    known = [evidence(name, (0.0, 0.0), 20) for name in names()] + [evidence(outlier, (1.0, 1.0), 20)]
    weights = {("deployment", outlier.key("deployment")): 0.01}
    new = replace(NAME, model="c", family="c")
    plain, robust = (theta_of(new, known, replace(SPREAD, weights=found))[0] for found in ({}, weights))
    assert 0 < robust[0] < plain[0] / 2
