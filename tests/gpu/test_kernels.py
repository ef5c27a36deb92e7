"""Every kernel, compiled, equals its reference in float32, float16 and bfloat16, at the shapes of real models.

Ragged and random shapes are tested under the interpreter (tests/kernels), which cannot do bfloat16.
"""

import math

import pytest
import torch

from exeplan.core.batch import BLOCK_SIZE
from exeplan.kernels.attention.online_softmax import DistanceBias, PagedKV
from exeplan.kernels.attention.spans import Span, Spans
from exeplan.kernels.products.fp8_linear import Fp8Linear, multiplies_fp8
from exeplan.kernels.select import REFERENCE, kernels_for

from .conftest import DEVICE

OURS = kernels_for(DEVICE, torch.float32)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Limits on the norm of the difference over that of the reference."""
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def drawn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def close(ours: torch.Tensor, reference: torch.Tensor, limit: float) -> None:
    assert ours.isfinite().all()
    assert (ours.float() - reference.float()).norm() <= limit * reference.float().norm() + 1e-12


def cache_of(contexts: list[int], kv_heads: int, head_dim: int, dtype: torch.dtype) -> PagedKV:
    """Scattered blocks."""
    counts = [max(1, -(-context // BLOCK_SIZE)) for context in contexts]
    order, table = (
        torch.randperm(sum(counts)),
        torch.zeros(len(contexts), -(-max(counts) // 16) * 16, dtype=torch.int32),
    )
    for row, count in enumerate(counts):
        table[row, :count], order = order[:count], order[count:]
    tables = drawn(2, kv_heads * sum(counts) * BLOCK_SIZE, head_dim, dtype=torch.float32).to(dtype)
    return PagedKV(tables[0], tables[1], table.to(DEVICE), kv_heads)


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@every_dtype
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "more"),
    [
        (32, 8, 128, {}),
        (8, 8, 64, {"window": 100}),
        (8, 1, 80, {"num_parts": 7}),
        (4, 2, 256, {}),
        (12, 12, 96, {"bias": True}),
    ],
)
def test_paged_attention(dtype, heads, kv_heads, head_dim, more):
    contexts, more = [1, 16, 17, 300, 1024, 0], dict(more)
    parts = {"num_parts": count} if (count := more.pop("num_parts", None)) and DEVICE.type == "cuda" else {}
    if more.pop("bias", False):
        more["bias"] = DistanceBias(drawn(heads, 64, dtype=dtype), 63)
    cache, q = cache_of(contexts, kv_heads, head_dim, dtype), drawn(len(contexts), heads, head_dim, dtype=dtype)
    named = {"scale": head_dim**-0.5, **more}
    ours = OURS.paged_attention(q, cache, ints(contexts), **named, **parts)
    close(ours, REFERENCE.paged_attention(q, cache, ints(contexts), **named), LIMITS[dtype])


@pytest.mark.usefixtures("fp8")
def test_paged_attention_over_keys_in_8_bits():
    contexts = [5, 64, 700]
    cache = cache_of(contexts, 8, 128, torch.float8_e4m3fn)
    arguments = (drawn(3, 32, 128, dtype=torch.bfloat16), cache, ints(contexts))
    close(OURS.paged_attention(*arguments, scale=0.1), REFERENCE.paged_attention(*arguments, scale=0.1), 1e-2)


@every_dtype
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (8, 8, 64), (6, 2, 80), (4, 4, 256)])
def test_ragged_attention(dtype, causal, heads, kv_heads, head_dim):
    spans = Spans([Span(n) for n in (1, 130, 37, 16)], DEVICE)
    q, k, v = (drawn(spans.num_tokens, n, head_dim, dtype=dtype) for n in (heads, kv_heads, kv_heads))
    named = {"scale": head_dim**-0.5, "causal": causal}
    close(
        OURS.ragged_attention(q, k, v, spans, **named),
        REFERENCE.ragged_attention(q, k, v, spans, **named),
        LIMITS[dtype],
    )


@every_dtype
def test_mixed_attention_after_cached_tokens(dtype):
    contexts, cached = [33, 500], 210
    spans = Spans([Span(90, cached=(0, cached)), Span(20)], DEVICE)
    q, k, v = (drawn(spans.num_tokens + 2, n, 128, dtype=dtype) for n in (32, 8, 8))
    everything = cache_of([cached, 1, *contexts], 8, 128, dtype)
    span_cache = everything._replace(block_table=everything.block_table[:2])
    cache = everything._replace(block_table=everything.block_table[2:])
    arguments = (q, k, v, spans, span_cache, cache, ints(contexts))
    close(
        OURS.mixed_attention(*arguments, scale=0.1),
        REFERENCE.mixed_attention(*arguments, scale=0.1),
        LIMITS[dtype],
    )


@every_dtype
def test_norms(dtype):
    x, residual = (drawn(70, 4096, dtype=dtype) for _ in range(2))
    weight, bias = drawn(4096, dtype=dtype), drawn(4096, dtype=dtype)
    close(OURS.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5), LIMITS[dtype])
    close(OURS.layer_norm(x, weight, bias, 1e-5), REFERENCE.layer_norm(x, weight, bias, 1e-5), LIMITS[dtype])
    for name, more in (("add_rms_norm", (weight,)), ("add_layer_norm", (weight, bias))):
        sums = residual.clone(), residual.clone()
        ours, expected = (getattr(k, name)(x, r, *more, 1e-5) for k, r in zip((OURS, REFERENCE), sums, strict=True))
        close(ours, expected, LIMITS[dtype])
        close(*sums, LIMITS[dtype])


@every_dtype
def test_rotary_and_activations(dtype):
    heads, angle = drawn(50, 40, 128, dtype=dtype), torch.rand(50, 1, 128, device=DEVICE)
    turned = heads.clone(), heads.clone()
    for kernels, x in zip((OURS, REFERENCE), turned, strict=True):
        kernels.rotate(x, angle.cos().to(dtype), angle.sin().to(dtype))
    close(*turned, LIMITS[dtype])
    x = drawn(50, 2 * 1000, dtype=dtype)
    close(OURS.gated_activation(x, "silu"), REFERENCE.gated_activation(x, "silu"), LIMITS[dtype])
    close(OURS.plain_activation(x, "gelu"), REFERENCE.plain_activation(x, "gelu"), LIMITS[dtype])


@every_dtype
def test_stores_of_one_layer_and_of_several(dtype):
    kv, slots = drawn(2, 40, 16, 128, dtype=dtype), torch.randperm(64, device=DEVICE)[:40].int()
    slots[3] = -1
    tables = torch.zeros(3, 2, 8 * 64, 128, dtype=dtype, device=DEVICE)
    expected = tables.clone()
    for kernels, into in ((OURS, tables), (REFERENCE, expected)):
        kernels.store_slots(kv[0], slots, into[0])
        kernels.scatter_slots(kv, slots, into[1:])
    assert torch.equal(tables, expected)


@pytest.mark.usefixtures("fp8")
def test_a_store_in_8_bits_saturates():
    kv = 300 * drawn(8, 4, 64, dtype=torch.bfloat16)
    tables = [torch.zeros(2, 2 * 16, 64, dtype=torch.float8_e4m3fn, device=DEVICE) for _ in range(2)]
    for kernels, table in zip((OURS, REFERENCE), tables, strict=True):
        kernels.store_slots(kv, torch.arange(8, device=DEVICE).int(), table)
    assert torch.equal(*(table.view(torch.uint8) for table in tables))
    assert tables[0].float().abs().max() == 448


def test_sampling_takes_the_tokens_of_the_reference():
    logits = 4 * drawn(40, 32_000, dtype=torch.float32)
    logits[3, 7], logits[5] = math.nan, -math.inf
    token, sound = OURS.most_likely(logits)
    expected, expected_sound = REFERENCE.most_likely(logits)
    assert torch.equal(sound, expected_sound)
    assert torch.equal(token[sound], expected[sound])
    rows = torch.arange(40, device=DEVICE)
    arguments = (
        torch.where(rows % 5 == 0, 0.0, 0.9),
        torch.where(rows % 3 == 0, 50, 0).int(),
        torch.where(rows % 4 == 0, 0.1, 0.0),
        torch.where(rows % 7 == 0, math.log(0.05), -math.inf),
        rows * 7919,
    )
    token, sound = OURS.draw(logits, *arguments)
    expected, _ = REFERENCE.draw(logits, *arguments)
    assert torch.equal(sound, expected_sound)
    # Scores that nearly tie may be swapped.
    assert (token[sound] == expected[sound]).float().mean() > 0.95


@pytest.mark.usefixtures("fp8")
def test_rows_in_8_bits_and_their_products():
    x, weight = drawn(33, 512, dtype=torch.bfloat16), drawn(256, 512, dtype=torch.bfloat16)
    rows, scale = OURS.quantize_rows(x)
    expected, expected_scale = REFERENCE.quantize_rows(x)
    torch.testing.assert_close(scale, expected_scale)
    assert (rows.view(torch.uint8) == expected.view(torch.uint8)).float().mean() > 0.99
    layer = Fp8Linear(weight, quantize_rows=OURS.quantize_rows)
    assert layer.in_8_bits == multiplies_fp8(DEVICE)
    close(layer(x), x.float() @ layer.dequantized(torch.float32).T, 5e-2)
