"""Limits that engines put on the prompts of a pass: how many (chunked), how many tokens while decodes pause (rra)."""

import numpy as np
import pytest

from exeplan.core.batch import Batch, SequenceState
from exeplan.core.runs.metrics import summarize
from exeplan.core.schedule import Schedule
from exeplan.policies import load_policy
from exeplan.scheduling.scheduler import Scheduler
from exeplan.simulator.closed_form import steady_state
from exeplan.simulator.cost import CostModel
from exeplan.simulator.replay import replay
from exeplan.workload.workload import Workload


def batches(schedule: Schedule, lengths: list[tuple[int, int]]) -> list[tuple[str, str]]:
    """The requests that prefill and those that decode in every pass, until all (prompt, output) requests are done."""
    scheduler = Scheduler(schedule, num_blocks=1000)
    for index, (prompt, output) in enumerate(lengths):
        scheduler.add(SequenceState(request_id=str(index), num_prompt_tokens=prompt, max_output_tokens=output))
    found = []
    while (batch := scheduler.next_batch()) is not None:
        found.append(shape(batch))
        for row in (*batch.whole_prefills, *batch.decode):
            row.num_output_tokens += 1
            row.finished = row.num_output_tokens >= row.max_output_tokens
        scheduler.complete(batch)
    return found


def shape(batch: Batch) -> tuple[str, str]:
    return "".join(s.request_id for s in batch.prefill), "".join(s.request_id for s in batch.decode)


def chunked(**limits: int) -> Schedule:
    return Schedule("chunked", {"max_num_seqs": 4, "max_num_batched_tokens": 30, **limits})


def test_a_pass_takes_no_more_prompts_than_its_limit() -> None:
    lengths = [(10, 3)] * 3
    assert batches(chunked(), lengths) == [("012", ""), ("", "012"), ("", "012")]
    one = [("0", ""), ("1", "0"), ("2", "01"), ("", "12"), ("", "2")]
    assert batches(chunked(max_num_prefills=1), lengths) == one
    assert batches(chunked(max_num_prefills=2), lengths) == [("01", ""), ("2", "01"), ("", "012"), ("", "2")]


def test_a_prompt_that_is_cut_counts_in_its_next_pass() -> None:
    assert batches(chunked(max_num_prefills=1), [(40, 1), (5, 1)]) == [("0", ""), ("0", ""), ("1", "")]
    assert batches(chunked(), [(40, 1), (5, 1)]) == [("0", ""), ("01", "")]


def test_decodes_pause_until_all_prompts_are_prefilled_within_the_token_limit() -> None:
    schedule = Schedule("rra", {"prefill_batch": 8, "decode_steps": 1, "max_num_batched_tokens": 20})
    found = batches(schedule, [(10, 2)] * 5)
    assert found == [("01", ""), ("23", ""), ("4", ""), ("", "01234")]


def test_a_prompt_longer_than_a_pass_goes_alone_and_whole() -> None:
    schedule = Schedule("rra", {"prefill_batch": 8, "decode_steps": 1, "max_num_batched_tokens": 20})
    assert batches(schedule, [(50, 2), (5, 2)]) == [("0", ""), ("1", ""), ("", "01")]


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule("chunked", {"max_num_seqs": 24, "max_num_batched_tokens": 400, "max_num_prefills": 1}),
        Schedule("chunked", {"max_num_seqs": 24, "max_num_batched_tokens": 400, "max_num_prefills": 2}),
        Schedule("rra", {"prefill_batch": 8, "decode_steps": 10, "max_num_batched_tokens": 256}),
    ],
    ids=str,
)
def test_the_closed_form_knows_the_limit(schedule: Schedule, cost: CostModel) -> None:
    rng = np.random.default_rng(1)
    outputs, inputs = rng.integers(10, 60, 2000), rng.integers(80, 160, 2000)
    workload = Workload.of("drawn", inputs=inputs, outputs=outputs, weights=np.ones(2000))
    load_policy(schedule.policy).check(schedule)
    steady = steady_state(schedule, workload, cost)
    drawn = workload.sample(2500, seed=3)
    run = replay(schedule, cost, input_tokens=drawn[0], output_tokens=drawn[1], num_blocks=10**6)
    replayed = summarize(run.requests, p99_output=workload.output_quantile(0.99))
    assert steady.throughput == pytest.approx(replayed.throughput, rel=0.01)
    assert replayed.latency is not None
    assert steady.bound_latency("p99-length") == pytest.approx(replayed.latency, rel=0.03)
