"""Norms equal torch's, alone and fused with the residual sum, which equals torch's rounding exactly."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exeplan.kernels.norm import (
    add_layer_norm,
    add_layer_norm_reference,
    add_rms_norm,
    add_rms_norm_reference,
    layer_norm,
    layer_norm_reference,
    rms_norm,
    rms_norm_reference,
)

from .conftest import DEVICE, needs_triton
from .paged_cache import TOLERANCES

EPS = 1e-5


def drawn(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


@needs_triton
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    rows=st.integers(0, 4),
    size=st.sampled_from([1, 8, 48, 80, 200]),
    mean=st.sampled_from([0.0, 30.0]),
    dtype=st.sampled_from(list(TOLERANCES)),
)
def test_all_norms_equal_torchs(rows, size, mean, dtype):
    weight, bias = drawn(size, dtype=dtype), drawn(size, dtype=dtype)
    x, residual = drawn(rows, size, dtype=dtype), (drawn(rows, size) + mean).to(dtype)
    close = TOLERANCES[dtype] | ({"atol": 1e-4} if dtype == torch.float32 else {"atol": 5e-3})
    torch.testing.assert_close(rms_norm(residual, weight, EPS), rms_norm_reference(residual, weight, EPS), **close)
    for affine in ((weight, bias), (weight, None), (None, None)):
        found, expected = layer_norm(residual, *affine, EPS), layer_norm_reference(residual, *affine, EPS)
        torch.testing.assert_close(found, expected, **close)
        sums = residual.clone(), residual.clone()
        found, expected = add_layer_norm(x, sums[0], *affine, EPS), add_layer_norm_reference(x, sums[1], *affine, EPS)
        torch.testing.assert_close(found, expected, **close)
        assert torch.equal(*sums)
    sums = residual.clone(), residual.clone()
    found, expected = add_rms_norm(x, sums[0], weight, EPS), add_rms_norm_reference(x, sums[1], weight, EPS)
    torch.testing.assert_close(found, expected, **close)
    assert torch.equal(*sums)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_the_queries_of_a_product_are_normed_in_place_and_the_rest_is_unchanged(dtype, device):
    qkv_NMD, weight = drawn(3, 6, 80, dtype=dtype), drawn(80, dtype=dtype)
    expected = qkv_NMD.clone()
    rms_norm(qkv_NMD[:, :4], weight, EPS, out=qkv_NMD[:, :4])
    rms_norm_reference(expected[:, :4], weight, EPS, out=expected[:, :4])
    torch.testing.assert_close(qkv_NMD, expected, **TOLERANCES[dtype])
    assert torch.equal(qkv_NMD[:, 4:], expected[:, 4:])


def test_a_row_of_zeros_stays_one(device):
    zeros = torch.zeros(1, 8, device=device)
    assert torch.equal(rms_norm(zeros, torch.ones(8, device=device), EPS), zeros)
    assert torch.equal(layer_norm(zeros, None, None, EPS), zeros)
