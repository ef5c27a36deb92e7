"""8-bit rows keep three bits of every element that is not tiny relative to its row's largest, and never overflow."""

import pytest
import torch

from exeplan.kernels import language
from exeplan.kernels.products.fp8 import LARGEST, quantize_rows, quantize_rows_reference, saturated
from exeplan.kernels.products.fp8_linear import Fp8Linear, multiplies_fp8

CPU = torch.device("cpu")


def test_an_element_is_within_a_sixteenth():
    x_NI = torch.randn(7, 48, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 7)[:, None]
    rows_NI, scale_N1 = quantize_rows_reference(x_NI)
    assert rows_NI.dtype == torch.float8_e4m3fn
    large = x_NI.abs() > x_NI.abs().amax(1, keepdim=True) / 2**14
    error = ((rows_NI.float() * scale_N1 - x_NI) / x_NI).abs()
    assert error[large].max() <= 1 / 16
    assert torch.equal((rows_NI.float() * scale_N1).abs().amax(1), x_NI.abs().amax(1))


def test_a_row_of_zeros_stays_one():
    rows_NI, scale_N1 = quantize_rows_reference(torch.zeros(2, 16))
    assert not rows_NI.float().any()
    assert scale_N1.isfinite().all()


def test_what_is_too_large_saturates():
    found = saturated(torch.tensor([1e6, -1e6, 3.0]), torch.float8_e4m3fn).float()
    assert found.tolist() == [LARGEST, -LARGEST, 3.0]


@pytest.mark.parametrize("shape", [(1, 16), (5, 80), (3, 7), (0, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernel_quantizes_as_its_reference(device, shape, dtype):
    if device.type == "cuda" and not multiplies_fp8(device):
        pytest.skip("Triton compiles no 8-bit floats for a GPU below compute capability 8.9")
    x_NI = torch.randn(shape, device=device).to(dtype)[:, : shape[1]]
    (rows, scale), (expected, expected_scale) = quantize_rows(x_NI), quantize_rows_reference(x_NI)
    torch.testing.assert_close(scale, expected_scale)
    differing = rows.view(torch.uint8) != expected.view(torch.uint8)
    if language.INTERPRETED:  # It forgets the carry of a mantissa that is rounded up to the next power of two.
        differing &= expected.view(torch.uint8) & 7 != 0
    # A quotient halfway between two numbers may be rounded to either.
    assert differing.sum() <= differing.numel() / 100


def test_a_layer_in_8_bits_is_near_the_layer():
    weight_OI = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 1, 64)[:, None]
    bias_O, x_NI = torch.ones(64), torch.randn(9, 128, generator=torch.Generator().manual_seed(1))
    layer = Fp8Linear(weight_OI, bias_O)
    expected = x_NI @ weight_OI.T + bias_O
    assert ((layer(x_NI) - expected).norm(dim=0) / expected.norm(dim=0)).max() < 7e-2
    assert layer.num_bytes == 64 * 128 + 64 * 4


def test_products_of_8_bit_rows_are_near_the_layer():
    layer = Fp8Linear(torch.randn(32, 64, generator=torch.Generator().manual_seed(0)))
    x_NI = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    dequantized = layer(x_NI)
    layer.in_8_bits = True  # Torch has this product on a CPU, too, if a slow one.
    in_8_bits = layer(x_NI)
    assert in_8_bits.dtype == torch.bfloat16
    assert (in_8_bits - dequantized).float().norm() / dequantized.float().norm() < 5e-2
    assert not multiplies_fp8(CPU)
    assert layer(x_NI[:0]).shape == (0, 32)
