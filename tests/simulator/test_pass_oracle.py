"""A pass costs what its rows cost by the made-up device's formulas, and an expected pass the mean of real ones.

The formulas are those of `profile` in tests/conftest.py, written down once more. Where the cost model interpolates,
lengths are measured ones.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exeplan.core.batch import Batch, Chunk, PackedPrompt, Packing, SequenceState
from exeplan.core.profile import Measurement, Profile
from exeplan.core.schedule import Stage
from exeplan.policies.interface import Cycle
from exeplan.simulator.cost import CostModel
from exeplan.workload.length_law import LengthLaw

LAYERS = 6
MEASURED = (16, 64, 128, 256, 512)


def rest(tokens: float) -> float:
    return 40e-6 + 20e-6 * tokens if tokens else 0.0


def overhead(rows: int, prefills: int) -> float:
    """A pass with prefills pays on top what theirs costs more than that of as many decode rows."""
    more = (120e-6 + 8e-6 * prefills) - (100e-6 + 5e-6 * prefills) if prefills else 0.0
    return 100e-6 + 5e-6 * (rows + prefills) + more


def around(tokens: float, sampled: int) -> float:
    return 5e-6 + 0.1e-6 * tokens + (50e-6 + 15e-6 * sampled if sampled else 0.0)


def prefill_attention(tokens: int) -> float:
    return 2e-5 + tokens * tokens * 2e-9


def decode_attention(contexts: list[int]) -> float:
    return sum(8e-6 + 2e-8 * context for context in contexts)


def row(prompt: int, generated: int = 0) -> SequenceState:
    return SequenceState(request_id="", num_prompt_tokens=prompt, max_output_tokens=999, num_output_tokens=generated)


def decoding(contexts: list[int]) -> tuple[SequenceState, ...]:
    """Rows with these numbers of tokens in the cache; the newest token of each is in none."""
    return tuple(row(context, 1) for context in contexts)


PROMPTS = st.lists(st.sampled_from(MEASURED), max_size=6)
CONTEXTS = st.lists(st.integers(16, 900), max_size=8)


@given(prompts=PROMPTS, contexts=CONTEXTS)
@settings(max_examples=60, deadline=None)
def test_prefills_and_decodes_in_one_pass(prompts: list[int], contexts: list[int], cost: CostModel) -> None:
    contexts = contexts if prompts else [*contexts, 50]
    tokens = sum(prompts) + len(contexts)
    layer = rest(tokens) + sum(map(prefill_attention, prompts)) + decode_attention(contexts)
    expected = LAYERS * layer + around(tokens, len(prompts) + len(contexts)) + overhead(len(contexts), len(prompts))
    batch = Batch(prefill=tuple(map(row, prompts)), decode=decoding(contexts))
    assert cost.batch_seconds(batch) == pytest.approx(expected, rel=1e-9)


@given(prompts=PROMPTS, contexts=CONTEXTS)
@settings(max_examples=60, deadline=None)
def test_encoders_compute_prompts_and_decoders_the_rest(
    prompts: list[int], contexts: list[int], profile: Profile
) -> None:
    """An encoder-decoder model: its first token comes from the first decode, so a prefill samples nothing."""
    contexts = contexts if prompts else [*contexts, 50]
    placement = (Stage(layers=(0, 6), encoder_layers=(0, 4)),)
    cost = CostModel(replace(profile, model=replace(profile.model, num_encoder_layers=4)), placement)
    encoder = rest(sum(prompts)) + sum(map(prefill_attention, prompts))
    decoder = rest(len(contexts)) + decode_attention(contexts)
    edges = around(sum(prompts) + len(contexts), len(contexts)) + overhead(len(contexts), len(prompts))
    batch = Batch(prefill=tuple(map(row, prompts)), decode=tuple(map(row, contexts)))
    assert cost.batch_seconds(batch) == pytest.approx(4 * encoder + 6 * decoder + edges, rel=1e-9)


@pytest.mark.parametrize("cuts", [[0, 64, 128, 256], [0, 256, 512], [0, 128]])
def test_a_chunk_attends_to_the_chunks_before_it(cuts: list[int], cost: CostModel) -> None:
    """Its attention is what the prompt's so far takes beyond that of the chunks before, or what it takes alone."""
    for begin, end in pairwise(cuts):
        before = prefill_attention(begin) if begin else 0.0
        attention = max(prefill_attention(end) - before, prefill_attention(end - begin))
        expected = LAYERS * (rest(end - begin) + attention) + around(end - begin, 1) + overhead(0, 1)
        batch = Batch(prefill=(row(cuts[-1]),), chunks=(Chunk(begin, end, end == cuts[-1]),))
        assert cost.batch_seconds(batch) == pytest.approx(expected, rel=1e-9)


def test_packed_prompts_attend_within_their_slots(cost: CostModel) -> None:
    """Two rows of two slots of 64 tokens each: 256 tokens in the products, four squares of 64 in attention."""
    packing = Packing(128, 64, (PackedPrompt(0, 0), PackedPrompt(0, 64), PackedPrompt(0, 100), PackedPrompt(1, 0)))
    batch = Batch(prefill=(row(60), row(30), row(20), row(64)), packing=packing)
    layer = rest(256) + 4 * prefill_attention(64)
    expected = LAYERS * layer + around(256, 4) + overhead(0, 4)
    assert cost.batch_seconds(batch) == pytest.approx(expected, rel=1e-9)


def kinked(profile: Profile, at: int) -> Profile:
    """Products that take equally long up to `at` tokens, and 0.2 ms for each token above."""
    others = tuple(row for row in profile.measurements if row.op != "rest")
    points = {1: 1e-3, at: 1e-3, 2 * at: 1e-3 + at * 2e-4}
    kink = tuple(Measurement(op="rest", num_tokens=tokens, seconds=seconds) for tokens, seconds in points.items())
    return replace(profile, measurements=others + kink)


@pytest.mark.parametrize("count", [1, 4, 9])
@pytest.mark.parametrize("rows", [0, 30])
def test_an_expected_pass_is_the_mean_over_the_draws_of_its_prompts(count: int, rows: int, profile: Profile) -> None:
    cost = CostModel(kinked(profile, 200 * count + rows))
    law = LengthLaw(np.arange(10, 400, 10), np.ones(39) / 39)
    cycle = Cycle(
        num_prefill=np.array([float(count)]),
        num_decode=np.array([float(rows)]),
        context_tokens=np.array([100.0 * rows]),
        prompt_law=law,
        kv_tokens=1.0,
        kv_tokens_std=0.0,
        num_seqs=1.0,
    )
    rng = np.random.default_rng(0)
    drawn = [
        cost.batch_seconds(Batch(prefill=tuple(map(row, prompts)), decode=decoding([100] * rows)))
        for prompts in rng.choice(law.tokens, (1500, count)).tolist()
    ]
    error = np.std(drawn) / len(drawn) ** 0.5
    assert cost.seconds(cycle)[0, 0] == pytest.approx(np.mean(drawn), abs=4 * error + 0.02 * np.mean(drawn))
