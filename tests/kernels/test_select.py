"""Every kernel has a reference of the same arguments, and a CPU needs neither Triton nor its import."""

import inspect
import subprocess
import sys

import pytest
import torch

from exeplan.kernels.select import REFERENCE, TRITON, Kernels, kernels_for

from .conftest import compiled_environment

LAUNCH_ONLY = {"config", "num_parts"}
"""How a kernel runs, not what it computes."""


@pytest.mark.parametrize("name", Kernels._fields)
def test_a_reference_takes_what_its_kernel_takes(name):
    kernel, reference = (inspect.signature(getattr(kernels, name)) for kernels in (TRITON, REFERENCE))
    wanted = {key: value for key, value in kernel.parameters.items() if key not in LAUNCH_ONLY}
    assert wanted == dict(reference.parameters)
    assert kernel.return_annotation == reference.return_annotation


def test_a_cpu_and_other_dtypes_get_the_references():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert kernels_for(torch.device("cpu"), dtype) is REFERENCE
    assert kernels_for(torch.device("cuda"), torch.float64) is REFERENCE


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="torch's CUDA build brings triton along")
@pytest.mark.parametrize("missing", ["", "sys.modules['triton'] = None; "])
def test_the_kernels_are_imported_without_triton(missing):
    code = f"import sys; {missing}from exeplan.kernels import language, select; print(language.AVAILABLE, *sys.modules)"
    options = {"capture_output": True, "text": True, "check": True, "env": compiled_environment()}
    done = subprocess.run([sys.executable, "-c", code], **options)
    available, *modules = done.stdout.split()
    assert available == "False"
    assert "triton.language" not in modules
