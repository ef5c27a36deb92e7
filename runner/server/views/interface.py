"""What a view module offers, and what views share: the service they are given, and how they declare their bodies.

    router = APIRouter()

    @router.get("/uptime", summary="seconds since the start", responses=failures(503))
    async def uptime(service: Served) -> JSONResponse: ...

A view returns a Starlette response and raises RequestError. Its types are declared for `/openapi.json` only: FastAPI
neither parses a body, which is read by `read_body` once the request has been admitted, nor validates a response.
Not here: statuses that any path may have (401, 403, 431), which `description` adds.
"""

from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Depends, Request
from pydantic import TypeAdapter

from exeplan.runner.server.openai.errors import ErrorBody
from exeplan.runner.server.service import Service

SCHEMAS = "#/components/schemas/"
Schema = dict[str, Any]
DEFINITIONS: Schema = {}
"""The schemas of all types that views have declared. FastAPI's own would turn integer limits into floats."""
_STATUSES = {
    400: "the request cannot be met; the message names field, value and limit",
    401: "a valid key is needed",
    403: "not allowed here",
    404: "not found",
    405: "no such method",
    408: "the request did not come in time, or had not begun by its own deadline",
    409: "nothing to do that to",
    413: "the body is too large",
    429: "the queue is full, or the request would be late; Retry-After says when to try again",
    431: "the header is too large",
    500: "an internal error",
    503: "the server is loading the model, restarting workers, or shutting down; Retry-After says when to try again",
    504: "not done in time",
}


class View(Protocol):
    """A module of this folder."""

    router: APIRouter


async def _service(request: Request) -> Service:
    return request.app.state.service


Served = Annotated[Service, Depends(_service)]
"""The type of a parameter that gets the service."""


def declared(kind: Any) -> Schema:
    """A reference to the schema of a type, which is added to `DEFINITIONS`."""
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    schema = adapter.json_schema(ref_template=SCHEMAS + "{model}")
    DEFINITIONS.update(schema.pop("$defs", {}))
    DEFINITIONS[kind.__name__] = schema
    return {"$ref": SCHEMAS + kind.__name__}


def content(schema: Schema) -> Schema:
    """A JSON body of this schema."""
    return {"content": {"application/json": {"schema": schema}}}


def reads(schema: Schema, *, required: bool = True) -> Schema:
    """`openapi_extra` of a route that reads its body itself."""
    return {"requestBody": {"required": required, **content(schema)}}


def failures(*statuses: int) -> dict[int | str, Schema]:
    """`responses` of a route that may answer with these statuses and OpenAI's error object."""
    return {status: {"description": _STATUSES[status], **content(declared(ErrorBody))} for status in statuses}
