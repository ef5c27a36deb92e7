"""Disaggregated runs are those without speculative decoding, each once, on the workers that their load ran on."""

from pathlib import Path

import pytest

from benchmarks.silicon.disaggregated import DecodeRun, predicted_tpot, read_decode_runs
from exeplan.core.schedule import Sharding

COLUMNS = "id,backend,model_path,system,mode,isl,osl,silicon_ttft_ms,silicon_tpot_ms"


def read(tmp_path: Path, *runs: tuple[str, int, int, int, float]) -> tuple[list[DecodeRun], int]:
    """Engine, prompt, answer, clients and TPOT of each."""
    lines = [
        f"2026_r1_{engine}_c{clients}_tp16,{engine},deepseek-ai/DeepSeek-R1,h100_sxm,disagg,{prompt},{answer},500,{tpot}"
        for engine, prompt, answer, clients, tpot in runs
    ]
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([COLUMNS, *lines]))
    return read_decode_runs(path)


def test_of_two_runs_of_a_load_the_slower_one_is_taken(tmp_path: Path) -> None:
    (run,), others = read(tmp_path, *(("trtllm", 1024, 1024, 30, tpot) for tpot in (12.7, 19.9, 19.9)))
    assert (1e3 * run.tpot, others) == (pytest.approx(19.9), 2)
    assert (run.workers, run.sharding) == (3, Sharding(16, 1, 16))


def test_a_load_that_may_have_been_speculative_is_left_out(tmp_path: Path) -> None:
    runs = [("trtllm", 1024, 1024, 30, 12.7), ("sglang", 8192, 1024, 32, 33.3), ("sglang", 8192, 1024, 32, 35.6)]
    assert read(tmp_path, *runs, ("trtllm", 1024, 1024, 117, 18.0)) == ([], 4)


def test_a_load_that_only_ran_without_speculation_needs_no_second_run(tmp_path: Path) -> None:
    (run,), _ = read(tmp_path, ("trtllm", 1024, 1024, 924, 54.5))
    assert run.sharding == Sharding(1, 16, 16)


def test_rows_are_of_the_clients_that_do_not_wait(tmp_path: Path) -> None:
    (run,), _ = read(tmp_path, ("trtllm", 1024, 1024, 1845, 64.0))
    rows, seconds = predicted_tpot(run)
    decoding = 1023 * seconds
    assert abs(rows - 1845 / 3 * decoding / (0.5 + decoding)) < 0.01
