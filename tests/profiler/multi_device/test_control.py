"""Control is timed on real engines over workers, for every arrangement of stages, and no worker remains."""

import multiprocessing

import pytest

from exeplan.core.models.model import model_spec
from exeplan.profiler.multi_device.control import control_rows

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
