"""Tests that need a GPU: `python -m pytest tests/gpu tests/kernels` on a machine that has one; skipped elsewhere.

They import nothing that only `exeplan[test]` brings. EXEPLAN_GPU_TESTS=cpu runs them without a GPU, on the kernels'
references: that tries the tests, not the GPU.
"""

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # In a run of all tests this folder comes first, but tests/kernels needs the kernels interpreted.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        from exeplan.kernels import select  # noqa: F401 - importing it defines every kernel

TRIED = os.environ.get("EXEPLAN_GPU_TESTS") == "cpu"
DEVICE = torch.device("cpu" if TRIED else "cuda")


def skip_without_fp8() -> None:
    """On a GPU below compute capability 8.9, for which Triton compiles no 8-bit floats; the references have them."""
    from exeplan.kernels.products.fp8_linear import multiplies_fp8

    if DEVICE.type == "cuda" and not multiplies_fp8(DEVICE):
        pytest.skip("needs a GPU of compute capability 8.9 for fp8")


@pytest.fixture
def fp8() -> None:
    skip_without_fp8()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    there = TRIED or torch.cuda.is_available()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.filterwarnings("default"))  # Of a GPU's libraries, whose versions vary.
            if not there:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and this machine has none"))
