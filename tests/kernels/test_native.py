"""The CPU's compiled kernels equal torch's operations, whatever the rows, the shapes and the processor's vectors."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name the whole field uses

from exeplan.kernels import native
from exeplan.kernels.linear import Linear

pytestmark = pytest.mark.skipif(not native.width(), reason="not built here, or a processor without AVX2")


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


def test_several_threads_take_torch(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    linear, x = Linear(torch.randn(40, 48)), torch.randn(5, 48)
    assert linear.weight.is_mkldnn
    torch.testing.assert_close(linear(x), F.linear(x, linear.dense()), rtol=1e-5, atol=1e-5)
