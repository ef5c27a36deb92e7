"""The life of the server: loading, signals, drain, and the end after a failure of the engine.

Probes, the page and refusals work from the start; generation works once the model is loaded and warm.
On SIGTERM or SIGINT new requests get 503 and running ones are finished; a second signal ends everything at once. On
SIGHUP the file of API keys is read again, and the plan's, as soon as there is an engine to take it.
An engine that dies is replaced, which clients do not notice but by the time it takes. When that is of no use any more,
because engines or workers die one after another, waiting clients get an error, and a moment later the server ends with
status 1, so that a supervisor such as systemd can restart it. systemd's watchdog is served for as long as this event
loop runs and the engine is watched or being replaced.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from exeplan.runner.engine_process.job import EngineError
from exeplan.runner.server.network.connection import HEADER_SECONDS, MAX_HEADER_BYTES, GuardedProtocol
from exeplan.runner.server.network.listener import Listener, connection_limit
from exeplan.runner.server.network.places import NUM_PROBES
from exeplan.runner.server.notify import notify, watchdog_seconds
from exeplan.runner.server.plan_control import reload
from exeplan.runner.server.service import Service

KEEP_ALIVE_SECONDS = 75
CLOSE_SECONDS = 5
"""How long connections may take to close after the last response."""
FAREWELL_SECONDS = 2.0
"""How long a server whose engine has failed still answers, so that all clients get the error."""
NUM_HANDSHAKES = 128
"""Connections that wait for the end of their TLS handshake, besides those that have a place."""
log = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, which would stop listening at once and exit by signal.

    It leaves a TLS handshake as long as a header may take; uvicorn would leave it a minute.
    """

    def __init__(self, config: uvicorn.Config, tls: ssl.SSLContext | None) -> None:
        super().__init__(config)
        self._tls = tls

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets
        protocol = partial(
            GuardedProtocol, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        listening = asyncio.get_running_loop().create_server(
            protocol,
            sock=sockets[0],
            ssl=self._tls,
            backlog=self.config.backlog,
            ssl_handshake_timeout=HEADER_SECONDS if self._tls else None,
            ssl_shutdown_timeout=CLOSE_SECONDS if self._tls else None,
        )
        self.servers = [await listening]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_until_stopped(
    app: ASGIApp,
    service: Service,
    listener: Listener,
    *,
    tls: ssl.SSLContext | None = None,
    trusted_proxies: Sequence[str] = (),
    drain_seconds: float,
    on_listening: Callable[[], None],
    on_ready: Callable[[], None],
    on_hangup: Callable[[], Awaitable[None]],
) -> None:
    """Serves until a signal or a failure of the engine, then drains.

    Requests from `trusted_proxies` name their clients in `X-Forwarded-For`. `on_listening` is called once signals are
    handled, `on_ready` once the engine is ready, `on_hangup` at SIGHUP.

    Raises InputError where the model cannot be loaded, EngineError where the engine failed before it was ready.
    """
    GuardedProtocol.max_connections = connection_limit()
    GuardedProtocol.listener = listener
    listener.limit = GuardedProtocol.max_connections + NUM_PROBES + NUM_HANDSHAKES
    life = _Life(service, _Server(_config(app, trusted_proxies), tls), drain_seconds)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, life.stop)
    loop.add_signal_handler(signal.SIGHUP, life.hang_up, on_hangup)
    on_listening()
    tasks = [asyncio.create_task(life.watch(on_ready)), asyncio.create_task(life.feed_watchdog())]
    try:
        await life.server.serve(sockets=[listener])
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(tasks[1], return_exceptions=True)
        with contextlib.suppress(asyncio.CancelledError):
            await tasks[0]


class _Life:
    """How one server reacts to signals and to its engine."""

    def __init__(self, service: Service, server: _Server, drain_seconds: float) -> None:
        self.service, self.server, self._drain_seconds = service, server, drain_seconds
        self._draining: asyncio.Task[None] | None = None
        self._reading: set[asyncio.Task[None]] = set()
        self._read_later = False
        self._one_at_a_time = asyncio.Lock()

    async def watch(self, on_ready: Callable[[], None]) -> None:
        """Waits until the engine is ready, and then until it fails."""
        try:
            await self.service.until_ready()
            on_ready()
            if self._read_later:
                self.read_plan()
            await self.service.engine.ended.wait()
            log.error("%s; ending", self.service.engine.failure)
            await asyncio.sleep(FAREWELL_SECONDS)
        finally:
            self.server.should_exit = True

    async def feed_watchdog(self) -> None:
        """Says that the server works, three times as often as systemd wants to hear it."""
        while seconds := watchdog_seconds():
            if self.service.engine.guarded:
                notify(WATCHDOG="1")
            await asyncio.sleep(seconds / 3)

    def stop(self) -> None:
        """The first time: no new requests. The second time: no further waiting."""
        notify(STOPPING="1")
        if self._draining:
            self._draining.cancel()
            self._end()
        elif self.service.engine.unready:
            log.info("ending before the engine is ready")
            self._end()
        else:
            log.info("draining: running requests have %g s to finish", self._drain_seconds)
            self.service.drain()
            self._draining = asyncio.create_task(self._drain())

    def hang_up(self, on_hangup: Callable[[], Awaitable[None]]) -> None:
        """Reads again what is in files."""
        self._begin(self._read_files(on_hangup))

    async def _read_files(self, on_hangup: Callable[[], Awaitable[None]]) -> None:
        async with self._one_at_a_time:
            await on_hangup()
        self.read_plan()

    def read_plan(self) -> None:
        """Reads the plan's file again, once there is an engine that can switch to it."""
        if self.service.engine.unready:
            log.info("the plan's file is read again when the engine is ready")
            self._read_later = True
            return
        self._begin(reload(self.service))

    def _begin(self, reading: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(reading)
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)

    async def _drain(self) -> None:
        """Finishes requests that run or are being read, while new ones get 503, then ends the rest with an error."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_seconds):
                while self.service.num_pending:
                    await asyncio.sleep(0.02)
        self._end()

    def _end(self) -> None:
        self.service.drain()
        self.service.ended = True
        self.service.engine.fail_all(EngineError("the server has shut down"))
        self.server.should_exit = True


def _config(app: ASGIApp, trusted_proxies: Sequence[str]) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=GuardedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=bool(trusted_proxies),
        forwarded_allow_ips=list(trusted_proxies),
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=CLOSE_SECONDS,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
    )
