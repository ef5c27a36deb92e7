"""The application: the views of `views/` behind the gate and the request log.

A request passes `RequestLog` (its id), `HostGate`, `Gate` (header size, origin, key), and the view of its path.
Every error, also of routing, is an OpenAI error object.
"""

import asyncio
from collections.abc import Sequence

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from exeplan.runner.server.api_keys import ApiKeys
from exeplan.runner.server.clients import client_of
from exeplan.runner.server.connection import Gate, error_response
from exeplan.runner.server.hosts import HostGate, Hosts
from exeplan.runner.server.protocol import RequestError
from exeplan.runner.server.request_log import RequestLog
from exeplan.runner.server.service import Service
from exeplan.runner.server.views import load_views
from exeplan.runner.server.views.description import describe

_EXPOSED = ["x-request-id", "retry-after"]
"""Headers that a page of an allowed origin may read."""


def build_app(service: Service, hosts: Hosts, *, keys: ApiKeys, cors_origins: Sequence[str] = ()) -> ASGIApp:
    """The whole application."""
    app = route_views()
    app.state.service, app.state.has_key = service, keys.required
    app.openapi_schema = describe(
        app, model=service.model_name, vocab_size=service.spec.vocab_size, has_key=keys.required
    )
    app.exception_handler(HTTPException)(_routing_error)
    app.exception_handler(RequestError)(_refusal)
    app.exception_handler(Exception)(_internal_error)
    guarded: ASGIApp = Gate(app, keys, origins=cors_origins)
    if cors_origins:  # Outside the gate: a browser's preflight request carries no key.
        methods = ["GET", "POST"]
        guarded = CORSMiddleware(
            guarded, allow_origins=cors_origins, allow_methods=methods, allow_headers=["*"], expose_headers=_EXPOSED
        )
    return RequestLog(HostGate(guarded, hosts))


def route_views() -> FastAPI:
    """An application with all views and without a service."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    for view in load_views():
        app.include_router(view.router)
    return app


async def _routing_error(request: Request, error: HTTPException) -> Response:
    shown = f"{request.method} {request.url.path:.200}"
    return error_response(RequestError(f"{shown}: {error.detail}", status=error.status_code))


async def _refusal(request: Request, error: RequestError) -> Response:
    service: Service = request.app.state.service
    if error.status == 429 and (seconds := service.clients.pause(client_of(request))):
        await asyncio.sleep(seconds)
    return error_response(error)


async def _internal_error(request: Request, error: Exception) -> Response:
    return error_response(RequestError("an internal error; the server's log has it", status=500))
