"""The fit of pooled effects finds how far deployments differ and how noisy a run is, and its law survives its file."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.silicon.pooled_fit import Sample, fitted_law
from benchmarks.silicon.pooling import CONSTANTS, law_text
from benchmarks.silicon.rows import Row
from exeplan.core.correction import THETA
from exeplan.profiler.calibration.law import CalibrationLaw, Observation, read_law
from exeplan.profiler.calibration.pooled_effects import PlacementName

DEPLOYMENT, NOISE = 0.2, 0.05
ROW = Row(
    engine="vllm",
    model="m",
    dtype="fp8",
    system="h100_sxm",
    input_tokens=8,
    output_tokens=8,
    concurrency=8,
    tensor_parallel_size=1,
    ttft=1.0,
    tpot=1.0,
)


def name(number: int) -> PlacementName:
    return PlacementName(
        engine=f"engine {number % 3}",
        device="h100",
        model=f"model {number}",
        dtype="fp8",
        family="f",
        kind="dense",
        tensor_parallel_size=1,
    )


def samples(levels: np.ndarray, rng: np.random.Generator) -> list[Sample]:
    """Eight runs of each deployment, whose logarithms are a level of its own and noise."""
    moves = np.zeros((2, len(THETA)))
    moves[:, 0], moves[0, THETA.index("first")] = 1.0, 1.0
    return [
        Sample(ROW, name(number), Observation(level + rng.normal(0, NOISE, 2), moves))
        for number, level in enumerate(levels)
        for _ in range(8)
    ]


@pytest.fixture(scope="module")
def law() -> CalibrationLaw:
    rng = np.random.default_rng(0)
    return fitted_law(samples(rng.normal(0, DEPLOYMENT, 24), rng), (0.003, 0.012, 0.05), CONSTANTS)


def test_spreads_of_deployments_and_runs_are_found(law: CalibrationLaw) -> None:
    between = sum(law.spread.variances[level][0] for level in ("deployment", "placement"))
    assert np.sqrt(between) == pytest.approx(DEPLOYMENT, rel=0.35)
    assert law.noise[1] == pytest.approx(NOISE, rel=0.25)


def test_an_unseen_deployment_has_the_spread_of_the_seen_ones(law: CalibrationLaw) -> None:
    seen, unseen = (law.correction(name(number)).spreads["tpot"] for number in (0, 99))
    assert seen < unseen
    assert unseen == pytest.approx(DEPLOYMENT, rel=0.35)


def test_a_law_is_read_as_it_was_written(law: CalibrationLaw, tmp_path: Path) -> None:
    (tmp_path / "law.yaml").write_text(law_text(law))
    found = read_law(tmp_path / "law.yaml")
    for number in (0, 1, 99):
        assert found.correction(name(number)).level == pytest.approx(law.correction(name(number)).level, abs=1e-3)
    assert found.without(name(0).deployment).correction(name(0)).own_runs == 0
