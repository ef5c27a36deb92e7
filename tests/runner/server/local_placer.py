"""Stands in for `exeplan.runner.server.front_ends.placing` where there is no Ray: front ends on this host; a program.

They are forked as an agent forks them, and reach their owner by a door. With `--port 0` each has a port of its own.
While the file of PLACER_REFUSES_WHILE exists there is no cluster.
"""

import contextlib
import os
import queue
import socket
import sys
import threading
from pathlib import Path

from exeplan.runner.ipc.door import Door
from exeplan.runner.ipc.fork_server import ForkServer
from exeplan.runner.ipc.frames import frame
from exeplan.runner.ipc.front_end_messages import (
    PLACER_COMMANDS,
    FrontEndLost,
    FrontEndPlaced,
    PlaceFrontEnds,
    PlacingRefused,
)
from exeplan.runner.ipc.handshake import dial
from exeplan.runner.server.front_ends.agent import FRONT_END

ADDRESS, PATIENCE = "127.0.0.1", 60.0


def main(descriptor: int) -> None:
    channel = socket.socket(fileno=descriptor)
    placing = PLACER_COMMANDS.read(channel.recv)
    assert isinstance(placing, PlaceFrontEnds)
    if Path(os.environ["PLACER_REFUSES_WHILE"]).exists():
        return channel.sendall(frame(PlacingRefused(message="there is no cluster")))
    forks, lacking = ForkServer((FRONT_END,), name="exeplan-fforks"), queue.SimpleQueue[int]()
    for number in range(1, placing.count + 1):
        lacking.put(number)

    def read() -> None:
        with contextlib.suppress(OSError):
            while isinstance(command := PLACER_COMMANDS.read(channel.recv), FrontEndLost):
                lacking.put(command.number)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        number = lacking.get()
        with Door(ADDRESS) as door:
            theirs = dial(ADDRESS, door.port, door.token)
            forks.fork(FRONT_END, theirs, name="exeplan-front")
            with door.admit(PATIENCE) as connection:
                placed = FrontEndPlaced(number=number, address=ADDRESS, model_directory=placing.model.directory)
                socket.send_fds(channel, [frame(placed)], [connection.fileno()])


if __name__ == "__main__":
    main(int(sys.argv[1]))
