"""The replay's policies order work as an independent replay, written from their description alone, does."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exeplan.core.batch import Batch, Chunk, SequenceState
from exeplan.core.profile import Profile
from exeplan.core.schedule import Schedule, Stage
from exeplan.simulator.cost import CostModel
from exeplan.simulator.replay import replay

from . import oracle
from .machine import CLUSTER

LAYERS = 8
CONTROLS = {
    "static": ("batch_size", "prefill_micro_batches"),
    "orca": ("max_num_seqs",),
    "rra": ("prefill_batch", "decode_steps"),
    "chunked": ("max_num_seqs", "max_num_batched_tokens"),
}


def pipeline(profile: Profile, cuts: list[int], num_encoder_layers: int) -> CostModel:
    """Stages between the cuts of eight decoder layers; encoder layers are cut alike."""
    spec = replace(profile.model, num_layers=LAYERS, num_encoder_layers=num_encoder_layers)
    bounds = [0, *cuts, LAYERS]
    stages = [
        Stage(devices=(i,), layers=(a, b), encoder_layers=(a, b) if num_encoder_layers else (0, 0))
        for i, (a, b) in enumerate(pairwise(bounds))
    ]
    return CostModel(replace(profile, model=spec), tuple(stages), CLUSTER)


def stage_seconds(cost: CostModel) -> Callable[[int, list[tuple[int, int]], list[int], int], float]:
    """The cost model as the oracle asks for it: prompts as (new, before), decodes as tokens in the cache."""
    newest = 1 if cost.first_token_from_prefill else 0

    def row(prompt: int, generated: int) -> SequenceState:
        return SequenceState(request_id="", num_prompt_tokens=prompt, max_output_tokens=1, num_output_tokens=generated)

    def seconds(stage: int, prefills: list[tuple[int, int]], decodes: list[int], padded_to: int) -> float:
        batch = Batch(
            prefill=tuple(row(new + before, 0) for new, before in prefills),
            decode=tuple(row(context, newest) for context in decodes),
            pad_to=padded_to,
            chunks=() if padded_to else tuple(Chunk(before, before + new, last=True) for new, before in prefills),
        )
        return cost.stage_seconds(batch)[stage]

    return seconds


@pytest.mark.parametrize("encoder_layers", [0, LAYERS], ids=["decoder-only", "encoder-decoder"])
@pytest.mark.parametrize("policy", CONTROLS)
@given(data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_every_token_comes_when_the_oracle_says(
    policy: str, encoder_layers: int, data: st.DataObject, profile: Profile
) -> None:
    cuts = data.draw(st.lists(st.integers(1, LAYERS - 1), unique=True, max_size=3).map(sorted))
    lengths = data.draw(st.lists(st.tuples(st.integers(1, 80), st.integers(1, 12)), min_size=1, max_size=24))
    micro_batches = data.draw(st.integers(1, 8 if cuts else 1))  # One stage has nothing to fill.
    variables = {name: data.draw(st.integers(1, 12)) for name in CONTROLS[policy]}
    if policy == "chunked":
        variables["max_num_batched_tokens"] += -(-variables["max_num_seqs"] // micro_batches)
    if policy == "static" and not cuts:
        variables["prefill_micro_batches"] = 1
    cost = pipeline(profile, cuts, encoder_layers)
    inputs, outputs = (list(side) for side in zip(*lengths, strict=True))
    run = replay(
        Schedule(policy, {**variables, "micro_batches": micro_batches}),
        cost,
        input_tokens=np.array(inputs),
        output_tokens=np.array(outputs),
        num_blocks=10_000,
    )
    play: Callable[..., oracle.Replayed] = getattr(oracle, policy)
    rules: dict[str, Any] = {"num_stages": len(cuts) + 1, "first_token_from_prefill": cost.first_token_from_prefill}
    expected = play(
        inputs, outputs, **variables, micro_batches=micro_batches, stage_seconds=stage_seconds(cost), **rules
    )
    assert len(run.passes) == len(expected.passes)
    for request, other in zip(run.requests, expected.requests, strict=True):
        assert request.start == pytest.approx(other.start, rel=1e-9)
        assert list(request.token_times) == pytest.approx(other.token_times, rel=1e-9)
