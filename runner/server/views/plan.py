"""`/plan`: the active plan with what it predicts and what is observed, and the way to change it."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect

from exeplan.core.plan import as_json
from exeplan.drift import state as drift_state
from exeplan.errors import InputError
from exeplan.planner.reports.tables import json_line
from exeplan.runner.engine_process.job import EngineError
from exeplan.runner.server.generation import as_request_error
from exeplan.runner.server.network.clients import check_admin
from exeplan.runner.server.network.connection import read_body
from exeplan.runner.server.observation.predicted import predicted_and_observed
from exeplan.runner.server.plan_control import Acceptance, Adopted, Veto, Vetoed, control
from exeplan.runner.server.views.interface import Served, declared, failures, reads

router = APIRouter()
_PLAN = {"type": "object", "description": "a plan, as GET shows it"}
_CHANGE = {"anyOf": [declared(Acceptance), declared(Veto), _PLAN]}


@router.get("/plan", summary="the active plan, predictions and observations", response_model=dict[str, Any])
async def plan(service: Served) -> Response:
    body = {**as_json(service.plan), **predicted_and_observed(service.plan, service.snapshot())}
    if service.replanner:
        body["replan"] = drift_state.as_json(service.replanner.state)
    return Response(json_line(body), media_type="application/json")


@router.post(
    "/plan",
    summary="change the plan; without a body its file is read again. Needs a server with a key",
    openapi_extra=reads(_CHANGE, required=False),
    response_model=Adopted | Vetoed,
    responses=failures(400, 408, 409, 413, 503),
)
async def change_plan(request: Request, service: Served) -> Response:
    check_admin(request, "changing the plan", or_else=", or SIGHUP after its file was written or touched")
    service.check_loaded()
    try:
        return JSONResponse(await control(service, await read_body(request)))
    except ClientDisconnect:
        return Response()
    except (InputError, EngineError) as error:
        raise as_request_error(error) from None
