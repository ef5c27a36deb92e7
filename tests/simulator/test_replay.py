"""A replay times each pass with the cost model and loses no token: every request gets each token once, in order."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exeplan.core.batch import Batch, SequenceState
from exeplan.core.schedule import Schedule
from exeplan.errors import InputError
from exeplan.policies import load_policy, policy_names
from exeplan.simulator.cost import CostModel
from exeplan.simulator.replay import replay
from exeplan.simulator.run import Run
from exeplan.workload.workload import Workload

ORCA = Schedule("orca", {"max_num_seqs": 2})
RRA = Schedule("rra", {"prefill_batch": 2, "decode_steps": 2})


def played(
    schedule: Schedule,
    cost: CostModel,
    lengths: Sequence[tuple[int, int]],
    *,
    num_blocks: int = 1000,
    arrivals: list[float] | None = None,
    concurrency: int | None = None,
) -> Run:
    inputs, outputs = np.array(lengths).T
    return replay(
        schedule,
        cost,
        input_tokens=inputs,
        output_tokens=outputs,
        num_blocks=num_blocks,
        arrivals=None if arrivals is None else np.array(arrivals),
        concurrency=concurrency,
    )


def row(prompt: int, generated: int = 0) -> SequenceState:
    return SequenceState(request_id="", num_prompt_tokens=prompt, max_output_tokens=9, num_output_tokens=generated)


def test_two_requests_by_hand(cost: CostModel) -> None:
    run = played(RRA, cost, [(20, 3), (30, 2)])
    # One prefill of both, one decode of both, one decode of the first alone.
    first = cost.batch_seconds(Batch(prefill=(row(20), row(30))))
    second = cost.batch_seconds(Batch(decode=(row(20, 1), row(30, 1))))
    third = cost.batch_seconds(Batch(decode=(row(20, 2),)))
    ends = np.cumsum([first, second, third])
    assert [p.end for p in run.passes] == pytest.approx(ends)
    assert [(p.num_prefill, p.num_decode, p.num_new_tokens) for p in run.passes] == [(2, 0, 50), (0, 2, 2), (0, 1, 1)]
    assert run.requests[0].token_times == pytest.approx(ends)
    assert run.requests[1].token_times == pytest.approx(ends[:2])
    assert [r.start for r in run.requests] == [0.0, 0.0]


def test_the_peak_counts_whole_blocks(cost: CostModel) -> None:
    # 20 tokens take two blocks of 16, 30 take two as well; the third token of the second request takes none more.
    assert played(RRA, cost, [(20, 2), (30, 3)]).peak_kv_tokens == 4 * 16


def test_passes_follow_each_other_without_a_gap_under_a_backlog(cost: CostModel) -> None:
    run = played(ORCA, cost, [(10, 4)] * 9)
    assert run.passes[0].start == 0.0
    assert all(a.end == b.start for a, b in zip(run.passes, run.passes[1:], strict=False))


def test_no_request_starts_before_it_arrives_and_the_clock_skips_idle_time(cost: CostModel) -> None:
    run = played(ORCA, cost, [(10, 2)] * 3, arrivals=[0.0, 0.0, 100.0])
    assert run.requests[2].start == 100.0
    assert run.requests[2].arrival == 100.0
    assert run.requests[1].token_times[-1] < 1.0


def test_an_arrival_during_a_pass_waits_for_its_end(cost: CostModel) -> None:
    run = played(ORCA, cost, [(100, 2), (10, 2)], arrivals=[0.0, 1e-6])
    assert run.requests[1].start == run.passes[0].end


def test_a_closed_loop_keeps_its_concurrency(cost: CostModel) -> None:
    run = played(Schedule("orca", {"max_num_seqs": 8}), cost, [(10, n) for n in (2, 5, 3, 4, 6, 2)], concurrency=2)
    events = sorted([(r.arrival, 1) for r in run.requests] + [(r.token_times[-1], -1) for r in run.requests])
    under_way = np.cumsum([step for _, step in events])
    assert under_way.max() == 2
    # The next request arrives at the very end of an earlier one.
    ends = {r.token_times[-1] for r in run.requests}
    assert all(r.arrival in ends for r in run.requests[2:])
    assert max(p.num_prefill + p.num_decode for p in run.passes) == 2


def test_a_preempted_request_keeps_its_tokens_and_its_start(cost: CostModel) -> None:
    # Both grow to four blocks, six are there: the younger one is computed again.
    run = played(RRA, cost, [(17, 40), (17, 40)], num_blocks=6)
    assert run.num_preemptions > 0
    assert run.peak_kv_tokens <= 6 * 16
    assert [r.output_tokens for r in run.requests] == [40, 40]
    assert run.requests[1].start == 0.0
    assert any(p.num_prefill == 1 and p.num_new_tokens > 17 for p in run.passes)


def test_a_request_beyond_the_cache_is_refused(cost: CostModel) -> None:
    with pytest.raises(InputError, match="50 prompt and 50 output tokens need 7 KV blocks, the cache has 6"):
        played(RRA, cost, [(50, 50)], num_blocks=6)


def test_nothing_to_replay_is_refused(cost: CostModel) -> None:
    with pytest.raises(InputError, match="a replay needs at least one request"):
        replay(RRA, cost, input_tokens=np.array([]), output_tokens=np.array([]), num_blocks=6)


@pytest.mark.parametrize("policy", [n for n in policy_names() if not load_policy(n).SEPARATE_STAGES])
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_every_request_gets_each_of_its_tokens_once_in_order(policy: str, data: st.DataObject, cost: CostModel) -> None:
    lengths = data.draw(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=12))
    inputs, outputs = np.array(lengths).T
    workload = Workload.of("drawn", inputs=inputs, outputs=outputs, weights=np.ones(len(lengths)))
    module = load_policy(policy)
    drawn = {k.name: data.draw(st.sampled_from(k.values)) for k in module.knobs(workload, 6)}
    least = max(-(-(i + o) // 16) for i, o in lengths)
    concurrency = data.draw(st.none() | st.integers(1, 4))
    gaps = data.draw(st.none() | st.lists(st.floats(0, 0.05), min_size=len(lengths), max_size=len(lengths)))
    run = played(
        module.schedule({**drawn, **module.enumerated(1)[0]}, workload),
        cost,
        lengths,
        num_blocks=data.draw(st.integers(least, least + 8)),
        arrivals=None if gaps is None or concurrency else np.cumsum(gaps).tolist(),
        concurrency=concurrency,
    )
    assert [(r.input_tokens, r.output_tokens) for r in run.requests] == lengths
    for request in run.requests:
        times = (request.arrival, request.start, *request.token_times)
        assert list(times) == sorted(times)
        assert len(set(request.token_times)) == request.output_tokens
    assert run.passes[-1].end == max(r.token_times[-1] for r in run.requests)
