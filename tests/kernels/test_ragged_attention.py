"""Attention of a flat batch equals an explicit softmax for each span, over its new tokens and its cached ones."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exeplan.kernels.attention import ragged_attention as module
from exeplan.kernels.attention.online_softmax import DistanceBias
from exeplan.kernels.attention.plain import full_attention, prefill_attention
from exeplan.kernels.attention.ragged_attention import ragged_attention, ragged_attention_reference
from exeplan.kernels.attention.spans import Span, Spans
from exeplan.kernels.tuning import Config

from .conftest import DEVICE, needs_triton
from .paged_cache import TOLERANCES, poisoned_cache

SMALL = Config(rows=16, columns=16)


def batch_of(tokens, heads, kv_heads, head_dim, device, dtype=torch.float32):
    """Queries, keys and values as views of one product."""
    qkv_NMD = torch.randn(tokens, heads + 2 * kv_heads, head_dim, device=device).to(dtype)
    return qkv_NMD.split((heads, kv_heads, kv_heads), 1)


def check(q, k, v, spans, *, config=SMALL, **options):
    spans = Spans(spans, q.device)
    found = ragged_attention(q, k, v, spans, config=config, **options)
    expected = ragged_attention_reference(q, k, v, spans, **options)
    assert not expected.isnan().any(), "the reference read what no sequence holds"
    torch.testing.assert_close(found, expected, **TOLERANCES[q.dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("head_dim", "heads", "kv_heads"), [(64, 2, 2), (80, 3, 1), (96, 2, 1), (128, 4, 2), (256, 8, 1)]
)
def test_equals_the_reference_after_a_cached_prefix(head_dim, heads, kv_heads, dtype, device):
    cache = poisoned_cache([0, 17], kv_heads, head_dim, dtype, device)
    q, k, v = batch_of(19, heads, kv_heads, head_dim, device, dtype)
    check(q, k, v, [Span(1), Span(18, cached=(0, 17))], cache=cache, scale=head_dim**-0.5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (32, 16), (16, 32)])
def test_spans_do_not_attend_to_each_other(rows, columns, causal, device):
    q, k, v = batch_of(50, 2, 1, 16, device)
    config = Config(rows=rows, columns=columns)
    check(q, k, v, [Span(33), Span(0), Span(1), Span(16)], scale=1.0, causal=causal, config=config)


@pytest.mark.parametrize("window", [1, 5, 16, 20, 1000])
def test_a_window_hides_what_is_too_far_back_in_batch_and_cache(window, device):
    cache = poisoned_cache([0, 21], 1, 16, torch.float32, device)
    q, k, v = batch_of(55, 1, 1, 16, device)
    check(q * 5, k, v, [Span(35), Span(20, cached=(0, 21))], cache=cache, scale=1.0, window=window)


def test_padding_is_computed_and_never_attended_to(device):
    q, k, v = batch_of(40, 2, 2, 16, device)
    k[5:20], v[5:20] = torch.nan, torch.nan
    for causal in (True, False):
        check(q, k, v, [Span(20, num_keys=5), Span(20)], scale=1.0, causal=causal)


@pytest.mark.parametrize("causal", [True, False])
def test_a_bias_depends_on_the_distance_of_key_and_query_in_batch_and_cache(causal, device):
    cache = poisoned_cache([0, 20], 2, 16, torch.float32, device)
    q, k, v = batch_of(38, 4, 2, 16, device)
    bias = DistanceBias(torch.randn(4, 15, device=device) * 3, 9)
    check(q, k, v, [Span(20), Span(18, cached=(3, 20))], cache=cache, scale=1.0, causal=causal, bias=bias)


def test_a_decoders_rows_attend_to_their_cached_prompts_alone(device):
    cache = poisoned_cache([18, 3], 2, 16, torch.float32, device)
    q, k, v = batch_of(21, 2, 2, 16, device)
    k, v = torch.full_like(k, torch.nan), torch.full_like(v, torch.nan)
    spans = [Span(3, num_keys=0, cached=(0, 18)), Span(18, num_keys=0, cached=(0, 3))]
    check(q, k, v, spans, cache=cache, scale=1.0, causal=False)


def test_a_query_without_keys_gets_zeros(device):
    q, k, v = batch_of(2, 1, 1, 16, device)
    found = ragged_attention(q, k, v, Spans([Span(2, num_keys=0)], device), scale=1.0, config=SMALL)
    assert found.eq(0).all()


@needs_triton
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    spans=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2)]),
    window=st.none() | st.integers(1, 25),
    biased=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCES)),
)
def test_equals_the_reference_on_any_spans(spans, heads, window, biased, dtype):
    cache = poisoned_cache([cached for _, cached in spans], heads[1], 24, dtype, DEVICE)
    q, k, v = batch_of(sum(new for new, _ in spans), *heads, 24, DEVICE, dtype)
    bias = DistanceBias(torch.randn(heads[0], 12, device=DEVICE), 11) if biased else None
    spans = [Span(new, cached=(0, cached)) for new, cached in spans]
    check(q, k, v, spans, cache=cache, scale=0.5, window=window, bias=bias)


def test_the_reference_is_the_attention_of_the_cpu():
    torch.manual_seed(0)
    q, k, v = batch_of(30, 4, 2, 16, torch.device("cpu"))
    spans = Spans([Span(30)], q.device)
    for window in (None, 4):
        expected = prefill_attention(q[None], k[None], v[None], scale=0.3, window=window)[0]
        torch.testing.assert_close(ragged_attention_reference(q, k, v, spans, scale=0.3, window=window), expected)
    bias_HX = torch.randn(4, 59)
    expected = full_attention(q[None], k[None], v[None], scale=0.3, bias_HX=bias_HX)[0]
    found = ragged_attention_reference(q, k, v, spans, scale=0.3, causal=False, bias=DistanceBias(bias_HX, 29))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 1)])
def test_the_librarys_attention_is_the_same(heads, kv_heads, dtype):
    q, k, v = batch_of(40, heads, kv_heads, 64, DEVICE, dtype)
    check(q, k, v, [Span(17), Span(1), Span(22)], scale=0.2, config=Config(library=True))


def test_the_library_is_a_candidate_for_whole_prompts_in_16_bits_only(monkeypatch):
    offered = []
    monkeypatch.setattr(module, "best_config", lambda name, key, configs, *_: offered.append(configs) or configs[-1])

    def is_offered(spans, dtype=torch.bfloat16, **options):
        tokens = sum(span.num_queries for span in spans)
        q, k, v = batch_of(tokens, 1, 1, 16, torch.device("cpu"), dtype)
        monkeypatch.setattr(module, "_prefill", Launched())
        ragged_attention(q, k, v, Spans(spans, q.device), scale=1.0, **options)
        return offered[-1][-1].library

    assert is_offered([Span(600), Span(500)])
    assert not is_offered([Span(600), Span(100)])
    assert not is_offered([Span(600)], dtype=torch.float32)
    assert not is_offered([Span(600, num_keys=599)])
    assert not is_offered([Span(600)], window=9)
    assert not is_offered([Span(600)], causal=False)


class Launched:
    """A kernel that does nothing."""

    def __getitem__(self, grid):
        return lambda *arguments, **constants: None


def test_tiles_cover_every_query_once_and_those_with_most_keys_come_first():
    spans = Spans([Span(33), Span(0), Span(5, cached=(0, 100))], torch.device("cpu"))
    assert spans.tiles(16).tolist() == [[2, 0], [0, 32], [0, 16], [0, 0]]
