"""The ceilings of a device are those of what the engine runs there."""

from types import SimpleNamespace

import pytest
import torch

from exeplan.kernels.products.fp8 import quantize_rows_reference
from exeplan.profiler.measuring import device
from exeplan.profiler.measuring.device import available_memory, matrix_rate

CPU = torch.device("cpu")


def test_products_in_8_bits_are_timed_with_the_devices_own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the reference takes several launches and some times the bytes, and no row may exceed the ceiling."""
    quantized = []

    def quantize_rows(x_NI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        quantized.append(x_NI.shape)
        return quantize_rows_reference(x_NI)

    monkeypatch.setattr(device, "kernels_for", lambda place, dtype: SimpleNamespace(quantize_rows=quantize_rows))
    monkeypatch.setattr(device, "_MATRIX_SIZES", {"cpu": ((16, 32),)})
    monkeypatch.setattr("exeplan.kernels.products.fp8_linear.multiplies_fp8", lambda place: True)
    assert matrix_rate(CPU, torch.bfloat16, fp8=True) > 0
    assert set(quantized) == {(16, 32)}


def test_memory_that_torch_keeps_of_arrays_that_are_gone_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [6 << 30]
    monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda place: ((70 << 30) - sum(kept), 80 << 30))
    assert available_memory(torch.device("cuda")) == 70 << 30
