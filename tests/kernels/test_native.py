"""The CPU's compiled kernels equal torch's operations, whatever the rows, the shapes and the processor's vectors."""

import itertools
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name the whole field uses
from hypothesis import given
from hypothesis import strategies as st

from exeplan.kernels import native
from exeplan.kernels.activation import gated_activation_compiled, gated_activation_reference
from exeplan.kernels.norm import rms_norm_compiled, rms_norm_reference
from exeplan.kernels.products.int8_linear import digits
from exeplan.kernels.products.int_linear import IntLinear
from exeplan.kernels.products.linear import Linear

pytestmark = pytest.mark.skipif(not native.width(), reason="not built here, or a processor without AVX2")
WAYS = native.ways_of_halves()
EDGES = [0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3.4e38, float("inf"), float("-inf"), float("nan")]
"""Ties, and what has no finite bfloat16."""


@pytest.fixture(params=[8, 16])
def width(request, monkeypatch):
    """Floats of a vector: AVX2's and AVX-512's."""
    if request.param > native.width():
        pytest.skip("a processor without AVX-512")
    torch.manual_seed(0)
    monkeypatch.setattr(native, "width", lambda: request.param)
    return request.param


@pytest.mark.parametrize("rows", [1, 5, 13, 32, 481, 1000])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 512), (100, 40), (5, 1000)])
@pytest.mark.parametrize("biased", [True, False])
def test_products_equal_torch(rows, outputs, inputs, biased, width):
    x, weight, sums = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(rows, outputs)
    bias = torch.randn(outputs) if biased else None
    packed, expected = (
        native.pack(weight),
        F.linear(x.double(), weight.double(), bias if bias is None else bias.double()),
    )
    close = {"rtol": 1e-5, "atol": 1e-3, "check_dtype": False}
    torch.testing.assert_close(native.linear(x, packed, bias, outputs), expected, **close)
    torch.testing.assert_close(native.linear(x, packed, bias, outputs, added_to=sums.clone()), expected + sums, **close)
    torch.testing.assert_close(native.unpack(packed, outputs), weight, rtol=0, atol=0)


def test_rows_may_be_apart():
    x, linear = torch.randn(7, 3, 48), Linear(torch.randn(40, 48))
    torch.testing.assert_close(linear(x[:, 1]), linear(x[:, 1].contiguous()), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 8, 64), (16, 4, 64), (4, 2, 80), (6, 1, 128), (5, 1, 16)])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("sinks", [True, False])
def test_decode_attention_equals_softmax(dtype, heads, kv_heads, dim, biased, sinks, width):
    contexts, num_slots = [1, 7, 64, 130], 256
    keys, values = (torch.randn(kv_heads * num_slots, dim).to(dtype) for _ in range(2))
    query = torch.randn(len(contexts), heads, dim)
    slots = [torch.randperm(num_slots)[:context] for context in contexts]
    biases = [torch.randn(heads, context) for context in contexts] if biased else None
    sink = torch.randn(heads) if sinks else None
    found = native.decode(
        query,
        keys,
        values,
        torch.cat(slots),
        torch.tensor(contexts),
        longest=max(contexts),
        kv_heads=kv_heads,
        scale=0.2,
        bias=torch.cat([bias.flatten() for bias in biases]) if biases else None,
        sink_H=sink,
    )
    k, v = (
        table.double().view(kv_heads, num_slots, dim).repeat_interleave(heads // kv_heads, 0)
        for table in (keys, values)
    )
    for number, slot in enumerate(slots):
        score = torch.einsum("hd,hcd->hc", query[number].double(), k[:, slot]) * 0.2
        score = score if biases is None else score + biases[number]
        shares = torch.cat([score, sink[:, None]], 1).softmax(1)[:, :-1] if sinks else score.softmax(1)
        expected = torch.einsum("hc,hcd->hd", shares, v[:, slot]).float()
        torch.testing.assert_close(found[number], expected, rtol=1e-4, atol=1e-5)


def test_without_threads_to_share_torch_multiplies(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(native, "_shares_threads", lambda: False)
    linear, x = Linear(torch.randn(40, 48)), torch.randn(5, 48)
    assert linear.weight.is_mkldnn
    torch.testing.assert_close(linear(x), F.linear(x, linear.dense()), rtol=1e-5, atol=1e-5)
    [remark] = native.remarks(torch.device("cpu"))
    assert (
        remark == "the compiled CPU kernels found no OpenMP library for 2 threads: torch's operations are used, slower"
    )


@pytest.mark.skipif(not native.multiplies_integers(), reason="a processor without AVX-512 VNNI")
@given(
    rows=st.integers(1, 200),
    outputs=st.integers(1, 100),
    groups=st.integers(1, 5),
    fours=st.integers(1, 20),
    bits=st.sampled_from([4, 8]),
    count=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    biased=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_products_of_integers_are_exact_for_the_digits(rows, outputs, groups, fours, bits, count, dtype, biased, seed):
    torch.manual_seed(seed)
    inputs = 4 * groups * fours - (seed % 4 if groups == 1 else 0)
    value = torch.randint(0, 2**bits, (outputs, inputs), dtype=torch.uint8)
    scale, zero = torch.rand(outputs, groups) + 0.1, torch.randint(0, 2**bits, (outputs, groups)).float()
    bias = torch.randn(outputs) if biased else None
    packed = native.pack_integers(value, scale, zero, bits)
    of_group = torch.arange(inputs) * groups // inputs
    weight = (value.double() - zero.double()[:, of_group]) * scale.double()[:, of_group]
    torch.testing.assert_close(native.unpack_integers(packed), weight.float())
    x = torch.randn(rows, inputs).to(dtype)
    digit, row_scale = digits(x, count)
    part = digit.view(count, rows, inputs).double() / 254.0 ** torch.arange(count)[:, None, None]
    expected = part.sum(0) * row_scale.double() @ weight.t() + (0 if bias is None else bias.double())
    found = native.linear_integers(x, packed, bias, digits=count)
    close = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2**-8, "atol": 1e-3}
    size = (part.sum(0).abs() * row_scale.double()) @ weight.abs().t()
    torch.testing.assert_close(found.double() / (1 + size), expected / (1 + size), **close)


@pytest.mark.skipif(not native.multiplies_integers(), reason="a processor without AVX-512 VNNI")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_integers_and_what_is_no_number_are_none(dtype):
    """Wherever in the row it is, and of that row alone."""
    value, scale = torch.randint(0, 256, (40, 70), dtype=torch.uint8), torch.rand(40, 1)
    x = torch.randn(5, 70).to(dtype)
    x[0, 3], x[2, 69], x[4, 17] = math.nan, math.nan, math.inf
    found = native.linear_integers(x, native.pack_integers(value, scale, torch.full((40, 1), 128.0), 8), None, digits=2)
    assert found.isnan().all(1).tolist()[:4] == [True, False, True, False]
    assert found.isfinite().all(1).tolist() == [False, True, False, True, False]


@pytest.mark.skipif(native.TILES not in native.ways_of_integers(), reason="a processor without AMX")
@given(
    rows=st.integers(1, 200),
    outputs=st.integers(1, 100),
    groups=st.integers(1, 4),
    wide=st.integers(1, 3),
    bits=st.sampled_from([4, 8]),
    count=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_products_of_integers_in_tiles_have_the_same_bits(rows, outputs, groups, wide, bits, count, dtype):
    value = torch.randint(0, 2**bits, (outputs, 64 * groups * wide), dtype=torch.uint8)
    scale, zero = torch.rand(outputs, groups), torch.randint(0, 2**bits, (outputs, groups)).float()
    packed, x = native.pack_integers(value, scale, zero, bits), torch.randn(rows, value.shape[1]).to(dtype)
    assert native.fits_tiles(value.shape[1], groups)
    found = [native.linear_integers(x, packed, None, digits=count, way=way) for way in native.ways_of_integers()]
    assert torch.equal(*found)


@pytest.mark.parametrize("way", WAYS)
@given(rows=st.integers(1, 100), outputs=st.integers(1, 100), inputs=st.integers(1, 200), biased=st.booleans())
def test_products_of_bfloat16_equal_torch(way, rows, outputs, inputs, biased):
    x, weight = torch.randn(rows, inputs).bfloat16(), torch.randn(outputs, inputs).bfloat16()
    bias = torch.randn(outputs) if biased else None
    packed = native.pack_halves(weight)
    assert torch.equal(native.unpack_halves(packed, outputs, inputs), weight)
    expected = F.linear(x.double(), weight.double(), bias if bias is None else bias.double())
    found = native.linear_halves(x, packed, bias, outputs, way=way)
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-3 * inputs**0.5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(481, 33, 64), (1000, 40, 1088)])
def test_many_rows_of_bfloat16_equal_torch(way, rows, outputs, inputs, width):
    x, weight = torch.randn(rows, 2 * inputs).bfloat16()[:, ::2], torch.randn(outputs, inputs).bfloat16()
    found = native.linear_halves(x, native.pack_halves(weight), None, outputs, way=way)
    torch.testing.assert_close(found.double(), x.double() @ weight.double().t(), rtol=2**-8, atol=1e-3 * inputs**0.5)


@pytest.mark.parametrize("way", WAYS)
def test_sums_are_rounded_to_the_nearest_bfloat16_of_two_to_the_even_one(way, width):
    sums = torch.cat([torch.randn(60) * 10.0 ** torch.randint(-30, 30, (60,)), torch.tensor(EDGES)])
    weight = native.pack_halves(torch.zeros(len(sums), 32, dtype=torch.bfloat16))
    found = native.linear_halves(torch.zeros(3, 32, dtype=torch.bfloat16), weight, sums, len(sums), way=way)
    torch.testing.assert_close(found, sums.bfloat16().expand(3, -1), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("seconds", "chosen"), [((3, 2, 1), "c"), ((1, 2, 1.5), "a"), ((1, 1.2, 1.05), "c")])
def test_the_way_of_the_shortest_turn_is_taken_the_later_one_where_it_takes_about_as_long(seconds, chosen, monkeypatch):
    now, slow = [0.0], itertools.cycle([5.0, 1.0, 3.0, 1.5, 1.0, 9.0, 1.0])
    monkeypatch.setattr(native.time, "thread_time", lambda: now[0])

    def product(least):
        now[0] += least * next(slow)

    products = {name: partial(product, least) for name, least in zip("abc", seconds, strict=True)}
    assert native._fastest(products) == chosen


@pytest.mark.parametrize(("rows", "size"), [(5, 1024), (3, 7), (64, 130), (40, 1000)])
@pytest.mark.parametrize("in_place", [False, True])
def test_norms_are_torchs_within_rounding(rows, size, in_place, width):
    x, weight = torch.randn(rows, size + 24)[:, :size], torch.randn(size)
    wanted = rms_norm_reference(x, weight, 1e-6)
    assert native.computes(x)
    found = rms_norm_compiled(x, weight, 1e-6, out=x if in_place else None)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_heads_of_rows_are_normed_in_place(width):
    qkv_NMD, weight = torch.randn(6, 5, 64), torch.randn(64)
    wanted = qkv_NMD.clone()
    wanted[:, 1:4] = rms_norm_reference(qkv_NMD[:, 1:4], weight, 1e-6)
    rms_norm_compiled(qkv_NMD[:, 1:4], weight, 1e-6, out=qkv_NMD[:, 1:4])
    torch.testing.assert_close(qkv_NMD, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("rows", "size"), [(5, 2048), (3, 14), (40, 1000)])
def test_gated_activations_are_torchs_within_rounding(rows, size, width):
    x = 20 * torch.randn(rows, size + 24)[:, :size]
    wanted = gated_activation_reference(x, "silu")
    torch.testing.assert_close(gated_activation_compiled(x, "silu"), wanted, rtol=1e-5, atol=1e-6)


def test_what_is_no_number_stays_none(width):
    x = torch.tensor([[1.0, math.nan, math.inf, 200.0, -200.0] + [1.0] * 5])
    wanted, ones = gated_activation_reference(x, "silu"), torch.ones(10)
    torch.testing.assert_close(gated_activation_compiled(x, "silu"), wanted, equal_nan=True)
    assert rms_norm_compiled(x, ones, 1e-6).isnan().any()


@pytest.mark.skipif(not native._shares_threads(), reason="no OpenMP library in the process")
def test_threads_change_no_bit_of_norms_and_activations(threads):
    x, weight = torch.randn(100, 1024), torch.randn(1024)
    assert torch.equal(*threads(lambda: rms_norm_compiled(x, weight, 1e-6)))
    assert torch.equal(*threads(lambda: gated_activation_compiled(x, "silu")))


@pytest.mark.parametrize(
    ("said", "taken"),
    [
        (["b,a,b", "a,a,b"], "b"),
        (["c,a,b,c", "b,a,b"], "b"),
        (["a,a,b", "b,b"], "b"),
        (["a,a", ""], ""),
        (["", "a,a"], ""),
    ],
)
def test_processes_that_work_together_multiply_in_the_first_ones_way_where_all_have_it(said, taken, monkeypatch):
    monkeypatch.setattr(native, "_agreed", "")
    native.agree_on_halves(said)
    assert native._agreed == taken


def test_a_processor_without_products_of_bfloat16_multiplies_it_as_float32(monkeypatch):
    module = SimpleNamespace(**{name: getattr(native.module(), name) for name in ("width", "threads", "linear_halves")})
    module.pairs = module.tiles = module.integers = lambda: False
    monkeypatch.setattr(native, "module", lambda: module)
    monkeypatch.setattr(native, "_measured_for_halves", native._measured_for_halves.__wrapped__)
    assert native.description() == f"compiled, {native.width()} floats a vector, bfloat16 as float32"
    x, weight = torch.randn(5, 48).bfloat16(), torch.randn(40, 48).bfloat16()
    torch.testing.assert_close(Linear(weight)(x), F.linear(x, weight), rtol=2**-7, atol=1e-3)


@pytest.mark.skipif(not native._shares_threads(), reason="no OpenMP library in the process")
@pytest.mark.parametrize("rows", [50, 1000])
def test_threads_change_no_bit_of_a_product_nor_do_other_rows(rows, threads):
    x, linear = torch.randn(rows, 128), Linear(torch.randn(200, 128))
    assert torch.equal(*threads(lambda: linear(x)))
    assert torch.equal(linear(x)[7:8], linear(x[7:8]))


@pytest.mark.skipif(not native._shares_threads(), reason="no OpenMP library in the process")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", [50, 1000])
def test_threads_change_no_bit_of_a_product_of_bfloat16_nor_do_other_rows(way, rows, threads):
    x, weight = torch.randn(rows, 128).bfloat16(), native.pack_halves(torch.randn(200, 128).bfloat16())
    multiplied = partial(native.linear_halves, weight=weight, bias_O=None, outputs=200, way=way)
    assert torch.equal(*threads(lambda: multiplied(x)))
    assert torch.equal(multiplied(x)[7:8], multiplied(x[7:8]))


@pytest.mark.skipif(
    not native._shares_threads() or not native.multiplies_integers(), reason="no such products on several threads"
)
@pytest.mark.parametrize("rows", [50, 1000])
def test_threads_change_no_bit_of_a_product_of_integers_nor_do_other_rows(rows, threads):
    value, x = torch.randint(0, 256, (200, 128), dtype=torch.uint8), torch.randn(rows, 128)
    layer = IntLinear(value, torch.rand(200, 2), torch.full((200, 2), 128.0), bits=8, dtype=torch.float32)
    assert torch.equal(*threads(lambda: layer(x)))
    assert torch.equal(layer(x)[7:8], layer(x[7:8]))


@pytest.mark.skipif(not native._shares_threads(), reason="no OpenMP library in the process")
def test_threads_change_no_bit_of_decode_attention(threads):
    contexts, table = [1, 300, 17, 64], torch.randn(2, 4 * 512, 64)
    query, slots = torch.randn(4, 16, 64), torch.cat([torch.randperm(512)[:context] for context in contexts])

    def attend() -> torch.Tensor:
        sizes = {"longest": 300, "kv_heads": 4, "scale": 0.2, "bias": None, "sink_H": None}
        return native.decode(query, table[0], table[1], slots, torch.tensor(contexts), **sizes)

    assert torch.equal(*threads(attend))


@pytest.fixture
def threads():
    """What a function returns with one thread of torch and with three."""
    before = torch.get_num_threads()

    def both(compute):
        found = []
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(compute())
        return found

    yield both
    torch.set_num_threads(before)
