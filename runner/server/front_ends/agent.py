"""FrontEndAgent: the Ray actor of a node that forks its front end; both end when Ray ends it, or the raylet dies.

Not here: where agents are placed (`placing.py`), and the front end (`process.py`).
"""

from exeplan.runner.distributed.ray_agent import OnNode
from exeplan.runner.ipc.fork_server import ForkServer
from exeplan.runner.ipc.handshake import dial

FRONT_END = "exeplan.runner.server.front_ends.process"


class FrontEndAgent(OnNode):
    """Its methods are called by way of Ray."""

    def __init__(self) -> None:
        super().__init__()
        self._forks = ForkServer((FRONT_END,), name="exeplan-fforks")
        self._forks.start()

    def start(self, address: str, port: int, token: bytes) -> None:
        """Forks the front end, whose owner is behind a door with that token."""
        self._forks.fork(FRONT_END, dial(address, port, token), name="exeplan-front")
