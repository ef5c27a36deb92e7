"""Host memory: a checkpoint's files kept where layers that move to other devices are loaded from (ExeGPT, Table 4).

The files are mapped and locked into memory by a process that outlives its workers, so that these find them in the page
cache whatever else the host does. Where the system forbids to lock so much they are read once, and stay as long as
nobody needs the room. They are left alone where they would take more than half of what is free.

Not here: copies for a GPU to read directly; a worker takes its part of the files as at the first load.
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
    """Files in memory, until it is closed; `num_locked` bytes of them whatever happens."""

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
        """Lets them go."""
        for mapped in self._maps:
            mapped.close()
        self._maps = []


def keep_weights(directory: Path | None) -> KeptFiles | None:
    """The safetensors files of a model's directory, kept in memory; None where there are none, or no room for them."""
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
    """Memory of the host that can be had without swapping; 0 where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)


def _lock(mapped: mmap.mmap) -> bool:
    """Whether the system locked all of it."""
    address = np.frombuffer(mapped, np.uint8).ctypes.data  # The pages themselves: a copy would be of use to nobody.
    try:
        return ctypes.CDLL(None).mlock(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped))) == 0
    except (OSError, AttributeError):
        return False
