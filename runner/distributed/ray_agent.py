"""NodeAgent: the Ray actor of a device; it forks that device's worker, again for each generation.

The engine's `RayLauncher` calls it. A worker talks to its engine on a connection of its own, which the agent has opened
by a token that is good for one, so that its death is noticed there at once. An agent whose engine is gone ends, and its
worker with it; so does one whose raylet is gone, as Ray would give the device to another once the node is back.
Not here: where agents are placed (`ray_launcher.py`).
"""

import contextlib
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from exeplan.core.models.hub import cached_snapshot, is_hub_id
from exeplan.core.models.model import load_model_spec
from exeplan.errors import InputError
from exeplan.runner.distributed.launcher import ForkedWorker, LocalLauncher, start_fork_server
from exeplan.runner.ipc.child_process import WATCH_SECONDS
from exeplan.runner.ipc.handshake import dial
from exeplan.runner.ipc.tether import answer
from exeplan.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOfPlan:
    """What a node needs of a plan's model."""

    name: str
    directory: str | None
    """Where it is on the engine's host; None where no weights are read."""
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFound:
    """What an agent has found on its node."""

    node: str
    """Ray's id of it."""
    address: str
    version: str
    """Of exeplan."""
    model_directory: str | None


class OnNode:
    """An actor on a node, which ends with the node's raylet."""

    def __init__(self) -> None:
        _take_niceness_of(os.getppid())
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()

    def look(self, model: ModelOfPlan) -> NodeFound:
        """Raises InputError where the node has not the model, or another one."""
        import ray

        address = ray.util.get_node_ip_address()
        try:
            directory = _find(model)
        except InputError as error:
            raise InputError(f"the node {address} of the Ray cluster {error}") from None
        node = ray.get_runtime_context().get_node_id()
        return NodeFound(node=node, address=address, version=__version__, model_directory=directory)


class NodeAgent(OnNode):
    """Serves one engine. Its methods are called by way of Ray, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self._launcher = LocalLauncher()
        self._worker: ForkedWorker | None = None
        start_fork_server()

    def tie(self, address: str, port: int, token: bytes) -> None:
        """Answers the engine's tether, which is behind a door with that token, and ends with it."""
        connection = dial(address, port, token)

        def hold() -> NoReturn:
            answer(connection)
            os._exit(0)  # The fork server ends with this process, and the worker with the fork server.

        threading.Thread(target=hold, daemon=True).start()

    def start(self, address: str, port: int, token: bytes) -> None:
        """Forks a worker, instead of the one before, whose engine is behind a door with that token."""
        self.kill()
        self._worker = ForkedWorker(dial(address, port, token))

    def kill(self) -> None:
        """Ends the worker, if there is one, and waits until it has ended."""
        if self._worker:
            self._worker.end()
            self._worker = None

    def share(self, num_bytes: int) -> str | None:
        """As `LocalLauncher.share`, on this node."""
        return self._launcher.share(0, num_bytes)

    def unshare(self) -> None:
        self._launcher.unshare()


def _take_niceness_of(raylet: int) -> None:
    """For this process and the workers that it forks: Ray starts an actor's process at niceness 15
    (`RAY_worker_niceness`), where it loses against everything else on its host, the engine and its server included."""
    with contextlib.suppress(PermissionError, ProcessLookupError):  # Only root may lower it.
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, raylet))


def _end_with(raylet: int) -> NoReturn:
    """Ends this process when its parent has ended: Ray leaves it running."""
    while os.getppid() == raylet:
        time.sleep(WATCH_SECONDS)
    os._exit(0)


def _find(model: ModelOfPlan) -> str | None:
    """Where the model is on this node: in the same directory as on the engine's host, or in the Hub's cache here."""
    if model.directory is None:
        return None
    found = Path(model.directory)
    if not found.is_dir():
        snapshot = cached_snapshot(model.name) if is_hub_id(model.name) else None
        if snapshot is None:
            raise InputError(f"has no model at {model.directory}; copy it there, or mount it")
        found = snapshot
    fingerprint = load_model_spec(str(found)).fingerprint
    if fingerprint != model.fingerprint:
        raise InputError(
            f"has a model of other sizes at {found} (fingerprint {fingerprint}) than the engine's host "
            f"({model.fingerprint}); give all nodes the same"
        )
    return str(found)
