"""RequestLog: every request gets an id, every response carries it, and one log line records the outcome.

A client may name its request with `X-Request-Id` (1 to 64 letters, digits, `.`, `_`, `-`); any other value is replaced.
The ASGI application inside adds fields with `note`: counts and reasons, never a user's text.
"""

import contextvars
import logging
import re
import time
import uuid
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from exeplan.runner.logs import REQUEST_ID
from exeplan.runner.server.network.streamed_body import keep_connection

log = logging.getLogger("exeplan.access")
_GIVEN_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_QUIET = ("/health", "/ready", "/metrics", "/dashboard")
"""Polled every few seconds; logged at level debug, unless there is an error."""
_NOTES: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar("notes", default=None)


def new_request_id() -> str:
    return uuid.uuid4().hex


def note(**fields: Any) -> None:
    """Adds fields to the log line of the current request."""
    notes = _NOTES.get()
    if notes is not None:
        notes.update(fields)


class RequestLog:
    """ASGI middleware, the outermost one: an exception from inside ends here, in the log."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        keep_connection(scope, send)
        request_id, began = _request_id(scope), time.monotonic()
        REQUEST_ID.set(request_id)
        fields: dict[str, Any] = {"status": 0}
        _NOTES.set(fields)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                fields["status"] = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", request_id.encode())]}
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception:
            log.exception("an internal error in a request")
        finally:
            fields["seconds"] = round(time.monotonic() - began, 4)
            path = scope["path"]
            level = logging.DEBUG if path in _QUIET and fields["status"] in (200, 503) else logging.INFO
            log.log(level, "%s %s", scope["method"], f"{path!a:.202}"[1:-1], extra=fields)


def _request_id(scope: Scope) -> str:
    given = [value for name, value in scope["headers"] if name == b"x-request-id"]
    if len(given) == 1 and _GIVEN_ID.fullmatch(given[0]):
        return given[0].decode()
    return new_request_id()
