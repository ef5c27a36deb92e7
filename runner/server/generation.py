"""Generation: the HTTP answer to one generation request, whole or streamed, for as long as the client is there.

The status line waits for the first token, so that whatever is wrong with a request is still an HTTP error. After that
an error is an event of the stream. Whoever goes away has their sequences dropped.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from textwrap import shorten
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from exeplan.errors import InputError
from exeplan.runner.compute.sampling import SamplingParams
from exeplan.runner.engine_process.client import EngineError, Job
from exeplan.runner.ipc.frames import Event
from exeplan.runner.server.connection import error_response
from exeplan.runner.server.protocol import GenerationRequest, RequestError
from exeplan.runner.server.request_log import note
from exeplan.runner.server.responses import Answer
from exeplan.runner.server.service import Service


class Generation(Response):
    """The answer to a generation request; it owns the job and releases it however it ends."""

    def __init__(self, service: Service, job: Job, request: GenerationRequest, params: SamplingParams) -> None:
        super().__init__()
        self._service, self._job, self._request, self._params = service, job, request, params

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        note(job=self._job.job_id)
        seconds = self._service.request_seconds
        late = EngineError(f"the request was not done within {seconds:g} s", status=504, code="timeout")
        timer = asyncio.get_running_loop().call_later(seconds, self._job.fail, late)
        answering = asyncio.create_task(self._respond(scope, receive, send))
        leaving = asyncio.create_task(_client_leaves(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
            else:
                note(ended="left")
        finally:
            timer.cancel()
            answering.cancel()
            leaving.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)
            self._service.release(self._job)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        response: Response
        try:
            prompts = await self._service.start(self._job, self._request, self._params)
            first = await self._job.next_events()
            answer = self._service.answer(self._request, prompts)
            if self._request.stream:
                await self._stream(answer, first, send)
                return note(**answer.usage())
            await self._collect(answer, first)
            note(**answer.usage())
            response = JSONResponse(answer.whole())
        except (InputError, EngineError) as error:
            response = error_response(_as_request_error(error))
        await response(scope, receive, send)

    async def _collect(self, answer: Answer, events: Sequence[Event]) -> None:
        while True:
            for event in events:
                answer.choices[_index(event)].take(event)
            if answer.finished:
                return
            events = await self._job.next_events()

    async def _stream(self, answer: Answer, first: Sequence[Event], send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async for chunks in self._chunks(answer, first):
                body = b"".join(b"data: " + _json(chunk) + b"\n\n" for chunk in chunks)
                await send({"type": "http.response.body", "body": body, "more_body": True})
        except (InputError, EngineError) as error:
            note(ended=str(error)[:200])
            body = b"data: " + _json(_as_request_error(error).body()) + b"\n\n"
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _chunks(self, answer: Answer, events: Sequence[Event]) -> AsyncIterator[list[dict[str, Any]]]:
        """Chunks as they come, one an event; more than one at a time where the client is slower than the engine."""
        options = self._request.stream_options
        usage = {"usage": None} if options and options.include_usage else {}
        while not answer.finished:
            found = []
            for event in events:
                choice = answer.choices[_index(event)]
                choice.take(event)
                found.append({**answer.chunk(choice, event), **usage})
            if answer.finished and usage:
                found.append(answer.last_chunk())
            elif answer.finished:
                found[-1]["timing"] = answer.timing()
            yield found
            if not answer.finished:
                events = await self._job.next_events()


def _index(event: Event) -> int:
    return int(event.request_id.rpartition("-")[2])


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def _as_request_error(error: Exception) -> RequestError:
    if isinstance(error, RequestError):
        return error
    message = shorten(str(error), 500, placeholder=" ...")
    if isinstance(error, EngineError):
        return RequestError(message, status=error.status, code=error.code)
    return RequestError(message)


async def _client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
