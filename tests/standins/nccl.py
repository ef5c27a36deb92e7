"""A stand-in for torch.distributed over threads, which keeps NCCL's rules and fails where a run might hang.

A communicator is a stream on each of its ranks: what is called first runs first, and an operation is complete when all
its ranks have come to it. So all ranks of a group must make the same calls in the same order. A group's sends and
receives between two ranks share one communicator, in both directions, and a send is a rendezvous: it is complete when
the other rank has come to its receive. Small messages may be buffered on a GPU; here none is. A call that waits for an
operation stands for the stream of compute, which waits for it. Groups over gloo have a channel for each direction.

Failures: unlike calls at the heads of two ranks, two sends head to head, groups that are not made by all ranks in one
order, a tensor that is overwritten before it was sent, and an operation that is not complete within `patience`.
Not here: how long anything takes.
"""

import contextlib
import socket
import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from exeplan.runner.distributed.launcher import LocalLauncher, WorkerHandle, disconnect
from exeplan.runner.distributed.worker import Commands, Reports, Worker
from exeplan.runner.ipc.frames import frame
from exeplan.runner.ipc.messages import WORKER_COMMANDS, WorkerReady

from .streams import Clock, DeviceTensor, Machine, grains, joined, known_to_thread

_MISSING = object()


class HangError(AssertionError):
    """What might hang, or mix data up, on GPUs."""


class Operation:
    """A call of one rank, in the queue of its communicator."""

    def __init__(self, kind: str, rank: int, values: Tensor) -> None:
        self.kind, self.rank, self.values = kind, rank, values
        self.held = values.clone() if kind != "receive" else None
        self.result: Any = _MISSING

    def __repr__(self) -> str:
        return f"{self.kind} of {tuple(self.values.shape)} on rank {self.rank}"

    @property
    def shape(self) -> tuple[Any, ...]:
        return self.kind, tuple(self.values.shape), self.values.dtype


class Handle:
    """`dist.ProcessGroup`, as one rank has it."""

    def __init__(self, number: int, ranks: Sequence[int], rank: int, backend: str) -> None:
        self.number, self.ranks, self.rank, self.backend = number, tuple(ranks), rank, backend


class Work:
    """A send or a receive: on a GPU on the communicator's own stream, which the current one waits for by `wait`."""

    def __init__(self, fabric: "Fabric", operation: Operation, stream: Any = None) -> None:
        self._fabric, self._operation, self._stream = fabric, operation, stream

    def wait(self) -> None:
        found = self._fabric.wait(self._operation)
        if self._operation.kind == "receive":
            self._operation.values.copy_(found)
        if self._stream is not None:
            self._stream.machine.current_stream(self._stream.device).wait_stream(self._stream)


class Fabric:
    """Takes the place of the module `torch.distributed` in the product's modules."""

    ProcessGroup = Handle
    Work = Work

    def __init__(self, patience: float = 2.0) -> None:
        self.patience = patience
        self.failure: BaseException | None = None
        self.communicators: set[Any] = set()
        self.device_ids: list[Any] = []
        self.engine_knows: Clock = {}
        self._queues: dict[Any, dict[int, deque[Operation]]] = defaultdict(lambda: defaultdict(deque))
        self._changed = threading.Condition()
        self._local = threading.local()
        self._groups: list[tuple[tuple[int, ...], str]] = []
        self._made: dict[int, int] = defaultdict(int)
        self._streams: dict[Any, Any] = {}
        """By communicator and rank."""

    # Groups.

    def init_process_group(self, backend: str, *, rank: int, world_size: int, device_id: Any = None, **_: Any) -> None:
        self._local.rank = rank
        self.device_ids.append(device_id)
        self._local.whole = self._group(range(world_size), backend)

    def new_group(self, ranks: Sequence[int], backend: str | None = None) -> Handle:
        return self._group(ranks, backend or self._local.whole.backend)

    def _group(self, ranks: Sequence[int], backend: str) -> Handle:
        rank, asked = self._local.rank, (tuple(ranks), backend)
        with self._changed:
            number = self._made[rank]
            self._made[rank] += 1
            if number == len(self._groups):
                self._groups.append(asked)
            elif self._groups[number] != asked:
                self._fail(f"group {number} is {asked} on rank {rank}, and {self._groups[number]} on another")
        return Handle(number, *asked[:1], rank, backend)

    def get_rank(self, group: Handle | None = None) -> int:
        group = group or self._local.whole
        return group.ranks.index(group.rank)

    def get_world_size(self, group: Handle | None = None) -> int:
        return len((group or self._local.whole).ranks)

    # Calls.

    def all_reduce(self, x: Tensor, group: Handle | None = None) -> None:
        self._collective("all_reduce", x, x, group or self._local.whole)

    def all_gather_into_tensor(self, out: Tensor, x: Tensor, group: Handle | None = None) -> None:
        self._collective("all_gather", out, x, group or self._local.whole)

    def _collective(self, kind: str, out: Tensor, x: Tensor, group: Handle) -> None:
        def run() -> None:
            operation = Operation(kind, group.rank, _noted(x, write=out is x))
            self._put(("ranks", group.number), group.ranks, operation)
            _noted(out, write=True).copy_(self.wait(operation))

        _launched(kind, run, x)

    def isend(self, x: Tensor, dst: int, group: Handle | None = None) -> Work:
        group = group or self._local.whole
        return self._transfer("send", x, group, (group.rank, dst))

    def irecv(self, x: Tensor, src: int, group: Handle | None = None) -> Work:
        group = group or self._local.whole
        return self._transfer("receive", x, group, (src, group.rank))

    def send(self, x: Tensor, dst: int, group: Handle | None = None) -> None:
        self.isend(x, dst, group).wait()

    def recv(self, x: Tensor, src: int, group: Handle | None = None) -> None:
        self.irecv(x, src, group).wait()

    def _transfer(self, kind: str, x: Tensor, group: Handle, pair: tuple[int, int]) -> Work:
        made: list[Operation] = []
        communicator, stream = self._pair(group, *pair), None

        def run() -> None:
            made.append(Operation(kind, group.rank, _noted(x, write=kind == "receive")))

        if isinstance(x, DeviceTensor):
            machine = x.memory.machine
            stream = self._streams.setdefault((communicator, group.rank), None) or machine.Stream(x.device)
            self._streams[communicator, group.rank] = stream
            stream.wait_stream(machine.current_stream(x.device))
            x.memory.spared.add(stream.number)
            with machine.use_stream(stream):
                machine.launch(kind, run, x.device)
        else:
            run()
        self._put(communicator, pair, made[0])
        return Work(self, made[0], stream)

    def _pair(self, group: Handle, sender: int, receiver: int) -> Any:
        if group.backend == "gloo":
            return ("channel", group.number, sender, receiver)
        return ("pair", group.number, frozenset((sender, receiver)))

    # Matching.

    def _put(self, communicator: Any, ranks: Sequence[int], operation: Operation) -> None:
        with self._changed:
            self.communicators.add(communicator)
            queues = self._queues[communicator]
            queues[operation.rank].append(operation)
            while all(queues[rank] for rank in ranks):
                self._match(communicator, [queues[rank].popleft() for rank in sorted(ranks)])
            self._changed.notify_all()

    def _match(self, communicator: Any, heads: list[Operation]) -> None:
        kinds = {head.kind for head in heads}
        if communicator[0] != "ranks":
            if kinds != {"send", "receive"}:
                self._fail(f"{heads[0]} and {heads[1]} are head to head on one communicator")
            send = next(head for head in heads if head.kind == "send")
            if len({head.shape[1:] for head in heads}) > 1:
                self._fail(f"{heads[0]} meets {heads[1]}")
            self._check_held(send)
            for head in heads:
                head.result = send.held
            return
        if len({head.shape for head in heads}) > 1:
            self._fail(f"{heads[0]} meets {' and '.join(map(str, heads[1:]))}")
        for head in heads:
            self._check_held(head)
        each = [head.held for head in heads]
        total = torch.cat([one.reshape(-1) for one in each]) if kinds == {"all_gather"} else sum(each[1:], each[0])
        for head in heads:
            head.result = total

    def _check_held(self, operation: Operation) -> None:
        if not torch.equal(operation.values, operation.held):
            self._fail(f"the tensor of {operation} was overwritten before it was sent")

    def wait(self, operation: Operation) -> Any:
        with self._changed:
            done = self._changed.wait_for(lambda: operation.result is not _MISSING or self.failure, self.patience)
            if operation.result is not _MISSING:
                return operation.result
            if not done:
                self._fail(f"{operation} waits for the other ranks for {self.patience:g} s")
            raise HangError(f"{operation} was not complete when another rank failed")

    def _fail(self, what: str) -> None:
        error = HangError(what)
        self.fail(error)
        raise error

    def fail(self, error: BaseException) -> None:
        """The first failure is kept; all that wait end."""
        with self._changed:
            self.failure = self.failure or error
            self._changed.notify_all()


def _noted(x: Tensor, *, write: bool) -> Tensor:
    if not isinstance(x, DeviceTensor):
        return x
    if x.memory.machine.local.access is not None:
        x.memory.machine.note(x.memory, grains(x.values), write=write)
    return x.values


def _launched(kind: str, run: Any, x: Tensor) -> None:
    """On a GPU it is a launch, which a graph may hold."""
    if isinstance(x, DeviceTensor):
        x.memory.machine.launch(kind, run, x.device)
    else:
        run()


class ThreadLauncher(LocalLauncher):
    """Starts workers as threads of this process; `apart`: as if each was on a host of its own."""

    def __init__(self, fabric: Fabric, machine: Machine | None = None, *, apart: bool = False) -> None:
        super().__init__()
        self._fabric, self._machine, self._apart = fabric, machine, apart

    def share(self, device: int, num_bytes: int) -> str | None:
        return None if self._apart else super().share(device, num_bytes)

    def start(self, device: int, generation: int) -> WorkerHandle:
        return _ThreadWorker(self._fabric, self._machine)


class _Reports(Reports):
    """The engine knows of a device what workers knew when they reported."""

    def __init__(self, connection: Any, fabric: Fabric, machine: Machine | None) -> None:
        super().__init__(connection)
        self._fabric, self._machine = fabric, machine

    def send(self, event: Any) -> None:
        with contextlib.suppress(OSError), self._lock:
            if self._machine:
                self._fabric.engine_knows = joined(self._fabric.engine_knows, self._machine.known)
            self._connection.sendall(frame(event))

    def fail(self, error: BaseException) -> Any:
        self._fabric.fail(error)
        self._end_with(None)

    def _end_with(self, event: Any) -> Any:
        disconnect(self._connection)


class _ThreadWorker:
    pid = None

    def __init__(self, fabric: Fabric, machine: Machine | None) -> None:
        self._fabric, self._machine = fabric, machine
        self._channel, self._theirs = socket.socketpair()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def connect(self) -> Any:
        return self._channel

    def kill(self) -> None:
        """Its channel's end ends it."""

    def join(self) -> None:
        self._thread.join(5.0)

    def _run(self) -> None:
        reports = _Reports(self._theirs, self._fabric, self._machine)
        try:
            with known_to_thread(self._machine) if self._machine else contextlib.nullcontext():
                self._serve(reports)
        except BaseException as error:
            reports.fail(error)

    def _serve(self, reports: Reports) -> None:
        commands = Commands()
        reader = threading.Thread(target=self._read, args=(commands,), daemon=True)
        reader.start()
        setup = commands.get()
        if setup is None:
            return
        worker = Worker(setup, reports)
        commands.on_expect = worker.expect
        reports.send(WorkerReady(capacity=worker.capacity))
        while (command := commands.get()) is not None:
            worker.take(command)

    def _read(self, commands: Commands) -> None:
        with contextlib.suppress(OSError):
            while (command := WORKER_COMMANDS.read(self._theirs.recv)) is not None:
                if self._machine:
                    self._machine.learn(self._fabric.engine_knows)
                commands.put(command)
        commands.put(None)


@contextlib.contextmanager
def stand_in_for_nccl(patch: Any, *, patience: float = 2.0) -> Iterator[Fabric]:
    """In the product's modules; leaving it raises the first failure of any rank."""
    fabric = Fabric(patience)
    for module in ("links", "kv_transfer", "fed_tokens", "worker"):
        patch.setattr(f"exeplan.runner.distributed.{module}.dist", fabric)
    patch.setattr("exeplan.runner.ipc.collectives.dist", fabric)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        patch.setenv(variable, "lo")
    num_threads = torch.get_num_threads()
    try:
        yield fabric
    except BaseException:
        if fabric.failure is None:
            raise
    finally:
        torch.set_num_threads(num_threads)
    if fabric.failure:
        raise fabric.failure
