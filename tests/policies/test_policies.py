"""Each policy orders work as its paper says, and every request gets each of its tokens once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exeplan.core.batch import Batch, SequenceState
from exeplan.core.schedule import Schedule
from exeplan.errors import InputError
from exeplan.policies import load_policy, policy_names
from exeplan.scheduling.scheduler import Scheduler
from exeplan.workload.workload import Workload

ONE_DEVICE = [name for name in policy_names() if not load_policy(name).SEPARATE_STAGES]
"""Policies that one device is enough for."""
SCHEDULES = {
    "static": Schedule("static", {"batch_size": 4}),
    "orca": Schedule("orca", {"max_num_seqs": 4}),
    "rra": Schedule("rra", {"prefill_batch": 2, "decode_steps": 3}),
}


def run_batches(schedule: Schedule, lengths: list[tuple[int, int]], num_blocks: int = 1000) -> list[Batch]:
    """Every batch until all (prompt, output) requests are done."""
    scheduler = Scheduler(schedule, num_blocks)
    for index, (prompt, output) in enumerate(lengths):
        scheduler.add(SequenceState(request_id=str(index), num_prompt_tokens=prompt, max_output_tokens=output))
    batches = []
    while (batch := scheduler.next_batch()) is not None:
        batches.append(batch)
        for row in (*batch.whole_prefills, *batch.decode):
            if not row.finished:
                row.num_output_tokens += 1
                row.finished = row.num_output_tokens >= row.max_output_tokens
        scheduler.complete(batch)
    assert scheduler.free_blocks == num_blocks
    return batches


def shape(batch: Batch) -> tuple[str, str]:
    return "".join(s.request_id for s in batch.prefill), "".join(s.request_id for s in batch.decode)


def test_rra_prefills_every_decode_steps_iterations() -> None:
    batches = run_batches(SCHEDULES["rra"], [(5, 6)] * 4)
    assert [shape(b) for b in batches] == [
        ("01", ""), ("", "01"), ("", "01"), ("", "01"),
        ("23", ""), ("", "0123"), ("", "0123"), ("", "23"), ("", "23"), ("", "23"),
    ]  # fmt: skip


def test_rra_prefills_at_once_when_no_request_is_left_to_decode() -> None:
    batches = run_batches(SCHEDULES["rra"], [(5, 1)] * 4)
    assert [shape(b) for b in batches] == [("01", ""), ("23", "")]


def test_orca_refills_a_slot_in_the_very_next_iteration() -> None:
    batches = run_batches(Schedule("orca", {"max_num_seqs": 2}), [(5, 1), (5, 3), (5, 2)])
    assert [shape(b) for b in batches] == [("01", ""), ("2", "1"), ("", "12")]


def test_orca_reserves_slots_for_the_longest_output() -> None:
    # Two blocks of 16 tokens: each request of 10 + 10 tokens reserves both, so they run one after the other.
    batches = run_batches(Schedule("orca", {"max_num_seqs": 2}), [(10, 10), (10, 10)], num_blocks=2)
    assert all(len(b.prefill) + len(b.decode) == 1 for b in batches)


def test_static_keeps_finished_rows_and_pads_to_the_longest_prompt() -> None:
    batches = run_batches(Schedule("static", {"batch_size": 2}), [(5, 1), (9, 3), (4, 2)])
    assert [shape(b) for b in batches] == [("01", ""), ("", "01"), ("", "01"), ("2", ""), ("", "2")]
    assert batches[0].pad_to == 9
    assert batches[0].num_new_tokens == 18


@pytest.mark.parametrize("schedule", [Schedule("static", {"batch_size": 2}), Schedule("turbo", {"batch_size": 2})])
def test_a_request_that_is_computed_again_is_padded_with_its_output(schedule: Schedule) -> None:
    scheduler = Scheduler(schedule, num_blocks=20)
    for name, output in (("0", 4), ("1", 0)):
        sequence = SequenceState(request_id=name, num_prompt_tokens=7, max_output_tokens=9, num_output_tokens=output)
        scheduler.add(sequence)
    batch = scheduler.next_batch()
    assert batch is not None
    assert batch.pad_to == 11
    assert batch.num_new_tokens == 22


def test_preemption_loses_nothing_and_spares_the_oldest() -> None:
    # Two requests that grow to 4 blocks each share 6: the younger one is computed again later.
    batches = run_batches(Schedule("rra", {"prefill_batch": 2, "decode_steps": 4}), [(17, 40), (17, 40)], num_blocks=6)
    produced = dict.fromkeys("01", 0)
    for batch in batches:
        for row in (*batch.prefill, *batch.decode):
            produced[row.request_id] += 1
    assert produced == {"0": 40, "1": 40}
    youngest = [s for b in batches for s in b.prefill if s.request_id == "1"]
    assert len(youngest) > 1
    assert sum(s.request_id == "0" for b in batches for s in b.prefill) == 1


def test_a_request_that_can_never_fit_is_refused() -> None:
    scheduler = Scheduler(SCHEDULES["rra"], num_blocks=2)
    with pytest.raises(InputError, match="need 3 KV blocks, the cache has 2"):
        scheduler.add(SequenceState(request_id="0", num_prompt_tokens=30, max_output_tokens=10))


@pytest.mark.parametrize("name", ONE_DEVICE)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_every_request_gets_each_of_its_tokens_once(name: str, data: st.DataObject) -> None:
    policy = load_policy(name)
    lengths = data.draw(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=20))
    inputs, outputs = zip(*lengths, strict=True)
    workload = Workload.of("drawn", inputs=inputs, outputs=outputs, weights=[1.0] * len(lengths))
    variables = {k.name: data.draw(st.sampled_from(k.values)) for k in policy.knobs(workload, 8)}
    # Blocks down to the least that holds the longest request alone, so that preemption happens too.
    least = max(-(-(i + o) // 16) for i, o in lengths)
    schedule = policy.schedule({**variables, **policy.enumerated(1)[0]}, workload)
    batches = run_batches(schedule, lengths, num_blocks=data.draw(st.integers(least, least + 10)))
    produced = dict.fromkeys(range(len(lengths)), 0)
    for batch in batches:
        for row in {*batch.whole_prefills, *batch.decode}:
            produced[int(row.request_id)] += 1
    for index, (_, output) in enumerate(lengths):
        kept_rows = policy.KEEPS_FINISHED_ROWS
        assert produced[index] >= output if kept_rows else produced[index] == output


def test_unknown_policies_and_variables_are_named() -> None:
    with pytest.raises(InputError, match=f"no policy 'best'; there are {', '.join(policy_names())}"):
        load_policy("best")
    with pytest.raises(
        InputError, match="rra takes the control variables prefill_batch, decode_steps; found batch_size"
    ):
        load_policy("rra").check(Schedule("rra", {"batch_size": 1}))
    with pytest.raises(InputError, match="decode_steps must be a positive integer, found 0"):
        load_policy("rra").check(Schedule("rra", {"prefill_batch": 1, "decode_steps": 0}))


@pytest.mark.parametrize(("trials", "chance"), [(0, 0.3), (1, 0.5), (24, 1 / 90), (300, 0.02), (7, 1.0)])
def test_the_prefills_of_an_orca_iteration_are_binomial(trials: int, chance: float) -> None:
    from scipy.stats import binom

    from exeplan.policies.orca import _whole_binomial

    number, probability = _whole_binomial(trials, chance)
    expected = binom.pmf(number, trials, chance)
    assert probability == pytest.approx(expected / expected.sum(), rel=1e-9)
