"""The noise of runs about a smooth surface is found, and a run that is listed twice counts once."""

import csv
from pathlib import Path

import numpy as np
import pytest

from benchmarks.silicon.noise_floor import fitted_surface
from benchmarks.silicon.pooling import rows_of_a_host

GPUS, PROMPTS, CLIENTS = (1, 2, 4, 8), (512, 1024, 2048), (8, 16, 32, 64, 128)
POINTS = np.log([(gpus, prompt, clients) for gpus in GPUS for prompt in PROMPTS for clients in CLIENTS])


@pytest.mark.parametrize("noise", [0.01, 0.08])
def test_noise_about_a_smooth_surface_is_found_and_each_run_is_missed_by_little_more(noise: float) -> None:
    smooth = POINTS @ np.array([-0.8, 0.6, 0.5]) + 0.1 * np.sin(POINTS[:, 2])
    drawn = np.random.default_rng(0).normal(0, noise, len(POINTS))
    found = fitted_surface(POINTS, smooth + drawn)
    assert found.noise == pytest.approx(drawn.std(), rel=0.25)
    assert found.noise < np.sqrt(np.mean(found.left_out_errors**2)) < 2 * found.noise


def test_what_a_steep_point_is_missed_by_has_the_sign_of_the_prediction() -> None:
    smooth = POINTS @ np.array([-0.8, 0.6, 0.5])
    smooth[5] += 0.5
    assert fitted_surface(POINTS, smooth).left_out_errors[5] == pytest.approx(-0.5, abs=0.1)


def test_a_run_under_two_names_is_one_run(tmp_path: Path) -> None:
    line = {
        "id": "2026_03_25_a",
        "backend": "sglang",
        "backend_version": "0.5.9",
        "model_path": "Qwen/Qwen3-32B",
        "system": "h100_sxm",
        "precision": "fp8",
        "mode": "agg",
        "isl": "1024",
        "osl": "1024",
        "batch_size": "4",
        "tp_size": "8",
        "pp_size": "1",
        "silicon_ttft_ms": "264.88012",
        "silicon_tpot_ms": "15.855601",
    }
    copy = line | {"id": "2026_04_06_b", "silicon_ttft_ms": "264.8801", "silicon_tpot_ms": "15.8556"}
    other = line | {"batch_size": "8"}
    with (path := tmp_path / "runs.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, line)
        writer.writeheader()
        writer.writerows([line, copy, other])
    assert [row.concurrency for row in rows_of_a_host(path)] == [4, 8]
