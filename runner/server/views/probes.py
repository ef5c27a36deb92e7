"""`/health` and `/ready`: the two probes of an orchestrator. They need no key.

`/health` fails only when a restart is the remedy; `/ready` fails whenever traffic should go elsewhere.
"""

from typing import Any, NotRequired

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from typing_extensions import TypedDict

from exeplan.runner.ipc.messages import as_values
from exeplan.runner.server.views.interface import Schema, Served, content, declared

router = APIRouter()


class Status(TypedDict):
    status: str
    stage: NotRequired[str]
    """What is loaded or warmed up, only while that takes place."""
    share: NotRequired[float]
    """The share of it that is done, 0 to 1."""
    devices: NotRequired[str]
    """What replicas do that have lost devices, only while some have."""


def _unavailable(description: str) -> dict[int | str, Schema]:
    return {503: {"description": description, **content(declared(Status))}}


@router.get("/health", summary="alive", response_model=Status, responses=_unavailable("failed; restart it"))
@router.head("/health", include_in_schema=False)
async def health(service: Served) -> JSONResponse:
    failure = service.engine.failure
    body: Status = {"status": failure or service.down or "ok"}
    return JSONResponse(body, status_code=503 if failure else 200)


@router.get("/ready", summary="ready for traffic", response_model=Status, responses=_unavailable("not ready"))
@router.head("/ready", include_in_schema=False)
async def ready(service: Served) -> JSONResponse:
    devices = service.replanner.state.devices if service.replanner else None
    body: dict[str, Any] = {"devices": devices.verdict} if devices else {}
    if not (reason := service.not_ready):
        return JSONResponse({"status": "ok", **body})
    body = {"status": reason, **as_values(service.engine.loading), **body}
    return JSONResponse(body, status_code=503, headers={"retry-after": str(service.retry_after)})
