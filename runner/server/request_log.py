"""RequestLog: every request gets an id, every answer says it, and one line of the log tells what became of it.

A client may name its request with `X-Request-Id` (1 to 64 letters, digits, `.`, `_`, `-`); anything else is replaced.
The ASGI application inside adds what it knows with `note`; it must be counts and reasons, never text of a user.
"""

import contextvars
import logging
import re
import time
import uuid
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from exeplan.runner.logs import REQUEST_ID

log = logging.getLogger("exeplan.access")
_GIVEN_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_QUIET = ("/health", "/ready", "/metrics", "/live")
"""Asked for every few seconds by machines; logged only at level debug, unless there is a fault."""
_NOTES: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar("notes", default=None)


def new_request_id() -> str:
    return uuid.uuid4().hex


def note(**fields: Any) -> None:
    """Adds fields to the line that the log will have of the request being answered."""
    notes = _NOTES.get()
    if notes is not None:
        notes.update(fields)


class RequestLog:
    """ASGI middleware, to be the outermost one: what is raised within ends here, in the log."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
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
            log.exception("a fault while answering")
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
