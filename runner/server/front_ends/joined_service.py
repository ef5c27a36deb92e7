"""JoinedService: the service of a front end on another host, and the paths that only the owner of the replicas answers.

The owner admits requests, by the queue and the limits of all front ends together. What this one knows of both serves to
refuse a request early, before its body is read.
"""

import asyncio
import logging
from pathlib import Path

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from exeplan.errors import InputError
from exeplan.planner.load_problem import plan_from
from exeplan.runner.engine_process.job import EngineError, Job
from exeplan.runner.ipc.front_end_messages import FrontEndState, PlanRuns
from exeplan.runner.server.front_ends.joined_engine import JoinedEngine
from exeplan.runner.server.generation import as_request_error
from exeplan.runner.server.network.clients import Client, client_in
from exeplan.runner.server.network.connection import error_response, read_body
from exeplan.runner.server.openai.errors import RequestError
from exeplan.runner.server.service import Service

log = logging.getLogger(__name__)
OF_OWNER = ("/plan", "/replicas", "/dashboard")
"""Paths whose answers are of the whole service."""
_ASK_SECONDS = 330.0
"""For the owner's answer: a change of plans may take this long."""


class JoinedService(Service):
    """Admission is the owner's."""

    def place(self, count: int, client: Client, *, max_tokens: int | None, deadline: float | None) -> Job:
        """A job that the owner admits or refuses when it is submitted. Raises RequestError 503 without an owner."""
        if gone := self.engine.failure or ("the server has shut down" if self.ended else None):
            raise self._unavailable(gone)
        job = self.engine.reserve(count)
        self.clients.begin(client, job)
        return job

    def state(self) -> FrontEndState:
        return FrontEndState(draining=self.draining, num_pending=self.num_pending, num_refused=self.num_refused())

    def follow(self, message: PlanRuns) -> None:
        """Predictions and bounds are those of this plan from now on."""
        try:
            self.switch_to(plan_from(message.plan, folder=Path("/")))
        except InputError as error:  # Its policy may be a file that this node has not.
            log.error("predictions stay those of the plan before: %s", error)


class OfOwner:
    """ASGI middleware: `OF_OWNER` is answered by the owner, whichever front end is asked."""

    def __init__(self, app: ASGIApp, engine: JoinedEngine) -> None:
        self._app, self._engine = app, engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in OF_OWNER:
            return await self._app(scope, receive, send)
        try:
            response = await self._asked(Request(scope, receive))
        except RequestError as error:
            response = error_response(error)
        except ClientDisconnect:
            return
        await response(scope, receive, send)

    async def _asked(self, request: Request) -> Response:
        body, client = await read_body(request), client_in(request.scope)
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                answer = await self._engine.ask(request.method, request.url.path, body, client.identity)
        except EngineError as error:
            raise as_request_error(error) from None
        except TimeoutError:
            raise RequestError("the host of the replicas did not answer in time", status=504, code="timeout") from None
        response = Response(answer.body, status_code=answer.status)
        response.raw_headers = list(answer.headers)
        return response
