"""Kernels run on the GPU where there is one, and in Triton's interpreter elsewhere: the same tests, the same
references.

Triton looks at the environment when a kernel is defined and again when the first is launched, so it says so while the
kernels are imported and while the tests of this folder run, and at no other time: processes that other tests start
shall not inherit it. The interpreter multiplies bfloat16 wrongly, which is why that dtype is tested on a GPU only.
"""

import contextlib
import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE.type == "cpu":
            patch.setenv("TRITON_INTERPRET", "1")
        yield


with interpreting():
    from exeplan.kernels import language, select  # noqa: F401 - importing them defines every kernel

assert language.AVAILABLE or not importlib.util.find_spec("triton"), (
    "the kernels were imported before, by a test collected before these: what it imports shall do so within functions"
)


@pytest.fixture(autouse=True, scope="package")
def _interpreted() -> Iterator[None]:
    with interpreting():
        yield


NO_TRITON = "triton is not installed; `pip install 'exeplan[test]'` does so on Linux"
needs_triton = pytest.mark.skipif(not language.AVAILABLE, reason=NO_TRITON)
"""For tests without the fixture `device`, such as those of hypothesis."""


@pytest.fixture
def device() -> torch.device:
    if not language.AVAILABLE:
        pytest.skip(NO_TRITON)
    torch.manual_seed(0)
    return DEVICE


def compiled_environment() -> dict[str, str]:
    """The environment of a process that does not interpret."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
