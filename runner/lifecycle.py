"""From listening to the end: signals, drain, and the end that an engine's failure brings.

On SIGTERM or SIGINT new requests get 503 and running ones are finished; on the second one everything ends at once. On
SIGHUP the plan's file is read again.
When the engine has failed for good, which is after its workers died again and again, whoever waits is told, and a
moment later the server ends by itself with status 1: a supervisor such as systemd can do more than it can.
"""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from exeplan.runner.client import EngineError
from exeplan.runner.connection import MAX_HEADER_BYTES, GuardedProtocol
from exeplan.runner.listener import connection_limit
from exeplan.runner.plan_control import reload
from exeplan.runner.service import Service

KEEP_ALIVE_SECONDS = 75
CLOSE_SECONDS = 2
"""How long connections may take to close after the last answer."""
FAREWELL_SECONDS = 2.0
"""How long a server whose engine has failed still answers, so that everybody gets to know."""
log = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """uvicorn's server, whose signals are ours: it would stop listening at once and exit by signal."""

    on_ready: Callable[[], None]

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.on_ready()


async def answer_until_told(
    app: ASGIApp, service: Service, listener: socket.socket, *, drain_seconds: float, on_ready: Callable[[], None]
) -> None:
    """Answers until a signal or a failure of the engine, then drains."""
    server = _Server(_config(app))
    server.on_ready = on_ready
    draining: list[asyncio.Task[None]] = []

    def stop() -> None:
        if draining:  # The second signal: no more waiting.
            draining[0].cancel()
            _end(service, server)
        else:
            log.info("finishing what runs, for at most %g s", drain_seconds)
            service.draining = True
            draining.append(asyncio.create_task(_drain(service, server, drain_seconds)))

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    loading: set[asyncio.Task[None]] = set()

    def load() -> None:
        task = asyncio.create_task(reload(service))
        loading.add(task)
        task.add_done_callback(loading.discard)

    loop.add_signal_handler(signal.SIGHUP, load)
    failing = asyncio.create_task(_end_after_failure(service, server))
    try:
        await server.serve(sockets=[listener])
    finally:
        failing.cancel()


def _config(app: ASGIApp) -> uvicorn.Config:
    GuardedProtocol.max_connections = connection_limit()
    return uvicorn.Config(
        app,
        http=GuardedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=CLOSE_SECONDS,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
    )


async def _drain(service: Service, server: uvicorn.Server, seconds: float) -> None:
    """Lets running requests finish for so long, while new ones get 503; then ends the rest with an error."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while service.engine.num_jobs:
                await asyncio.sleep(0.02)
    _end(service, server)


async def _end_after_failure(service: Service, server: uvicorn.Server) -> None:
    await service.engine.ended.wait()
    log.error("%s; ending", service.engine.failure)
    await asyncio.sleep(FAREWELL_SECONDS)
    server.should_exit = True


def _end(service: Service, server: uvicorn.Server) -> None:
    service.engine.fail_all(EngineError("the server has shut down"))
    server.should_exit = True
