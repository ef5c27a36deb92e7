"""The coarse grid covers its range, fits the memory and the budget, and its batches are ragged."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exeplan.core.models.model import ModelSpec, model_spec
from exeplan.core.profile import Device
from exeplan.profiler.measuring.points import Point, Range, Work, choose_range, first_rows, order, ragged

GIB = 2**30


@pytest.fixture
def spec() -> ModelSpec:
    config = {
        "model_type": "llama",
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "vocab_size": 1000,
        "max_position_embeddings": 2048,
    }
    return model_spec(config, name="small")


@pytest.fixture
def work(spec: ModelSpec) -> Work:
    device = Device(
        name="test",
        kind="cpu",
        memory_bytes=8 * GIB,
        copy_bytes_per_second=10e9,
        flops_per_second=100e9,
        cache_bytes=32 * 2**20,
    )
    return Work(spec=spec, dtype="float32", device=device, layer_bytes=16_000_000)


def reach(work: Work, *, memory_bytes: int = 8 * GIB, pass_seconds: float = 10.0) -> Range:
    return choose_range(
        work, copies=8, max_num_seqs=64, max_context=2048, memory_bytes=memory_bytes, pass_seconds=pass_seconds
    )


def test_everything_is_covered_when_memory_and_time_allow(work: Work) -> None:
    found = reach(work)
    assert (found.max_seqs, found.max_context, found.max_prompt, found.max_prefill_seqs) == (64, 2047, 2048, 4)
    assert found.max_tokens(64) == 2047


def test_keys_and_values_fit_the_memory_that_they_are_given(work: Work) -> None:
    found = reach(work, memory_bytes=GIB)
    # 8 layers of 2 * 512 floats a token: 32 KiB.
    assert found.kv_tokens * 32 * 1024 <= GIB
    assert found.max_tokens(64) < 2047
    assert found.max_tokens(1) == 2047


def test_a_small_budget_shortens_the_longest_passes(work: Work) -> None:
    found = reach(work, pass_seconds=0.2)
    assert found.max_prompt < 2048
    points = [point for row in first_rows(found) for point in row if point.kind == "prefill"]
    assert all(work.pass_seconds(point, 8) <= 0.2 for point in points)


def test_the_first_row_measures_every_op(work: Work) -> None:
    first = first_rows(reach(work))[0]
    assert {point.kind for point in first} == {"prefill", "decode", "engine"}


def test_rows_of_the_grid_span_the_same_prompts(work: Work) -> None:
    # The cost model extends a row by its last slope, which would be wrong for quadratic attention.
    points = {point for row in first_rows(reach(work)) for point in row if point.kind == "prefill"}
    longest = {n: max(p.tokens for p in points if p.num_seqs == n) for n in {p.num_seqs for p in points}}
    assert longest == {1: 2047, 4: 2047}


def test_a_pass_visits_enough_layers_to_be_cold(work: Work) -> None:
    assert work.layers_needed(Point("decode", 1, 16), 8) == 8
    assert work.layers_needed(Point("decode", 64, 2047), 8) == 2
    assert work.layers_needed(Point("prefill", 4, 2048), 8) < 3


@given(st.integers(1, 70), st.integers(1, 3000))
def test_ragged_lengths_add_up_and_keep_the_limit(num_seqs: int, tokens: int) -> None:
    lengths = ragged(num_seqs, tokens, tokens + 5)
    assert len(lengths) == num_seqs
    assert sum(lengths) == num_seqs * tokens
    assert 1 <= min(lengths) <= max(lengths) <= tokens + 5


def test_neighbours_in_a_batch_differ() -> None:
    lengths = ragged(64, 128, 4096)
    assert all(a != b for a, b in pairwise(lengths))


def test_points_measured_least_come_first_in_an_order_that_changes() -> None:
    points = {Point("decode", n, 16): n % 2 for n in range(1, 21)}
    orders = [order(points, seed) for seed in (1, 2)]
    assert orders[0] != orders[1]
    assert all([points[p] for p in found] == sorted(points.values()) for found in orders)
