"""Another plan for a running server: from its file (SIGHUP, or an empty `POST /plan`) or out of a request's body.

`POST /plan` needs a server with a key. Its body is empty, a plan as `GET /plan` shows it, `{"accept": true}` for the
plan that is proposed, or `{"veto": "why"}` against it. A plan from the network may not name files: those of the active
plan go on to hold. Whatever is wrong with a plan, the old one stays active and nothing is lost.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from exeplan.core.plan import Plan
from exeplan.core.schedule import POLICY_FILE
from exeplan.drift.state import Replanned
from exeplan.errors import InputError
from exeplan.planner.load_problem import plan_from
from exeplan.runner.server.protocol import RequestError, read_object
from exeplan.runner.server.service import Service

log = logging.getLogger("exeplan.replan")
_FILES = ("model", "workload", "profile", "cluster")
_SHOWN = ("predicted", "observed", "bounds", "replan")
"""What `GET /plan` has beside the plan."""


async def reload(service: Service) -> None:
    """What SIGHUP asks for; what is wrong is said in the log."""
    try:
        await load_file(service, source="signal")
    except InputError as error:
        log.error("the plan was not loaded: %s", error)


async def load_file(service: Service, *, source: str) -> Replanned:
    """The plan's file is read again. Raises InputError, and nothing has changed, where that cannot be done."""
    if service.replanner is None or service.plan_file is None:
        raise InputError("this server's plan came from no file")
    return await service.replanner.load(service.plan_file, source=source)


async def control(service: Service, body: bytes) -> Mapping[str, Any]:
    """Does what a request asks for and says what came of it. Raises RequestError."""
    replanner = service.replanner
    assert replanner is not None
    if not body.strip():
        return _outcome(await load_file(service, source="request"))
    given = read_object(body)
    if "veto" in given:
        if set(given) != {"veto"} or not isinstance(given["veto"], str):
            raise RequestError('a veto is {"veto": "why"} and nothing else', param="veto")
        return {"vetoed": replanner.veto(given["veto"][:500])}
    if "accept" in given:
        if given != {"accept": True}:
            raise RequestError('acceptance is {"accept": true} and nothing else', param="accept")
        if (accepted := await replanner.accept()) is None:
            raise RequestError("no plan is proposed", status=409, param="accept")
        return _outcome(accepted)
    return _outcome(
        await replanner.adopt(plan_from_network(service.plan, given), source="request", reason="a request brought it")
    )


def plan_from_network(active: Plan, given: Mapping[str, Any]) -> Plan:
    """The plan of a request's body, with the files of the active one. Raises RequestError where it names others."""
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


def _outcome(replanned: Replanned) -> Mapping[str, Any]:
    return {
        "adopted": True,
        "number": replanned.number,
        "schedule": str(replanned.plan.schedule),
        "diff": replanned.diff,
        "pause_seconds": replanned.pause_seconds,
        "num_recomputed": replanned.num_recomputed,
        "num_carried": replanned.num_carried,
    }
