"""What an iteration reports is of the batches that ended in it: of several, of one, or of none."""

from types import SimpleNamespace

from exeplan.runner.engine.engine import StepRecord
from exeplan.runner.engine_process.process import _stats


def test_a_batch_is_reported_once_and_all_that_ended_together() -> None:
    counts = {"num_waiting": 1, "num_running": 2, "free_blocks": 3, "num_blocks": 4, "num_preemptions": 5}
    first, second = StepRecord(0.0, 1.0, 2, 1, 9, 6), StepRecord(0.5, 1.0, 0, 3, 3, 8)
    found = [_stats(SimpleNamespace(last_steps=steps, **counts), 3) for steps in ((), (first,), (first, second))]
    assert [(one.iteration_tokens, one.num_prefill, one.num_decode) for one in found] == [
        (0, 0, 0),
        (9, 2, 1),
        (12, 2, 4),
    ]
    assert [one.num_preemptions for one in found] == [2, 2, 2]  # Three of the five were told before.
