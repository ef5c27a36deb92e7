"""Weights from which layers are loaded later stay in host memory, where there is memory for them."""

import resource
from pathlib import Path

import pytest

from exeplan.runner.ipc import host_memory
from exeplan.runner.ipc.host_memory import KeptFiles, keep_weights


def locked_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmLck:"))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for number in (1, 2):
        (tmp_path / f"model-{number}.safetensors").write_bytes(bytes(1 << 20))
    (tmp_path / "notes.txt").write_text("no weights")
    return tmp_path


def test_the_files_are_locked_until_they_are_released(directory):
    if 0 <= resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] < 2 << 20:
        pytest.skip("this process may not lock two megabytes")
    before = locked_bytes()
    kept = keep_weights(directory)
    assert kept is not None
    assert (kept.num_bytes, kept.num_locked) == (2 << 20, 2 << 20)
    assert locked_bytes() - before == 2 << 20
    kept.close()
    assert locked_bytes() == before


def test_files_that_cannot_be_locked_are_read(directory, monkeypatch):
    monkeypatch.setattr(host_memory, "_lock", lambda mapped: False)
    kept = KeptFiles(sorted(directory.glob("*.safetensors")))
    assert (kept.num_bytes, kept.num_locked) == (2 << 20, 0)
    kept.close()


def test_files_that_would_take_most_of_the_memory_are_not_kept(directory, monkeypatch):
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 3 << 20)
    assert keep_weights(directory) is None


def test_a_model_without_files_has_nothing_to_keep(tmp_path):
    assert keep_weights(None) is None
    assert keep_weights(tmp_path) is None
