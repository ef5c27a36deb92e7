"""Separate stages for prefill and decode work as an independent replay does, lose nothing, and fit their closed form."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exeplan.cluster import Cluster, Link
from exeplan.plan import Schedule, Stage
from exeplan.profile import Profile
from exeplan.scheduling import BLOCK_SIZE, Batch, num_blocks_for
from exeplan.scheduling import Sequence as Row
from exeplan.simulator.cost import CostModel
from exeplan.simulator.replay import Run, replay

from .simulator import oracle

CLUSTER = Cluster(
    name="made-up",
    device="affine",
    num_nodes=1,
    gpus_per_node=8,
    memory_bytes=8 << 30,
    intra=Link(bytes_per_second=2e8, latency=1e-4),
    inter=Link(bytes_per_second=1e8, latency=2e-4),
)
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
        handover=lambda prompts: cost.handover_seconds(sum(prompts)),
        stage_seconds=stage_seconds,
        first_token_from_prefill=cost.first_token_from_prefill,
    )


def row(num_tokens: int) -> Row:
    return Row(request_id="", num_prompt_tokens=num_tokens, max_output_tokens=1)


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
