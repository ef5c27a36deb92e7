"""WorkerGroup: the workers of one generation, wherever they run, and the channel to each of them.

A generation lives and dies as a whole: after a failed send or receive nobody knows what the others hold. The end of a
channel is the end of a worker, whichever of the two notices first: a worker whose engine is gone ends at once, and an
engine learns from the closed socket that a worker died.
Not here: what the messages say (`worker`, `workers`), what starts a worker (`hosts`), and whether to begin again.
"""

import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from exeplan.core.schedule import Placement
from exeplan.errors import InputError
from exeplan.runner.compute.kv_budget import Room, least_room
from exeplan.runner.distributed.launcher import Hosts, Place, Started, ThisHost, disconnect
from exeplan.runner.ipc.frames import frame, read_frame

LOAD_SECONDS = 600.0
"""How long workers may take to load the model."""


OnLoading = Callable[[int, int], None]
"""Is told a rank, and how many bytes of its weights it has read."""


class Report(NamedTuple):
    """A worker's message; None when it has died."""

    rank: int
    message: Mapping[str, Any] | None


class WorkerGroup:
    """Starts the workers and waits until they are ready. `reports` is what they say from then on."""

    def __init__(
        self,
        setup: Mapping[str, Any],
        placement: Placement,
        *,
        generation: int,
        on_loss: Callable[[], None],
        on_loading: OnLoading = lambda rank, num_bytes: None,
        hosts: Hosts | None = None,
    ) -> None:
        """`on_loss` is called, in some thread, when a worker has died: its report is there then.

        Raises InputError for a model that cannot be loaded, ChildProcessError when a worker died before it was.
        """
        self._on_loss, self._hosts = on_loss, hosts or ThisHost()
        self.reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._started: list[Started] = []
        self._channels: list[socket.socket] = []
        self._store: object = None
        """Where the workers find each other; it lives as long as they do."""
        try:
            self._start(setup, placement, generation, on_loading)
        except BaseException:
            self.kill()
            raise

    @property
    def pids(self) -> list[int]:
        """Of the workers on this host."""
        return [worker.pid for worker in self._started if worker.pid is not None]

    def send(self, ranks: Sequence[int], message: Mapping[str, Any]) -> None:
        """One message to several workers. Nothing is said of one that has died: its report does."""
        data = frame(message)
        for rank in ranks:
            try:
                self._channels[rank].sendall(data)
            except OSError:
                self.reports.put(Report(rank, None))

    def kill(self) -> None:
        """Ends all of them, at once, and everything that they shared."""
        for worker in self._started:
            worker.kill()
        for channel in self._channels:
            disconnect(channel)
        for worker in self._started:
            worker.join()
        self._started, self._channels, self._store = [], [], None
        self._hosts.unshare()

    def _start(self, setup: Mapping[str, Any], placement: Placement, generation: int, on_loading: OnLoading) -> None:
        self._hosts.prepare()
        devices = [device for stage in placement for device in stage.devices]
        places = [self._hosts.place(device) for device in devices]
        common = {
            "store": self._open_store(setup["timeout"]),
            "prefix": f"generation-{generation}",
            "buffers": self._shared_buffers(setup, placement),
            "links": self._shared_links(setup, placement),
        }
        for device in devices:
            self._started.append(self._hosts.start(device, generation))
        for rank, (worker, place) in enumerate(zip(self._started, places, strict=True)):
            self._channels.append(worker.connect())
            threading.Thread(target=self._read, args=(rank, self._channels[rank], place), daemon=True).start()
            self.send([rank], {"kind": "setup", "rank": rank, **setup, **common, **_own(setup, place)})
        self._await_ready(len(devices), on_loading)

    def _open_store(self, timeout: float) -> tuple[str, int]:
        """Returns the address of the store."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined] # it is not in their __all__

        listener = socket.create_server((self._hosts.address, 0))  # The store itself would listen on all interfaces.
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

    def _shared_buffers(self, setup: Mapping[str, Any], placement: Placement) -> list[str | None]:
        """Memory for each stage whose ranks add up through it: those of several CPU workers on one host."""
        from exeplan.runner.ipc.collectives import group_bytes

        paths: list[str | None] = [None] * len(placement)
        for number, stage in enumerate(placement):
            hosts = {self._hosts.place(device).host for device in stage.devices}
            if setup["engine"]["device"] == "cpu" and stage.tensor_parallel_size > 1 and len(hosts) == 1:
                paths[number] = self._hosts.share(stage.devices[0], group_bytes(stage.tensor_parallel_size))
        return paths

    def _shared_links(self, setup: Mapping[str, Any], placement: Placement) -> dict[str, str | None]:
        """Memory for the hidden states of two CPU workers on one host, by their ranks."""
        from exeplan.runner.distributed.links import hidden_pairs
        from exeplan.runner.distributed.shared_link import LINK_BYTES

        devices = [device for stage in placement for device in stage.devices]
        pairs = hidden_pairs(placement) if setup["engine"]["device"] == "cpu" else []
        return {
            f"{sender}-{receiver}": self._hosts.share(devices[sender], LINK_BYTES)
            for sender, receiver in pairs
            if self._hosts.place(devices[sender]).host == self._hosts.place(devices[receiver]).host
        }

    def _read(self, rank: int, channel: socket.socket, place: Place) -> None:
        try:
            while (message := read_frame(channel)) is not None:
                self.reports.put(Report(rank, _on_our_clock(message, place.clock_offset)))
        except OSError:
            pass
        self.reports.put(Report(rank, None))
        self._on_loss()

    def _await_ready(self, ranks: int, on_loading: OnLoading) -> None:
        rooms: list[Room] = []
        waiting, deadline = set(range(ranks)), time.monotonic() + LOAD_SECONDS
        while waiting:
            try:
                rank, message = self.reports.get(timeout=max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                raise ChildProcessError(f"workers {sorted(waiting)} did not load within {LOAD_SECONDS:g} s") from None
            if message is None:
                raise ChildProcessError(f"worker {rank} died while it loaded the model")
            if message["kind"] == "refused":
                raise InputError(message["message"])
            if message["kind"] == "failed":
                raise ChildProcessError(f"worker {rank} failed: {message['message']}")
            if message["kind"] == "loading":
                on_loading(rank, message["bytes"])
            else:
                waiting.discard(rank)
                rooms += [Room(*message["room"])] if message.get("room") else []
        self.room = least_room(rooms)
        self._hosts.unshare()  # All have attached to what they share.


def _own(setup: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """What only the worker at that place is told."""
    own: dict[str, Any] = {"address": place.address, "local_device": place.local_device}
    if place.model_directory is not None:
        own["model"] = {**setup["model"], "directory": place.model_directory}
    return own


def _on_our_clock(message: dict[str, Any], offset: float) -> dict[str, Any]:
    if message["kind"] == "ran":
        message["start"] += offset
        message["end"] += offset
    return message
