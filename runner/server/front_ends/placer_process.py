"""PlacerProcess: the owner's side of the process that places front ends (`placing.py`).

It is a process of its own because it is a driver of Ray's, whose threads and signal handlers have no place in the event
loop of a server.
"""

import asyncio
import contextlib
import socket

from msgspec import Struct

from exeplan.runner.ipc.child_process import start_child
from exeplan.runner.ipc.frames import MessageError, frame
from exeplan.runner.ipc.front_end_messages import PLACER_REPLIES, FrontEndPlaced, PlaceFrontEnds, PlacingRefused

PLACER = "exeplan.runner.server.front_ends.placing"
Placed = tuple[FrontEndPlaced, socket.socket] | tuple[PlacingRefused, None]


class PlacerProcess:
    """A process that has been started."""

    def __init__(self, process: asyncio.subprocess.Process, channel: socket.socket) -> None:
        self._process, self._channel = process, channel

    @classmethod
    async def start(cls, placing: PlaceFrontEnds) -> "PlacerProcess":
        ours, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            process = await start_child(PLACER, str(number), pass_fds=[number], stdin=asyncio.subprocess.DEVNULL)
        placer = cls(process, ours)
        placer.send(placing)
        return placer

    def send(self, message: Struct) -> None:
        """What cannot be sent any more is dropped: its end is seen by `next`."""
        with contextlib.suppress(OSError):
            self._channel.sendall(frame(message))

    async def next(self) -> Placed | None:
        """A front end that waits for its setup, or why there is none; None when the process has ended."""
        return await asyncio.to_thread(self._receive)

    def _receive(self) -> Placed | None:
        descriptors: list[int] = []

        def receive(size: int) -> bytes:
            data, found, _, _ = socket.recv_fds(self._channel, size, 1)
            descriptors.extend(found)
            return data

        try:
            reply = PLACER_REPLIES.read(receive)
        except (MessageError, OSError):
            return None
        if isinstance(reply, FrontEndPlaced) and descriptors:
            return reply, socket.socket(fileno=descriptors[0])
        return (reply, None) if isinstance(reply, PlacingRefused) else None

    async def close(self) -> None:
        """Ends it, and with it, by Ray, the agents that it has placed."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        self._channel.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        await self._process.wait()
