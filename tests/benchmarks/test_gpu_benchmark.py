"""`python -m benchmarks.gpu` runs end to end without a GPU, at toy sizes, and does not record that as a measurement."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

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


VLLM = """
from types import SimpleNamespace

class SamplingParams(SimpleNamespace):
    pass

class LLM:
    def __init__(self, *, model, load_format, max_num_seqs, enable_prefix_caching, **options):
        assert open(model + "/config.json").read() and load_format == "dummy" and not enable_prefix_caching
        self.slots = max_num_seqs

    def generate(self, prompts, wanted, use_tqdm):
        assert len(prompts) == len(wanted) == self.slots and all(one["prompt_token_ids"] for one in prompts)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * (one.max_tokens - FEWER))]) for one in wanted]
"""


@pytest.mark.parametrize("fewer", [0, 1], ids=["all tokens", "a token too few"])
def test_vllm_gets_the_same_requests_and_must_give_every_token(fewer, tmp_path, monkeypatch) -> None:
    """By a module with its interface in place of vLLM, which needs a GPU."""
    from benchmarks.gpu.peers import _vllm  # Not above: the kernels' tests say how kernels are imported first.
    from benchmarks.gpu.setting import setting_for

    (tmp_path / "vllm.py").write_text(VLLM.replace("FEWER", str(fewer)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run_it = partial(_vllm, setting_for(smoke=True), sys.executable, 60.0)
    if fewer:
        with pytest.raises(RuntimeError, match="every token that was asked for must be given"):
            run_it()
    else:
        assert 0 <= run_it() < 60.0
