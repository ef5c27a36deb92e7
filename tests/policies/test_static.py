"""Policy static on a pipeline: a batch drains behind its longest output, whichever micro-batch that is in."""

from itertools import product

import numpy as np
import pytest

from exeplan.core.batch import SequenceState
from exeplan.core.profile import Profile
from exeplan.core.schedule import Schedule, Stage
from exeplan.scheduling.scheduler import Scheduler
from exeplan.simulator.closed_form import steady_state
from exeplan.simulator.cost import CostModel
from exeplan.simulator.replay import replay
from exeplan.workload.workload import Workload

from ..simulator.machine import CLUSTER

SHORT, LONG = 2, 9
COIN = Workload.of("coin", inputs=[64, 64], outputs=[SHORT, LONG], weights=[1, 1])
PIPELINE = (Stage(devices=(0,), layers=(0, 3)), Stage(devices=(1,), layers=(3, 6)))
SCHEDULE = Schedule("static", {"batch_size": 2, "micro_batches": 2, "prefill_micro_batches": 2})


def cycle_seconds(cost: CostModel, outputs: tuple[int, ...]) -> float:
    """From the start of a batch with these outputs to that of the next one."""
    lengths = np.array(outputs * 3)
    run = replay(SCHEDULE, cost, input_tokens=np.full(len(lengths), 64), output_tokens=lengths, num_blocks=1000)
    return run.requests[4].start - run.requests[2].start


def test_the_closed_form_is_the_mean_over_all_batches_that_there_are(profile: Profile) -> None:
    """Each of the two is short or long: four batches, all as likely. The closed form takes for granted that the longest
    output is in one micro-batch alone, as in a batch of many lengths; that is 0.8 % here, and the drain 3 %."""
    cost = CostModel(profile, PIPELINE, CLUSTER)
    mean = np.mean([cycle_seconds(cost, outputs) for outputs in product((SHORT, LONG), repeat=2)])
    assert steady_state(SCHEDULE, COIN, cost).throughput == pytest.approx(2 / mean, rel=0.015)


def test_padding_to_an_earlier_part_keeps_to_the_memory_of_a_device() -> None:
    schedule = Schedule("static", {"batch_size": 32, "prefill_micro_batches": 2})
    scheduler = Scheduler(schedule, 10_000, pass_tokens=8192)
    for tokens in 4 * [1000] + 28 * [100]:
        scheduler.add(SequenceState(request_id="", num_prompt_tokens=tokens, max_output_tokens=5))
    parts = [scheduler.next_batch(), scheduler.next_batch()]
    assert [(len(part.prefill), part.pad_to, part.num_new_tokens) for part in parts if part] == [
        (4, 1000, 4000),
        (8, 1000, 8000),
    ]
