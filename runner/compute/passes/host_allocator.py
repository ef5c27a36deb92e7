"""The C library's allocator, told to keep what a pass has freed for the next one.

By default glibc returns large blocks to the system as soon as they are freed, and so does a pass of many tokens with
its activations in every layer: each is then zeroed by the system anew, page by page, which took a fifth of the time of
a prefill of 4,000 to 50,000 tokens, more or less of it by what else was in the heap. Memory that is not needed again is
given back where it is known: after loading, and before another KV cache is made.

Keys and values are in huge pages where Linux gives them: decode attention reads blocks anywhere, and each is a page of
4 KiB otherwise, whose address costs a walk of its own.

Not here: memory of GPUs (`gpu_memory.py`). Other C libraries are left as they are.
"""

import ctypes
import mmap
import sys
from functools import cache

from torch import Tensor

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""glibc's numbers of the parameters, from malloc.h."""
_NEVER = 2**31 - 1
_HUGE_PAGES = 14
"""Linux's MADV_HUGEPAGE."""


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


def in_huge_pages(tensor: Tensor) -> Tensor:
    """The same tensor, not yet written, its memory in huge pages where the system has them on request."""
    libc = _libc()
    if libc is not None and hasattr(libc, "madvise"):
        first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        size = max(0, tensor.data_ptr() + tensor.nbytes - first)
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), _HUGE_PAGES)
    return tensor


@cache
def _libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if sys.platform.startswith("linux") else None
