"""SharedMemoryLink: tensors from one process to another on the same host's CPUs, through a ring of bytes.

Where every core computes, what gloo sends waits for the sender's I/O thread to be scheduled: up to a tick of 4 ms after
the receiver asks for it, however long ago it was sent. Here the sender copies it into the ring at once, and the
receiver copies it out when it needs it; a sender waits only while the ring is full.

The memory has two counters, each on a cache line of its own and with one writer: bytes written, and bytes read.
"""

import time

import torch
from torch import Tensor

from exeplan.runner.ipc.collectives import LINE, PAGE, attach

RING_BYTES = 16 << 20
LINK_BYTES = PAGE + RING_BYTES
"""Of the `SharedBuffer` for one link."""
_WRITTEN, _READ = 0, LINE // 8
_SPINS = 200
_NAP_SECONDS = 50e-6


class SharedMemoryLink:
    """One end of a link over a `SharedBuffer` of `LINK_BYTES`; waits of more than `timeout` raise TimeoutError."""

    def __init__(self, path: str, *, timeout: float) -> None:
        """Raises OSError when there is no such buffer."""
        memory = attach(path)
        self._counts = memoryview(memory).cast("Q")
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
            data = data[len(part) :]
        return x

    def _wait_for(self, counter: int, offset: int) -> int:
        """Waits until the other end's counter plus the offset is above zero, and returns that."""
        for _ in range(_SPINS):
            if (count := self._counts[counter] + offset) > 0:
                return count
        start = time.monotonic()
        while (count := self._counts[counter] + offset) <= 0:
            if time.monotonic() - start > self._timeout:
                raise TimeoutError(f"the other end of a link did not move for {self._timeout:g} s")
            time.sleep(_NAP_SECONDS)
        return count


def _bytes_of(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)
