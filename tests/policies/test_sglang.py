"""SGLang's order of work: prompts first, in chunks; admission by the room that answers may yet take."""

import numpy as np
import pytest

from exeplan.core.batch import Batch, SequenceState
from exeplan.core.runs.metrics import summarize, window
from exeplan.core.schedule import Schedule
from exeplan.errors import InputError
from exeplan.planner.choice.optimize import resolve_policies
from exeplan.policies import sglang
from exeplan.scheduling.scheduler import Scheduler
from exeplan.simulator.closed_form import steady_state
from exeplan.simulator.cost import CostModel
from exeplan.simulator.replay import replay
from exeplan.workload.workload import Workload


def made(slots: int, tokens: int, **more: int) -> Schedule:
    return Schedule("sglang", {"max_num_seqs": slots, "max_num_batched_tokens": tokens, **more})


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


def summary(batch: Batch) -> str:
    """What is prefilled, as request:from-to, and the requests that decode."""
    chunks = zip(batch.prefill, batch.chunks, strict=True)
    return " ".join([f"{row.request_id}:{c.start}-{c.end}" for row, c in chunks] + [s.request_id for s in batch.decode])


def test_decodes_pause_until_no_prompt_is_left_that_fits() -> None:
    found = passes(made(3, 10), [(4, 2), (12, 3), (8, 2), (3, 2)])
    assert [summary(batch) for batch in found] == [
        "0:0-4 1:0-6",
        "1:6-12 2:0-4",
        "2:4-8",
        "0 1 2",
        "3:0-3",
        "1 3",
    ]


def test_a_request_is_admitted_with_room_for_its_answer_and_one_refused_waits_until_another_leaves() -> None:
    """20 blocks, 320 tokens: 200 and 95 are taken, so that another 95 wait for the 64 decodes of the second one."""
    found = passes(made(4, 1000), [(100, 100), (30, 65), (30, 65)], num_blocks=20)
    assert summary(found[0]) == "0:0-100 1:0-30"
    assert {summary(batch) for batch in found[1:65]} == {"0 1"}
    assert summary(found[65]) == "2:0-30"


def test_the_share_that_is_kept_falls_with_decodes_and_is_the_first_one_again_when_all_have_left() -> None:
    state = sglang.start(made(4, 100), 1)
    assert state.ratio == pytest.approx(0.7)
    state.began(Batch(), 300)
    assert state.ratio == pytest.approx(0.7 - 0.7 * 0.86 / 2)
    state.began(Batch(), 10_000)
    assert state.ratio == pytest.approx(0.7 * 0.14)
    state.drained()
    assert state.ratio == pytest.approx(0.7)
    assert sglang.start(made(4, 100, conservativeness_percent=50), 1).ratio == pytest.approx(0.35)


def test_a_preemption_raises_the_share_to_what_answers_were_so_far() -> None:
    scheduler = Scheduler(made(4, 100), 100)
    head = SequenceState(
        request_id="a", num_prompt_tokens=5, max_output_tokens=100, num_output_tokens=30, preemptions=1
    )
    scheduler.waiting.append(head)
    state = sglang.start(scheduler.schedule, 1)
    state.look(scheduler)
    assert state.ratio == pytest.approx((30 + 20) / 101)


def test_auto_leaves_it_to_its_engine() -> None:
    assert "sglang" not in resolve_policies("auto")
    assert resolve_policies("auto", engine=("sglang", "chunked")) == ("chunked", "sglang")


def test_variables_that_it_has_not_are_refused() -> None:
    with pytest.raises(InputError, match="sglang takes the control variables max_num_seqs, max_num_batched_tokens"):
        sglang.check(Schedule("sglang", {"max_num_seqs": 3}))
    with pytest.raises(InputError, match="conservativeness_percent must be a positive integer, found 0"):
        sglang.check(made(3, 100, conservativeness_percent=0))


def test_closed_form_agrees_with_the_replay(cost: CostModel) -> None:
    """By its errors over random cases, cut prompts among them: throughput, and the latency of all requests."""
    rates, times = [], []
    for seed in range(10):
        rng = np.random.default_rng(seed)
        inputs, outputs = (
            np.clip(np.rint(rng.lognormal(np.log(mean), sigma, 2000)), 1, 500).astype(int)
            for mean, sigma in ((80, rng.uniform(0.1, 0.8)), (rng.uniform(8, 60), 0.6))
        )
        workload = Workload.of("drawn", inputs=inputs, outputs=outputs, weights=np.ones(2000))
        schedule = made(int(rng.integers(4, 64)), int(rng.choice([64, 128, 256, 512])))
        steady = steady_state(schedule, workload, cost)
        inputs, outputs = workload.sample(3000, seed=seed)
        requests = replay(schedule, cost, input_tokens=inputs, output_tokens=outputs, num_blocks=10**6).requests
        opens, closes = window(requests, backlog=True)
        inside = [request for request in requests if opens <= request.start < closes]
        took = np.mean([request.token_times[-1] - request.start for request in inside])
        predicted = steady.latency(np.array([float(request.output_tokens) for request in inside])).mean()
        rates.append(steady.throughput / summarize(requests, p99_output=1).throughput - 1)
        times.append(predicted / took - 1)
    for off, median, most in ((np.abs(rates), 0.02, 0.06), (np.abs(times), 0.03, 0.1)):
        assert np.median(off) < median, off
        assert np.quantile(off, 0.95) < most, off


@pytest.mark.parametrize(("longest", "most"), [(1, 0.02), (2, 0.03), (4, 0.03)])
@pytest.mark.parametrize("slots", [1, 8, 32])
def test_slots_of_requests_of_one_token_are_refilled_in_passes_of_their_own(
    longest: int, most: float, slots: int, cost: CostModel
) -> None:
    """One output token to `longest`, and 20 prompt tokens."""
    workload = Workload.of("few", inputs=[20] * longest, outputs=range(1, longest + 1), weights=np.ones(longest))
    schedule, count = made(slots, 2048), 200 * slots
    steady = steady_state(schedule, workload, cost)
    inputs, outputs = workload.sample(count, seed=0)
    requests = replay(schedule, cost, input_tokens=inputs, output_tokens=outputs, num_blocks=10**5).requests
    real = summarize(requests, p99_output=1).throughput
    took = np.mean([one.token_times[-1] - one.start for one in requests])
    assert steady.throughput == pytest.approx(real, rel=most)
    assert steady.latency(outputs.astype(float)).mean() == pytest.approx(took, rel=most)


@pytest.mark.parametrize("slots", [4, 16, 64])
@pytest.mark.parametrize("inputs", [[20, 40, 300], [10, 400], [600]])
def test_the_first_token_waits_for_all_passes_that_a_long_prompt_takes(
    inputs: list[int], slots: int, cost: CostModel
) -> None:
    """Passes of 128 tokens: the mean of the first prompts fits into one, which the longest of them does not."""
    lengths = [(prompt, output) for prompt in inputs for output in range(10, 60, 5)]
    workload = Workload.of(
        "long", inputs=[one for one, _ in lengths], outputs=[one for _, one in lengths], weights=np.ones(len(lengths))
    )
    schedule = made(slots, 128)
    drawn, outputs = workload.sample(80 * slots, seed=1)
    requests = replay(schedule, cost, input_tokens=drawn, output_tokens=outputs, num_blocks=10**6).requests
    steady, found = steady_state(schedule, workload, cost), summarize(requests, p99_output=55)
    assert steady.ttft == pytest.approx(found.ttft, rel=0.08)
    assert steady.tpot == pytest.approx(found.tpot, rel=0.05)
