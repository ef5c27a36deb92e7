"""A stand-in for CUDA's streams: runs the CUDA path on a CPU and fails where the order of its work is not certain.

A `DeviceTensor` says that it is on a GPU and holds a CPU tensor. Every operation on one is computed at once, in the
order of the program, and recorded as a launch on the current stream with the bytes that it reads and writes. Values are
therefore always right; what is checked is whether they would be, whatever the speed of each stream: an access must be
ordered after every earlier one that it conflicts with, by its stream, by events, or by a wait of the host. A launch, a
wait and a synchronization advance vector clocks (as in `torch.cuda._sanitizer`, which needs a GPU and knows neither
pinned memory nor graphs). Also found are memory that is freed while another stream than its own still uses it, graph
outputs that another graph of the pool overwrote, what may not happen while a graph is captured, and streams of another
device than the thread's.

Counted as one launch each: an operation of torch, a kernel of `exeplan.kernels`, the replay of a graph. Not here:
time, what a kernel does within its launch, and what torch itself orders wrongly.
"""

import contextlib
import functools
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from exeplan.kernels.select import REFERENCE, Kernels

aten = torch.ops.aten
_GRAIN = 4
"""Bytes whose accesses are not told apart."""
_READS_ON_HOST = {"tolist", "numpy", "item", "__array__", "__bool__", "__int__", "__float__", "__index__"}
_WAITS = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.is_nonzero}
_BY_INDEX = {aten.index, aten.index_select, aten.index_copy_, aten.index_put_, aten._index_put_impl_}
_GUARDED = {
    "__invert__": torch.bitwise_not,
    "nonzero": aten.nonzero.default,
    "contiguous": lambda x: x if x.values.is_contiguous() else aten.clone(x, memory_format=torch.contiguous_format),
}
"""Methods that enter a device guard, which a build of torch without CUDA does not have, and what does without."""
_NO_LAUNCH = {aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty, aten.new_empty_strided}

Clock = dict[int, int]
"""By stream number: how many of its launches are known to be complete."""


class OrderError(AssertionError):
    """An access whose order after an earlier one is not certain, or a call that CUDA does not allow."""


def joined(one: Clock, other: Clock) -> Clock:
    """Neither is changed; either may be returned."""
    if one is other or not other:
        return one
    found = dict(one)
    for stream, time in other.items():
        if time > found.get(stream, 0):
            found[stream] = time
    return found


def tensors(tree: Any) -> list[Tensor]:
    """Those in tuples, lists and dictionaries."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, (tuple, list)):
        return [leaf for part in tree for leaf in tensors(part)]
    if isinstance(tree, dict):
        return [leaf for part in tree.values() for leaf in tensors(part)]
    return []


def replaced(tree: Any, function: Callable[[Tensor], Any]) -> Any:
    """The same tuples, lists and dictionaries with the results for their tensors."""
    if isinstance(tree, Tensor):
        return function(tree)
    if type(tree) in (tuple, list):
        return type(tree)([replaced(part, function) for part in tree])
    if type(tree) is dict:
        return {key: replaced(part, function) for key, part in tree.items()}
    assert not tensors(tree), f"tensors in a {type(tree)}"
    return tree


@functools.cache
def written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Which arguments an operation writes: their numbers and names."""
    return tuple(
        (number, argument.name)
        for number, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@functools.cache
def is_composite(func: Any) -> bool:
    """It consists of other operations."""
    return func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


class DeviceTensor(Tensor):
    """A tensor on a GPU, as far as Python sees."""

    values: Tensor
    """On the CPU."""
    memory: "Memory"
    __slots__ = ("memory", "values")

    @staticmethod
    def __new__(cls, values: Tensor, memory: "Memory", device: torch.device):
        made = Tensor._make_wrapper_subclass(
            cls, values.shape, values.stride(), values.storage_offset(), dtype=values.dtype, device=device
        )
        made.values, made.memory = values, memory
        return made

    def __repr__(self) -> str:
        return f"{self.values} of {self.device}"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise OrderError(f"{func} on a GPU's tensor in a thread that does not know the stand-in")


class Memory:
    """An allocation, and by grain its last writer and its readers."""

    def __init__(
        self, machine: "Machine", name: str, num_bytes: int, home: "Stream | None", pool: object = None
    ) -> None:
        self.machine, self.name, self.home, self.pool = machine, name, home, pool
        grains = -(-num_bytes // _GRAIN)
        self.writer, self.written = np.zeros(grains, np.int32), np.zeros(grains, np.int64)
        self.read: dict[int, np.ndarray] = {}
        self.spared: set[int] = set()
        """Streams of which the allocator was told (`record_stream`)."""
        self.lost_to: str = ""
        """What may have overwritten it."""

    def conflict(self, cells: Any, clock: Clock, *, write: bool) -> str:
        """The stream of an earlier access that these need not follow, and what it did; empty where there is none."""
        writer, written = self.writer[cells], self.written[cells]
        known = [clock.get(stream, 0) for stream in range(len(self.machine.streams))]
        late = written > np.array(known)[writer]  # What no stream has written is 0 on stream 0.
        if late.any():
            return f"written on {self.machine.streams[writer[late].min()]}"
        for stream, when in self.read.items() if write else ():
            if (when[cells] > clock.get(stream, 0)).any():
                return f"read on {self.machine.streams[stream]}"
        return ""

    def record(self, cells: Any, stream: int, time: int, *, write: bool) -> None:
        if write:
            self.writer[cells], self.written[cells] = stream, time
        else:
            self.read.setdefault(stream, np.zeros(len(self.writer), np.int64))[cells] = time

    def __del__(self) -> None:
        if self.home is not None:
            self.machine.freed(self)


class Stream:
    """`torch.cuda.Stream`."""

    machine: "Machine"

    def __init__(self, device: torch.device | None = None, *, default: bool = False) -> None:
        self.device = torch.device(device or "cuda:0")
        self.number = len(self.machine.streams)
        self.clock: Clock = {}
        self.default = default
        self.machine.streams.append(self)

    def __repr__(self) -> str:
        return f"{'the default stream' if self.default else f'stream {self.number}'} of {self.device}"

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: "Event") -> None:
        with self.machine.lock:
            self.clock = joined(self.clock, event.clock)

    def record_event(self) -> "Event":
        event = self.machine.Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.machine.host_waits(self.clock, "synchronizing a stream")


class Event:
    """`torch.cuda.Event`."""

    machine: "Machine"

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        with self.machine.lock:
            stream = stream or self.machine.current_stream()
            self.clock = joined(stream.clock, self.machine.known)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.machine.current_stream()).wait_event(self)

    def query(self) -> bool:
        return all(self.machine.known.get(stream, 0) >= time for stream, time in self.clock.items())

    def synchronize(self) -> None:
        self.machine.host_waits(self.clock, "synchronizing an event")

    def elapsed_time(self, end: "Event") -> float:
        return 0.0


class Graph:
    """`torch.cuda.CUDAGraph`: what was launched during capture, run again over the same memory."""

    machine: "Machine"

    def __init__(self) -> None:
        self.nodes: list[tuple[str, Callable[[], Any], list[DeviceTensor]]] = []
        self.pool: object = None
        self.own: set[int] = set()
        """Ids of the memory that it allocated."""

    def replay(self) -> None:
        self.machine.replay(self)


class Access:
    """What one launch reads and writes: memory, and which grains of it."""

    def __init__(self) -> None:
        self.found: list[tuple[Memory, Any, bool]] = []


class Machine:
    """GPUs, their streams, and what each thread of the host knows of them."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.streams: list[Any] = [None]  # 0 stands for no stream.
        self.errors: list[OrderError] = []
        self.launches: list[str] = []
        """Names of all launches outside graphs, and "graph" for a replay."""
        self.copies: list[str] = []
        """"to device" and "to host", by pinned memory or pageable."""
        self._known: dict[int, Clock] = {}
        self._default: dict[torch.device, Stream] = {}
        self._pinned: dict[int, tuple[Any, Memory]] = {}
        self._sent: list[tuple[Memory, Tensor, bytes, str]] = []
        """Copies from pinned memory: that, the source, and what it held."""
        self._pools: dict[object, list[Any]] = {}
        self.local = threading.local()
        self.Stream: type[Stream] = type("Stream", (Stream,), {"machine": self})
        self.Event: type[Event] = type("Event", (Event,), {"machine": self})
        self.Graph: type[Graph] = type("Graph", (Graph,), {"machine": self})

    # Streams and the host.

    @property
    def known(self) -> Clock:
        """What this thread of the host knows to be complete."""
        return self._known.setdefault(threading.get_ident(), {})

    def learn(self, clock: Clock) -> None:
        with self.lock:
            self._known[threading.get_ident()] = joined(self.known, clock)
            self._check_sent()

    def host_waits(self, clock: Clock, what: str) -> None:
        if getattr(self.local, "graph", None) is not None:
            raise self._failed(OrderError(f"{what} while a graph is captured"))
        self.learn(clock)

    def device(self) -> torch.device:
        return getattr(self.local, "device", torch.device("cuda:0"))

    def current_stream(self, device: torch.device | None = None) -> Stream:
        device = torch.device(device) if device is not None else self.device()
        stream = getattr(self.local, "stream", None)
        if stream is not None and stream.device == device:
            return stream
        with self.lock:
            if device not in self._default:
                self._default[device] = self.Stream(device, default=True)
            return self._default[device]

    @contextlib.contextmanager
    def use_stream(self, stream: Stream | None) -> Iterator[None]:
        """Leaving it returns to the thread's device, and makes a context there: the thread must have chosen its own."""
        before = getattr(self.local, "stream", None), self.device()
        if stream is not None and stream.device.index and not hasattr(self.local, "device"):
            raise self._failed(OrderError(f"{stream} in a thread that uses the first device"))
        if stream is not None:
            self.local.stream, self.local.device = stream, stream.device
        try:
            yield
        finally:
            self.local.stream, self.local.device = before

    def synchronize(self, device: torch.device | None = None) -> None:
        clock: Clock = {}
        for stream in self.streams[1:]:
            clock = joined(clock, stream.clock)
        self.host_waits(clock, "synchronizing a device")

    def _failed(self, error: OrderError) -> OrderError:
        self.errors.append(error)
        return error

    def check(self) -> None:
        """Raises the first error, also one of another thread or of memory that was freed."""
        self._check_sent()
        if self.errors:
            raise self.errors[0]

    # Memory.

    def allocate(self, values: Tensor, name: str, device: torch.device) -> DeviceTensor:
        graph = getattr(self.local, "graph", None)
        stream = self.current_stream(device)
        memory = Memory(self, name, values.untyped_storage().nbytes(), stream, graph.pool if graph else None)
        if graph:
            graph.own.add(id(memory))
            self._pools.setdefault(graph.pool, []).append(weakref.ref(memory))
        return DeviceTensor(values, memory, device)

    def freed(self, memory: Memory) -> None:
        """The allocator may hand it out again, for work on its own stream from now on; that of a graph's pool goes back
        to the driver, which waits for all work."""
        if memory.pool is not None:
            return
        with self.lock:
            assert memory.home is not None
            spared = dict.fromkeys(memory.spared, 2**62)
            if not memory.conflict(slice(None), joined(memory.home.clock, spared), write=True):
                return  # Nor is there one with what the host knows.
            # Whatever thread lets go of it last, others have done so when they knew what they know.
            known = functools.reduce(joined, self._known.values(), memory.home.clock)
            clock = joined(known, spared)
            if found := memory.conflict(slice(None), clock, write=True):
                self.errors.append(
                    OrderError(f"memory of {memory.name}, of {memory.home}, is freed while it may still be {found}")
                )

    def pin(self, host: Tensor, name: str) -> Tensor:
        storage = host.untyped_storage()
        self._pinned[storage._cdata] = (StorageWeakRef(storage), Memory(self, name, storage.nbytes(), None))
        return host

    def pinned(self, host: Tensor) -> Memory | None:
        entry = self._pinned.get(host.untyped_storage()._cdata)
        return entry[1] if entry and not entry[0].expired() else None

    # Launches.

    def launch(self, name: str, run: Callable[[], Any], device: torch.device | None = None) -> Any:
        """Runs it as one kernel on the current stream; within another launch, as a part of that."""
        if getattr(self.local, "access", None) is not None:
            return run()
        out, access = self._accesses(run)
        graph = getattr(self.local, "graph", None)
        if graph is not None:
            graph.nodes.append((name, run, _leaves(out)))
        else:
            self.launches.append(name)
            self._commit(name, access, self.current_stream(device))
        return out

    def _accesses(self, run: Callable[[], Any]) -> tuple[Any, Access]:
        self.local.access = access = Access()
        try:
            return run(), access
        finally:
            self.local.access = None

    def _commit(self, name: str, access: Access, stream: Stream) -> None:
        with self.lock:
            stream.clock = joined(stream.clock, self.known)
            time = stream.clock.get(stream.number, 0) + 1
            for memory, cells, write in access.found:
                if memory.lost_to and not write:
                    raise self._failed(OrderError(f"{name} reads {memory.name}, which {memory.lost_to} overwrote"))
                if found := memory.conflict(cells, stream.clock, write=write):
                    does = "writes" if write else "reads"
                    raise self._failed(
                        OrderError(f"{name} on {stream} {does} memory of {memory.name}, which may still be {found}")
                    )
            stream.clock = {**stream.clock, stream.number: time}
            for memory, cells, write in access.found:
                memory.record(cells, stream.number, time, write=write)

    def note(self, memory: Memory, cells: Any, *, write: bool) -> None:
        self.local.access.found.append((memory, cells, write))

    def replay(self, graph: Graph) -> None:
        stream, clobber = self.current_stream(), Access()
        self.launches.append("graph")
        with self.lock:
            for ref in self._pools.get(graph.pool, ()):
                memory = ref()
                if memory is not None:
                    clobber.found.append((memory, slice(None), True))
                    memory.lost_to = "" if id(memory) in graph.own else "another graph of its pool"
        self._commit("the replay of a graph", clobber, stream)
        for name, run, made in graph.nodes:
            out, access = self._accesses(run)
            for kept, new in zip(made, _leaves(out), strict=True):
                if kept.values is not new.values:
                    kept.values.copy_(new.values)
                    access.found = [
                        (kept.memory if memory is new.memory else memory, cells, write)
                        for memory, cells, write in access.found
                    ]
                    new.memory.home = None
            self._commit(f"{name} of a graph", access, stream)

    @contextlib.contextmanager
    def capture(self, graph: Graph, pool: object = None, stream: Stream | None = None, **_: Any) -> Iterator[None]:
        graph.pool = pool
        with self.use_stream(stream or self.Stream(self.device())):
            self.local.graph = graph
            try:
                yield
            finally:
                self.local.graph = None

    # The host's memory.

    def host_reads(self, host: Tensor, what: str) -> None:
        if (memory := self.pinned(host)) is None:
            return
        with self.lock:
            if found := memory.conflict(slice(None), self.known, write=False):
                raise self._failed(OrderError(f"the host {what} {memory.name}, which may still be {found}"))

    def host_writes(self, host: Tensor, what: str) -> None:
        if (memory := self.pinned(host)) is None:
            return
        with self.lock:
            if found := memory.conflict(slice(None), self.known, write=True):
                raise self._failed(OrderError(f"the host {what} {memory.name}, which may still be {found}"))

    def sent(self, memory: Memory, host: Tensor) -> None:
        with self.lock:
            self._sent.append((memory, host, _bytes(host), memory.name))

    def _check_sent(self) -> None:
        """numpy writes without torch: a source of a copy must hold what it held, until a thread knows it complete."""
        with self.lock, torch._C.DisableTorchFunction(), _disable_current_modes():
            for copy in list(self._sent):
                memory, host, held, name = copy
                if _bytes(host) != held:
                    self.errors.append(
                        OrderError(f"the host overwrote {name} while it may still be copied to a device")
                    )
                elif memory.conflict(slice(None), self.known, write=True):
                    continue
                self._sent = [other for other in self._sent if other is not copy]


def _leaves(tree: Any) -> list[DeviceTensor]:
    return [leaf for leaf in tensors(tree) if isinstance(leaf, DeviceTensor)]


def _bytes(host: Tensor) -> bytes:
    return host.detach().reshape(-1).view(torch.uint8).numpy().tobytes() if host.numel() else b""


def grains(values: Tensor) -> slice:
    """The grains between the first and the last element."""
    if not values.numel():
        return slice(0, 0)
    span = 1 + sum((size - 1) * stride for size, stride in zip(values.shape, values.stride(), strict=True))
    first = values.storage_offset() * values.itemsize
    return slice(first // _GRAIN, -(-(first + span * values.itemsize) // _GRAIN))


def _elements(func: Any, values: Tensor, args: tuple[Any, ...]) -> Any:
    """The grains of `values` that an operation by index takes."""
    if values.itemsize % _GRAIN:
        return grains(values)
    place = _places(values)
    packet = func.overloadpacket
    if packet in (aten.index, aten.index_put_, aten._index_put_impl_):
        chosen = aten.index(place, args[1])
    else:
        chosen = aten.index_select(place, args[1], args[2])
    each = values.itemsize // _GRAIN
    return (chosen.reshape(-1, 1).numpy() * each + np.arange(each)).ravel()


class _Operations(TorchDispatchMode):
    """Every operation of torch on a GPU's tensors becomes a launch."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # Skipping would import it, which takes seconds.

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        machine = self.machine
        leaves = tensors((args, kwargs))
        ours = [leaf for leaf in leaves if isinstance(leaf, DeviceTensor)]
        target = kwargs.get("device")
        to_gpu = target is not None and torch.device(target).type == "cuda"
        if not ours and not to_gpu:
            return self._on_host(func, args, kwargs, leaves)
        packet = func.overloadpacket
        if packet in (aten._to_copy, aten.copy_):
            return self.copy(func, args, kwargs)
        if packet is aten.record_stream:
            args[0].memory.spared.add(args[1].number)
            return None
        if packet is not aten.is_pinned and is_composite(func):
            with self:
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        if packet is aten.is_pinned:
            return False
        inside = getattr(machine.local, "access", None) is not None
        if (not inside and packet in _WAITS) or (packet is aten.index and not inside and _by_mask(args[1])):
            machine.host_waits(machine.current_stream(ours[0].device).clock, f"{func}, which waits for its result,")
        device = ours[0].device if ours else _indexed(torch.device(target), machine)
        if {leaf.device for leaf in ours} - {device}:
            raise OrderError(f"{func} takes tensors of several devices")
        for leaf in leaves:
            if not isinstance(leaf, DeviceTensor) and leaf.dim() and packet not in (aten.index, aten.index_put_):
                raise OrderError(f"{func} takes tensors of a GPU and of the host")

        if self._is_view(func, args, kwargs, ours):
            return self._wrapped(func, func(*_values(args), **_values(kwargs)), ours, device)
        if packet in _NO_LAUNCH:
            return self._wrapped(func, func(*_values(args), **_on_cpu(_values(kwargs))), ours, device)
        return machine.launch(str(func), lambda: self._compute(func, args, kwargs, ours, device), device)

    def _is_view(self, func, args, kwargs, ours) -> bool:
        return func.is_view or func.overloadpacket in (aten._unsafe_view, aten.detach, aten._reshape_alias, aten.alias)

    def _compute(self, func, args, kwargs, ours, device):
        machine = self.machine
        written = set()
        for number, name in written_arguments(func):
            value = args[number] if number < len(args) else kwargs.get(name)
            written |= {id(leaf) for leaf in tensors(value)}
        for leaf in ours:
            by_index = func.overloadpacket in _BY_INDEX and leaf is args[0]
            cells = _elements(func, leaf.values, _values(args)) if by_index else grains(leaf.values)
            machine.note(leaf.memory, cells, write=id(leaf) in written)
        out = func(*_values(args), **_on_cpu(_values(kwargs)))
        return self._wrapped(func, out, ours, device, fresh=True)

    def _wrapped(self, func, out, ours, device, *, fresh: bool = False):
        machine, by_id = self.machine, {id(leaf.values): leaf for leaf in ours}
        by_storage = {leaf.values.untyped_storage()._cdata: leaf.memory for leaf in ours}

        def wrap(value: Tensor) -> Tensor:
            if id(value) in by_id:
                return by_id[id(value)]
            memory = by_storage.get(value.untyped_storage()._cdata)
            if memory is not None:
                return DeviceTensor(value, memory, device)
            made = machine.allocate(value, str(func), device)
            if fresh:
                machine.note(made.memory, grains(value), write=True)
            return made

        return replaced(out, wrap)

    def _on_host(self, func, args, kwargs, leaves):
        """Of the host alone: pinned memory is made, read and written here."""
        machine, packet = self.machine, func.overloadpacket
        if packet is aten.is_pinned:
            return machine.pinned(args[0]) is not None
        if packet in (aten.pin_memory, aten._pin_memory):
            return machine.pin(args[0].clone(), "a pinned copy")
        pin = kwargs.pop("pin_memory", False) if "pin_memory" in kwargs else False
        if not getattr(machine.local, "access", None) and not func.is_view:
            written = {number for number, _ in written_arguments(func)}
            for number, value in enumerate(args):
                for leaf in tensors(value):
                    if number in written:
                        machine.host_writes(leaf, f"writes ({func})")
                    else:
                        machine.host_reads(leaf, f"reads ({func})")
        out = func(*args, **kwargs)
        return machine.pin(out, "pinned memory") if pin else out

    def copy(self, func, args, kwargs):
        """Within a device, from the host to it, or the other way."""
        machine = self.machine
        if func.overloadpacket is aten.copy_:
            into, source = args[0], args[1]
            waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        else:
            into, source = None, args[0]
            waits = not kwargs.get("non_blocking", False)
        goes_to = into.device if into is not None else torch.device(kwargs.get("device") or source.device)
        device = source.device if source.is_cuda else _indexed(goes_to, machine)
        if source.is_cuda and goes_to.type == "cuda":
            if _indexed(goes_to, machine) != source.device:
                raise OrderError("a copy between devices")
            ours = [leaf for leaf in (into, source) if leaf is not None]
            return machine.launch(str(func), lambda: self._compute(func, args, kwargs, ours, device), device)
        host_to_device = not source.is_cuda
        inside = getattr(machine.local, "access", None) is not None
        if host_to_device:
            memory = machine.pinned(source)
            if memory is None and source.dim() and getattr(machine.local, "graph", None) is not None and not inside:
                raise machine._failed(OrderError("a copy from pageable memory while a graph is captured"))

            def send() -> DeviceTensor:
                made = into
                if made is None:
                    dtype = kwargs.get("dtype") or source.dtype
                    made = machine.allocate(source.to(dtype, copy=True), "a copy from the host", device)
                else:
                    made.values.copy_(source)
                if memory is not None:
                    machine.note(memory, grains(source), write=False)
                machine.note(made.memory, grains(made.values), write=True)
                return made

            found = machine.launch("copy to the device", send, device)
            if not inside:
                machine.copies.append("to device" if memory else "to device, pageable")
                if memory is not None:
                    if waits:
                        machine.host_waits(machine.current_stream(device).clock, "a blocking copy")
                    else:
                        machine.sent(memory, source)
            return found

        def fetch() -> Tensor:
            machine.note(source.memory, grains(source.values), write=False)
            host = into
            if host is None:
                host = source.values.to(kwargs.get("dtype") or source.dtype, copy=True)
                if not waits:
                    machine.pin(host, "a copy on the host")
            else:
                host.copy_(source.values)
            if (memory := machine.pinned(host)) is not None:
                machine.note(memory, grains(host), write=True)
            return host

        host = machine.launch("copy to the host", fetch, device)
        if not inside:
            machine.copies.append("to host" if machine.pinned(host) else "to host, pageable")
            if waits or not machine.pinned(host):
                machine.host_waits(machine.current_stream(device).clock, "a copy to the host that waits")
        return host


class _HostReads(TorchFunctionMode):
    """What reads a tensor's values without an operation of torch: `tolist`, `numpy`."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine, self.operations = machine, _Operations(machine)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in _READS_ON_HOST and args and type(args[0]) is Tensor and not args[0].is_meta:
            self.machine.host_reads(args[0], f"reads ({name})")
        if name == "tolist" and isinstance(args[0], DeviceTensor):
            return args[0].to("cpu").tolist()
        if name == "__getitem__" and isinstance(args[0], DeviceTensor):
            return self._get(*args)
        if name == "__setitem__" and isinstance(args[0], DeviceTensor):
            return self._set(*args)
        if name == "copy_" and any(isinstance(arg, DeviceTensor) for arg in args[:2]):
            return self.operations.copy(aten.copy_.default, args, kwargs or {})
        if name in _GUARDED and isinstance(args[0], DeviceTensor):
            return _GUARDED[name](*args, **(kwargs or {}))
        if name == "record_stream":
            args[0].memory.spared.add(args[1].number)
            return None
        return func(*args, **(kwargs or {}))

    # Indexing enters a device guard, which a build of torch without CUDA does not have.

    def _get(self, x: DeviceTensor, index: Any) -> DeviceTensor:
        machine, held = self.machine, self._index(index)
        if not _advanced(index):
            return DeviceTensor(x.values[held], x.memory, x.device)

        def gather() -> DeviceTensor:
            machine.note(x.memory, _chosen(x.values, held), write=False)
            self._note_index(index)
            made = machine.allocate(x.values[held], "indexing", x.device)
            machine.note(made.memory, grains(made.values), write=True)
            return made

        return machine.launch("index", gather, x.device)

    def _set(self, x: DeviceTensor, index: Any, value: Any) -> None:
        machine, held = self.machine, self._index(index)
        if not _advanced(index):
            part = DeviceTensor(x.values[held], x.memory, x.device)
            if isinstance(value, Tensor):
                self.operations.copy(aten.copy_.default, (part, value), {})
            else:
                aten.fill_.Scalar(part, value)
            return

        def scatter() -> None:
            if isinstance(value, DeviceTensor):
                machine.note(value.memory, grains(value.values), write=False)
            self._note_index(index)
            machine.note(x.memory, _chosen(x.values, held), write=True)
            x.values[held] = _values(value)

        machine.launch("index_put", scatter, x.device)

    def _index(self, index: Any) -> Any:
        """On the CPU; a mask or an index that is on the host makes a launch wait."""
        machine = self.machine
        if getattr(machine.local, "access", None) is None:
            for part in _parts(index):
                if isinstance(part, DeviceTensor) and part.dtype in (torch.bool, torch.uint8):
                    machine.host_waits(machine.current_stream(part.device).clock, "indexing by a mask")
                elif isinstance(part, (Tensor, list, np.ndarray)) and not isinstance(part, DeviceTensor):
                    if getattr(machine.local, "graph", None) is not None:
                        raise machine._failed(OrderError("an index on the host while a graph is captured"))
                    machine.copies.append("to device, pageable")
        return _values(index)

    def _note_index(self, index: Any) -> None:
        for part in _parts(index):
            if isinstance(part, DeviceTensor):
                self.machine.note(part.memory, grains(part.values), write=False)


def _parts(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _advanced(index: Any) -> bool:
    return any(isinstance(part, (list, np.ndarray, Tensor)) for part in _parts(index))


def _chosen(values: Tensor, index: Any) -> Any:
    """The grains that indexing takes."""
    if values.itemsize % _GRAIN:
        return grains(values)
    each = values.itemsize // _GRAIN
    return (_places(values)[index].reshape(-1, 1).numpy() * each + np.arange(each)).ravel()


def _places(values: Tensor) -> Tensor:
    """For each element its number in its memory."""
    count = values.untyped_storage().nbytes() // values.itemsize
    return torch.arange(count).as_strided(values.shape, values.stride(), values.storage_offset())


def _values(tree: Any) -> Any:
    return replaced(tree, lambda leaf: leaf.values if isinstance(leaf, DeviceTensor) else leaf)


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": torch.device("cpu")} if "device" in kwargs else kwargs


def _by_mask(indices: Any) -> bool:
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _indexed(device: torch.device, machine: Machine) -> torch.device:
    return device if device.index is not None else machine.device()


class _Lock:
    """A lock or a queue passes on what its last owner knew."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._lock, self._clock = machine, threading.Lock(), {}

    def __enter__(self) -> None:
        self._lock.acquire()
        self._machine.learn(self._clock)

    def __exit__(self, *_: object) -> None:
        self._clock = joined(self._clock, self._machine.known)
        self._lock.release()


class TrackedQueue:
    """`queue.SimpleQueue`."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._queue = machine, queue.SimpleQueue()

    def put(self, item: Any) -> None:
        self._queue.put((dict(self._machine.known), item))

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        clock, item = self._queue.get(block, timeout)
        self._machine.learn(clock)
        return item

    def empty(self) -> bool:
        return self._queue.empty()


def opaque_kernels(machine: Machine) -> Kernels:
    """The references, each of them one launch."""

    def of(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return machine.launch(name, lambda: function(*args, **kwargs))

        return call

    return Kernels(**{name: of(name, function) for name, function in vars(REFERENCE).items()})


@contextlib.contextmanager
def known_to_thread(machine: Machine) -> Iterator[None]:
    """Has operations of this thread go to the stand-in."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor` makes its values on the CPU; a thread's own setting.
    try:
        with _HostReads(machine), _Operations(machine):
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


@contextlib.contextmanager
def stand_in(*, num_devices: int = 4, threaded: tuple[Any, ...] = (), with_triton: bool = True) -> Iterator[Machine]:
    """GPUs for the product's code, in this thread and in those that the modules `threaded` start. Without Triton the
    references are no kernels, but what they do is launched one by one.

    Leaving it raises the first error that was found.
    """
    machine = Machine()

    class Thread(threading.Thread):
        def run(self) -> None:
            machine.learn(self.began)
            with known_to_thread(machine):
                super().run()

        def start(self) -> None:
            self.began = dict(machine.known)
            super().start()

    def set_device(device: torch.device) -> None:
        machine.local.device = torch.device(device)

    class Generator(torch.Generator):
        """On the CPU, whatever the device."""

        def __new__(cls, device: Any = "cpu") -> "Generator":
            return super().__new__(cls, "cpu")

    kernels = opaque_kernels(machine)
    cuda = {
        "Stream": machine.Stream,
        "Event": machine.Event,
        "CUDAGraph": machine.Graph,
        "graph": machine.capture,
        "stream": machine.use_stream,
        "current_stream": machine.current_stream,
        "synchronize": machine.synchronize,
        "graph_pool_handle": object,
        "is_current_stream_capturing": lambda: getattr(machine.local, "graph", None) is not None,
        "set_device": set_device,
        "device_count": lambda: num_devices,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device=None: (1 << 34, 1 << 34),
        "_lazy_init": lambda: None,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cuda.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch, "Generator", Generator)
        chosen = kernels if with_triton else REFERENCE
        patch.setattr("exeplan.runner.compute.model_runner.kernels_for", lambda device, dtype: chosen)
        patch.setattr("exeplan.runner.compute.model_runner.kernels_are_fused", lambda found: found is kernels)
        for module in threaded:
            patch.setattr(
                module, "queue", SimpleNamespace(**vars(queue) | {"SimpleQueue": lambda: TrackedQueue(machine)})
            )
            named = {"Thread": Thread, "Lock": lambda: _Lock(machine)}
            patch.setattr(module, "threading", SimpleNamespace(**vars(threading) | named))
        with known_to_thread(machine):
            yield machine
        machine.check()
