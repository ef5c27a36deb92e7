"""The replay-speed benchmark hands its peer the requests and pass times that our own replay has."""

import csv
import os
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from benchmarks.planner import replay_speed
from benchmarks.planner.replay_peer import write_files
from exeplan.core.batch import Batch, Chunk, SequenceState
from exeplan.simulator.cost import CostModel

SLOTS, BUDGET = 16, 64


@pytest.fixture
def cost() -> CostModel:
    return replay_speed.cost_model(1, separate=False)


@pytest.fixture
def folder(tmp_path: Path, cost: CostModel) -> Path:
    inputs, outputs = np.array([100, 20]), np.array([5, 7])
    write_files(tmp_path, cost, slots=SLOTS, budget=BUDGET, inputs=inputs, outputs=outputs)
    return tmp_path


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_trace_has_all_requests_at_time_0(folder: Path) -> None:
    assert rows(folder / "trace.csv") == [
        {"arrived_at": "0", "num_prefill_tokens": "100", "num_decode_tokens": "5"},
        {"arrived_at": "0", "num_prefill_tokens": "20", "num_decode_tokens": "7"},
    ]


def test_the_profiles_add_up_to_the_cost_models_passes(folder: Path, cost: CostModel) -> None:
    """Milliseconds a layer: what a pass costs without caches, and attention to them."""
    rest = {int(row["num_tokens"]): float(row["time_stats.mlp_up_proj.median"]) for row in rows(folder / "mlp.csv")}
    attention = rows(folder / "attention.csv")
    decode = {
        (int(row["batch_size"]), int(row["kv_cache_size"])): float(row["time_stats.attn_decode.median"])
        for row in attention
        if row["prefill_chunk_size"] == "0"
    }
    chunks = {
        (int(row["prefill_chunk_size"]), int(row["kv_cache_size"])): float(row["time_stats.attn_prefill.median"])
        for row in attention
        if row["prefill_chunk_size"] != "0"
    }
    layers = cost.spec.num_layers
    for count, context in product((1, 5, SLOTS), (0, 1024, 16384)):
        row = SequenceState(request_id="", num_prompt_tokens=context, max_output_tokens=2, num_output_tokens=1)
        expected = cost.batch_seconds(Batch(decode=(row,) * count)) * 1e3 / layers
        assert rest[count] + decode[count, context] == pytest.approx(expected)
    for context in (0, 1024, 16384):
        row = SequenceState(request_id="", num_prompt_tokens=context + BUDGET, max_output_tokens=2)
        batch = Batch(prefill=(row,), chunks=(Chunk(context, context + BUDGET, False),))
        expected = cost.batch_seconds(batch) * 1e3 / layers
        assert rest[BUDGET] + chunks[BUDGET, context] == pytest.approx(expected, rel=0.05)


def test_every_size_of_a_pass_is_within_the_profiles(folder: Path) -> None:
    assert max(int(row["num_tokens"]) for row in rows(folder / "mlp.csv")) == BUDGET
    decode = [row for row in rows(folder / "attention.csv") if row["prefill_chunk_size"] == "0"]
    assert max(int(row["batch_size"]) for row in decode) == SLOTS
    assert max(int(row["kv_cache_size"]) for row in decode) == 16_384


def test_a_case_measures_one_replay_in_a_process_of_its_own() -> None:
    found = replay_speed.measured_apart("orca", 1, 300)
    assert found["requests"] == 300
    assert found["simulated seconds"] > 0
    assert 0 < found["peak MiB"] < 1024


@pytest.mark.skipif("VIDUR_PYTHON" not in os.environ, reason="VIDUR_PYTHON names no interpreter that can import vidur")
@pytest.mark.parametrize("stages", [1, 4])
def test_vidur_makes_the_same_passes(stages: int) -> None:
    found = replay_speed.compare(os.environ["VIDUR_PYTHON"], stages, 300, repeats=1)
    assert found["peer's passes"] == pytest.approx(found["passes"], rel=0.02)
    assert found["peer's simulated seconds"] == pytest.approx(found["simulated seconds"], rel=0.1)
