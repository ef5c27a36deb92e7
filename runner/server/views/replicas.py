"""`/replicas`: what each replica does, and the way to drain one and to have it serve again."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect
from typing_extensions import TypedDict

from exeplan.errors import InputError
from exeplan.runner.engine_process.replicas import ReplicaSet
from exeplan.runner.server.network.clients import check_admin
from exeplan.runner.server.network.connection import read_body
from exeplan.runner.server.openai.check import check
from exeplan.runner.server.openai.errors import RequestError
from exeplan.runner.server.openai.fields import Strict
from exeplan.runner.server.openai.json_body import read_object
from exeplan.runner.server.service import Service
from exeplan.runner.server.views.interface import Served, declared, failures, reads

router = APIRouter()


class Drain(Strict):
    """Gives a replica no more requests, and ends it once it has answered those that it has."""

    drain: int
    """Its number."""
    move: bool = False
    """Have the other replicas go on with what it has."""


class Resume(Strict):
    """Has a replica that was drained serve again."""

    resume: int
    """Its number."""


class Replica(TypedDict):
    number: int
    state: str
    num_requests: int
    reason: str | None


class Replicas(TypedDict):
    replicas: list[Replica]


_CHANGE = {"anyOf": [declared(Drain), declared(Resume)]}


@router.get("/replicas", summary="what each replica does", response_model=Replicas, responses=failures(409))
async def replicas(service: Served) -> Response:
    return JSONResponse(_shown(_replicas(service)))


@router.post(
    "/replicas",
    summary="drain a replica, or have it serve again. Needs a server with a key",
    openapi_extra=reads(_CHANGE),
    response_model=Replicas,
    responses=failures(400, 408, 409, 413, 503),
)
async def change_replicas(request: Request, service: Served) -> Response:
    check_admin(request, "draining a replica")
    service.check_loaded()
    try:
        return JSONResponse(_shown(_change(_replicas(service), read_object(await read_body(request)))))
    except ClientDisconnect:
        return Response()


def _replicas(service: Service) -> ReplicaSet:
    if not isinstance(service.engine, ReplicaSet):
        raise RequestError("the plan has one replica, which SIGTERM drains with the server", status=409)
    return service.engine


def _change(engine: ReplicaSet, given: Mapping[str, Any]) -> ReplicaSet:
    wanted = check(Resume, given) if "resume" in given else check(Drain, given)
    try:
        if isinstance(wanted, Resume):
            engine.resume(wanted.resume)
        else:
            engine.drain(wanted.drain, move=wanted.move)
    except InputError as error:
        raise RequestError(str(error), status=409) from None
    return engine


def _shown(engine: ReplicaSet) -> dict[str, Any]:
    return {"replicas": [asdict(one) for one in engine.states()]}
