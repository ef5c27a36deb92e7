"""Products of weights of 8 and 4 bits equal those of the weights that they mean."""

import pytest
import torch

from exeplan.kernels.products.int4_linear import GROUP_SIZES, Int4Linear, fits_int4, multiplies_int4
from exeplan.kernels.products.int8_linear import Int8Linear, digits, multiplies_int8

CPU = torch.device("cpu")
in_8_bits = pytest.mark.skipif(not multiplies_int8(CPU), reason="a CPU without products of 8 bits")
in_4_bits = pytest.mark.skipif(not multiplies_int4(CPU), reason="a CPU without this product of 4 bits")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integers(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(1))


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("count", [1, 2, 3])
def test_digits_add_up_to_the_row_to_within_half_a_step_of_the_last(count):
    x = random(5, 40) * torch.logspace(-4, 4, 5)[:, None]
    x[2] = 0.0
    found, scale = digits(x, count)
    parts = found.view(count, 5, 40).double()
    total = sum(part / 254**number for number, part in enumerate(parts)) * scale
    assert found.dtype == torch.int8
    assert ((total - x).abs() <= 0.5001 * scale / 254 ** (count - 1) + 1e-6 * x.abs()).all()


@in_8_bits
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("rows", [0, 1, 5, 70])
@pytest.mark.parametrize("offset", [False, True])
def test_products_of_8_bits(dtype, limit, rows, offset):
    value, scale, bias = integers(-128, 128, 48, 80), random(48).abs(), random(48)
    shift = random(48, seed=2) * scale if offset else None
    layer = Int8Linear(value.to(torch.int8), scale, bias, dtype=dtype, offset_O=shift)
    x = (random(rows, 80) * 10).to(dtype)
    weight = value * scale[:, None] + (0.0 if shift is None else shift[:, None])
    expected = x.float() @ weight.t() + bias
    found = layer(x)
    assert (found.dtype, found.shape) == (dtype, expected.shape)
    assert not rows or error(found, expected) < limit


@in_8_bits
def test_a_row_that_is_not_finite_stays_so():
    layer = Int8Linear(integers(-128, 128, 16, 32).to(torch.int8), torch.ones(16), dtype=torch.float32)
    x = random(3, 32)
    x[0, 3], x[1, 4] = float("nan"), float("inf")
    assert layer(x).isfinite().all(1).tolist() == [False, False, True]


@in_4_bits
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("rows", [0, 1, 7, 200])
@pytest.mark.parametrize("ordered", [False, True])
def test_products_of_4_bits(group_size, rows, ordered):
    """By torch's product, and by blocks of the weight for many rows."""
    inputs = 2 * group_size
    value, scale = integers(0, 16, 192, inputs), random(192, 2).abs() + 0.1
    zero, bias, x = integers(0, 17, 192, 2), random(192).bfloat16(), random(rows, inputs).bfloat16()
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(3)) if ordered else None
    layer = Int4Linear(value.to(torch.uint8), scale, zero, bias, order_I=order)
    weight = ((value.view(192, 2, -1) - zero[..., None]) * scale[..., None]).flatten(1)
    taken = x.float() if order is None else x.float()[:, order]
    assert not rows or error(layer(x), taken @ weight.t() + bias.float()) < 8e-3
    assert layer(x).shape == (rows, 192)
    assert layer.num_bytes == 192 * inputs // 2 + 192 * 2 * 4 + (inputs * 8 if ordered else 0)


def test_what_does_not_fit_blocks_is_known():
    assert fits_int4(192, 256, 128)
    assert not fits_int4(96, 256, 128)
    assert not fits_int4(192, 96, 64)
    assert not fits_int4(192, 96, 48)
