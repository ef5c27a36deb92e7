"""Changes the plan of a running server: from its file (SIGHUP where it has changed, or an empty `POST /plan`) or from a
request's body.

`POST /plan` needs a server with a key. Its body is empty, a plan as `GET /plan` shows it, `{"accept": true}` for the
proposed plan, or `{"veto": "why"}` against it. A plan from the network may not name files: it keeps those of the active
plan. When a plan is refused, the old one stays active and no request is lost.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from typing_extensions import TypedDict

from exeplan.core.plan import Plan
from exeplan.core.schedule import POLICY_FILE
from exeplan.drift.state import Replanned
from exeplan.errors import InputError
from exeplan.planner.load_problem import plan_from
from exeplan.runner.engine_process.job import EngineError
from exeplan.runner.replan.replanner import Replanner
from exeplan.runner.server.openai.check import Model, check
from exeplan.runner.server.openai.errors import RequestError
from exeplan.runner.server.openai.fields import Only, Strict
from exeplan.runner.server.openai.json_body import read_object
from exeplan.runner.server.service import Service

log = logging.getLogger("exeplan.replan")
_FILES = ("model", "workload", "profile", "cluster")
_SHOWN = ("predicted", "observed", "bounds", "replan")
"""What `GET /plan` shows in addition to the plan."""


class Acceptance(Strict):
    """Adopts the proposed plan."""

    accept: Annotated[Any, Only(True)]


class Veto(Strict):
    """Refuses the proposed plan."""

    veto: str
    """Why; the first 500 characters are kept."""


class Adopted(TypedDict):
    """What became of a change of plans."""

    adopted: Literal[True]
    number: int
    schedule: str
    diff: str
    pause_seconds: float
    num_recomputed: int
    num_carried: int


class Vetoed(TypedDict):
    vetoed: bool
    """Whether there was a proposed plan."""


async def reload(service: Service) -> None:
    """What SIGHUP asks for: the plan's file is adopted where it was written since then, as the signal may be for keys
    and certificates. An error is logged."""
    try:
        replanner, file = _source(service)
        await replanner.load_changed(file, source="signal")
    except (InputError, EngineError) as error:
        log.error("the plan was not loaded: %s", error)


def _source(service: Service) -> tuple[Replanner, Path]:
    """What loads the plan's file, and the file. Raises InputError where there is none."""
    if service.replanner is None or service.plan_file is None:
        raise InputError("this server's plan came from no file")
    return service.replanner, service.plan_file


async def control(service: Service, body: bytes) -> Adopted | Vetoed:
    """Does what a request asks for and returns the result. Raises InputError or RequestError where that cannot be done,
    with nothing changed, and EngineError when the engine is gone."""
    replanner = service.replanner
    assert replanner is not None
    if not body.strip():
        replanner, file = _source(service)
        return _adopted(await replanner.load(file, source="request"))
    given = read_object(body)
    if "veto" in given:
        veto = _only(Veto, given, 'a veto is {"veto": "why"} and nothing else', param="veto")
        return {"vetoed": replanner.veto(veto.veto[:500])}
    if "accept" in given:
        _only(Acceptance, given, 'acceptance is {"accept": true} and nothing else', param="accept")
        if (accepted := await replanner.accept()) is None:
            raise RequestError("no plan is proposed", status=409, param="accept")
        return _adopted(accepted)
    return _adopted(
        await replanner.adopt(plan_from_network(service.plan, given), source="request", reason="a request brought it")
    )


def _only(kind: type[Model], given: Mapping[str, Any], rule: str, *, param: str) -> Model:
    try:
        return check(kind, given)
    except RequestError:
        raise RequestError(rule, param=param) from None


def plan_from_network(active: Plan, given: Mapping[str, Any]) -> Plan:
    """The plan in a request's body, with the files of the active one."""
    body = {name: value for name, value in given.items() if name not in _SHOWN}
    for name in _FILES:
        if body.get(name, getattr(active, name)) != getattr(active, name):
            raise RequestError(f"a plan from the network keeps the server's {name}; leave it out", param=name)
    _keep_policy_file(body, active)
    folder = Path(active.schedule.policy).parent if active.schedule.has_policy_file else None
    plan = plan_from({**body, "model": active.model}, folder=folder)
    kept = {name: getattr(active, name) for name in _FILES}
    return replace(plan, **kept, fit_context=active.fit_context)


def _keep_policy_file(body: Mapping[str, Any], active: Plan) -> None:
    """Raises RequestError for a policy file other than that of the active plan: the network cannot make code run."""
    schedule = body.get("schedule")
    policy = schedule.get("policy") if isinstance(schedule, Mapping) else None
    if isinstance(policy, str) and policy.endswith(POLICY_FILE) and policy != active.schedule.policy:
        raise RequestError("a plan from the network cannot name a policy file, which is code", param="schedule")


def _adopted(replanned: Replanned) -> Adopted:
    return {
        "adopted": True,
        "number": replanned.number,
        "schedule": str(replanned.plan.schedule),
        "diff": replanned.diff,
        "pause_seconds": replanned.pause_seconds,
        "num_recomputed": replanned.num_recomputed,
        "num_carried": replanned.num_carried,
    }
