"""The server says at its start where requests without max_tokens leave seats of the plan empty."""

import pytest

from exeplan.core.plan import Plan
from exeplan.core.schedule import Schedule, Stage
from exeplan.runner.server.service import few_at_once

from .conftest import ORCA


def told(schedule: Schedule, request_tokens: int) -> str:
    plan = Plan(model="demo", schedule=schedule, placement=(Stage(devices=(0,), layers=(0, 2)),))
    return few_at_once(plan, request_tokens=request_tokens, num_slots=30_000)


@pytest.mark.parametrize("schedule", [Schedule("orca", {"max_num_seqs": 64}), Schedule("static", {"batch_size": 64})])
def test_it_is_said_how_many_run_in_place_of_the_planned(schedule: Schedule) -> None:
    assert " 3 run at a time in place of 64; have clients send max_tokens" in told(schedule, 10_000)
    assert " 1 run at a time in place of 64; have clients send max_tokens" in told(schedule, 30_000)


def test_nothing_is_said_where_all_seats_are_taken_or_nothing_is_reserved() -> None:
    assert not told(Schedule("orca", {"max_num_seqs": 3}), 10_000)
    assert not told(Schedule("rra", {"prefill_batch": 8, "decode_steps": 4}), 30_000)
    assert not told(Schedule("chunked", {"max_num_seqs": 64, "max_num_batched_tokens": 512}), 30_000)


def test_the_log_says_it_when_the_model_is_loaded(launch, tmp_path):
    with launch(ORCA, log=tmp_path / "log"):
        pass
    assert "orca reserves KV cache" in (tmp_path / "log").read_text()
