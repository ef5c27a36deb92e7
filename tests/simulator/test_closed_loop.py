"""Clients of a closed loop wait for answers and think in between; passes scheduled together equal single ones."""

import numpy as np
import pytest

from exeplan.core.schedule import Schedule
from exeplan.simulator.cost import CostModel
from exeplan.simulator.replay import replay
from exeplan.simulator.run import Run

ORCA = Schedule("orca", {"max_num_seqs": 4})


def looped(cost: CostModel, *, concurrency: int, think_seconds: float, seed: int = 0, count: int = 40) -> Run:
    return replay(
        ORCA,
        cost,
        input_tokens=np.full(count, 30),
        output_tokens=np.full(count, 6),
        num_blocks=1000,
        concurrency=concurrency,
        think_seconds=think_seconds,
        seed=seed,
    )


def test_without_thinking_a_request_comes_when_an_answer_is_there(cost: CostModel) -> None:
    run = looped(cost, concurrency=2, think_seconds=0.0)
    answers = sorted(r.token_times[-1] for r in run.requests)
    assert [r.arrival for r in run.requests] == [0.0, 0.0, *answers[:-2]]


def test_a_client_thinks_before_each_request(cost: CostModel) -> None:
    run = looped(cost, concurrency=1, think_seconds=0.5, count=2000)
    answers = [0.0, *(r.token_times[-1] for r in run.requests)]
    pauses = [r.arrival - answer for r, answer in zip(run.requests, answers, strict=False)]
    assert min(pauses) > 0
    assert np.mean(pauses) == pytest.approx(0.5, rel=0.1)
    assert np.std(pauses) == pytest.approx(0.5, rel=0.15)  # An exponential law.
    # The engine is idle when a thinking client sends.
    assert [r.start for r in run.requests] == [r.arrival for r in run.requests]


def test_never_more_requests_than_clients_are_open(cost: CostModel) -> None:
    run = looped(cost, concurrency=3, think_seconds=0.01)
    for request in run.requests:
        open_requests = sum(r.arrival <= request.arrival < r.token_times[-1] for r in run.requests)
        assert 1 <= open_requests <= 3


def test_the_seed_decides_the_pauses(cost: CostModel) -> None:
    times = [
        [r.arrival for r in looped(cost, concurrency=2, think_seconds=0.1, seed=seed).requests] for seed in (1, 1, 2)
    ]
    assert times[0] == times[1] != times[2]


def test_a_request_during_decode_passes_joins_the_next_one(cost: CostModel) -> None:
    arrivals = np.array([0.0, 0.012])
    run = replay(
        ORCA,
        cost,
        input_tokens=np.array([30, 30]),
        output_tokens=np.array([40, 3]),
        num_blocks=1000,
        arrivals=arrivals,
    )
    first, second = run.requests
    alone = [p for p in run.passes if p.num_prefill == 0 and p.end < second.start]
    assert len(alone) > 1
    # It starts when the running pass ends, and from then on both have their tokens at the same times.
    assert second.start == min(p.end for p in run.passes if p.end >= arrivals[1])
    assert set(second.token_times) <= set(first.token_times)
    assert all(early.end == late.start for early, late in zip(run.passes, run.passes[1:], strict=False))


def test_passes_booked_together_take_the_blocks_and_the_times_of_each(cost: CostModel) -> None:
    run = replay(
        ORCA, cost, input_tokens=np.array([20, 30]), output_tokens=np.array([40, 40]), num_blocks=100, arrivals=None
    )
    # The last tokens are in no cache: 59 and 69 tokens, 16 in a block.
    assert run.peak_kv_tokens == (4 + 5) * 16
    durations = [p.end - p.start for p in run.passes[1:]]
    steps = np.diff(durations)
    layers = cost.spec.num_layers
    # 20 ns a token of context and row: two more tokens a pass, on every layer.
    assert steps == pytest.approx(np.full(len(steps), layers * 2 * 20e-9), rel=1e-3)
