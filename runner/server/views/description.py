"""`/openapi.json`: what FastAPI says of the views, with what only this server knows: its model, vocabulary and key.

Source: https://spec.openapis.org/oas/v3.1.0.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse

from exeplan.runner.server.network.connection import OPEN_PATHS
from exeplan.runner.server.openai.fields import MODEL_NAME_FORMAT, TOKEN_ID_FORMAT
from exeplan.runner.server.views.interface import DEFINITIONS, Schema, failures
from exeplan.version import __version__

router = APIRouter()
_ABOUT = (
    "The OpenAI-compatible server of one plan. Some rules are beyond a schema: fields that are taken only together, "
    "and that prompt and output must fit into the context. A request that breaks one gets 400 as well."
)


@router.get("/openapi.json", summary="this description", response_model=dict[str, Any])
async def description(request: Request) -> JSONResponse:
    return JSONResponse(request.app.openapi_schema)


def describe(app: FastAPI, *, model: str, vocab_size: int, has_key: bool) -> Schema:
    """The description of an application with these views, for a server of this model."""
    document = get_openapi(title="exeplan", version=__version__, description=_ABOUT, routes=app.routes)
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _add_gate(operation, is_open=path in OPEN_PATHS, has_key=has_key)
    components = document.setdefault("components", {})
    # FastAPI's own error for parameters, which no view answers.
    unused = ("HTTPValidationError", "ValidationError")
    schemas = {k: v for k, v in components.get("schemas", {}).items() if k not in unused}
    components["schemas"] = schemas | deepcopy(DEFINITIONS)
    if has_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    vocabulary: Schema = {"minimum": 0, "maximum": vocab_size - 1}
    _fill_in(document, {TOKEN_ID_FORMAT: vocabulary, MODEL_NAME_FORMAT: {"enum": [model]}})
    return document


def _add_gate(operation: Schema, *, is_open: bool, has_key: bool) -> None:
    """What the gate in front of every view may answer."""
    responses = operation["responses"]
    responses.pop("422", None)
    statuses = (403, 431) if is_open else (401, 403, 431)
    responses.update({str(status): body for status, body in failures(*statuses).items()})
    if has_key:
        operation["security"] = [] if is_open else [{"key": []}]


def _fill_in(node: Any, limits: Mapping[str, Schema]) -> None:
    """Adds what is known of a format to every schema that has it."""
    if isinstance(node, dict):
        if isinstance(name := node.get("format"), str):
            node.update(limits.get(name, {}))
        for value in node.values():
            _fill_in(value, limits)
    elif isinstance(node, list):
        for value in node:
            _fill_in(value, limits)
