"""The C library's allocator, told to keep what a pass has freed for the next one.

By default glibc returns large blocks to the system as soon as they are freed, and so does a pass of many tokens with
its activations in every layer: each is then zeroed by the system anew, page by page, which took a fifth of the time of
a prefill of 4,000 to 50,000 tokens, more or less of it by what else was in the heap. Memory that is not needed again is
given back where it is known: after loading, and before another KV cache is made.

Not here: memory of GPUs (`gpu_memory.py`). Other C libraries are left as they are.
"""

import ctypes
import sys
from functools import cache

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""glibc's numbers of the parameters, from malloc.h."""
_NEVER = 2**31 - 1


@cache
def keep_freed_memory() -> None:
    """From now on, and for the whole process, freed memory is kept until `give_back`."""
    libc = _libc()
    if libc is not None and hasattr(libc, "mallopt"):
        libc.mallopt(_TRIM_THRESHOLD, _NEVER)
        libc.mallopt(_MMAP_MAX, 0)


def give_back() -> None:
    """Returns all freed memory to the system."""
    libc = _libc()
    if libc is not None and hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


@cache
def _libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if sys.platform.startswith("linux") else None
