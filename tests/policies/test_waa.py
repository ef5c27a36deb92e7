"""Stages that prefill next to stages that decode: equal to an independent replay, without a lost token."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exeplan.core.batch import BLOCK_SIZE, Batch, SequenceState, num_blocks_for
from exeplan.core.profile import Profile
from exeplan.core.schedule import Schedule, Stage
from exeplan.errors import InputError
from exeplan.policies import waa_c, waa_m
from exeplan.scheduling.scheduler import Scheduler
from exeplan.simulator.closed_form import steady_state
from exeplan.simulator.cost import CostModel
from exeplan.simulator.replay import replay
from exeplan.simulator.run import Run
from exeplan.simulator.stalls import longest_stall
from exeplan.workload.workload import Workload

from ..simulator import oracle
from ..simulator.machine import CLUSTER

LAYERS = 8


def stages(cuts: Sequence[int], phase: str, first_device: int, *, encoder: bool) -> tuple[Stage, ...]:
    bounds = pairwise([0, *cuts, LAYERS])
    return tuple(
        Stage(
            devices=(first_device + i,),
            layers=(0, 0) if encoder else span,
            encoder_layers=span if encoder else (0, 0),
            phase=phase,
        )
        for i, span in enumerate(bounds)
    )


def split_cost(
    profile: Profile, prefill_cuts: Sequence[int], decode_cuts: Sequence[int], *, encoder_decoder: bool
) -> CostModel:
    """Stages that prefill and stages that decode, each kind holding all layers between the cuts."""
    spec = replace(profile.model, num_layers=LAYERS, num_encoder_layers=LAYERS if encoder_decoder else 0)
    placement = stages(prefill_cuts, "prefill", 0, encoder=encoder_decoder)
    placement += stages(decode_cuts, "decode", len(placement), encoder=False)
    return CostModel(replace(profile, model=spec), placement, CLUSTER)


def played(schedule: Schedule, cost: CostModel, lengths: Sequence[tuple[int, int]], num_blocks: int = 10_000) -> Run:
    inputs, outputs = np.array(lengths).T
    return replay(schedule, cost, input_tokens=inputs, output_tokens=outputs, num_blocks=num_blocks)


def refereed(schedule: Schedule, cost: CostModel, lengths: Sequence[tuple[int, int]]) -> oracle.Replayed:
    """The same by the oracle, on the times of the same cost model."""
    prefills = len(cost.prefill_stages)
    newest = 1 if cost.first_token_from_prefill else 0  # In no cache yet.

    def stage_seconds(stage: int, new: list[tuple[int, int]], contexts: list[int], padded_to: int) -> float:
        rows = tuple(row(prompt) for prompt, _ in new)
        decodes = tuple(row(context + newest) for context in contexts)
        batch = Batch(prefill=rows, decode=decodes, phase="prefill" if new else "decode")
        return cost.stage_seconds(batch)[stage if new else stage - prefills]

    inputs, outputs = zip(*lengths, strict=True)
    return oracle.waa(
        inputs,
        outputs,
        decode_batch=schedule["decode_batch"],
        prefill_batch=schedule["prefill_batch"],
        micro_batches=schedule["micro_batches"],
        num_prefill_stages=prefills,
        num_decode_stages=len(cost.decode_stages),
        kv_transfer=lambda prompts: cost.kv_transfer_seconds(sum(prompts)),
        stage_seconds=stage_seconds,
        first_token_from_prefill=cost.first_token_from_prefill,
    )


def row(num_tokens: int) -> SequenceState:
    return SequenceState(request_id="", num_prompt_tokens=num_tokens, max_output_tokens=1)


LENGTHS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12)), min_size=1, max_size=30)
CUTS = st.lists(st.integers(1, LAYERS - 1), unique=True, max_size=3).map(sorted)


@given(
    lengths=LENGTHS,
    prefill_cuts=CUTS,
    decode_cuts=CUTS,
    decode_batch=st.integers(1, 12),
    prefill_batch=st.integers(1, 5),
    micro_batches=st.integers(1, 5),
    encoder_decoder=st.booleans(),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_every_token_comes_when_the_oracle_says(
    lengths: list[tuple[int, int]],
    prefill_cuts: list[int],
    decode_cuts: list[int],
    decode_batch: int,
    prefill_batch: int,
    micro_batches: int,
    encoder_decoder: bool,
    profile: Profile,
) -> None:
    cost = split_cost(profile, prefill_cuts, decode_cuts, encoder_decoder=encoder_decoder)
    sizes = {"decode_batch": decode_batch, "prefill_batch": prefill_batch, "micro_batches": micro_batches}
    schedule = Schedule("waa-c", sizes)
    run, expected = played(schedule, cost, lengths), refereed(schedule, cost, lengths)
    for mine, theirs in zip(run.requests, expected.requests, strict=True):
        assert mine.start == theirs.start
        assert mine.token_times == pytest.approx(theirs.token_times, rel=1e-12)


@given(
    lengths=LENGTHS,
    cuts=st.tuples(CUTS, CUTS),
    decode_batch=st.integers(1, 12),
    prefill_batch=st.integers(1, 5),
    micro_batches=st.integers(1, 5),
    encoder_decoder=st.booleans(),
    spare_blocks=st.integers(0, 6),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_scarce_memory_delays_requests_but_loses_no_token(
    lengths: list[tuple[int, int]],
    cuts: tuple[list[int], list[int]],
    decode_batch: int,
    prefill_batch: int,
    micro_batches: int,
    encoder_decoder: bool,
    spare_blocks: int,
    profile: Profile,
) -> None:
    cost = split_cost(profile, *cuts, encoder_decoder=encoder_decoder)
    sizes = {"decode_batch": decode_batch, "prefill_batch": prefill_batch, "micro_batches": micro_batches}
    # Down to the least that holds the longest request alone.
    num_blocks = max(num_blocks_for(prompt + output) for prompt, output in lengths) + spare_blocks
    run = played(Schedule("waa-c", sizes), cost, lengths, num_blocks)
    assert [request.output_tokens for request in run.requests] == [output for _, output in lengths]
    assert all(a < b for request in run.requests for a, b in pairwise((request.start, *request.token_times)))
    assert run.peak_kv_tokens <= num_blocks * BLOCK_SIZE


def test_the_oldest_waits_for_blocks_until_a_younger_one_can_be_preempted() -> None:
    scheduler = Scheduler(Schedule("waa-c", {"decode_batch": 2, "prefill_batch": 1}), num_blocks=3)
    for number, prompt in enumerate((16, 17)):
        scheduler.add(SequenceState(request_id=str(number), num_prompt_tokens=prompt, max_output_tokens=9))
    first, second = prefilled(scheduler), prefilled(scheduler)
    scheduler.complete(first)
    scheduler.kv_arrived(first)
    assert scheduler.next_batch("decode") is None  # Its second block is the younger one's, which is being prefilled,
    scheduler.complete(second)
    assert scheduler.next_batch("decode") is None  # or transferred.
    scheduler.kv_arrived(second)
    decoding = scheduler.next_batch("decode")
    assert decoding is not None
    assert decoding.decode == first.prefill
    assert list(scheduler.waiting) == list(second.prefill)


def prefilled(scheduler: Scheduler) -> Batch:
    """The next prefill, with its token, but not complete."""
    batch = scheduler.next_batch("prefill")
    assert batch is not None
    for row in batch.prefill:
        row.num_output_tokens += 1
    return batch


def test_the_prefill_batch_replaces_the_requests_finished_in_one_iteration() -> None:
    workload = Workload.of("even", inputs=[10, 10], outputs=[10, 30], weights=[1, 1])
    assert waa_c.schedule({"decode_batch": 64}, workload) == Schedule("waa-c", {"prefill_batch": 3, "decode_batch": 64})
    assert waa_m.schedule({"decode_batch": 4}, workload) == Schedule("waa-m", {"prefill_batch": 1, "decode_batch": 4})
    given = {"decode_batch": 64, "prefill_batch": 5, "micro_batches": 2}
    assert waa_c.schedule(given, workload) == Schedule("waa-c", given)


def test_a_request_of_one_token_never_decodes(profile: Profile) -> None:
    workload = Workload.of("one", inputs=[20], outputs=[1], weights=[1])
    cost = split_cost(profile, [4], [4], encoder_decoder=False)
    schedule = waa_m.schedule({"decode_batch": 4}, workload)
    run = played(schedule, cost, [(20, 1)] * 200)
    assert all(one.num_decode == 0 for one in run.passes)
    seconds = run.passes[49].end - run.passes[9].end
    assert steady_state(schedule, workload, cost).throughput == pytest.approx(4 * 40 / seconds, rel=1e-6)


def test_where_all_have_one_token_the_closed_form_holds_what_is_in_prefill(profile: Profile) -> None:
    cost = split_cost(profile, [], [], encoder_decoder=False)
    schedule = Schedule("waa-c", {"decode_batch": 8, "prefill_batch": 4})
    steady = steady_state(schedule, Workload.of("one", inputs=[20], outputs=[1], weights=[1.0]), cost)
    run = played(schedule, cost, [(20, 1)] * 40)
    assert steady.throughput == pytest.approx(40 / run.passes[-1].end, rel=1e-6)
    assert (steady.cycle.num_seqs, steady.cycle.kv_tokens) == pytest.approx((4, 80))
    assert longest_stall(steady, cost).num_prompts == 0


def test_both_numbers_are_needed() -> None:
    with pytest.raises(InputError, match="waa-m takes the control variables decode_batch, prefill_batch; found decode"):
        waa_m.check(Schedule("waa-m", {"decode_batch": 4}))
