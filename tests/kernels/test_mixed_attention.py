"""Spans and decoded sequences in one launch get what each gets alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exeplan.kernels.attention.mixed_attention import mixed_attention, mixed_attention_reference
from exeplan.kernels.attention.online_softmax import DistanceBias
from exeplan.kernels.attention.spans import Span, Spans
from exeplan.kernels.tuning import Config

from .conftest import DEVICE, needs_triton
from .paged_cache import TOLERANCES, lengths, poisoned_cache


def check(spans, contexts, *, heads=(4, 2), head_dim=16, dtype=torch.float32, num_parts=None, **options):
    span_cache = poisoned_cache([span.cached[1] for span in spans], heads[1], head_dim, dtype, DEVICE)
    cache = poisoned_cache(contexts, heads[1], head_dim, dtype, DEVICE)
    tokens = sum(span.num_queries for span in spans) + len(contexts)
    qkv_NMD = torch.randn(tokens, heads[0] + 2 * heads[1], head_dim, device=DEVICE).to(dtype)
    q, k, v = qkv_NMD.split((heads[0], heads[1], heads[1]), 1)
    arguments = (q, k, v, Spans(spans, DEVICE), span_cache, cache, lengths(contexts, DEVICE))
    config = Config(rows=16, columns=16)
    found = mixed_attention(*arguments, scale=0.4, num_parts=num_parts, config=config, **options)
    torch.testing.assert_close(found, mixed_attention_reference(*arguments, scale=0.4, **options), **TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("num_parts", [1, 2])
def test_equals_the_reference(num_parts, dtype, device):
    check([Span(1), Span(17, cached=(0, 5))], [0, 1, 20], heads=(6, 2), dtype=dtype, num_parts=num_parts)


def test_windows_and_biases_hold_for_both(device):
    spans, contexts = [Span(18), Span(3, cached=(0, 18))], [30, 4]
    check(spans, contexts, window=6)
    check(spans, contexts, bias=DistanceBias(torch.randn(4, 9, device=device), 8))


def test_decoders_may_begin_after_their_encoded_prompts(device):
    check([Span(3, cached=(2, 9))], [12, 17], first_B=lengths([5, 16], device))
    check([], [12, 17], first_B=lengths([5, 16], device))


@pytest.mark.parametrize(("spans", "contexts"), [([], [5]), ([Span(5)], []), ([], [])])
def test_either_may_be_missing(spans, contexts, device):
    check(spans, contexts)


@needs_triton
@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    spans=st.lists(st.tuples(st.integers(1, 18), st.integers(0, 18)), min_size=1, max_size=2),
    contexts=st.lists(st.integers(0, 30), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 1), (4, 2)]),
    num_parts=st.integers(1, 3),
)
def test_equals_the_reference_on_any_batch(spans, contexts, heads, num_parts):
    check([Span(new, cached=(0, cached)) for new, cached in spans], contexts, heads=heads, num_parts=num_parts)
