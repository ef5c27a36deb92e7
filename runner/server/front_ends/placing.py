"""The process that places front ends: a driver of Ray's, with an agent on each of so many nodes.

`python -m exeplan.runner.server.front_ends.placing FD` reads PlacerCommand on its socket, and answers with a
FrontEndPlaced and a connection for each front end that runs. There is one a node at most, as all listen on one port,
and none on this host, which has the owner's. Where there are too few nodes it waits for others; a front end that is
lost is placed again, on another node where there is one. It ends with its socket, and Ray ends its agents then.
"""

import contextlib
import logging
import os
import queue
import secrets
import signal
import socket
import sys
import threading
import time
from typing import Any, NoReturn

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from exeplan.errors import InputError
from exeplan.runner import logs
from exeplan.runner.distributed.ray_agent import ModelOfPlan, NodeFound
from exeplan.runner.distributed.ray_launcher import CALL_SECONDS, START_SECONDS, admitted, connect, result_of
from exeplan.runner.ipc.door import Door
from exeplan.runner.ipc.frames import frame
from exeplan.runner.ipc.front_end_messages import (
    PLACER_COMMANDS,
    FrontEndLost,
    FrontEndPlaced,
    PlaceFrontEnds,
    PlacingRefused,
)
from exeplan.runner.server.front_ends.agent import FrontEndAgent
from exeplan.version import __version__

LOOK_SECONDS = 1.0
"""Between two looks whether front ends lack."""
AVOIDED_SECONDS = 30.0
"""How long a node where one was lost, or could not start, is chosen last."""
_SAY_SECONDS = 30.0
log = logging.getLogger(__name__)


class Placer:
    """Which front end is on which node."""

    def __init__(self, placing: PlaceFrontEnds, channel: socket.socket) -> None:
        """Connects to the cluster. Raises InputError where there is none, or this host is none of its nodes."""
        self._channel = channel
        source = placing.model
        self._model = ModelOfPlan(name=source.name, directory=source.directory, fingerprint=placing.fingerprint)
        connect(placing.address)
        self._address: str = ray.util.get_node_ip_address()
        self._own: str = ray.get_runtime_context().get_node_id()
        self._lacking = set(range(1, placing.count + 1))
        self._placed: dict[int, tuple[str, ActorHandle]] = {}
        self._avoided: dict[str, float] = {}
        """When, by node."""
        self._said = -_SAY_SECONDS

    def lost(self, number: int) -> None:
        """A front end is gone; nothing of it is left on its node."""
        if found := self._placed.pop(number, None):
            self._avoided[found[0]] = time.monotonic()
            _kill(found[1])
        self._lacking.add(number)

    def look(self) -> None:
        """Places what lacks, as far as there are nodes."""
        for number in sorted(self._lacking):
            node = self._free_node()
            if node is None:
                return self._say(f"{len(self._lacking)} front ends wait for a node of the Ray cluster")
            self._place(number, node)

    def _free_node(self) -> str | None:
        taken = {self._own, *(node for node, _ in self._placed.values())}
        free = [one["NodeID"] for one in ray.nodes() if one["Alive"] and one["NodeID"] not in taken]
        now = time.monotonic()
        self._avoided = {node: then for node, then in self._avoided.items() if now - then < AVOIDED_SECONDS}
        return min(free, key=lambda node: (self._avoided.get(node, 0.0), node), default=None)

    def _place(self, number: int, node: str) -> None:
        place = NodeAffinitySchedulingStrategy(node, soft=False)
        name = f"exeplan-front-end-{number}-{secrets.token_hex(4)}"
        options = {"name": name, "num_cpus": 0, "scheduling_strategy": place, "max_restarts": 0}
        handle: Any = ray.remote(FrontEndAgent).options(**options).remote()
        try:
            found = result_of(handle.look.remote(self._model), START_SECONDS, f"the agent of front end {number}")
            assert isinstance(found, NodeFound)
            if found.version != __version__:
                raise InputError(f"a node of the Ray cluster has exeplan {found.version}, this host {__version__}")
            with Door(self._address) as door:
                started = handle.start.remote(self._address, door.port, door.token)
                result_of(started, CALL_SECONDS, f"the agent of front end {number}")
                connection = admitted(door)
        except (InputError, ChildProcessError) as error:
            _kill(handle)
            self._avoided[node] = time.monotonic()
            return self._say(f"front end {number} could not be placed: {error}")
        placed = FrontEndPlaced(number=number, address=found.address, model_directory=found.model_directory)
        with connection:
            socket.send_fds(self._channel, [frame(placed)], [connection.fileno()])
        self._lacking.discard(number)
        self._placed[number] = (node, handle)

    def _say(self, what: str) -> None:
        """Now and then."""
        if time.monotonic() - self._said >= _SAY_SECONDS:
            self._said = time.monotonic()
            log.warning("%s", what)


def _kill(handle: ActorHandle) -> None:
    with contextlib.suppress(RayError):
        ray.kill(handle)


def _read(channel: socket.socket, lost: "queue.SimpleQueue[int]") -> NoReturn:
    """Until the owner is gone, and this process with it."""
    with contextlib.suppress(OSError):
        while isinstance(command := PLACER_COMMANDS.read(channel.recv), FrontEndLost):
            lost.put(command.number)
    os._exit(0)


def main(descriptor: int) -> None:
    """Places front ends until the socket closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logs.configure_child()
    channel = socket.socket(fileno=descriptor)
    placing = PLACER_COMMANDS.read(channel.recv)
    assert isinstance(placing, PlaceFrontEnds)
    lost: queue.SimpleQueue[int] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(channel, lost), daemon=True).start()
    try:
        placer = Placer(placing, channel)
    except InputError as error:
        return channel.sendall(frame(PlacingRefused(message=str(error))))
    while True:
        with contextlib.suppress(RayError):  # While the head node is gone nothing is placed.
            placer.look()
        with contextlib.suppress(queue.Empty):
            placer.lost(lost.get(timeout=LOOK_SECONDS))


if __name__ == "__main__":
    main(int(sys.argv[1]))
