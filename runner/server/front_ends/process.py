"""A front end on another host than the replicas: HTTP, keys, templates and tokens; it never imports torch.

An agent of Ray's forks it (`agent.py`). It ends with its connection to the owner, at SIGTERM when its requests are
answered, or where it cannot start; the owner has another one placed then.
"""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

from exeplan.core.models.model import ModelSpec, model_spec
from exeplan.core.plan import Plan
from exeplan.errors import InputError
from exeplan.planner.load_problem import plan_from
from exeplan.runner import logs
from exeplan.runner.engine.tokenizer import Tokenizer
from exeplan.runner.engine_process.job import EngineError
from exeplan.runner.ipc.frames import frame
from exeplan.runner.ipc.front_end_messages import OWNER_MESSAGES, FrontEndOptions, FrontEndRefused, FrontEndSetup
from exeplan.runner.ipc.tether import LOST_SECONDS
from exeplan.runner.server.admission import Admission
from exeplan.runner.server.front_ends.joined_engine import JoinedEngine
from exeplan.runner.server.front_ends.joined_service import JoinedService, OfOwner
from exeplan.runner.server.lifecycle import serve_until_stopped
from exeplan.runner.server.network.api_keys import ApiKeys
from exeplan.runner.server.network.hosts import Hosts
from exeplan.runner.server.network.listener import Listener, open_listener
from exeplan.runner.server.network.tls import Tls
from exeplan.runner.server.read_again import read_again
from exeplan.runner.server.routes import build_app

log = logging.getLogger(__name__)


def main(connection: socket.socket) -> int:
    """Serves until the owner is gone or a signal comes; returns an exit status."""
    setup = OWNER_MESSAGES.read(connection.recv)
    if not isinstance(setup, FrontEndSetup):
        return 1
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * LOST_SECONDS))
    logs.configure(setup.options.log_format, setup.options.log_level)
    try:
        return _serve(setup, connection)
    except InputError as error:
        log.error("%s", error)
        connection.sendall(frame(FrontEndRefused(message=str(error))))
        return 2
    except EngineError as error:
        log.error("%s", error)
        return 1


def _serve(setup: FrontEndSetup, connection: socket.socket) -> int:
    options, source = setup.options, setup.model
    directory = None if source.directory is None else Path(source.directory)
    spec = model_spec(source.config, name=source.name, directory=directory)
    plan = plan_from(setup.plan, folder=Path("/"))
    keys = ApiKeys(key=options.api_key, file=Path(options.api_keys) if options.api_keys else None)
    tls = Tls(Path(options.tls_cert), Path(options.tls_key)) if options.tls_cert and options.tls_key else None
    host = host_here(options.host, setup.address)
    with open_listener(host, options.port) as listener:
        port = listener.getsockname()[1]
        shown = url_host(host, setup.address)
        front_end = _FrontEnd(plan, spec, options, keys, tls, Hosts(host, options.allowed_hosts))
        asyncio.run(front_end.run(listener, connection, f"{'https' if tls else 'http'}://{shown}:{port}"))
    return 0


def url_host(host: str, address: str) -> str:
    """Where what listens on `host` of the node at `address` is reached."""
    everywhere = host in ("0.0.0.0", "::")
    found = address if everywhere else host.strip("[]")
    return f"[{found}]" if ":" in found else found


def host_here(host: str, address: str) -> str:
    """What a front end on the node at `address` listens on, for the owner's `--host`: the same where that is no single
    address of the owner's host, as loopback and all interfaces are; else its node's."""
    try:
        given = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host if host == "localhost" else address
    return host if given.is_loopback or given.is_unspecified else address


class _FrontEnd:
    """What is made within the event loop."""

    def __init__(
        self, plan: Plan, spec: ModelSpec, options: FrontEndOptions, keys: ApiKeys, tls: Tls | None, hosts: Hosts
    ) -> None:
        self._plan, self._spec, self._options = plan, spec, options
        self._keys, self._tls, self._hosts = keys, tls, hosts

    async def run(self, listener: Listener, connection: socket.socket, url: str) -> None:
        options, engine = self._options, JoinedEngine(*await asyncio.open_connection(sock=connection))
        service = self._service(engine)
        service.clients.count_from_now(self._keys.clients)
        read = read_again(self._keys, self._tls, service.clients)
        engine.state, engine.on_plan, engine.on_drain = service.state, service.follow, service.drain
        engine.on_files = _in_background(read)
        app = build_app(
            service,
            self._hosts,
            keys=self._keys,
            cors_origins=options.cors_origins,
            inner=lambda app: OfOwner(app, engine),
        )
        try:
            await serve_until_stopped(
                app,
                service,
                listener,
                drain_seconds=options.drain_seconds,
                on_listening=lambda: engine.start(url),
                on_ready=lambda: log.info("serving %s at %s", service.model_name, url),
                on_hangup=read,
                tls=self._tls.context if self._tls else None,
                trusted_proxies=options.trusted_proxies,
            )
        finally:
            await service.close()

    def _service(self, engine: JoinedEngine) -> JoinedService:
        options = self._options
        return JoinedService(
            engine,
            Tokenizer.load(self._spec),
            Admission(self._plan, max_queue=options.max_queue, refuse_late=options.admission == "refuse-late"),
            plan=self._plan,
            spec=self._spec,
            model_name=options.model_name,
            request_seconds=options.request_seconds,
            metrics_aliases=options.metrics_aliases,
            sampling_defaults=options.sampling_defaults,
        )


def _in_background(read: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    tasks: set[asyncio.Future[None]] = set()

    def begin() -> None:
        task = asyncio.ensure_future(read())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    return begin
