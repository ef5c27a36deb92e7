"""WorkerGroup: the workers of one generation, wherever they run, and the channel to each of them.

A generation lives and dies as a whole: after a failed send or receive it is not known what the other workers hold. The
end of a channel is the end of a worker, whichever side notices first: a worker whose engine is gone ends at once, and
an engine learns from the closed socket that a worker died.
Not here: what the messages mean (`worker.py`, `multiprocess_executor.py`), what starts a worker (`launcher.py`), and
whether to start another generation.
"""

import contextlib
import logging
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

from msgspec.structs import replace

from exeplan.core.models.model import model_spec
from exeplan.core.schedule import Placement
from exeplan.errors import InputError
from exeplan.runner.compute.kv_budget import KVBudget, smallest_budget
from exeplan.runner.distributed.launcher import (
    DeviceAddress,
    Launcher,
    LocalLauncher,
    WorkerHandle,
    disconnect,
)
from exeplan.runner.ipc.child_process import STOPPED_SECONDS, WATCH_SECONDS, is_stopped
from exeplan.runner.ipc.frames import MessageError, frame
from exeplan.runner.ipc.messages import (
    WORKER_EVENTS,
    BatchRan,
    EngineSetup,
    WorkerCommand,
    WorkerEvent,
    WorkerFailed,
    WorkerLoading,
    WorkerReady,
    WorkerRefused,
    WorkerSetup,
)
from exeplan.runner.logs import server_options

log = logging.getLogger(__name__)
LOAD_SECONDS = 600.0
"""How long workers that load the model may report nothing."""


OnLoading = Callable[[int, int], None]
"""Called with a rank, and how many bytes of its weights it has read."""


class WorkerLoadError(ChildProcessError):
    """A worker ended before it had loaded the model."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class Report(NamedTuple):
    """What a worker reported; None when it has died."""

    rank: int
    event: WorkerEvent | None


class WorkerGroup:
    """Starts the workers and waits until they are ready. `reports` has what they send from then on.

    A None among the reports comes from the user of this group, which wakes itself with it.
    """

    def __init__(
        self,
        setup: EngineSetup,
        *,
        generation: int,
        on_loss: Callable[[], None],
        on_loading: OnLoading = lambda rank, num_bytes: None,
        launcher: Launcher | None = None,
    ) -> None:
        """`on_loss` is called, in some thread, when a worker has died: its report is there then.

        Raises InputError for a model that cannot be loaded, WorkerLoadError when a worker died before it was, another
        ChildProcessError when one could not be started.
        """
        self._setup, self._on_loss, self._launcher = setup, on_loss, launcher or LocalLauncher()
        self.reports: queue.SimpleQueue[Report | None] = queue.SimpleQueue()
        self._workers: list[WorkerHandle] = []
        self._channels: list[socket.socket] = []
        self._store: object = None
        """Where the workers find each other; it lives as long as they do."""
        self._ended = threading.Event()
        try:
            self._start(generation, on_loading)
        except BaseException:
            self.kill()
            raise

    @property
    def pids(self) -> list[int]:
        """Of the workers on this host."""
        return [worker.pid for worker in self._workers if worker.pid is not None]

    def send(self, ranks: Sequence[int], command: WorkerCommand) -> None:
        """One command to several workers. One that has died raises nothing here, and is reported."""
        data = frame(command)
        for rank in ranks:
            try:
                self._channels[rank].sendall(data)
            except OSError:
                self.reports.put(Report(rank, None))

    def kill(self) -> None:
        """Ends all workers, at once, and releases all that they shared."""
        self._ended.set()
        for worker in self._workers:
            worker.kill()
        for channel in self._channels:
            disconnect(channel)
        for worker in self._workers:
            worker.join()
        self._workers, self._channels, self._store = [], [], None
        self._launcher.unshare()

    def _start(self, generation: int, on_loading: OnLoading) -> None:
        self._launcher.prepare(self._setup.placement, num_threads=self._setup.num_threads)
        devices = _devices(self._setup.placement)
        addresses = [self._launcher.locate(device) for device in devices]
        store = self._open_store(self._setup.deadline_seconds)
        buffers, links = self._shared_buffers(), self._shared_links()
        for device in devices:
            self._workers.append(self._launcher.start(device, generation))
        for rank, (worker, address) in enumerate(zip(self._workers, addresses, strict=True)):
            self._channels.append(worker.connect())
            threading.Thread(target=self._read, args=(rank, self._channels[rank], address), daemon=True).start()
            command = WorkerSetup(
                rank=rank,
                setup=self._setup,
                model_directory=address.model_directory or self._setup.model.directory,
                address=address.address,
                local_device=address.local_device,
                store=store,
                prefix=f"generation-{generation}",
                buffers=buffers,
                links=links,
                logs=server_options(),
            )
            self.send([rank], command)
        threading.Thread(target=self._watch, args=(self.pids,), daemon=True).start()
        self._await_ready(len(devices), on_loading)

    def _watch(self, pids: Sequence[int]) -> None:
        """Ends a worker of this host that is stopped by a signal: it counts as lost then."""
        stopped = dict.fromkeys(pids, 0)
        while not self._ended.wait(WATCH_SECONDS):
            for rank, pid in enumerate(pids):
                stopped[pid] = stopped[pid] + 1 if is_stopped(pid) else 0
                if stopped[pid] * WATCH_SECONDS > STOPPED_SECONDS:
                    log.error("local worker %d was stopped by a signal, and is ended", rank)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    return

    def _open_store(self, timeout: float) -> tuple[str, int]:
        """Returns the address of the store."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined] # it is not in their __all__

        listener = socket.create_server((self._launcher.address, 0))  # The store itself would listen on all interfaces.
        host, port = listener.getsockname()[:2]
        self._store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
            master_listen_fd=listener.detach(),
        )
        return host, port

    def _shared_buffers(self) -> list[str | None]:
        """Memory for each stage whose ranks add up through it: those of several CPU workers on one host."""
        from exeplan.runner.ipc.collectives import group_bytes

        paths: list[str | None] = [None] * len(self._setup.placement)
        for number, stage in enumerate(self._setup.placement):
            hosts = {self._launcher.locate(device).host for device in stage.devices}
            if self._setup.engine.device == "cpu" and stage.tensor_parallel_size > 1 and len(hosts) == 1:
                paths[number] = self._launcher.share(stage.devices[0], group_bytes(stage.tensor_parallel_size))
        return paths

    def _shared_links(self) -> dict[str, str | None]:
        """Memory for what two workers on one host send each other from host memory, by their ranks: hidden states, and
        keys and values of CPUs; announcements of those that GPUs send.
        """
        from exeplan.runner.distributed.kv_transfer import transfer_pairs
        from exeplan.runner.distributed.links import hidden_pairs
        from exeplan.runner.distributed.shared_link import LINK_BYTES

        placement, model = self._setup.placement, self._setup.model
        devices, pairs = _devices(placement), transfer_pairs(model_spec(model.config, name=model.name), placement)
        if self._setup.engine.device == "cpu":
            pairs |= set(hidden_pairs(placement))
        return {
            f"{sender}-{receiver}": self._launcher.share(devices[sender], LINK_BYTES)
            for sender, receiver in sorted(pairs)
            if self._launcher.locate(devices[sender]).host == self._launcher.locate(devices[receiver]).host
        }

    def _read(self, rank: int, channel: socket.socket, address: DeviceAddress) -> None:
        try:
            while (event := WORKER_EVENTS.read(channel.recv)) is not None:
                self.reports.put(Report(rank, _on_engine_clock(event, address.clock_offset)))
        except MessageError as error:
            log.error("worker %d counts as lost: %s", rank, error)
        except OSError:
            pass
        self.reports.put(Report(rank, None))
        self._on_loss()

    def _await_ready(self, num_ranks: int, on_loading: OnLoading) -> None:
        budgets: list[KVBudget] = []
        waiting, deadline = set(range(num_ranks)), time.monotonic() + LOAD_SECONDS
        while waiting:
            try:
                report = self.reports.get(timeout=max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                raise ChildProcessError(
                    f"workers {sorted(waiting)} reported nothing for {LOAD_SECONDS:g} s while they loaded the model"
                ) from None
            if report is None:
                continue
            match report.event:
                case WorkerLoading(num_bytes=num_bytes):
                    deadline = time.monotonic() + LOAD_SECONDS
                    on_loading(report.rank, num_bytes)
                case WorkerReady(capacity=capacity):
                    waiting.discard(report.rank)
                    budgets += [KVBudget(capacity.num_blocks, capacity.pass_tokens)] if capacity else []
                case WorkerRefused(message=message):
                    raise InputError(message)
                case WorkerFailed(message=message):
                    raise WorkerLoadError(report.rank, f"worker {report.rank} failed: {message}")
                case None:
                    raise WorkerLoadError(report.rank, f"worker {report.rank} died while it loaded the model")
                case _:
                    raise ChildProcessError(f"worker {report.rank} sent {type(report.event).__name__} while it loaded")
        self.kv_budget = smallest_budget(budgets)
        self._launcher.unshare()  # All have attached to what they share.


def _devices(placement: Placement) -> list[int]:
    """By rank."""
    return [device for stage in placement for device in stage.devices]


def _on_engine_clock(event: WorkerEvent, offset: float) -> WorkerEvent:
    if offset and isinstance(event, BatchRan):
        return replace(event, start=event.start + offset, end=event.end + offset)
    return event
