"""StreamedBody: the parts of a streamed response, past the layers of the application.

Not here: the beginning and the end of a response, which go through them.
"""

import weakref
from collections.abc import Awaitable, Callable

from starlette.types import Scope, Send
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

_CYCLE = "exeplan.cycle"


class StreamedBody:
    """Writes the parts of a body whose response has begun to its connection: for each token the layers would take as
    much time as what it is made of.

    It relies on uvicorn's `RequestResponseCycle`, whose `send` the outermost layer gets, as `GuardedProtocol` does.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._is_chunked = cycle.scope["http_version"] != "1.0"

    async def write(self, part: bytes) -> None:
        """Returns when there is room for more: at once, unless the client is slow."""
        cycle = self._cycle
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if part and not cycle.disconnected:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part) if self._is_chunked else part)


def keep_connection(scope: Scope, send: Send) -> None:
    """Notes what the outermost layer sends with, for `streamed_body`. That has the scope and the request's body, and a
    circle would keep both until garbage is collected."""
    if isinstance(cycle := getattr(send, "__self__", None), RequestResponseCycle):
        scope.setdefault("extensions", {})[_CYCLE] = weakref.ref(cycle)


def streamed_body(scope: Scope, send: Send) -> Callable[[bytes], Awaitable[None]]:
    """Sends a part of a response's body, once that has begun; through `send` where the server is another one."""
    kept = scope.get("extensions", {}).get(_CYCLE)
    if kept is not None and (cycle := kept()) is not None:
        return StreamedBody(cycle).write

    async def write(part: bytes) -> None:
        await send({"type": "http.response.body", "body": part, "more_body": True})

    return write
