"""The border to the network: size limits, timeouts and the key, before any other code sees a request.

uvicorn accepts headers and bodies of any size and waits for them without limit. Here a header has at most 16 KiB and 10
seconds, a body 2 MiB, 10 seconds between parts and 30 in total, and a client that reads nothing of a response for 30
seconds is disconnected. All bodies being read share one limit, and so do connections (`places.py`). Every error is an
OpenAI error object. A page of another site cannot send requests through a visitor's browser, unless its origin is
allowed.
"""

import asyncio
import json
import logging
import sys
import time
from collections.abc import Sequence

import h11
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from exeplan.runner.server.network.api_keys import ApiKeys
from exeplan.runner.server.network.clients import Client, network_of, set_client
from exeplan.runner.server.network.listener import MAX_CONNECTIONS, Listener, set_options
from exeplan.runner.server.network.places import Places
from exeplan.runner.server.network.request_log import new_request_id, note
from exeplan.runner.server.openai.errors import RequestError

MAX_HEADER_BYTES = 16 * 1024
MAX_BODY_BYTES = 2 * 1024 * 1024
HEADER_SECONDS = 10.0
BODY_PAUSE_SECONDS = 10.0
BODY_SECONDS = 30.0
LINGER_SECONDS = 2.0
STALL_SECONDS = 30.0
"""How long a client may read nothing of a response that is larger than the buffers on the way."""
VANISHED_SECONDS = 60
"""After this time the kernel closes a connection whose peer no longer answers."""
MAX_BODIES_BYTES = 256 * 1024 * 1024
"""Of all bodies being read at one time."""
AMBIGUOUS = "ambiguous_length"
"""The code of a refusal after which the connection is not used again: a proxy may see other requests on it."""
PROBES = ("/health", "/ready")
"""Answered on a few more connections than there may be."""
OPEN_PATHS = ("/", *PROBES)
"""The only paths without a key: probes carry none, and the page at `/` holds no data. All others are refused."""
log = logging.getLogger(__name__)


class GuardedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 with a limit on how long either side may keep the other waiting, and errors that name it.

    It relies on internals of uvicorn's `H11Protocol`: `conn`, `cycle`, `transport`, `connections`, `headers` and
    `send_400_response`. pyproject.toml therefore bounds uvicorn from above; raise the bound with these tests green:
    tests/runner/server/test_bad_input.py, test_overload.py and test_lifecycle.py.
    """

    max_connections = MAX_CONNECTIONS
    listener: Listener | None = None
    """Where connections come from."""
    _header_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _rest_timer: asyncio.TimerHandle | None = None
    _num_rest_bytes = 0
    """Of a body that still arrives after its request has been answered."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        super().connection_made(transport)
        if connection := transport.get_extra_info("socket"):
            set_options(connection, VANISHED_SECONDS)
            if self.listener is not None:
                self.listener.has_begun(connection.fileno())
        self._expect_header()
        entry = self._places.enter(self, network_of(self.client[0] if self.client else ""))
        if entry.probes:
            self.app = OnlyProbes(self.app)
        if entry.leaves and entry.probes:
            entry.leaves._close_with(busy())
        elif entry.leaves:
            entry.leaves.transport.abort()

    @property
    def _places(self) -> "Places[GuardedProtocol]":
        """Those of all connections of one server."""
        state = self.server_state
        if not hasattr(state, "places"):
            state.places = Places(self.max_connections)  # type: ignore[attr-defined]
        found: Places[GuardedProtocol] = state.places  # type: ignore[attr-defined]
        return found

    def connection_lost(self, exc: Exception | None) -> None:
        self._places.leave(self)
        self._header_came()
        self._rest_came()
        self.resume_writing()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """A request may be refused before its body is read; what still arrives of it is discarded, within limits."""
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE:
            self._places.rest(self)
        if not self._rest_comes:
            return
        if any(name == b"expect" for name, _ in self.headers):  # Whether a body follows is not known.
            self.transport.close()
        else:
            self._rest_timer = self.loop.call_later(BODY_SECONDS, self.transport.close)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(STALL_SECONDS, self._stalled)

    def resume_writing(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        super().resume_writing()

    def _stalled(self) -> None:
        log.info("a client read nothing of its response for %g s and is disconnected", STALL_SECONDS)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._rest_timer is not None:
            self._take_rest(len(data))
        if self.conn.their_state is not h11.IDLE:
            self._places.work(self)
            self._header_came()
        elif self.conn.trailing_data[0]:
            self._expect_header()

    @property
    def _rest_comes(self) -> bool:
        return self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY

    def _take_rest(self, num_bytes: int) -> None:
        self._num_rest_bytes += num_bytes
        if not self._rest_comes:  # It may be the next request's body.
            self._rest_came()
        elif self._num_rest_bytes > MAX_BODY_BYTES:
            self.transport.close()

    def _rest_came(self) -> None:
        if self._rest_timer is not None:
            self._rest_timer.cancel()
            self._rest_timer, self._num_rest_bytes = None, 0

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this while it handles the parser's exception, which carries the fitting status."""
        if getattr(sys.exception(), "error_status_hint", 400) == 431:
            message = f"the header is larger than {MAX_HEADER_BYTES >> 10} KiB"
            self._close_with(RequestError(message, status=431))
        else:  # Its other hints, such as 501 for an unknown transfer encoding, would be server errors.
            self._close_with(RequestError(msg, status=400))

    def _expect_header(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADER_SECONDS, self._header_late)

    def _header_came(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _header_late(self) -> None:
        if self.conn.trailing_data[0]:
            self._close_with(RequestError(f"no complete header within {HEADER_SECONDS:g} s", status=408))
        else:  # Opened in advance and never used: there is nothing to answer.
            self.transport.close()

    def _close_with(self, error: RequestError) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body, request_id = json.dumps(error.body()).encode(), new_request_id()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
                ("x-request-id", request_id),
            ]
            if error.retry_after is not None:
                headers.append(("retry-after", str(error.retry_after)))
            log.info("%s", error, extra={"request_id": request_id, "status": error.status})
            for event in (
                h11.Response(status_code=error.status, headers=headers),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
        if self.cycle and not self.cycle.response_complete:  # There is no client left to respond to.
            self.cycle.disconnected = True
            self.cycle.message_event.set()


def busy() -> RequestError:
    """There is no room for a connection."""
    message = "too many connections are open, or too many from one address; only probes are answered"
    return RequestError(message, status=503, code="busy", retry_after=1)


class OnlyProbes:
    """ASGI middleware of a connection beyond the limit: one request, answered if it is to an open path, else 503."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_and_close(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        if scope["path"] in PROBES:
            return await self._app(scope, receive, send_and_close)
        await error_response(busy())(scope, receive, send)


class Gate:
    """ASGI middleware: large headers get 431, ambiguous ones 400, pages of other sites 403, and paths outside
    `OPEN_PATHS` 401 without the key.

    It precedes routing: a path is refused whether or not a view exists for it.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, *, origins: Sequence[str] = ()) -> None:
        self.app, self._keys = app, keys
        self._origins = {origin.encode() for origin in origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self._refusal(scope)):
            await error_response(error)(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _refusal(self, scope: Scope) -> RequestError | None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        size = (
            len(scope["raw_path"]) + len(scope["query_string"]) + sum(len(name) + len(value) for name, value in headers)
        )
        if size > MAX_HEADER_BYTES:
            return RequestError(f"the header is larger than {MAX_HEADER_BYTES >> 10} KiB", status=431)
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}:
            message = (
                "a header with both content-length and transfer-encoding may be read in two ways; send one of them"
            )
            return RequestError(message, status=400, code=AMBIGUOUS)
        if self._is_foreign(headers):
            return RequestError("pages of this origin may not use this server (--cors-origin allows one)", status=403)
        if not self._keys.required or scope["path"] in OPEN_PATHS:
            set_client(scope, Client())
            return None
        given = [value for name, value in headers if name == b"authorization"]
        kind, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        if kind.lower() == b"bearer" and (client := self._keys.find(key.strip())):
            set_client(scope, client)
            if client.name:
                note(client=client.name)
            return None
        return RequestError("a valid API key is needed (Authorization: Bearer KEY)", status=401, code="invalid_api_key")

    def _is_foreign(self, headers: Sequence[tuple[bytes, bytes]]) -> bool:
        """Whether a browser states that a page of another site sends this. Other clients send no `Origin`."""
        hosts = [value for name, value in headers if name == b"host"]
        origins = [value for name, value in headers if name == b"origin"]
        return any(o not in self._origins and o.partition(b"://")[2] not in hosts for o in origins)


_num_body_bytes = 0


async def read_body(request: Request) -> bytes:
    """The body of a request. Raises RequestError 415 for an encoded one, 413 before an oversized one is read, 408 for
    one that does not arrive, and 503 when the bodies of all requests together are too large."""
    global _num_body_bytes
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        message = f"a body with content-encoding {encoding[:40]!r} is not read; send it as it is"
        raise RequestError(message, status=415)
    if int(request.headers.get("content-length", "0")) > MAX_BODY_BYTES:
        raise _too_large()
    parts = bytearray()
    deadline = time.monotonic() + BODY_SECONDS
    stream = request.stream()
    try:
        while True:
            pause = min(BODY_PAUSE_SECONDS, deadline - time.monotonic())
            part = await asyncio.wait_for(anext(stream), pause)
            parts += part
            _num_body_bytes += len(part)
            if len(parts) > MAX_BODY_BYTES:
                raise _too_large()
            if _num_body_bytes > MAX_BODIES_BYTES:
                raise RequestError("too many large requests at once", status=503, code="busy", retry_after=1)
    except StopAsyncIteration:
        return bytes(parts)
    except TimeoutError:
        raise RequestError("the body did not come in time", status=408) from None
    finally:
        _num_body_bytes -= len(parts)


def _too_large() -> RequestError:
    return RequestError(f"the body is larger than {MAX_BODY_BYTES >> 20} MiB", status=413)


class ClosingResponse(JSONResponse):
    """An error for a request that is not read to its end: sent whole, then what still arrives is discarded for a while.

    Closing at once would reset the connection, and the client might never see the response.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        try:
            async with asyncio.timeout(LINGER_SECONDS):
                while (await receive()).get("more_body", False):
                    pass
        except TimeoutError:
            pass
        await send({"type": "http.response.body", "body": b""})


def error_response(error: RequestError) -> JSONResponse:
    """The response for an error."""
    headers: dict[str, str] = {}
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.code != "deadline_exceeded" and (error.status in (408, 413, 431) or error.code in ("busy", AMBIGUOUS)):
        headers["connection"] = "close"
    if error.code == "deadline_exceeded" or error.status in (500, 504):
        headers["x-should-retry"] = "false"  # OpenAI's clients would send it twice more.
    kind = ClosingResponse if error.status in (413, 431) else JSONResponse
    return kind(error.body(), status_code=error.status, headers=headers)
