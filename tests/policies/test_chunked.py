"""Chunked prefill puts no more tokens into a pass than it may, decodes first; the closed form predicts the result."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exeplan.core.batch import Batch, SequenceState
from exeplan.core.runs.metrics import summarize, window
from exeplan.core.schedule import Schedule
from exeplan.errors import InputError
from exeplan.policies import chunked
from exeplan.policies.shared.chunk_passes import chunk_passes
from exeplan.policies.shared.whole_passes import whole_passes
from exeplan.scheduling.scheduler import Scheduler
from exeplan.simulator.closed_form import steady_state
from exeplan.simulator.cost import CostModel
from exeplan.simulator.replay import replay
from exeplan.workload.workload import Workload


def made(max_num_seqs: int, max_num_batched_tokens: int, micro_batches: int = 1) -> Schedule:
    values = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    return Schedule("chunked", {**values, "micro_batches": micro_batches})


def passes(schedule: Schedule, lengths: list[tuple[int, int]], num_blocks: int = 1000) -> list[Batch]:
    """Every pass until all (prompt, output) requests are done."""
    scheduler = Scheduler(schedule, num_blocks)
    for index, (prompt, output) in enumerate(lengths):
        scheduler.add(SequenceState(request_id=str(index), num_prompt_tokens=prompt, max_output_tokens=output))
    found = []
    while (batch := scheduler.next_batch()) is not None:
        found.append(batch)
        for row in (*batch.whole_prefills, *batch.decode):
            row.num_output_tokens += 1
            row.finished = row.num_output_tokens >= row.max_output_tokens
        scheduler.complete(batch)
    assert scheduler.free_blocks == num_blocks
    return found


def summary(batch: Batch) -> tuple[list[tuple[str, int, int]], str]:
    """What is prefilled as (request, from, to), and the requests that decode."""
    chunks = zip(batch.prefill, batch.chunks, strict=True)
    return [(row.request_id, c.start, c.end) for row, c in chunks], "".join(row.request_id for row in batch.decode)


def workload_of(inputs: np.ndarray, outputs: np.ndarray) -> Workload:
    return Workload.of("drawn", inputs=inputs, outputs=outputs, weights=np.ones(len(inputs)))


def lognormal(rng: np.random.Generator, mean: float, sigma: float, longest: int) -> np.ndarray:
    drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, 2000)
    return np.clip(np.rint(drawn), 1, longest).astype(int)


def test_a_prompt_goes_on_where_the_pass_before_cut_it() -> None:
    found = passes(made(2, 4), [(6, 2), (3, 2)])
    assert [summary(batch) for batch in found] == [
        ([("0", 0, 4)], ""),
        ([("0", 4, 6), ("1", 0, 2)], ""),
        ([("1", 2, 3)], "0"),
        ([], "1"),
    ]


def test_decodes_come_first_and_prompts_take_the_rest() -> None:
    found = passes(made(3, 5), [(3, 9), (2, 9), (10, 1)])
    assert summary(found[1]) == ([("2", 0, 3)], "01")
    assert [batch.num_new_tokens for batch in found[:4]] == [5, 5, 5, 5]


def test_a_slot_is_taken_with_the_first_token_of_a_prompt() -> None:
    scheduler = Scheduler(made(8, 16), num_blocks=100)
    for index in range(3):
        scheduler.add(SequenceState(request_id=str(index), num_prompt_tokens=40, max_output_tokens=2))
    scheduler.next_batch()
    assert [row.request_id for row in scheduler.running] == ["0"]
    assert scheduler.free_blocks == 100 - 3  # The whole prompt of 40 tokens.


def test_a_preempted_prompt_starts_again() -> None:
    # The first grows into the blocks that the second, cut after 15 of its 40 tokens, holds.
    found = passes(made(2, 16), [(15, 30), (40, 2)], num_blocks=4)
    starts = [chunk.start for batch in found for row, chunk in zip(batch.prefill, batch.chunks, strict=True)
              if row.request_id == "1"]  # fmt: skip
    assert starts.count(0) > 1
    computed = [chunk.end - chunk.start for batch in found for chunk in batch.chunks]
    assert sum(computed) > 15 + 40


def test_more_rows_than_tokens_a_pass_are_refused() -> None:
    chunked.check(made(16, 8, micro_batches=2))
    with pytest.raises(InputError, match=r"9 requests decode in one pass, .*=8 limits to 8 tokens; .* serve is 16"):
        chunked.check(made(17, 8, micro_batches=2))


def test_a_point_of_the_search_has_no_more_slots_than_tokens() -> None:
    workload = workload_of(np.array([10]), np.array([1000]))
    point = {"max_num_seqs": 500, "max_num_batched_tokens": 64, "micro_batches": 2}
    assert chunked.schedule(point, workload).variables == {**point, "max_num_seqs": 128}


@pytest.mark.parametrize("budget", [128, 300, 2048])
def test_slots_that_full_passes_leave_empty_are_not_searched(budget: int) -> None:
    rng = np.random.default_rng(1)
    workload = workload_of(lognormal(rng, 150, 0.6, 900), lognormal(rng, 12, 0.5, 60))
    point = {"max_num_seqs": budget, "max_num_batched_tokens": budget}
    slots, steps = chunked.schedule(point, workload)["max_num_seqs"], workload.mean_output + 1
    assert slots < budget / 2
    for passes_of in (chunk_passes, whole_passes):
        few, many = (passes_of(workload.input_law, steps, count, budget) for count in (float(slots), float(budget)))
        assert few.completed == pytest.approx(many.completed, rel=1e-3)


@given(data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_no_pass_is_fuller_than_it_may_be_and_every_token_is_computed(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=20))
    budget = data.draw(st.integers(1, 40))
    least = max(-(-(i + o) // 16) for i, o in lengths)
    num_blocks = data.draw(st.integers(least, least + 10))
    found = passes(made(data.draw(st.integers(1, budget)), budget), lengths, num_blocks=num_blocks)
    assert max(batch.num_new_tokens for batch in found) <= budget
    produced = dict.fromkeys(range(len(lengths)), 0)
    for batch in found:
        for row in (*batch.whole_prefills, *batch.decode):
            produced[int(row.request_id)] += 1
    assert produced == {index: output for index, (_, output) in enumerate(lengths)}


def test_without_a_tight_budget_it_is_orca(cost: CostModel) -> None:
    rng = np.random.default_rng(3)
    workload = workload_of(lognormal(rng, 60, 0.5, 300), lognormal(rng, 30, 0.6, 200))
    inputs, outputs = workload.sample(300, seed=1)
    runs = [
        replay(schedule, cost, input_tokens=inputs, output_tokens=outputs, num_blocks=10_000)
        for schedule in (made(6, 16384), Schedule("orca", {"max_num_seqs": 6}))
    ]
    assert runs[0].requests == runs[1].requests
    chunks = steady_state(made(6, 16384), workload, cost)
    whole = steady_state(Schedule("orca", {"max_num_seqs": 6}), workload, cost)
    assert chunks.throughput == pytest.approx(whole.throughput, rel=0.01)
    assert chunks.bound_latency("p99-length") == pytest.approx(whole.bound_latency("p99-length"), rel=0.01)


def test_one_slot_needs_a_pass_for_every_budget_of_its_prompt() -> None:
    law = workload_of(np.array([100, 250]), np.array([7, 7])).input_law
    # Prompts of 2 and 4 passes, the last of which yields the first of 7 tokens.
    assert chunk_passes(law, 7.0, 1.0, 64.0).completed == pytest.approx(1 / (3 + 6), rel=0.02)


def test_with_slots_to_spare_every_pass_is_full() -> None:
    law = workload_of(np.array([100, 300]), np.array([50, 50])).input_law
    found = chunk_passes(law, 50.0, 200.0, 256.0)
    assert found.completed == pytest.approx(256 / (200 + 49), rel=5e-3)
    assert found.probability[-1] == pytest.approx(1.0, abs=1e-3)


@given(slots=st.integers(1, 60), budget=st.integers(16, 400), mean=st.floats(1, 500), output=st.floats(1, 90))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_no_token_is_lost_between_passes(slots: int, budget: int, mean: float, output: float) -> None:
    rng = np.random.default_rng(0)
    law = workload_of(lognormal(rng, mean, 0.8, 2000), np.ones(2000)).input_law
    found = chunk_passes(law, output, float(min(slots, budget)), float(budget))
    assert found.probability @ found.prompt_tokens == pytest.approx(found.completed * law.mean, rel=0.01)
    assert (found.rows + found.prompt_tokens <= budget + 1e-6).all()
    assert found.completed <= min(slots / output, budget / (law.mean + output - 1)) * 1.005


def completed_a_pass(inputs: np.ndarray, outputs: np.ndarray, slots: int, budget: int, num_passes: int) -> float:
    """Prompts completed by a long sequence of single requests, without the first tenth as warm-up."""
    ends = np.zeros(num_passes + int(outputs.max()) + 1, dtype=int)  # Rows that decode for the last time, by pass.
    rows = left = number = done = 0
    for now in range(num_passes):
        room = budget - rows
        free = slots - rows - (left > 0)
        while room > 0 and (left or free):
            if not left:
                left, free = int(inputs[number % len(inputs)]), free - 1
            taken = min(left, room)
            left, room = left - taken, room - taken
            if not left:
                done += now >= num_passes // 10
                decodes = int(outputs[number % len(inputs)]) - 1
                ends[now + decodes] += decodes > 0
                rows += decodes > 0
                number += 1
        # Rows that have just completed their prompt decode from the next pass on: none of them ends in this one.
        rows -= ends[now]
    return done / (num_passes - num_passes // 10)


def test_as_many_prompts_are_completed_a_pass_as_single_requests_complete() -> None:
    off = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        inputs = lognormal(rng, rng.uniform(20, 500), rng.uniform(0.1, 0.8), 2000)
        outputs = lognormal(rng, rng.uniform(5, 100), rng.uniform(0.1, 0.8), 500)
        workload, budget = workload_of(inputs, outputs), int(rng.choice([64, 128, 256, 512]))
        even = budget * workload.mean_output / (workload.mean_input + workload.mean_output)
        slots = int(np.clip(rng.uniform(0.2, 3) * even, 1, budget))
        found = chunk_passes(workload.input_law, workload.mean_output, float(slots), float(budget)).completed
        off.append(abs(found / completed_a_pass(inputs, outputs, slots, budget, 20_000) - 1))
    assert np.median(off) < 0.002
    assert np.quantile(off, 0.95) < 0.02


def passes_of_whole_prompts(inputs: np.ndarray, outputs: np.ndarray, slots: int, budget: int, num: int) -> float:
    """Prompts a pass of a long sequence of single requests, none of them cut, without the first tenth as warm-up."""
    ends = np.zeros(num + int(outputs.max()) + 1, dtype=int)  # Rows that decode for the last time, by pass.
    rows = number = done = 0
    for now in range(num):
        room, before = budget - rows, number
        while room > 0 and number - before < slots - rows:
            length = int(inputs[number % len(inputs)])
            if number > before and length > room:
                break
            room -= length
            ends[now + int(outputs[number % len(outputs)])] += 1
            number += 1
        rows += number - before - ends[now]
        done += (number - before) * (now >= num // 10)
        ends[now] = 0
    return done / (num - num // 10)


def test_as_many_whole_prompts_fit_a_pass_as_single_requests_do() -> None:
    off = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        inputs = lognormal(rng, rng.uniform(20, 500), rng.uniform(0.1, 0.8), 2000)
        outputs = lognormal(rng, rng.uniform(5, 100), rng.uniform(0.1, 0.8), 500)
        workload, budget = workload_of(inputs, outputs), int(rng.choice([64, 128, 256, 512]))
        even = budget * workload.mean_output / (workload.mean_input + workload.mean_output)
        slots = int(np.clip(rng.uniform(0.2, 3) * even, 1, budget))
        found = whole_passes(workload.input_law, workload.mean_output + 1, float(slots), float(budget))
        assert found.probability @ found.prompt_tokens == pytest.approx(found.completed * workload.mean_input, rel=1e-6)
        drawn = (values[rng.integers(0, len(values), 50_000)] for values in (inputs, outputs))
        off.append(abs(found.completed / passes_of_whole_prompts(*drawn, slots, budget, 20_000) - 1))
    assert np.median(off) < 0.01
    assert np.quantile(off, 0.95) < 0.04


def test_closed_form_agrees_with_the_replay(cost: CostModel) -> None:
    """By its errors over random cases: throughput, and the latency of all requests at their own lengths."""
    rates, times = [], []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        outputs = lognormal(rng, rng.uniform(8, 60), 0.6, 300)
        workload = workload_of(lognormal(rng, 90, rng.uniform(0.1, 0.8), 500), outputs)
        budget = int(rng.choice([64, 128, 256, 512]))
        even = budget * workload.mean_output / (workload.mean_input + workload.mean_output)
        schedule = made(int(np.clip(rng.uniform(0.3, 2.5) * even, 1, budget)), budget)
        steady = steady_state(schedule, workload, cost)
        inputs, outputs = workload.sample(4000, seed=seed)
        requests = replay(schedule, cost, input_tokens=inputs, output_tokens=outputs, num_blocks=10**6).requests
        opens, closes = window(requests, backlog=True)
        inside = [request for request in requests if opens <= request.start < closes]
        took = np.mean([request.token_times[-1] - request.start for request in inside])
        predicted = steady.latency(np.array([float(request.output_tokens) for request in inside])).mean()
        rates.append(abs(steady.throughput / summarize(requests, p99_output=1).throughput - 1))
        times.append(abs(predicted / took - 1))
    for off in (rates, times):
        assert np.median(off) < 0.015, off
        assert np.quantile(off, 0.95) < 0.05, off
