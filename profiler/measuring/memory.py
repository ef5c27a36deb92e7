"""Bytes: what a model's layers hold, and how far a pass raises the memory in use."""

import gc
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exeplan.runner.compute.passes.host_allocator import give_back

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def tensor_bytes(owner: object) -> int:
    """Bytes of all tensors that an object holds, in whatever depth, each counted once."""
    found: dict[int, int] = {}
    _collect(owner, found, set())
    return sum(found.values())


def _collect(owner: Any, found: dict[int, int], seen: set[int]) -> None:
    if id(owner) in seen:
        return
    seen.add(id(owner))
    if isinstance(owner, Tensor):
        found[id(owner)] = owner.numel() * owner.element_size()
    elif isinstance(owner, list | tuple):
        for item in owner:
            _collect(item, found, seen)
    elif type(owner).__module__.startswith("exeplan."):
        for value in vars(owner).values() if hasattr(owner, "__dict__") else ():
            _collect(value, found, seen)


def peak_bytes(work: Callable[[], object], place: torch.device) -> int:
    """How far memory in use rises above its start while the work runs.

    On CUDA the allocator's own count. On a CPU the rise of the resident set to its high-water mark, after freed memory
    was given back to the system; where the mark cannot be reset (not Linux) what it rose by beyond the highest so far.
    """
    if place.type == "cuda":
        torch.cuda.synchronize(place)
        torch.cuda.reset_peak_memory_stats(place)
        before = torch.cuda.memory_allocated(place)
        work()
        torch.cuda.synchronize(place)
        return torch.cuda.max_memory_allocated(place) - before
    give_back()
    before = _resident_bytes() if _reset_peak() else _highest_resident_bytes()
    work()
    return max(0, _highest_resident_bytes() - before)


def give_back_unused(place: torch.device) -> None:
    """Frees what nothing uses, on a GPU for other processes, too: torch's allocator keeps what was freed."""
    gc.collect()
    if place.type == "cuda":
        torch.cuda.empty_cache()


def runtime_bytes(place: torch.device) -> int | None:
    """What driver and libraries hold on a GPU, with all other processes there; None on a CPU."""
    if place.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(place)
    return max(1, total - free - torch.cuda.memory_reserved(place))


def _reset_peak() -> bool:
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True


def _resident_bytes() -> int:
    return _status("VmRSS")


def _highest_resident_bytes() -> int:
    if _STATUS.exists():
        return _status("VmHWM")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _status(name: str) -> int:
    line = next(line for line in _STATUS.read_text(encoding="utf-8").splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
