"""A small synthetic device whose times can be checked by hand, and a working folder with its profile."""

import os
import signal
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from exeplan.core.models.model import load_model_spec
from exeplan.core.profile import Device, Measurement, Profile, save_profile
from exeplan.simulator.cost import CostModel

from .runner.preloaded import Preloaded

_MOST_PROCESSES = 5
"""More would only start more engines side by side."""
os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"} | os.environ
"""Before torch is imported, here or in a process that a test starts: these processes occupy the cores already, so that
further threads for models this small mostly wait for each other, and spin meanwhile, as they do by default."""

if find_spec("hypothesis"):  # Tests of a GPU do without.
    from hypothesis import HealthCheck, settings

    unhurried = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    # The same cases each time, so that more of them only take longer; `searching` draws others, a hundred each time.
    settings.register_profile("repeatable", derandomize=True, print_blob=True, max_examples=40, **unhurried)
    settings.register_profile("searching", **unhurried)
    settings.load_profile("repeatable")  # `--hypothesis-profile searching` tries other cases each time.


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One process more than cores for the whole suite, because some wait; none for a part of it, which ends sooner."""
    whole = config.args == config.getini("testpaths")
    return min(len(os.sched_getaffinity(0)) + 1, _MOST_PROCESSES) if whole else 0


_LONGEST = (
    "standins/test_memory.py",
    "standins/test_workers_ahead.py",
    "workload/test_arrivals.py",
    "workload/test_deadlines.py",
)
"""Late in the order of names: one of them would run alone at the end, for minutes."""


_PATIENCE = 300.0
"""Seconds that processes wait for the first, which may have ended early."""


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Where nothing is compiled yet, the first of several processes does it for all, while the checks have its core."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if not worker or not sys.pycache_prefix:
        return (yield)
    compiled, end = Path(sys.pycache_prefix, "tests-collected"), time.monotonic() + _PATIENCE
    while worker != "gw0" and not compiled.exists() and time.monotonic() < end:
        time.sleep(0.1)
    try:
        return (yield)
    finally:
        if worker == "gw0":
            compiled.touch()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long begin first, so that several processes end at about the same time."""
    items.sort(key=lambda item: not item.path.as_posix().endswith(_LONGEST))


@pytest.fixture(scope="session")
def profile() -> Profile:
    """Affine times: a layer costs 40 us + 20 us a token, a decode row's attention 8 us + 20 ns a token of context."""
    rows = [
        Measurement(op=op, num_tokens=n, seconds=fixed + slope * n)
        for op, fixed, slope in (("rest", 40e-6, 20e-6), ("embed", 5e-6, 0.1e-6))
        for n in (1, 8, 64, 512, 4096)
    ]
    for b in (1, 4, 16, 64):
        rows.append(Measurement(op="head", num_seqs=b, seconds=50e-6 + b * 15e-6))
        rows.append(Measurement(op="overhead", phase="decode", num_seqs=b, seconds=100e-6 + b * 5e-6))
        rows.append(Measurement(op="overhead", phase="prefill", num_seqs=b, seconds=120e-6 + b * 8e-6))
        rows += [
            Measurement(op="attention", phase="decode", num_seqs=b, context_tokens=b * c, seconds=b * (8e-6 + c * 2e-8))
            for c in (16, 256, 1024)
        ]
        rows += [
            Measurement(
                op="attention", phase="prefill", num_seqs=b, num_tokens=b * n, seconds=b * (2e-5 + n * n * 2e-9)
            )
            for n in (16, 64, 128, 256, 512)
        ]
    return Profile(
        model=load_model_spec("demo"),
        dtype="float32",
        device=Device(
            name="affine", kind="cpu", memory_bytes=8 << 30, copy_bytes_per_second=1e10, flops_per_second=1e11
        ),
        weight_bytes=20 << 20,
        workspace_bytes=1 << 20,
        measurements=tuple(rows),
    )


@pytest.fixture(scope="session")
def cost(profile: Profile) -> CostModel:
    return CostModel(profile)


_once = cache(cache)
"""The same function that remembers, each time that one is asked for."""


@pytest.fixture(scope="module")
def rates_measured_once() -> Iterator[None]:
    """The rates of this machine, which take two seconds at the begin of each profile and two at its end."""
    from exeplan.profiler.measuring import device  # Imports torch.

    with pytest.MonkeyPatch.context() as patch:
        for name in ("copy_rate", "matrix_rate"):
            patch.setattr(device, name, _once(getattr(device, name)))
        yield


@pytest.fixture(scope="session")
def preloaded() -> Iterator[Preloaded]:
    """What forks servers that have imported their modules."""
    with closing(Preloaded()) as process:
        yield process


@pytest.fixture
def folder(profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with the profile as `p.json`."""
    monkeypatch.chdir(tmp_path)
    save_profile(profile, tmp_path / "p.json")
    return tmp_path


@pytest.fixture(autouse=True, scope="session")
def _interruptible() -> Iterator[None]:
    """Tests interrupt what they run; a shell that starts pytest in the background has it ignore interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
