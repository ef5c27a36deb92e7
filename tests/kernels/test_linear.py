"""A packed Linear equals torch's for every number of rows, with and without bias."""

import pytest
import torch

from exeplan.kernels.products.linear import Linear


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-4), (torch.bfloat16, 2**-7)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 33, 700])
def test_equals_torch(rows, bias, dtype, close):
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 48).to(dtype), torch.randn(40, 48).to(dtype)
    offset = torch.randn(40).to(dtype) if bias else None
    expected = torch.nn.functional.linear(x, weight, offset)
    torch.testing.assert_close(Linear(weight, offset)(x), expected, rtol=close, atol=1e-4)


def test_a_row_gives_the_same_in_any_batch():
    torch.manual_seed(0)
    linear, x = Linear(torch.randn(64, 64)), torch.randn(32, 64)
    torch.testing.assert_close(linear(x)[:2], linear(x[:2]), rtol=1e-5, atol=1e-5)
