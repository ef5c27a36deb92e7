"""Sums and gathers over the ranks of a stage: in shared memory on one host's CPUs, else by torch.distributed.

A layer waits for two sums. Between two CPU ranks gloo takes 0.2-0.5 ms for one of 4 KB, shared memory 5 us.

The memory has a counter for every rank, on a cache line of its own, and two slots. For its n-th message a rank writes
slot n modulo 2, then sets its counter to n, waits until the others have counted n, and reads what they wrote. Two slots
suffice: a rank that writes message n + 2 has seen all counters at n + 1, which the others set after reading message n.

Not here: noticing that a rank has died, which its supervisor does; here the wait for it ends with a timeout.
"""

import mmap
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

LINE = 64
PAGE = 4096
_SLOT = 1 << 20
"""Bytes that a rank can send at once; a longer message goes in pieces."""
_SPINS = 500
"""Reads of a counter before the core is yielded: about 20 us."""
_YIELDS_SECONDS = 2e-3
"""A rank that waits longer sleeps between reads."""
_NAP_SECONDS = 50e-6


def shared_memory_works() -> bool:
    """Whether this machine has what `SharedMemoryGroup` needs: memory without a name, and x86's order of stores."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


class SharedBuffer:
    """Zeroed memory for several processes, made by the one that starts them.

    They attach by `path` while this process lives and has not closed the buffer; close it once all have attached. It is
    in no file system, so that nothing is left however the processes end.
    """

    def __init__(self, num_bytes: int) -> None:
        """Raises OSError when there is not enough memory."""
        self._descriptor = os.memfd_create("exeplan-group")
        os.posix_fallocate(self._descriptor, 0, num_bytes)
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def close(self) -> None:
        """Processes that have attached keep the memory."""
        os.close(self._descriptor)


class _Mutable:
    """What can be muted (`Group.muted`)."""

    _muted = False

    @contextmanager
    def muted(self) -> Iterator[None]:
        self._muted = True
        try:
            yield
        finally:
            self._muted = False


class SharedMemoryGroup(_Mutable):
    """A group of two or more ranks on one host, over a `SharedBuffer` of their own.

    All sum in rank order, and so to the same bits. A wait of more than `timeout` seconds raises TimeoutError; the group
    cannot be used afterwards.
    """

    def __init__(self, path: str, rank: int, size: int, timeout: float) -> None:
        """Raises OSError when there is no such buffer, ValueError when it is for another number of ranks."""
        self.rank, self.size, self._timeout = rank, size, timeout
        memory = attach(path)
        if len(memory) != group_bytes(size):
            raise ValueError(f"a buffer of {len(memory)} bytes is not for {size} ranks")
        self._counts = memoryview(memory).cast("Q")[: size * LINE // 8 : LINE // 8]
        self._slots = torch.frombuffer(memory, dtype=torch.uint8, offset=PAGE).view(2, size, _SLOT)
        self._views: dict[tuple[torch.dtype, torch.Size], list[tuple[Tensor, ...]]] = {}
        self._peers = [peer for peer in range(size) if peer != rank]
        self._turn = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.nbytes > _SLOT:
            x = x.contiguous()
            for piece in _pieces(x):
                self.all_reduce(piece)
            return x
        first, second, *others = self._exchange(x)
        torch.add(first, second, out=x)
        for other in others:
            x.add_(other)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        if x.nbytes <= _SLOT:
            return torch.cat(self._exchange(x), -1)
        flat = torch.cat([torch.stack(self._exchange(piece)) for piece in _pieces(x.contiguous())], 1)
        return _side_by_side(flat.view(self.size, *x.shape))

    def _exchange(self, x: Tensor) -> tuple[Tensor, ...]:
        """Writes a message for the others and waits for theirs. Returns all in rank order, to be read at once."""
        if self._muted:
            return (x,) * self.size
        self._turn = turn = self._turn + 1
        shared = self._shared(x.dtype, x.shape)[turn & 1]
        shared[self.rank].copy_(x)
        self._counts[self.rank] = turn  # x86 shows this store to others after those before it; ARM would need a fence.
        for peer in self._peers:
            if self._counts[peer] < turn:
                self._wait(peer, turn)
        return shared

    def _shared(self, dtype: torch.dtype, shape: torch.Size) -> list[tuple[Tensor, ...]]:
        """For each slot the ranks' messages of that shape."""
        views = self._views.get((dtype, shape))
        if views is None:
            slots = self._slots.view(dtype)[:, :, : shape.numel()]
            views = [tuple(message.view(shape) for message in slot) for slot in slots]
            self._views[dtype, shape] = views
        return views

    def _wait(self, peer: int, turn: int) -> None:
        """Until a rank's counter is at `turn`. Where every rank has a core that is soon: it spins before it sleeps."""
        for _ in range(_SPINS):
            if self._counts[peer] >= turn:
                return
        start = time.monotonic()
        while self._counts[peer] < turn:
            waited = time.monotonic() - start
            if waited > self._timeout:
                raise TimeoutError(
                    f"rank {peer} of a group of {self.size} did not answer within {self._timeout:g} s: "
                    "it is gone, or it hangs"
                )
            if waited < _YIELDS_SECONDS:
                os.sched_yield()
            else:
                time.sleep(_NAP_SECONDS)


class DistributedGroup(_Mutable):
    """A group over a process group of torch.distributed, with that group's timeout; a failed call makes it unusable.

    Raises what torch raises, RuntimeError, when a rank is gone.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Overwrites x where that is contiguous."""
        x = x.contiguous()
        if not self._muted:
            dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty(self.size * x.numel())  # Flat, because gloo wants one shape and NCCL takes any.
        if self._muted:
            gathered.view(self.size, x.numel()).copy_(x.reshape(-1))
        else:
            dist.all_gather_into_tensor(gathered, x.reshape(-1), group=self._group)
        return _side_by_side(gathered.view(self.size, *x.shape))


def _pieces(x: Tensor) -> tuple[Tensor, ...]:
    """Views of a contiguous tensor, each of which fits a slot."""
    return torch.split(x.view(-1), _SLOT // x.element_size())


def _side_by_side(x: Tensor) -> Tensor:
    """From `[ranks, ..., X]` to `[..., ranks * X]`."""
    return x.movedim(0, -2).flatten(-2)


def group_bytes(num_ranks: int) -> int:
    """Of the buffer for a group: a page of counters and two slots a rank."""
    return PAGE + 2 * num_ranks * _SLOT


def attach(path: str) -> mmap.mmap:
    """The memory of a `SharedBuffer`. Raises OSError when it has been closed."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)
