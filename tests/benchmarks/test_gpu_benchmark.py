"""`python -m benchmarks.gpu` runs end to end without a GPU, at toy sizes, and does not record that as a measurement."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "benchmarks.gpu", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)


def test_every_section_runs_and_none_is_saved_as_a_measurement(tmp_path: Path) -> None:
    records = {path: path.stat().st_mtime_ns for path in (ROOT / "benchmarks" / "records").iterdir()}
    answer = run("--smoke", "--output", str(tmp_path / "smoke.json"), "--profiles", str(tmp_path / "profiles"))
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert answer.stdout.startswith("SMOKE: toy sizes on a CPU with stand-ins; none of these figures measures anything")
    assert {path: path.stat().st_mtime_ns for path in (ROOT / "benchmarks" / "records").iterdir()} == records
    record = json.loads((tmp_path / "smoke.json").read_text())
    assert record["smoke"] is True
    for section in ("kernels", "model", "peers", "profiles", "policies"):
        assert record[section]["failures"] == []
        assert record[section]["rows"], section
    assert [path.name for path in (tmp_path / "profiles").iterdir()] == ["toy-smoke.json"]


def test_without_a_gpu_it_measures_nothing() -> None:
    answer = run()
    assert answer.returncode == 2
    assert (
        answer.stdout
        == "benchmarks.gpu: no CUDA GPU here, so there is nothing to measure; --smoke only tries whether it runs\n"
    )
