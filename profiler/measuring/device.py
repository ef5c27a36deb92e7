"""The measured device: name, memory, caches, and the rates that no valid row can exceed.

Ceilings are the best over several sizes and repeats, with the products the engine itself uses: a row of a profile that
beats them is wrong. Not here: choosing a device.
"""

import math
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy
import torch

from exeplan.core.profile import Device
from exeplan.errors import InputError
from exeplan.kernels import native
from exeplan.kernels.products.fp8_linear import Fp8Linear
from exeplan.kernels.products.linear import Linear
from exeplan.kernels.select import kernels_for
from exeplan.version import __version__

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_DEFAULT_CACHE = 32 * 2**20
_MATRIX_SIZES = {"cpu": ((256, 1024), (1024, 1024), (512, 2048)), "cuda": ((4096, 4096), (8192, 8192))}
"""Rows, and inputs and outputs, of the products; small ones do not saturate a GPU."""
_LEAST_COPY = {"cpu": 0, "cuda": 2**30}
_MOST_COPY = 2**29
"""Bytes of a copied array on a CPU: a virtual machine sees the last-level cache of its whole host, of which it has a
share, and arrays of gigabytes take seconds to make."""
_SECONDS_A_RATE = 0.1


def raise_ceilings(device: Device, place: torch.device, dtype: torch.dtype, *, fp8: bool = False) -> Device:
    """The same device with its rates measured again, the better of both kept."""
    copied, multiplied = copy_rate(place, device.cache_bytes), matrix_rate(place, dtype, fp8=fp8)
    return replace(
        device,
        copy_bytes_per_second=max(copied, device.copy_bytes_per_second),
        flops_per_second=max(multiplied, device.flops_per_second),
    )


def measure_device(device: str, dtype: torch.dtype, *, fp8: bool = False) -> Device:
    """Name, memory and measured ceilings, with `fp8` of products in 8 bits.

    Raises InputError when there is no such device.
    """
    place = check_device(device)
    cache = cache_bytes(place)
    return Device(
        name=device_name(place),
        kind=place.type,
        memory_bytes=device_memory(place),
        num_threads=torch.get_num_threads() if place.type == "cpu" else 1,
        copy_bytes_per_second=copy_rate(place, cache),
        flops_per_second=matrix_rate(place, dtype, fp8=fp8),
        cache_bytes=cache,
    )


def check_device(device: str) -> torch.device:
    """The torch device of that name. Raises InputError unless it is a CPU or a CUDA device that is there, or where it
    has a number: a process is profiled on the first GPU that it sees."""
    try:
        place = torch.device(device)
    except RuntimeError:
        raise InputError(f"no device '{device}'; there are cpu and cuda") from None
    if place.type not in ("cpu", "cuda"):
        raise InputError(f"no device '{device}'; there are cpu and cuda")
    if place.index is not None:
        choice = f" and CUDA_VISIBLE_DEVICES={place.index}" if place.type == "cuda" else ""
        raise InputError(f"device '{device}' has a number; choose it by --device {place.type}{choice}")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device '{device}' needs a CUDA GPU and this machine has none; use --device cpu")
    return place


def device_name(place: torch.device) -> str:
    """The vendor's name of the device."""
    if place.type == "cuda":
        return torch.cuda.get_device_name(place)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def cache_bytes(place: torch.device) -> int:
    """The last-level cache; what fits it may be read faster than memory."""
    if place.type == "cuda":
        return int(torch.cuda.get_device_properties(place).L2_cache_size)
    sizes = [path.read_text().strip() for path in _CACHES.glob("index*/size")] if _CACHES.is_dir() else []
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    found = [int(size[:-1]) * units[size[-1]] for size in sizes if size[:-1].isdigit() and size[-1] in units]
    return max(found, default=_DEFAULT_CACHE)


def device_memory(place: torch.device) -> int:
    """Bytes of memory: of a GPU all, of which plans take a share and subtract what driver and libraries hold there
    (`Profile.runtime_bytes`); of a CPU those that a process can use now."""
    if place.type == "cuda":
        return int(torch.cuda.mem_get_info(place)[1])
    return available_memory(place)


def available_memory(place: torch.device) -> int:
    """Bytes that a process can use now: free memory, capped by its control group; of a GPU also what torch's allocator
    keeps of arrays that are gone."""
    if place.type == "cuda":
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(place)[0])
    limits = [_meminfo("MemAvailable"), *(_integer(path) for path in _CGROUP_LIMITS)]
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _meminfo(name: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def _integer(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # No such group, or "max".
        return None


def copy_rate(place: torch.device, cache: int) -> float:
    """Bytes a second moved by the better of copying (read and written) and reading, on arrays beyond the cache.

    On a CPU not beyond a cache of over 128 MiB: the rate may then be its cache's, which is a ceiling as well.
    """
    most = _MOST_COPY if place.type == "cpu" else math.inf
    rates = []
    for factor in (1, 2):
        size = int(min(factor * max(2 * cache, _LEAST_COPY[place.type]), factor * most / 2))
        source = torch.ones(size // 4, dtype=torch.float32, device=place)
        target = torch.empty_like(source)
        rates.append(2 * source.nbytes / _best_seconds(place, partial(target.copy_, source)))
        rates.append(source.nbytes / _best_seconds(place, source.sum))
    return max(rates)


@torch.inference_mode()
def matrix_rate(place: torch.device, dtype: torch.dtype, *, fp8: bool = False) -> float:
    """Floating-point operations a second of the engine's own matrix product, at the best of a few sizes."""
    rates = []
    for rows, size in _MATRIX_SIZES[place.type]:
        weight = torch.randn(size, size, dtype=dtype, device=place)  # A GPU multiplies equal numbers faster.
        layer = Fp8Linear(weight, quantize_rows=kernels_for(place, dtype).quantize_rows) if fp8 else Linear(weight)
        x = torch.randn(rows, size, dtype=dtype, device=place)
        rates.append(2 * rows * size * size / _best_seconds(place, partial(layer, x)))
    return max(rates)


def _best_seconds(place: torch.device, work: Callable[[], object]) -> float:
    """The shortest of as many repeats as fit a tenth of a second, at least three; other programs do not count."""
    own = place.type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if own else time.perf_counter
    best, repeats, started = float("inf"), 0, clock()
    while repeats < 4 or clock() - started < _SECONDS_A_RATE:
        start = clock()
        work()
        synchronize(place)
        repeats += 1
        if repeats > 1:  # The first one warms up.
            best = min(best, clock() - start)
    return best


def synchronize(place: torch.device) -> None:
    """Waits for all work queued on the device."""
    if place.type == "cuda":
        torch.cuda.synchronize(place)


def versions() -> dict[str, str]:
    """What a timing depends on besides the device."""
    return {
        "exeplan": __version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cpu_kernels": native.description(),
    }
