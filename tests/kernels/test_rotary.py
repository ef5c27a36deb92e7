"""The rotation in place equals its reference, and touches queries and keys only."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exeplan.kernels.rotary import rotate, rotate_reference

from .conftest import DEVICE, needs_triton
from .paged_cache import TOLERANCES


def angles_of(tokens, dim, dtype):
    angle_ND = torch.rand(tokens, dim // 2, device=DEVICE) * 6
    cos_ND, sin_ND = angle_ND.cos(), angle_ND.sin()
    return torch.cat((cos_ND, cos_ND), -1)[:, None].to(dtype), torch.cat((-sin_ND, sin_ND), -1)[:, None].to(dtype)


def check(tokens, heads, head_dim, dim, dtype):
    qkv_NMD = torch.randn(tokens, heads + 2, head_dim, device=DEVICE).to(dtype)
    expected, before = qkv_NMD.clone(), qkv_NMD.clone()
    cos, sin = angles_of(tokens, dim, dtype)
    rotate(qkv_NMD[:, :heads], cos, sin)
    rotate_reference(expected[:, :heads], cos, sin)
    torch.testing.assert_close(qkv_NMD, expected, **TOLERANCES[dtype])
    assert torch.equal(qkv_NMD[:, heads:], before[:, heads:])
    assert torch.equal(qkv_NMD[..., dim:], before[..., dim:])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("head_dim", "dim"), [(64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (80, 32)])
def test_equals_the_reference(head_dim, dim, dtype, device):
    check(2, 3, head_dim, dim, dtype)


@needs_triton
@settings(max_examples=6, deadline=None, derandomize=True)
@given(tokens=st.integers(0, 3), heads=st.integers(1, 5), dims=st.sampled_from([(8, 8), (24, 24), (24, 12), (6, 2)]))
def test_equals_the_reference_on_any_shape(tokens, heads, dims):
    check(tokens, heads, *dims, torch.float32)
