"""Every kernel has a reference of the same arguments, a CPU needs neither Triton nor its import, and a kernel is added
as one file."""

import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from exeplan.kernels.select import REFERENCE, TRITON, Kernels, kernels_for

from .conftest import compiled_environment

LAUNCH_ONLY = {"config", "num_parts"}
"""How a kernel runs, not what it computes."""


@pytest.mark.parametrize("name", vars(TRITON))
def test_a_reference_takes_what_its_kernel_takes(name):
    kernel, reference = (inspect.signature(getattr(kernels, name)) for kernels in (TRITON, REFERENCE))
    wanted = {key: value for key, value in kernel.parameters.items() if key not in LAUNCH_ONLY}
    assert wanted == dict(reference.parameters)
    assert kernel.return_annotation == reference.return_annotation


def test_every_op_that_the_runner_calls_has_both():
    assert set(vars(TRITON)) == set(vars(REFERENCE)) == set(Kernels.__annotations__)


def test_a_cpu_and_other_dtypes_get_the_references():
    for dtype in (torch.bfloat16, torch.float64):
        assert kernels_for(torch.device("cpu"), dtype) == REFERENCE


def test_a_cpu_gets_compiled_norms_and_gated_activations_in_float32():
    found, reference = vars(kernels_for(torch.device("cpu"), torch.float32)), vars(REFERENCE)
    others = {op: function.__name__ for op, function in found.items() if function is not reference[op]}
    names = ("rms_norm", "add_rms_norm", "gated_activation")
    assert others == {name: f"{name}_compiled" for name in names}
    assert kernels_for(torch.device("cuda"), torch.float64) == REFERENCE


TOY = '''"""An op of its own, and RMSNorm without weights for double precision on a CPU."""

import torch

from exeplan.kernels.kernel import Kernel


def double(x):
    return x + x


def rms_norm(x, weight_E, eps, *, out=None):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


KERNELS = (Kernel("double", double), Kernel("rms_norm", rms_norm, "cpu", (torch.float64,)))
'''


@pytest.fixture
def add_file(tmp_path, monkeypatch) -> Iterator[Callable[[str, str], None]]:
    """Writes a file into a further folder of the package `kernels`."""
    package, added = importlib.import_module("exeplan.kernels"), []
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])

    def add(name: str, text: str) -> None:
        Path(tmp_path, f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        added.append(f"exeplan.kernels.{name}")

    yield add
    for name in added:
        sys.modules.pop(name, None)


def test_a_file_adds_its_kernels_where_it_says_that_they_serve(add_file):
    add_file("toy", TOY)
    cpu = torch.device("cpu")
    double, single = (kernels_for(cpu, dtype) for dtype in (torch.float64, torch.float32))
    assert double.double(torch.tensor(2.0)) == single.double(torch.tensor(2.0)) == 4.0
    x, weight = torch.tensor([[3.0, 4.0]]), torch.full((2,), 10.0)
    assert torch.allclose(double.rms_norm(x, weight, 0.0), x / 12.5**0.5)
    assert torch.allclose(single.rms_norm(x, weight, 0.0), 10 * x / 12.5**0.5)
    others = {op: function for op, function in vars(double).items() if op not in ("double", "rms_norm")}
    assert others == {op: function for op, function in vars(REFERENCE).items() if op != "rms_norm"}


def test_two_files_that_serve_the_same_are_refused(add_file):
    add_file("toy", TOY)
    add_file("toy_again", TOY)
    with pytest.raises(
        RuntimeError, match=r"'double' .* by both exeplan\.kernels\.toy and exeplan\.kernels\.toy_again"
    ):
        kernels_for(torch.device("cpu"), torch.float32)


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="torch's CUDA build brings triton along")
@pytest.mark.parametrize("missing", ["", "sys.modules['triton'] = None; "])
def test_the_kernels_are_imported_without_triton(missing):
    code = f"import sys; {missing}from exeplan.kernels import language, select; print(language.AVAILABLE, *sys.modules)"
    options = {"capture_output": True, "text": True, "check": True, "env": compiled_environment()}
    done = subprocess.run([sys.executable, "-c", code], **options)
    available, *modules = done.stdout.split()
    assert available == "False"
    assert "triton.language" not in modules
