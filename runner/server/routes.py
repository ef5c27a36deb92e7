"""The application: the views of `views/` behind the gate and the request log.

A request passes `RequestLog` (its id), `HostGate`, `Gate` (header size, origin, key), `Room` (the queue), and the view
of its path.
Every error, also of routing, is an OpenAI error object.
"""

from collections.abc import Callable, Sequence

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from exeplan.runner.server.network.api_keys import ApiKeys
from exeplan.runner.server.network.clients import Client, client_in, client_of
from exeplan.runner.server.network.connection import Gate, error_response
from exeplan.runner.server.network.hosts import HostGate, Hosts
from exeplan.runner.server.network.request_log import RequestLog
from exeplan.runner.server.openai.errors import RequestError
from exeplan.runner.server.service import Service
from exeplan.runner.server.views import load_views
from exeplan.runner.server.views.description import describe

_NEED_ROOM = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
_EXPOSED = ["x-request-id", "retry-after"]
"""Headers that a page of an allowed origin may read."""


def build_app(
    service: Service,
    hosts: Hosts,
    *,
    keys: ApiKeys,
    cors_origins: Sequence[str] = (),
    inner: Callable[[ASGIApp], ASGIApp] = lambda app: app,
) -> ASGIApp:
    """The whole application; `inner` is put around the views, behind the gate."""
    app = build_views(service, keys=keys)
    guarded: ASGIApp = Gate(Room(inner(app), service), keys, origins=cors_origins)
    if cors_origins:  # Outside the gate: a browser's preflight request carries no key.
        methods = ["GET", "POST"]
        guarded = CORSMiddleware(
            guarded, allow_origins=cors_origins, allow_methods=methods, allow_headers=["*"], expose_headers=_EXPOSED
        )
    return RequestLog(HostGate(guarded, hosts))


def build_views(service: Service, *, keys: ApiKeys) -> FastAPI:
    """The views of a service, for requests that have passed the gate."""
    app = route_views()
    app.state.service, app.state.has_key = service, keys.required
    app.openapi_schema = describe(
        app, model=service.model_name, vocab_size=service.spec.vocab_size, has_key=keys.required
    )
    app.exception_handler(HTTPException)(_routing_error)
    app.exception_handler(RequestError)(_refusal)
    app.exception_handler(Exception)(_internal_error)
    return app


def route_views() -> FastAPI:
    """An application with all views and without a service."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    for view in load_views():
        app.include_router(view.router)
    return app


async def _routing_error(request: Request, error: HTTPException) -> Response:
    shown = f"{request.method} {request.url.path:.200}"
    return error_response(RequestError(f"{shown}: {error.detail}", status=error.status_code))


class Room:
    """ASGI middleware: what needs a place where there is none is refused before its body is read, and before routing:
    there may be many such requests, and each takes time from the others."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in _NEED_ROOM:
            client = client_in(scope)
            if error := self._service.refusal(client):
                response = await _refused(self._service, client, error)
                return await response(scope, receive, send)
        await self.app(scope, receive, send)


async def _refused(service: Service, client: Client, error: RequestError) -> Response:
    if error.status == 429:
        await service.pause(client)
    return error_response(error)


async def _refusal(request: Request, error: RequestError) -> Response:
    return await _refused(request.app.state.service, client_of(request), error)


async def _internal_error(request: Request, error: Exception) -> Response:
    return error_response(RequestError("an internal error; the server's log has it", status=500))
