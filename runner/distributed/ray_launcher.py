"""RayLauncher: the engine's side of several hosts: Ray places an agent for each device (`ray_agent.py`).

A placement group a pipeline has a bundle for each stage (`ray_bundles.py`). Ray starts, shows and ends the agents, and
carries what is asked of them between passes; a pass goes over a connection of the engine's to each worker, and tensors
from worker to worker. A tether to each agent says within two seconds that its node is lost; Ray learns it later. All
agents are placed anew before the next generation of workers then, as soon as the cluster has room.
When this process ends, Ray ends its agents and frees the group.
Not here: what a worker does (`worker.py`), and whether to start another generation.
"""

import contextlib
import io
import logging
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from exeplan.core.schedule import Placement
from exeplan.errors import InputError
from exeplan.progress import OnProgress, no_progress
from exeplan.runner.distributed.launcher import DeviceAddress, OnLeft, WorkerHandle, disconnect
from exeplan.runner.distributed.ray_agent import ModelOfPlan, NodeAgent, NodeFound
from exeplan.runner.distributed.ray_bundles import Bundle, bundles, devices_left, worker_resources
from exeplan.runner.ipc.door import Door
from exeplan.runner.ipc.messages import EngineOptions, RaySetup
from exeplan.runner.ipc.tether import Tether
from exeplan.version import __version__

log = logging.getLogger(__name__)
NAMESPACE = "exeplan"
START_SECONDS = 120.0
"""How long an agent may take to start: its node may have to read torch from a disk first."""
ROOM_SECONDS = 120.0
"""How long the first start waits for a cluster that has room, but not now."""
SWITCH_SECONDS = 10.0
"""How long a change of plans waits for room, as nothing is computed meanwhile."""
LEFT_SECONDS = 3.0
"""How long a pipeline that has lost devices waits for others before it says which are left."""
CALL_SECONDS = 30.0
_PROBE_SECONDS = 5.0
_LOOK_SECONDS = 1.0
_SAY_SECONDS = 10.0
"""Between two lines of a log while there is no room."""
_SILENT_SECONDS = 30.0
"""How long nothing is placed on a node that has fallen silent, or cannot run an agent; Ray gives a silent one up within
that time by its defaults."""


class _NodeRefusesError(Exception):
    """A node cannot run an agent, as the sentence says."""

    def __init__(self, sentence: str, node: str) -> None:
        super().__init__(sentence)
        self.node = node


class RayLauncher:
    """Starts the workers of one pipeline on the nodes of a Ray cluster."""

    def __init__(
        self,
        setup: RaySetup,
        model: ModelOfPlan,
        options: EngineOptions,
        num_threads: int,
        *,
        on_progress: OnProgress = no_progress,
        on_left: OnLeft = lambda by_node, silent: None,
        on_back: Callable[[bool], None] = lambda there: None,
    ) -> None:
        """Connects to the cluster. Raises InputError where there is none, or this host is none of its nodes.

        `on_left` is called, in `prepare`, with the devices that are left to a placement for which there is no room any
        more; `on_back`, in a thread, when there is room for the setup's workers that are away, and when that is gone.
        """
        self._setup, self._model, self._on_progress = setup, model, on_progress
        self._on_left, self._on_back = on_left, on_back
        self._device, self._worker = options.device, worker_resources(options.device, num_threads)
        connect(setup.address)
        self.address: str = ray.util.get_node_ip_address()
        self._group: PlacementGroup | None = None
        self._placement: Placement | None = None
        self._agents: dict[int, _Agent] = {}
        self._silent = dict.fromkeys(setup.silent, time.monotonic() + _SILENT_SECONDS)
        """Until when nodes are left out that are silent, or cannot run an agent: Ray may take them for healthy."""
        self._ran: tuple[Placement, dict[str, float]] | None = None
        """The placement that had room last, and what each of its workers took."""
        self._reduced: Placement | None = None
        """The first one, where workers are away from it."""
        self._awaiting: _Awaited | None = None
        """Room for these."""

    def prepare(self, placement: Placement, *, num_threads: int) -> None:
        """Places agents where there are none for this placement, or with other resources, or one of them is gone."""
        worker = worker_resources(self._device, num_threads)
        same = placement == self._placement and worker == self._worker
        if same and not any(agent.gone for agent in self._agents.values()):
            return
        self._release()
        self._worker = worker
        while not self._agents:
            wanted = self._await_room(placement)
            try:
                self._agents = self._place(wanted)
            except _NodeRefusesError as error:
                self._free_group()
                if not (self._ran or self._setup.started):
                    raise InputError(str(error)) from None
                log.error("%s; other nodes are looked for", error)
                self._silent[error.node] = time.monotonic() + _SILENT_SECONDS
            except BaseException:
                self._release()
                raise
        self._placement, self._ran = placement, (placement, worker)
        self._reduced = self._reduced or placement
        if self._setup.away and placement == self._reduced:
            self._awaiting = _Awaited(self._setup, self._worker, self._on_back)
        log.info("replica %d: workers on %s", self._setup.replica, ", ".join(self._node_names()))

    def locate(self, device: int) -> DeviceAddress:
        return self._agents[device].located()

    def start(self, device: int, generation: int) -> WorkerHandle:
        return _RayWorker(self._agents[device], self.address)

    def share(self, device: int, num_bytes: int) -> str | None:
        return self._agents[device].ask("share", num_bytes)

    def unshare(self) -> None:
        for agent in self._agents.values():
            agent.tell("unshare")

    def close(self) -> None:
        for agent in list(self._agents.values()):
            agent.release()

    def _node_names(self) -> list[str]:
        """Addresses, with the beginning of Ray's id, as a host may have several nodes."""
        addresses = [agent.address for agent in self._agents.values()]
        return list(dict.fromkeys(f"{one.address} ({str(one.host)[:8]})" for one in addresses))

    def _release(self) -> None:
        if self._awaiting:
            self._awaiting.close()
            self._awaiting = None
        for agent in self._agents.values():
            if agent.silent:
                self._silent[str(agent.address.host)] = time.monotonic() + _SILENT_SECONDS
            agent.release()
        self._agents, self._placement = {}, None
        self._free_group()

    def _await_room(self, placement: Placement) -> tuple[Bundle, ...]:
        """Reserves what the placement needs, in `_group`.

        What has run before it waits for without limit: a lost node may come back. For the first placement it waits
        `ROOM_SECONDS`, for a change of plans `SWITCH_SECONDS`, and raises InputError then, as at once for what the
        cluster will never have room for.
        """
        patient = (placement, self._worker) == self._ran if self._ran else self._setup.started
        limit = SWITCH_SECONDS if self._ran else ROOM_SECONDS
        began, said, reserved = time.monotonic(), 0.0, None
        left: tuple[tuple[int, ...], ...] | None = None
        while True:
            self._silent = {node: until for node, until in self._silent.items() if until > time.monotonic()}
            try:
                wanted = bundles(placement, self._worker, _nodes(self._silent))
            except InputError as error:
                if not patient:
                    raise
                problem = str(error)
                time.sleep(_LOOK_SECONDS)
            else:
                if reserved != (reserved := (wanted, frozenset(self._silent))):
                    self._reserve(*reserved)
                assert self._group is not None
                if self._group.wait(_LOOK_SECONDS):
                    return wanted
                problem = f"no room now for {sum(len(bundle.devices) for bundle in wanted)} workers"
            waited = time.monotonic() - began
            if waited > limit and not patient:
                raise InputError(
                    f"the Ray cluster had {problem} of replica {self._setup.replica} for {limit:g} s; "
                    "`ray status` says what has taken its resources"
                )
            if waited > LEFT_SECONDS and patient and left != (now := self._left(placement)):
                left = now
                self._on_left(now, tuple(self._silent))
            if waited > said + _SAY_SECONDS:
                log.warning("waiting for the Ray cluster: %s", problem)
                said = waited
            self._on_progress(f"waiting for the Ray cluster for {waited:.0f} s: {problem}", 0.0)

    def _left(self, placement: Placement) -> tuple[tuple[int, ...], ...]:
        """Devices that there is room for now, by node."""
        free = available_resources_per_node()
        alive = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] not in self._silent]
        return devices_left(placement, self._worker, [free.get(node, {}) for node in alive])

    def _reserve(self, wanted: Sequence[Bundle], silent: Collection[str]) -> None:
        """Asks for the bundles, on other nodes than the silent ones."""
        self._free_group()
        elsewhere = {"ray.io/node-id": f"!in({','.join(sorted(silent))})"}
        self._group = placement_group(
            [bundle.resources for bundle in wanted],
            strategy="PACK",
            name=_name(f"exeplan-replica-{self._setup.replica}"),
            bundle_label_selector=[elsewhere] * len(wanted) if silent else None,
        )

    def _free_group(self) -> None:
        if self._group is not None:
            _remove(self._group)
            self._group = None

    def _place(self, wanted: Sequence[Bundle]) -> dict[int, "_Agent"]:
        """Agents of all devices. Raises _NodeRefusesError for a node that cannot run one, ChildProcessError for a lost
        one."""
        self._on_progress("starting workers on the Ray cluster", 0.0)
        assert self._group is not None
        handles: dict[int, ActorHandle] = {}
        bundle_of = {device: index for index, bundle in enumerate(wanted) for device in bundle.devices}
        for index, bundle in enumerate(wanted):
            for device in bundle.devices:
                handles[device] = _actor(
                    name=_name(f"exeplan-replica-{self._setup.replica}-device-{device}"),
                    worker=self._worker,
                    place=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index),
                )
        agents = {device: _Agent(handle) for device, handle in handles.items()}
        try:
            found = [agent.begin("look", self._model) for agent in agents.values()]
            for (device, agent), one in zip(agents.items(), found, strict=True):
                try:
                    agent.meet(device, one, self.address)
                except InputError as error:
                    nodes = placement_group_table(self._group)["bundles_to_node_id"]
                    raise _NodeRefusesError(str(error), nodes[bundle_of[device]]) from None
        except BaseException:
            for agent in agents.values():
                agent.release()
            raise
        return agents


class _Awaited:
    """Room for workers that are away, reserved as soon as the cluster has it; Ray's autoscaler sees that it lacks."""

    def __init__(self, setup: RaySetup, worker: dict[str, float], on_back: Callable[[bool], None]) -> None:
        name = _name(f"exeplan-replica-{setup.replica}-away")
        self._group = placement_group([worker] * setup.away, strategy="PACK", name=name)
        self._on_back, self._closed = on_back, threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def close(self) -> None:
        """Gives the room to the next one that reserves it."""
        self._closed.set()
        _remove(self._group)

    def _watch(self) -> None:
        there = None
        while not self._closed.wait(_LOOK_SECONDS):
            with contextlib.suppress(RayError):  # While the head node is gone nothing is known.
                now = placement_group_table(self._group)["state"] == "CREATED"
                if now != there and not self._closed.is_set():
                    there = now
                    self._on_back(there)


class _Agent:
    """The engine's end of one agent."""

    def __init__(self, handle: ActorHandle) -> None:
        self.gone = False
        self.address = DeviceAddress(host="", address="", local_device=0)
        self._handle = handle
        self._tether: Tether | None = None
        self._worker: socket.socket | None = None
        self._lock = threading.Lock()

    def meet(self, device: int, found: Any, engine: str) -> None:
        """Waits until the agent runs and has looked at its node, and ties it to this process."""
        node = result_of(found, START_SECONDS, f"the agent of device {device}")
        assert isinstance(node, NodeFound)
        if node.version != __version__:
            raise InputError(f"a node of the Ray cluster has exeplan {node.version}, this host {__version__}")
        with Door(engine) as door:
            tied = self.begin("tie", engine, door.port, door.token)
            result_of(tied, CALL_SECONDS, f"the agent of device {device}")
            self._tether = Tether(admitted(door), self._leave)
        self.address = DeviceAddress(
            host=node.node, address=node.address, local_device=0, model_directory=node.model_directory
        )

    @property
    def silent(self) -> bool:
        """Whether its node acknowledges nothing any more."""
        return self._tether is not None and self._tether.silent

    def located(self) -> DeviceAddress:
        """With the clock as it is now. Raises ChildProcessError where the agent is gone."""
        assert self._tether
        try:
            return replace(self.address, clock_offset=self._tether.clock_offset(CALL_SECONDS))
        except TimeoutError as error:
            raise self._lost(str(error)) from None

    def begin(self, method: str, *arguments: Any) -> Any:
        """Calls a method, without waiting for its result."""
        return getattr(self._handle, method).remote(*arguments)

    def ask(self, method: str, *arguments: Any) -> Any:
        """The result of a method. Raises ChildProcessError where it does not come."""
        return result_of(
            self.begin(method, *arguments), CALL_SECONDS, f"the agent on {self.address.address or 'a node'}"
        )

    def await_result(self, reference: Any) -> None:
        """Until a call has ended well. Raises ChildProcessError where it has not, also as soon as the agent is gone."""
        deadline = time.monotonic() + START_SECONDS
        while not ray.wait([reference], timeout=_LOOK_SECONDS)[0] and time.monotonic() < deadline:
            if self.gone:
                raise ChildProcessError(f"the node at {self.address.address} is lost")
        result_of(reference, _LOOK_SECONDS, f"the agent on {self.address.address}")

    def tell(self, method: str) -> None:
        """An agent that is gone raises nothing here: `gone` says it."""
        if not self.gone:
            with contextlib.suppress(RayError):
                self.begin(method)

    def worker_connected(self, connection: socket.socket) -> None:
        with self._lock:
            self._worker = connection
        if self.gone:
            disconnect(connection)

    def release(self) -> None:
        """Ends it, and its worker."""
        if self._tether:
            self._tether.close()
        with contextlib.suppress(RayError):
            ray.kill(self._handle)
        self._leave()

    def _lost(self, reason: str) -> ChildProcessError:
        self._leave()
        return ChildProcessError(f"the node at {self.address.address} is lost: {reason}")

    def _leave(self) -> None:
        """Without its agent a worker counts as lost, too."""
        self.gone = True
        with self._lock:
            if self._worker is not None:
                disconnect(self._worker)


class _RayWorker:
    """A worker that an agent forks."""

    pid = None

    def __init__(self, agent: _Agent, engine: str) -> None:
        self._agent, self._door = agent, Door(engine)
        self._started = agent.begin("start", engine, self._door.port, self._door.token)

    def connect(self) -> socket.socket:
        with self._door:
            self._agent.await_result(self._started)
            connection = admitted(self._door)
        self._agent.worker_connected(connection)
        return connection

    def kill(self) -> None:
        self._door.close()
        self._agent.tell("kill")

    def join(self) -> None:
        """The agent waits for the worker before it starts another."""


def _remove(group: PlacementGroup) -> None:
    with contextlib.suppress(RayError):
        remove_placement_group(group)


def _name(what: str) -> str:
    """One that no other server in the cluster has, nor an engine that Ray has not cleared away yet."""
    return f"{what}-{secrets.token_hex(4)}"


def _actor(*, name: str, worker: dict[str, float], place: PlacementGroupSchedulingStrategy) -> Any:
    """An agent that Ray starts, but does not start again: this process places another one then."""
    options = {"num_cpus": worker.get("CPU", 0.0), "num_gpus": worker.get("GPU", 0.0)}
    return ray.remote(NodeAgent).options(name=name, scheduling_strategy=place, max_restarts=0, **options).remote()


def admitted(door: Door) -> socket.socket:
    """The connection of an agent that has dialled. Raises ChildProcessError where there is none."""
    try:
        return door.admit(CALL_SECONDS)
    except TimeoutError as error:
        raise ChildProcessError(str(error)) from None


def result_of(reference: Any, seconds: float, what: str) -> Any:
    """The result of a call. Raises InputError where the call did, ChildProcessError where no result comes."""
    try:
        return ray.get(reference, timeout=seconds)
    except GetTimeoutError:
        raise ChildProcessError(f"{what} did not answer within {seconds:g} s") from None
    except RayTaskError as error:
        if isinstance(error.cause, InputError):
            raise InputError(str(error.cause)) from None
        raise ChildProcessError(f"{what} failed: {error.cause}") from None
    except RayError as error:
        if "No module named 'exeplan" in str(error):
            raise InputError(
                "a node of the Ray cluster cannot import exeplan; install it there with the Python that Ray runs: "
                "pip install 'exeplan[ray]'"
            ) from None
        raise ChildProcessError(f"{what} is gone ({type(error).__name__})") from None


def _nodes(without: Collection[str]) -> list[dict[str, float]]:
    """The resources of the nodes that Ray takes for healthy, without some of them."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"] and node["NodeID"] not in without]


class _Dropped(io.TextIOBase):
    """Standard output of an engine that is a driver of Ray's: Ray prints there what is in its own logs, too, and the
    server's is for one line."""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        return len(text)


def _check_address(address: str) -> None:
    """Raises InputError for what is no address of a cluster, and where nothing answers: Ray would try for long."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        raise InputError(f"--ray must be HOST:PORT of a Ray cluster, or auto for this host's, found '{address}'")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise InputError(
            f"no Ray cluster answers at {address} ({error}); `ray start --head` on that host starts one"
        ) from None


def connect(address: str) -> None:
    """Raises InputError where there is no cluster, or this host is none of its nodes."""
    _check_address(address)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise InputError(
            f"no Ray cluster at '{address}' that this host is part of ({reason}); `ray start --head` starts one, "
            "`ray start --address HOST:PORT` adds a host to it"
        ) from None
    finally:
        sys.stdout = _Dropped()
        for number, handler in handlers.items():
            signal.signal(number, handler)
