"""Attention of a shard comes from kernels by heads: as measured, scaled by work, or fitted to a few lengths."""

import numpy as np
import pytest

from exeplan.core.models.model import ModelSpec, model_spec
from exeplan.profiler.importing.attention import Kernels, attention_rows, shard_shape, within_windows

LAUNCH, A_BYTE = 10e-6, 1e-12
LENGTHS = tuple(2**i for i in range(4, 12))


def model(*, heads: int, kv_heads: int, context: int = 2048, **more: object) -> ModelSpec:
    config = {
        "model_type": "llama",
        "hidden_size": 128 * heads,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": 1000,
        "max_position_embeddings": context,
        **more,
    }
    return model_spec(config, name="toy")


def decode_seconds(kv_heads: int, num_seqs: int, context: int) -> float:
    return LAUNCH + A_BYTE * 4 * 128 * kv_heads * num_seqs * context


def decode(
    *shapes: tuple[int, int], seqs: tuple[int, ...] = (1, 2, 4, 8, 16), lengths: tuple[int, ...] = LENGTHS
) -> Kernels:
    """A device that reads keys and values at a constant rate."""
    points = [(q, k, n, x) for q, k in shapes for n in seqs for x in lengths]
    heads = np.array([(q, k, 128) for q, k, _, _ in points])
    num_seqs, tokens = (np.array([point[i] for point in points], dtype=float) for i in (2, 3))
    seconds = np.array([decode_seconds(k, n, x) for _, k, n, x in points])
    return Kernels("decode", heads, num_seqs, tokens, np.zeros(len(points)), seconds, notes=())


def test_a_shard_has_its_share_of_heads_and_at_least_one_of_keys() -> None:
    assert shard_shape(model(heads=32, kv_heads=8), 4) == (8, 2, 128)
    assert shard_shape(model(heads=64, kv_heads=4), 8) == (8, 1, 128)


def test_rows_of_the_shard_s_own_heads_are_taken_as_measured() -> None:
    part = attention_rows([decode((8, 2), (4, 1))], model(heads=8, kv_heads=2), (1, 2))
    assert part.notes == ()
    assert len(part.rows) == 2 * 5 * len(LENGTHS)
    assert {row.repeats for row in part.rows} == {1}
    (row,) = [r for r in part.rows if (r.tensor_parallel_size, r.num_seqs, r.context_tokens) == (2, 8, 8 * 1024)]
    assert row.seconds == pytest.approx(decode_seconds(1, 8, 1024), rel=1e-5)


def test_other_heads_are_scaled_by_their_bytes_and_said() -> None:
    """Five times the heads at n sequences read what one time the heads reads at 5n."""
    part = attention_rows([decode((2, 2), (4, 1))], model(heads=10, kv_heads=10), (1,))
    assert part.notes == (
        "decode attention of 10/10/128 (query heads/key-value heads/dimension) is not in the tables: scaled by bytes "
        "of keys and values from 2/2/128 (query heads/key-value heads/dimension)",
    )
    assert {row.repeats for row in part.rows} == {0}
    assert {row.num_seqs for row in part.rows} == {1, 2}  # 4 sequences would need 20 of the table's, which ends at 16.
    for row in part.rows:
        expected = decode_seconds(10, row.num_seqs, row.context_tokens // row.num_seqs)
        assert row.seconds == pytest.approx(expected, rel=1e-5)


def test_contexts_beyond_the_model_s_are_left_out() -> None:
    part = attention_rows([decode((8, 2))], model(heads=8, kv_heads=2, context=500), (1,))
    assert max(row.context_tokens // row.num_seqs for row in part.rows) == 256


def test_too_few_lengths_are_fitted() -> None:
    sparse = decode((8, 2), seqs=(1, 4, 16, 30), lengths=(480, 512, 2040))
    part = attention_rows([sparse], model(heads=8, kv_heads=2), (1, 2))
    assert part.notes == (
        "decode attention: 12 rows are too few lengths for a grid, so a fit stands for them; it misses them by 0.0% "
        "(median), 0.0% at most",
    )
    assert {row.repeats for row in part.rows} == {0}
    assert max(row.num_seqs for row in part.rows) == 16
    for row in part.rows:
        kv_heads = 2 // row.tensor_parallel_size
        expected = decode_seconds(kv_heads, row.num_seqs, row.context_tokens // row.num_seqs)
        assert row.seconds == pytest.approx(expected, rel=1e-4)


def test_prefills_on_cached_tokens_serve_the_fit_only() -> None:
    new, cached = np.array([512.0, 1024.0, 1024.0, 2000.0]), np.array([0.0, 0.0, 512.0, 0.0])
    work = 8 * 128 * 1e-15
    seconds = LAUNCH + work * (40 * new + new**2 + 2 * new * cached)
    kernels = Kernels("prefill", np.array([(8, 2, 128)] * 4), np.ones(4), new, cached, seconds, notes=())
    part = attention_rows([kernels], model(heads=8, kv_heads=2), (1,))
    longest = max(part.rows, key=lambda row: row.num_tokens)
    assert (longest.num_seqs, longest.num_tokens) == (1, 2000)
    assert longest.seconds == pytest.approx(seconds[-1], rel=1e-3)


def test_decode_beyond_a_window_takes_what_it_takes_over_the_window() -> None:
    """One of two layers has a window: rows are the mean of both."""
    kinds = ["sliding_attention", "full_attention"]
    spec = model(heads=8, kv_heads=2, sliding_window=200, layer_types=kinds)
    whole = attention_rows([decode((8, 2))], spec, (1,))
    part = within_windows(whole, spec)
    assert part.notes == (
        "attention: 1 of 2 layers attend to the last 200 tokens; theirs is taken from the tables' attention to all "
        "tokens, over as many",
    )
    assert len(part.rows) == len(whole.rows)
    for row in part.rows:
        context = row.context_tokens // row.num_seqs
        seconds = [decode_seconds(2, row.num_seqs, tokens) for tokens in (min(context, 200), context)]
        assert row.seconds == pytest.approx(sum(seconds) / 2, rel=1e-5)
        assert row.repeats == (context <= 200)


def test_a_prompt_beyond_a_window_takes_what_shorter_ones_of_as_many_tokens_and_pairs_take() -> None:
    """1024 tokens that attend to 512 each at most are 393,216 pairs, as those of 1024 / 768 prompts of 768 tokens."""
    points = [(n, x) for n in (1, 2) for x in (64, 128, 256, 512, 768, 1024)]
    num_seqs, tokens = (np.array([point[i] for point in points], dtype=float) for i in (0, 1))
    seconds = num_seqs * (40e-9 * tokens + 1e-9 * tokens**2)
    shapes = np.array([(8, 2, 128)] * len(points))
    kernels = Kernels("prefill", shapes, num_seqs, tokens, np.zeros(len(points)), seconds, notes=())
    spec = model(heads=8, kv_heads=2, model_type="mistral", sliding_window=512)
    part = within_windows(attention_rows([kernels], spec, (1,)), spec)
    found = {(row.num_seqs, row.num_tokens // row.num_seqs): row.seconds for row in part.rows}
    for n in (1, 2):
        windowed = n * (40e-9 * 1024 + 2e-9 * (512 * 1024 - 512**2 / 2))
        assert found[n, 1024] == pytest.approx(windowed, rel=1e-5)
        assert found[n, 512] == pytest.approx(n * (40e-9 * 512 + 1e-9 * 512**2), rel=1e-5)


def test_attention_without_windows_stays_as_it_is() -> None:
    spec = model(heads=8, kv_heads=2)
    whole = attention_rows([decode((8, 2))], spec, (1,))
    assert within_windows(whole, spec) is whole
