"""Logs of the server and its engine, on standard error: a readable line a record, or one JSON object a line.

Every record made while a request is answered has its id. Prompts and answers are never logged: a record has counts of
tokens, never their text.
"""

import contextvars
import json
import logging
import os
import sys
import time
from typing import Any

REQUEST_ID: contextvars.ContextVar[str | None] = contextvars.ContextVar("request_id", default=None)
_ENVIRONMENT = "EXEPLAN_LOG"
"""Passes the server's options to the processes of its host: FORMAT,LEVEL."""
_STANDARD = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_STANDARD |= {"_ray_timestamp_ns"}  # Ray, once imported, adds it to every record.


def configure(log_format: str, level: str) -> None:
    """Configures this process, and those that it will start."""
    os.environ[_ENVIRONMENT] = f"{log_format},{level}"
    _install(log_format, level)


def configure_child() -> None:
    """Configures a process that a configured one has started; otherwise as `text` and `info`."""
    _install(*os.environ.get(_ENVIRONMENT, "text,info").split(","))


def server_options() -> str | None:
    """FORMAT,LEVEL of the server that this process belongs to; None without one, as in `exeplan bench`."""
    return os.environ.get(_ENVIRONMENT)


def configure_worker(options: str | None) -> None:
    """Configures a worker by its engine's `server_options`: on another host its own environment has none."""
    if options is not None:
        _install(*options.split(","))


def _install(log_format: str, level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if log_format == "json" else Text())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    # The access log has what uvicorn logs of a connection.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    logging.getLogger("asyncio").setLevel(logging.WARNING)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """What was given as `extra`, and the id of the request that is being answered."""
    found = {name: value for name, value in vars(record).items() if name not in _STANDARD}
    request_id = found.pop("request_id", None) or REQUEST_ID.get()
    return {"request_id": request_id, **found} if request_id else found


def _when(record: logging.LogRecord) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{whole}.{int(record.msecs):03d}Z"


class JsonLines(logging.Formatter):
    """One JSON object a record: time (UTC), level, logger, message, request_id, further fields, traceback."""

    def format(self, record: logging.LogRecord) -> str:
        body = {
            "time": _when(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            body["traceback"] = self.formatException(record.exc_info)
        return json.dumps(body, ensure_ascii=False, default=str)


class Text(logging.Formatter):
    """Time, level, message, fields; a line break in a message is escaped, as it could pass for another record."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={value}" for name, value in _fields(record).items())
        message = f"{record.getMessage()}{fields}".replace("\r", "\\r").replace("\n", "\\n")
        lines = [f"{_when(record)} {record.levelname.lower()} {message}"]
        if record.exc_info:
            lines.append(self.formatException(record.exc_info))
        return "\n".join(lines)
