"""The routes of the server: generation, and views of what is served.

A request's life: `RequestLog` (its id), `Gate` (header size, origin, key), `Service.check_room`, `read_body`, `parse`,
`Service.admit`, `Generation`. Every error, also of routing, is an OpenAI error object.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from exeplan.core.plan import as_json
from exeplan.drift import state as drift_state
from exeplan.errors import InputError
from exeplan.planner.tables import json_line
from exeplan.runner.engine_process.client import EngineError
from exeplan.runner.ipc.frames import as_values
from exeplan.runner.server.connection import Gate, error_response, read_body
from exeplan.runner.server.dashboard import Live, load_page
from exeplan.runner.server.generation import Generation
from exeplan.runner.server.openapi import describe
from exeplan.runner.server.plan_control import control
from exeplan.runner.server.predicted import beside
from exeplan.runner.server.protocol import ChatRequest, CompletionRequest, GenerationRequest, RequestError, parse
from exeplan.runner.server.request_log import RequestLog
from exeplan.runner.server.service import Service

_EXPOSED = ["x-request-id", "retry-after"]
"""Headers that a page of an allowed origin may read."""

_SAFE = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}


def build_app(service: Service, *, api_key: str | None = None, cors_origins: Sequence[str] = ()) -> ASGIApp:
    """The whole application."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.post("/v1/completions", response_model=None)(_generation(service, CompletionRequest))
    app.post("/v1/chat/completions", response_model=None)(_generation(service, ChatRequest))
    _add_models(app, service)
    _add_views(app, service)
    _add_control(app, service, allowed=api_key is not None)
    _add_page(app, service)
    _add_description(app, service, keyed=api_key is not None)

    @app.exception_handler(HTTPException)
    async def routing_error(request: Request, error: HTTPException) -> Response:
        shown = f"{request.method} {request.url.path:.200}"
        return error_response(RequestError(f"{shown}: {error.detail}", status=error.status_code))

    @app.exception_handler(RequestError)
    async def refusal(request: Request, error: RequestError) -> Response:
        return error_response(error)

    @app.exception_handler(Exception)
    async def fault(request: Request, error: Exception) -> Response:
        return error_response(RequestError("an internal fault; the server's log has it", status=500))

    guarded: ASGIApp = Gate(app, api_key=api_key, origins=cors_origins)
    if cors_origins:  # Outside the gate: a browser asks first, without a key.
        methods = ["GET", "POST"]
        guarded = CORSMiddleware(
            guarded, allow_origins=cors_origins, allow_methods=methods, allow_headers=["*"], expose_headers=_EXPOSED
        )
    return RequestLog(guarded)


def _generation(service: Service, kind: type[GenerationRequest]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        service.check_room()
        try:
            body = await read_body(request)
        except ClientDisconnect:
            return Response()
        generation_request, params = parse(kind, body)
        return Generation(service, service.admit(generation_request, params), generation_request, params)

    return endpoint


def _add_models(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        service.check_loaded()
        entry = {"id": service.model_name, "object": "model", "created": 0, "owned_by": "exeplan"}
        return {"object": "list", "data": [{**entry, "max_model_len": service.max_context}]}

    @app.get("/v1/models/{name:path}", response_model=None)
    async def model(name: str) -> Response:
        if name == service.model_name:
            return JSONResponse((await models())["data"][0])
        raise service.unknown_model(name)


def _add_views(app: FastAPI, service: Service) -> None:
    @app.api_route("/health", methods=["GET", "HEAD"], response_model=None)
    async def health() -> Response:
        """Alive: 503 only when nothing but a new start helps."""
        failure = service.engine.failure
        return JSONResponse({"status": failure or service.down or "ok"}, status_code=503 if failure else 200)

    @app.api_route("/ready", methods=["GET", "HEAD"], response_model=None)
    async def ready() -> Response:
        """Answering: the model is warm, work gets on, and the server is not going."""
        if not (reason := service.not_ready):
            return JSONResponse({"status": "ok"})
        body = {"status": reason, **as_values(service.engine.loading)}
        return JSONResponse(body, status_code=503, headers={"retry-after": str(service.retry_after)})

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        replanning = drift_state.summary(service.replanner.state) if service.replanner else {}
        stats, waiting = service.engine.stats, service.engine.num_waiting
        page = service.metrics.render(stats, service.look_back(), num_waiting=waiting, replanning=replanning)
        return PlainTextResponse(page, media_type="text/plain; version=0.0.4")

    @app.get("/plan", response_model=None)
    async def plan() -> Response:
        """The active plan, and beside it what became of it."""
        body = {**as_json(service.plan), **beside(service.plan, service.look_back())}
        if service.replanner:
            body["replan"] = drift_state.as_json(service.replanner.state)
        return Response(json_line(body), media_type="application/json")


def _add_control(app: FastAPI, service: Service, *, allowed: bool) -> None:
    @app.post("/plan", response_model=None)
    async def change_plan(request: Request) -> Response:
        try:
            if not allowed:
                message = "changing the plan needs a server with an API key (--api-key), or SIGHUP"
                raise RequestError(message, status=403)
            service.check_loaded()
            return JSONResponse(await control(service, await read_body(request)))
        except ClientDisconnect:
            return Response()
        except InputError as error:
            known = error if isinstance(error, RequestError) else RequestError(str(error)[:500])
            return error_response(known)
        except EngineError as error:
            return error_response(RequestError(str(error), status=error.status, code="unavailable"))


def _add_description(app: FastAPI, service: Service, *, keyed: bool) -> None:
    body = describe(model=service.model_name, vocab_size=service.spec.vocab_size, keyed=keyed)

    @app.get("/openapi.json", response_model=None)
    async def description() -> Response:
        return JSONResponse(body)


def _add_page(app: FastAPI, service: Service) -> None:
    page, values = load_page(), Live(service)
    headers = {"content-security-policy": page.policy, "cache-control": "no-cache", **_SAFE}

    @app.api_route("/", methods=["GET", "HEAD"], response_model=None)
    async def show() -> Response:
        return Response(page.body, media_type="text/html; charset=utf-8", headers=headers)

    @app.get("/live", response_model=None)
    async def live() -> Response:
        return Response(values.body(), media_type="application/json", headers={"cache-control": "no-store", **_SAFE})
