"""SharedMemoryLink: tensors from one process to another on the same host's CPUs, through a ring of bytes.

Where every core computes, what gloo sends waits for the sender's I/O thread to be scheduled: up to a tick of 4 ms after
the receiver asks for it, however long ago it was sent. Here the sender copies it into the ring at once, and the
receiver copies it out when it needs it; a sender waits only while the ring is full.

The memory has two counters, each on a cache line of its own and with one writer: bytes written, and bytes read. An end
that waits sleeps on the other's counter (futex(2)) and is woken when that has moved: reading it every 50 us instead
takes a fifth of a core for as long as it waits.
"""

import ctypes
import time

import torch
from torch import Tensor

from exeplan.runner.ipc.collectives import LINE, PAGE, attach

RING_BYTES = 16 << 20
LINK_BYTES = PAGE + RING_BYTES
"""Of the `SharedBuffer` for one link."""
_WRITTEN, _READ = 0, LINE // 8
_SPINS = 200
_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE = 202, 0, 1
"""The number of the system call on x86-64, and its operations."""
_LONGEST_SLEEP = 0.1
"""Seconds; a counter that moves by a multiple of 4 GiB between two looks is noticed then."""


class SharedMemoryLink:
    """One end of a link over a `SharedBuffer` of `LINK_BYTES`; waits of more than `timeout` raise TimeoutError."""

    def __init__(self, path: str, *, timeout: float) -> None:
        """Raises OSError when there is no such buffer."""
        memory = attach(path)
        self._counts = memoryview(memory).cast("Q")
        self._futex = Futex(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
        self._ring = torch.frombuffer(memory, dtype=torch.uint8, offset=PAGE)
        self._timeout = timeout
        self._moved = 0
        """Bytes that this end has written, or read."""

    def send(self, x: Tensor) -> None:
        """Copies a tensor into the ring."""
        data = _bytes_of(x.contiguous())
        while len(data):
            # Free space ends at the reader's position, or at the end of the ring.
            count = self._wait_for(_READ, RING_BYTES - self._moved)
            place = self._moved % RING_BYTES
            part = data[: min(count, RING_BYTES - place)]
            self._ring[place : place + len(part)] = part
            self._moved += len(part)
            self._counts[_WRITTEN] = self._moved  # x86 shows this store after those before; ARM would need a fence.
            self._futex.wake(_WRITTEN)
            data = data[len(part) :]

    def receive(self, x: Tensor) -> Tensor:
        """Fills a contiguous tensor with what the other end sent."""
        data = _bytes_of(x)
        while len(data):
            count = self._wait_for(_WRITTEN, -self._moved)
            place = self._moved % RING_BYTES
            part = data[: min(count, RING_BYTES - place)]
            part.copy_(self._ring[place : place + len(part)])
            self._moved += len(part)
            self._counts[_READ] = self._moved
            self._futex.wake(_READ)
            data = data[len(part) :]
        return x

    def _wait_for(self, counter: int, offset: int) -> int:
        """Waits until the other end's counter plus the offset is above zero, and returns that."""
        for _ in range(_SPINS):
            if (count := self._counts[counter] + offset) > 0:
                return count
        start = time.monotonic()
        while (count := (moved := self._counts[counter]) + offset) <= 0:
            if time.monotonic() - start > self._timeout:
                raise TimeoutError(f"the other end of a link did not move for {self._timeout:g} s")
            self._futex.wait(counter, moved)
        return count


class Futex:
    """Sleeping on 64-bit counters of shared memory, by their low halves."""

    def __init__(self, address: int) -> None:
        """Of the first counter."""
        self._address = address
        self._call = ctypes.CDLL(None).syscall  # Releases the interpreter's lock.
        self._longest = (ctypes.c_long * 2)(0, int(_LONGEST_SLEEP * 1e9))

    def wait(self, counter: int, value: int) -> None:
        """Returns when woken, when the counter has another value already, and now and then without a reason."""
        low = ctypes.c_uint(value & 0xFFFFFFFF)
        self._call(_FUTEX, ctypes.c_void_p(self._address + 8 * counter), _FUTEX_WAIT, low, self._longest, None, 0)

    def wake(self, counter: int) -> None:
        self._call(_FUTEX, ctypes.c_void_p(self._address + 8 * counter), _FUTEX_WAKE, 1, None, None, 0)


def _bytes_of(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)
