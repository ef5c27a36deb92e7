"""Policy turbo cuts the waiting requests into batches of like lengths, at the least cost of all ways to cut them."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exeplan.core.batch import Batch, SequenceState
from exeplan.core.bounds import Bound
from exeplan.core.profile import Profile
from exeplan.core.schedule import Schedule
from exeplan.planner.problems.problem import make_problem
from exeplan.planner.problems.replays import replay_estimate
from exeplan.policies import sampled_evenly
from exeplan.policies.shared.alike_at_rate import Cutting, batch_of_first
from exeplan.policies.turbo import _cut
from exeplan.runner.load import draw_load
from exeplan.scheduling.scheduler import Scheduler
from exeplan.workload.files import load_workload


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8), size=st.integers(1, 8), overhead=st.integers(1, 40)
)
@settings(max_examples=60, deadline=None)
def test_no_way_to_cut_costs_less(lengths: list[int], size: int, overhead: int) -> None:
    rising = np.sort(lengths)

    def cost(ends: tuple[int, ...]) -> int:
        begins = (0, *ends[:-1])
        return sum((end - begin) * int(rising[end - 1]) + overhead for begin, end in zip(begins, ends, strict=True))

    n = len(rising)
    ways = [(*inner, n) for count in range(n) for inner in combinations(range(1, n), count)]
    allowed = [way for way in ways if max(np.diff((0, *way))) <= size]
    found = tuple(_cut(rising, size, overhead).tolist())
    assert found in allowed
    assert cost(found) == min(map(cost, allowed))


@pytest.mark.parametrize(
    ("order", "expected"),
    [("fcfs", [("ac", 31), ("bde", 4)]), ("sjf", [("bde", 4), ("ac", 31)])],
)
def test_the_batch_of_the_first_request_runs_next(order: str, expected: list[tuple[str, int]]) -> None:
    scheduler = Scheduler(Schedule("turbo", {"batch_size": 4, "overhead_tokens": 5}, order), 1000)
    for name, tokens in zip("abcde", (30, 4, 31, 3, 4), strict=True):
        scheduler.add(SequenceState(request_id=name, num_prompt_tokens=tokens, max_output_tokens=2))
    found = []
    while (batch := scheduler.next_batch()) is not None:
        if batch.prefill:
            found.append(("".join(sorted(row.request_id for row in batch.prefill)), batch.pad_to))
        _finish(batch, scheduler)
    assert found == expected


def _finish(batch: Batch, scheduler: Scheduler) -> None:
    for row in (*batch.prefill, *batch.decode):
        row.num_output_tokens += 1
        row.finished = row.num_output_tokens >= 2
    scheduler.complete(batch)


@given(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=12), min_size=1, max_size=4), st.integers(1, 6))
@settings(max_examples=50, deadline=None)
def test_queues_side_by_side_run_the_batch_that_each_would_run_alone(queues: list[list[int]], size: int) -> None:
    counts = np.array([len(queue) for queue in queues])
    lengths = np.ones((len(queues), int(counts.max())), dtype=np.int64)
    for row, queue in zip(lengths, queues, strict=True):
        row[: len(queue)] = queue
    found = batch_of_first(lengths, counts, Cutting(size=size, overhead=20, lookahead=12))
    for row, queue in zip(found, queues, strict=True):
        order = np.argsort(queue, kind="stable")
        place, ends = int(np.flatnonzero(order == 0)[0]), _cut(np.sort(queue), size, 20)
        end = int(ends[np.searchsorted(ends, place, side="right")])
        begin = max((int(e) for e in ends if e <= place), default=0)
        assert np.flatnonzero(row).tolist() == sorted(order[begin:end].tolist())


def test_batches_of_like_prompts_have_as_few_long_outputs_or_as_many_as_chance_gives_them() -> None:
    law, schedule = load_workload("alpaca"), Schedule("turbo", {"batch_size": 24})
    long = law.output_quantile(0.9)

    def variance(stratified: bool) -> float:
        """Of the long outputs in batches of neighbours by their prompts."""
        counts = []
        for seed in range(40):
            load = draw_load(law, 288, seed=seed, stratified=stratified)
            alike = load.output_tokens[np.argsort(load.input_tokens, kind="stable")].reshape(-1, 24)
            counts.append((alike >= long).sum(axis=1))
        return float((counts - np.mean(counts, axis=0)).var())

    by_chance = 24 * 0.1 * 0.9
    assert variance(stratified=True) < 0.5 * by_chance
    assert variance(stratified=sampled_evenly(schedule)) == pytest.approx(by_chance, rel=0.15)
    assert sampled_evenly(Schedule("orca", {"max_num_seqs": 24}))


def test_a_replay_under_a_backlog_is_not_of_a_short_queue(profile: Profile) -> None:
    """Of 400 requests, as other policies have them, evenly drawn ones serve less than random ones of a long run."""
    problem = make_problem(profile, load_workload("alpaca"), Bound(seconds=math.inf))
    run, _ = replay_estimate(problem, Schedule("turbo", {"batch_size": 4, "overhead_tokens": 64}), seed=0)
    other, _ = replay_estimate(problem, Schedule("static", {"batch_size": 4}), seed=0)
    assert len(run.requests) == 192 * 4
    assert len(other.requests) < 192 * 4
