"""Control is timed on real engines over workers, for every arrangement of stages, and no worker remains."""

import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest

from exeplan.core.models.model import model_spec
from exeplan.core.plan import Plan
from exeplan.core.schedule import Schedule
from exeplan.planner.problems.layouts import placed
from exeplan.profiler.multi_device.control import _setup, _watched, control_rows

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 50,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("stages", [[(0, 1)], [(0,), (1,)]], ids=["one stage of two", "two stages"])
def test_rows_are_what_messages_add_to_an_iteration(stages: list[tuple[int, ...]]) -> None:
    rows = control_rows(
        model_spec(CONFIG, name="tiny"),
        stages=stages,
        dtype="float32",
        device="cpu",
        num_threads=1,
        num_seqs=(1, 4),
        seconds=0.1,
    )
    assert [(row.op, row.phase, row.num_seqs) for row in rows] == [("control", "", 1), ("control", "", 4)]
    # 24 tokens are a prefill and 23 decodes, so 22 gaps between two decodes a round, one of which may come too late.
    assert all(row.seconds > 0 and row.repeats >= 21 for row in rows)
    assert not multiprocessing.active_children()


PLAN = Plan(
    model="tiny",
    schedule=Schedule("orca", {"max_num_seqs": 2}),
    placement=(),
    dtype="float32",
    device="cpu",
    num_threads=1,
    kv_cache_tokens=256,
)


def test_the_engine_without_workers_has_a_few_of_the_layers_as_they_have() -> None:
    deep = model_spec({**CONFIG, "num_hidden_layers": 12}, name="deep")
    with _watched(PLAN, deep, [(0,)]) as local:
        assert len(local.engine._executor.runner.model.layers) == 4
        assert local.gaps(2)


def test_no_engine_fills_the_gpu_that_it_shares(tmp_path: Path) -> None:
    spec = model_spec(CONFIG, name="tiny")
    plan = replace(PLAN, device="cuda", placement=placed(spec, [(0, 1)], [3]))
    setup = _setup(plan, spec, tmp_path / "timeline.json")
    assert (setup.gpu_memory_utilization, setup.engine.num_blocks) == (None, 16)
