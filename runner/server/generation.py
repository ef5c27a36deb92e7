"""Generation: one generation request from its body to the last byte of its response, whole or streamed.

In this order: does the queue have room (`routes.Room`), the body (`read_body`), is it a request
(`Service.read_generation`), is it admitted (`Service.admit`). The status line waits for the first token, so that a
wrong request still gets an HTTP error. After that an error is an event of the stream. When the client disconnects, its
sequences are dropped.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from textwrap import shorten
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from exeplan.errors import InputError
from exeplan.runner.engine_process.job import EngineError, Job
from exeplan.runner.ipc.messages import Event, Generate
from exeplan.runner.server.network.clients import client_of
from exeplan.runner.server.network.connection import error_response, read_body
from exeplan.runner.server.network.request_log import note
from exeplan.runner.server.network.streamed_body import streamed_body
from exeplan.runner.server.openai.errors import RequestError
from exeplan.runner.server.openai.responses import ChatChunk, CompletionChunk, ResponseBuilder
from exeplan.runner.server.service import RETRY_LOADING, Service

Rendered = TypeVar("Rendered")
_PART_BYTES = 1 << 18
"""Of a large answer, that are given to the connection at a time."""


async def generate(service: Service, http_request: Request, *, chat: bool) -> Response:
    """The response to a request for generation. Raises RequestError where it is refused."""
    client = client_of(http_request)
    with service.clients.reading(client):
        try:
            body = await read_body(http_request)
        except ClientDisconnect:
            return Response()
        with service.reading():
            request = await service.read_generation(body, chat=chat, client=client)
            return Generation(service, service.admit(request, client), request)


class Generation(Response):
    """The response to an admitted request; it owns the job and releases it however it ends."""

    def __init__(self, service: Service, job: Job, request: Generate) -> None:
        super().__init__()
        self._service, self._job, self._request = service, job, request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        note(job=self._job.job_id)
        seconds = self._service.request_seconds
        late = EngineError(f"the request was not done within {seconds:g} s", status=504, code="timeout")
        timer = asyncio.get_running_loop().call_later(seconds, self._job.fail, late)
        responding = asyncio.create_task(self._respond(scope, receive, send))
        disconnecting = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({responding, disconnecting}, return_when=asyncio.FIRST_COMPLETED)
            if responding.done():
                responding.result()
            else:
                note(ended="left")
        finally:
            timer.cancel()
            responding.cancel()
            disconnecting.cancel()
            await asyncio.gather(responding, disconnecting, return_exceptions=True)
            self._service.release(self._job)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        response: Response
        try:
            self._service.start(self._job, self._request)
            first = await self._job.next_events()
            builder = self._service.response_builder(self._request)
            if self._request.stream:
                await self._stream(builder, first, scope, send)
                return note(**builder.usage())
            await self._collect(builder, first)
            note(**builder.usage())
            if builder.is_large:
                return await self._send_in_pieces(builder, send)
            response = Response(b"".join(builder.pieces()), media_type="application/json")
        except (InputError, EngineError) as error:
            response = error_response(as_request_error(error))
        await response(scope, receive, send)

    async def _in_thread(self, render: Callable[[], Rendered]) -> Rendered:
        """What it returns: for what takes longer than the event loop may be away."""
        async with self._service.rendering:
            return await asyncio.to_thread(render)

    async def _send_in_pieces(self, builder: ResponseBuilder, send: Send) -> None:
        """A large answer, of which no more is in memory than a choice and what the connection takes."""
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        pieces = builder.pieces()
        while piece := await self._in_thread(partial(next, pieces, b"")):
            for begin in range(0, len(piece), _PART_BYTES):
                await send(
                    {"type": "http.response.body", "body": piece[begin : begin + _PART_BYTES], "more_body": True}
                )
        await send({"type": "http.response.body", "body": b""})

    async def _collect(self, builder: ResponseBuilder, events: Sequence[Event]) -> None:
        while True:
            for event in events:
                builder.take(event)
            if builder.finished:
                return
            events = await self._job.next_events()

    async def _stream(self, builder: ResponseBuilder, first: Sequence[Event], scope: Scope, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        write = streamed_body(scope, send)
        try:
            events = first
            while True:
                body = b""
                for chunk in await self._chunks(builder, events):
                    body += b"data: %b\n\n" % _json(chunk)
                    if len(body) > _PART_BYTES:  # Of many choices, each of which repeats a long prompt.
                        await write(body)
                        await asyncio.sleep(0)
                        body = b""
                await write(body)
                if builder.finished:
                    break
                events = await self._job.next_events()
        except (InputError, EngineError) as error:
            note(ended=str(error)[:200])
            await write(b"data: %b\n\n" % _json(as_request_error(error).body()))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _chunks(self, builder: ResponseBuilder, events: Sequence[Event]) -> list[CompletionChunk | ChatChunk]:
        """One an event; several where the client is slower than the engine."""
        wants_usage, found = self._request.usage, []
        for each in events:
            choice, event = builder.take(each)
            if event.prompt:
                chunk = await self._in_thread(partial(builder.chunk, choice, event))
            else:
                chunk = builder.chunk(choice, event)
            if wants_usage:
                chunk["usage"] = builder.usage() if self._request.usage_in_each_chunk else None
            found.append(chunk)
        if builder.finished and wants_usage:
            found.append(builder.last_chunk())
        elif builder.finished:
            found[-1]["timing"] = builder.timing()
        return found


_json = msgspec.json.Encoder().encode


def as_request_error(error: Exception) -> RequestError:
    """As a response says what a job, or a question to the engine, has ended with."""
    if isinstance(error, RequestError):
        return error
    message = shorten(str(error), 500, placeholder=" ...")
    if not isinstance(error, EngineError):
        return RequestError(message)
    if error.status == 503:  # Another engine or server may answer in a while.
        return RequestError(message, status=503, code=error.code or "unavailable", retry_after=RETRY_LOADING)
    return RequestError(message, status=error.status, code=error.code)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
