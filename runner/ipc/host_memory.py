"""Host memory: a checkpoint's files kept in memory, for layers that move to other devices (ExeGPT, Table 4).

The files are mapped and locked into memory by a process that outlives its workers, so that these find them in the page
cache whatever else the host does. Where the system does not allow locking that much, they are read once, and stay in
the page cache until the memory is needed. They are not kept if they would take more than half of the free memory.

Not here: copies for a GPU to read directly; a worker reads its part of the files as at the first load.
"""

import ctypes
import logging
import mmap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from exeplan.units import show_bytes

log = logging.getLogger(__name__)
_MOST_SHARE = 0.5


class KeptFiles:
    """Files in memory until `close`; `num_locked` bytes of them cannot be evicted."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.num_bytes = self.num_locked = 0
        self._maps: list[mmap.mmap] = []
        for path in files:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._maps.append(mapped)
            self.num_bytes += len(mapped)
            if _lock(mapped):
                self.num_locked += len(mapped)
            else:
                mapped.madvise(mmap.MADV_WILLNEED)

    def close(self) -> None:
        """Unlocks and unmaps them."""
        for mapped in self._maps:
            mapped.close()
        self._maps = []


def keep_weights(directory: Path | None) -> KeptFiles | None:
    """The safetensors files of a model's directory, kept in memory; None if there are none, or too little memory."""
    files = sorted(directory.glob("*.safetensors")) if directory else []
    needed = sum(path.stat().st_size for path in files)
    if not needed:
        return None
    if needed > _MOST_SHARE * available_bytes():
        free = show_bytes(available_bytes())
        log.info("%s of weights are not kept in host memory, of which %s is free", show_bytes(needed), free)
        return None
    kept = KeptFiles(files)
    log.info("%s of weights stay in host memory, %s of it locked", show_bytes(needed), show_bytes(kept.num_locked))
    return kept


def available_bytes() -> int:
    """Memory of the host that is available without swapping; 0 where the system does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)


def _lock(mapped: mmap.mmap) -> bool:
    """Whether the system locked all of it."""
    address = np.frombuffer(mapped, np.uint8).ctypes.data  # Of the mapped pages, not of a copy.
    try:
        return ctypes.CDLL(None).mlock(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped))) == 0
    except (OSError, AttributeError):
        return False
