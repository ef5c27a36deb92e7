"""`exeplan serve`: the OpenAI-compatible HTTP server of one plan.

Two processes: this one speaks HTTP and never imports torch; the engine runs in its child (`process`), connected by a
pair of sockets. A request's life: `Gate` (key, header size), `read_body`, `parse`, `Service.admit`, `Generation`.
On SIGTERM or SIGINT new requests get 503 and running ones are finished; on the second one everything ends at once.
Not here: TLS and several models; put a proxy in front.
"""

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from exeplan.errors import InputError
from exeplan.model import ModelSpec
from exeplan.plan import Plan, as_json
from exeplan.runner.client import EngineClient, EngineError
from exeplan.runner.connection import MAX_HEADER_BYTES, Gate, GuardedProtocol, error_response, read_body
from exeplan.runner.generation import Generation
from exeplan.runner.launch import engine_setup
from exeplan.runner.protocol import ChatRequest, CompletionRequest, GenerationRequest, RequestError, parse
from exeplan.runner.service import Service, default_max_queue, summary
from exeplan.runner.tokenizer import Tokenizer

KEEP_ALIVE_SECONDS = 75
CLOSE_SECONDS = 2
"""How long connections may take to close after the last answer."""


def serve(
    plan: Plan,
    spec: ModelSpec,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    max_queue: int | None = None,
    served_model_name: str | None = None,
    dummy_weights: bool = False,
    drain_seconds: float = 30.0,
    timeline: Path | None = None,
    deadline_seconds: float | None = None,
    hosts: Mapping[str, Any] | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status: 0, or 1 when the engine had died.

    `max_queue` limits the sequences that wait for their prefill; port 0 takes a free one. When the model is loaded and
    requests are answered, one summary line is printed and `on_ready` gets the base URL. `hosts` as for `engine_setup`.
    Raises InputError for what a user can mend: a port in use, a model that cannot be loaded.
    """
    if max_queue is not None and max_queue < 1:
        raise InputError(f"--max-queue must be at least 1, found {max_queue}")
    setup = engine_setup(
        plan,
        spec,
        dummy_weights=dummy_weights,
        timeline=timeline,
        deadline_seconds=deadline_seconds,
        hosts=hosts,
    )
    tokenizer = Tokenizer.load(spec)
    with _listener(host, port) as listener:
        bound_port = listener.getsockname()[1]
        url = f"http://{f'[{host}]' if ':' in host else host}:{bound_port}"

        async def run() -> int:
            engine = await EngineClient.start({"kind": "setup", **setup})
            name, queue = served_model_name or spec.name, max_queue or default_max_queue(plan)
            service = Service(engine, tokenizer, plan=plan, spec=spec, model_name=name, max_queue=queue)

            def ready() -> None:
                print(summary(service, url), flush=True)
                if on_ready:
                    on_ready(url)

            try:
                await _run(build_app(service, api_key=api_key), service, listener, drain_seconds, ready)
                return 1 if engine.failure else 0
            finally:
                await engine.close()

        try:
            return asyncio.run(run())
        except EngineError as error:  # Its traceback is the engine process's own.
            print(f"exeplan serve: {error}", file=sys.stderr)
            return 1


def build_app(service: Service, *, api_key: str | None = None) -> FastAPI:
    """The routes. Every error, also of routing, is an OpenAI error object."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.add_middleware(Gate, api_key=api_key)

    def generation(kind: type[GenerationRequest]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                generation_request, params = parse(kind, await read_body(request))
                return Generation(service, service.admit(generation_request), generation_request, params)
            except ClientDisconnect:
                return Response()
            except RequestError as error:
                return error_response(error)

        return endpoint

    app.post("/v1/completions", response_model=None)(generation(CompletionRequest))
    app.post("/v1/chat/completions", response_model=None)(generation(ChatRequest))
    _add_views(app, service)

    @app.exception_handler(HTTPException)
    async def routing_error(request: Request, error: HTTPException) -> Response:
        shown = f"{request.method} {request.url.path:.200}"
        return error_response(RequestError(f"{shown}: {error.detail}", status=error.status_code))

    @app.exception_handler(Exception)
    async def fault(request: Request, error: Exception) -> Response:
        return error_response(RequestError("an internal fault; the server's log has it", status=500))

    return app


def _add_views(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        entry = {"id": service.model_name, "object": "model", "created": 0, "owned_by": "exeplan"}
        return {"object": "list", "data": [{**entry, "max_model_len": service.max_context}]}

    @app.get("/v1/models/{name:path}", response_model=None)
    async def model(name: str) -> Response:
        entry = (await models())["data"][0]
        if name == service.model_name:
            return JSONResponse(entry)
        message = f"no model '{name:.80}'; this server has '{service.model_name}'"
        return error_response(RequestError(message, status=404, param="model", code="model_not_found"))

    @app.api_route("/health", methods=["GET", "HEAD"], response_model=None)
    async def health() -> Response:
        return JSONResponse({"status": service.down or "ok"}, status_code=503 if service.down else 200)

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        page = service.metrics.render(service.engine.stats, num_waiting=service.engine.num_waiting)
        return PlainTextResponse(page, media_type="text/plain; version=0.0.4")

    @app.get("/plan", response_model=None)
    async def plan() -> Response:
        return JSONResponse(as_json(service.plan))


class _Server(uvicorn.Server):
    """uvicorn's server, whose signals are ours: it would stop listening at once and exit by signal."""

    on_ready: Callable[[], None]

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.on_ready()


async def _run(
    app: FastAPI, service: Service, listener: socket.socket, drain_seconds: float, on_ready: Callable[[], None]
) -> None:
    """Answers until told to stop, then drains."""
    config = uvicorn.Config(
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
    server = _Server(config)
    server.on_ready = on_ready
    draining: list[asyncio.Task[None]] = []

    def stop() -> None:
        if draining:  # The second signal: no more waiting.
            draining[0].cancel()
            _end(service, server)
        else:
            service.draining = True
            draining.append(asyncio.create_task(_drain(service, server, drain_seconds)))

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    await server.serve(sockets=[listener])


async def _drain(service: Service, server: uvicorn.Server, seconds: float) -> None:
    """Lets running requests finish for so long, while new ones get 503; then ends the rest with an error."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while service.engine.num_jobs:
                await asyncio.sleep(0.02)
    _end(service, server)


def _end(service: Service, server: uvicorn.Server) -> None:
    service.engine.fail_all(EngineError("the server has shut down"))
    server.should_exit = True


def _listener(host: str, port: int) -> socket.socket:
    """A bound socket. Raises InputError when the address cannot be had."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # A name such as localhost may have both; clients try 127.0.0.1 more surely than ::1.
        family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
        listener = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, UnicodeError, OverflowError) as error:
        raise InputError(f"cannot serve on {host}:{port}: {error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"cannot serve on {host}:{port}: {reason}; another --port may be free") from None
    return listener
