"""With arrivals, the replay gives every token the time that a simulation from the policies' definitions gives it."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.planner.event_simulation import simulate
from exeplan.core.profile import Profile
from exeplan.core.schedule import Schedule, Stage
from exeplan.simulator.cost import CostModel
from exeplan.simulator.replay import replay

from .machine import CLUSTER

LAYERS = 8
SCHEDULES = [
    Schedule("orca", {"max_num_seqs": 6}),
    Schedule("orca", {"max_num_seqs": 7, "micro_batches": 3}),
    Schedule("orca", {"max_num_seqs": 14, "micro_batches": 6}),
    Schedule("chunked", {"max_num_seqs": 6, "max_num_batched_tokens": 40}),
    Schedule("chunked", {"max_num_seqs": 7, "max_num_batched_tokens": 40, "micro_batches": 2}),
    Schedule("rra", {"prefill_batch": 4, "decode_steps": 3}),
    Schedule("rra", {"prefill_batch": 7, "decode_steps": 5, "micro_batches": 4}),
    Schedule("waa-c", {"prefill_batch": 2, "decode_batch": 8}),
    Schedule("waa-c", {"prefill_batch": 3, "decode_batch": 9, "micro_batches": 3}),
]


def machine(profile: Profile, *, apart: bool, stages: int) -> CostModel:
    def line(count: int, first: int, phase: str) -> list[Stage]:
        ends = [LAYERS * i // count for i in range(count + 1)]
        return [Stage(devices=(first + i,), layers=span, phase=phase) for i, span in enumerate(pairwise(ends))]

    before = line(min(stages, 2), 0, "prefill") if apart else []
    behind = line(stages, len(before), "decode" if apart else "")
    spec = replace(profile.model, num_layers=LAYERS)
    return CostModel(replace(profile, model=spec), (*before, *behind), CLUSTER)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("load", [0.3, 0.9, 2.0])
def test_all_tokens_come_at_the_same_time(schedule: Schedule, load: float, profile: Profile) -> None:
    cost = machine(profile, apart=schedule.policy == "waa-c", stages=min(schedule.num_micro_batches, 3))
    rng = np.random.default_rng(7)
    inputs, outputs = rng.integers(1, 60, 150), rng.integers(1, 25, 150)
    backlog = replay(schedule, cost, input_tokens=inputs, output_tokens=outputs, num_blocks=10**5)
    seconds = float(backlog.requests.last_tokens.max())
    arrivals = np.sort(rng.uniform(0, seconds / load, 150))
    run = replay(
        schedule, cost, input_tokens=inputs, output_tokens=outputs, num_blocks=10**5, arrivals=arrivals
    ).requests
    simulated = simulate(schedule, cost, inputs.tolist(), outputs.tolist(), arrivals.tolist())
    for ours, theirs in zip(run, simulated, strict=True):
        assert ours.token_times == pytest.approx(theirs.token_times, rel=1e-5)
