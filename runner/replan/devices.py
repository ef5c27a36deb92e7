"""DeviceFollower: has each replica run a plan for the devices that it has.

Where a replica has lost devices, and there is no room for its placement elsewhere, the engine says which are left. The
planner, in a process of its own, says what a plan on those promises (`exeplan.drift.devices_left`), and the plan is
proposed: with `advise` it waits for `accept`, with `auto` another engine takes over with it at once, and goes on with
all requests from the tokens that they have. When the devices are back, the first plan is proposed in the same way, a
dwell time after the last change, so that a node that comes and goes makes two changes in that time at most.

On one host a device counts as lost when no worker can be started on it time after time. The engine has ended then, so
that with `advise` the server ends as well, and such a device does not come back before a restart.

Not here: how a plan is adopted (`replanner.py`), and which devices are left (`ray_launcher.py`).
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol, TypeAlias

from msgspec.structs import replace as with_fields

from exeplan.core.plan import Plan, as_json, single_plans
from exeplan.core.schedule import Estimate, num_devices
from exeplan.drift.devices_left import service_plan
from exeplan.drift.state import FewerDevices, Replanned, ReplanState, Rules
from exeplan.errors import InputError
from exeplan.planner.load_problem import plan_from
from exeplan.runner.engine_process.client import EngineClient
from exeplan.runner.engine_process.job import EngineError
from exeplan.runner.engine_process.replicas import ReplicaSet
from exeplan.runner.ipc.messages import (
    AdvisorRefused,
    DevicesLeft,
    EngineSetup,
    LeftPlanned,
    PlanForLeft,
    PlanSwitched,
)
from exeplan.runner.replan.advisor_process import AdvisorProcess

log = logging.getLogger("exeplan.replan")
_LOOK_SECONDS = 0.05
"""Between two looks whether an engine runs again."""


CarryOut: TypeAlias = Callable[[], Awaitable[Replanned]]
"""Adopts a proposed plan. Raises InputError or EngineError, and nothing has changed, where that fails."""


class Proposals(Protocol):
    """What proposes and adopts plans (`replanner.py`)."""

    state: ReplanState
    rules: Rules

    def describe(
        self, plan: Plan, source: str, reason: str, *, old: Estimate | None = None, new: Estimate | None = None
    ) -> Replanned: ...

    async def propose(self, replanned: Replanned, carry_out: CarryOut) -> None: ...

    async def carry_out(
        self, describe: Callable[[], Replanned], switch: Callable[[], Awaitable[PlanSwitched]]
    ) -> Replanned: ...

    def withdraw(self, replanned: Replanned) -> bool: ...

    def note_devices(self, devices: FewerDevices | None) -> None: ...


@dataclass(frozen=True, slots=True)
class _Reduced:
    """A replica that runs a plan for fewer devices."""

    found: LeftPlanned
    plan: Plan
    """Of this replica alone."""
    since: float


class DeviceFollower:
    """The plans of the replicas of one service by their devices."""

    def __init__(
        self, engine: EngineClient | ReplicaSet, proposals: Proposals, *, setup: Callable[[Plan], EngineSetup]
    ) -> None:
        """`setup` makes the engine's setup of a plan of one replica."""
        self._engine, self._proposals, self._setup = engine, proposals, setup
        self._first = proposals.state.plan
        """The service's plan for all devices."""
        self._reduced: dict[int, _Reduced] = {}
        self._waiting: dict[int, str] = {}
        """What is said of replicas that wait for devices, by number."""
        self._proposed: dict[int, Replanned] = {}
        """By number: what was last proposed of a replica; one that was proposed of another may have its place."""
        self._following: dict[int, asyncio.Task[None]] = {}
        self._changed: dict[int, asyncio.Event] = {}
        """By number: set when the devices of a replica have changed since they were last looked at."""
        self._adopting: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """From now on the engine's devices are followed."""
        if isinstance(self._engine, ReplicaSet):
            self._engine.on_devices, self._engine.find_setup = self._change, self._rescue
        else:
            self._engine.on_devices, self._engine.find_setup = partial(self._change, 0), partial(self._rescue, 0)

    async def close(self) -> None:
        tasks = [*self._following.values(), *self._adopting]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def adopted(self, plan: Plan) -> None:
        """The service runs another plan, made for all of its devices."""
        self._first = plan
        self._reduced.clear()
        self._waiting.clear()
        self._proposed.clear()
        self._say()

    def _client(self, number: int) -> EngineClient | None:
        return self._engine.client(number) if isinstance(self._engine, ReplicaSet) else self._engine

    def _change(self, number: int) -> None:
        """The devices of a replica have changed."""
        self._changed.setdefault(number, asyncio.Event()).set()
        if number not in self._following:
            self._following[number] = asyncio.create_task(self._follow(number))

    async def _follow(self, number: int) -> None:
        changed = self._changed[number]
        try:
            while changed.is_set() and (client := self._client(number)):
                changed.clear()
                if client.left:
                    await self._replan_for_left(number, client, client.left)
                else:
                    self._settle(number)
                    await self._replan_for_all(number, client, changed)
        except Exception:
            log.exception("replica %d keeps its plan, whatever its devices are", number)
        finally:
            del self._following[number]

    def _settle(self, number: int) -> None:
        """A replica no longer waits for devices, so that no plan without them is of use."""
        if self._waiting.pop(number, None) is not None:
            self._withdraw(number)
            self._say()

    async def _propose(self, number: int, replanned: Replanned, carry_out: CarryOut) -> None:
        self._proposed[number] = replanned
        await self._proposals.propose(replanned, carry_out)

    def _withdraw(self, number: int) -> None:
        """Drops what was proposed of a replica."""
        replanned = self._proposed.pop(number, None)
        if replanned and self._proposals.withdraw(replanned):
            self._have_others_propose(number)

    def _have_others_propose(self, number: int) -> None:
        """Has the replicas but this one propose again: its proposal may have taken the place of theirs, and theirs be
        of a plan that is no longer the active one."""
        back = [other for other in self._reduced if (client := self._client(other)) and client.back]
        for other in {*self._waiting, *back} - {number}:
            self._change(other)

    async def _replan_for_left(self, number: int, client: EngineClient, left: DevicesLeft) -> None:
        found = await self._find(number, left)
        if client.left != left:
            return
        if isinstance(found, str):
            self._withdraw(number)
            self._waiting[number] = f"{found}; replica {number} waits for its devices"
            log.warning("%s", self._waiting[number])
            self._say()
            return
        self._waiting[number] = f"{found.verdict}; it waits for its devices until this plan is accepted"
        self._say()
        replanned = self._describe(number, found)
        await self._propose(number, replanned, partial(self._fall_back, number, found, left))

    async def _find(self, number: int, left: DevicesLeft) -> LeftPlanned | str:
        """What the planner says of these devices; a sentence where it has no plan."""
        count = sum(map(len, left.by_node))
        total = num_devices(single_plans(self._first)[number].placement)
        advisor = await AdvisorProcess.start(urgent=True)
        try:
            request = PlanForLeft(plan=as_json(self._first), replica=number, by_node=left.by_node)
            reply = await advisor.ask(request)
        except (TimeoutError, EOFError, ConnectionError) as error:
            return f"no plan was found for the {count} of {total} devices left ({type(error).__name__})"
        finally:
            await advisor.close()
        if isinstance(reply, AdvisorRefused):
            return f"there is no plan for the {count} of {total} devices left: {reply.message}"
        assert isinstance(reply, LeftPlanned)
        return reply

    def _describe(self, number: int, found: LeftPlanned | None) -> Replanned:
        """The service's plan with another one of a replica, or its first one."""
        plans = {other: one.plan for other, one in self._reduced.items() if other != number}
        if found:
            plans[number] = _plan(found)
        whole = service_plan(self._first, plans)
        reason = found.verdict if found else f"the devices of replica {number} are back"
        return self._proposals.describe(whole, "devices", reason, new=whole.replay or whole.estimate)

    async def _fall_back(self, number: int, found: LeftPlanned, left: DevicesLeft) -> Replanned:
        """Has another engine go on with the plan. Raises InputError where that is of no use any more."""

        async def switch() -> PlanSwitched:
            client = self._client(number)
            if client is None or client.left != left:
                raise InputError(f"the devices of replica {number} have changed meanwhile")
            setup = self._reduce(number, found, left)
            reason = "another engine goes on with a plan for the devices left"
            if isinstance(self._engine, ReplicaSet):
                self._engine.fall_back(number, setup, reason=reason)
            else:
                self._engine.fall_back(setup, reason=reason)
            return await _until_up(client)

        if client := self._client(number):
            client.refuse_switch()
        return await self._carry_out(number, found, switch)

    async def _carry_out(
        self, number: int, found: LeftPlanned | None, switch: Callable[[], Awaitable[PlanSwitched]]
    ) -> Replanned:
        """Carries out what was proposed of a replica, and has the others propose again."""
        try:
            replanned = await self._proposals.carry_out(partial(self._describe, number, found), switch)
        except (InputError, EngineError):
            if self._proposals.state.mode != "auto":  # There they might fail by turns, without end.
                self._have_others_propose(number)
            raise
        self._have_others_propose(number)
        return replanned

    def _reduce(self, number: int, found: LeftPlanned, left: DevicesLeft) -> EngineSetup:
        """Notes that a replica runs this plan. Returns the setup."""
        plan = _plan(found)
        setup = self._setup(plan)
        self._reduced[number] = _Reduced(found, plan, time.monotonic())
        self._waiting.pop(number, None)
        self._say()
        if setup.ray:
            away = num_devices(single_plans(self._first)[number].placement) - num_devices(plan.placement)
            setup = with_fields(setup, ray=with_fields(setup.ray, replica=number, away=away, silent=left.silent))
        return setup

    async def _rescue(self, number: int, left: DevicesLeft) -> EngineSetup | None:
        """The setup for an engine that follows one which lost a device of this host; None where there is to be none."""
        found = await self._find(number, left)
        if isinstance(found, str):
            log.error("%s", found)
            return None
        if self._proposals.state.mode != "auto":
            log.error("%s; --replan auto would go over to that plan", found.verdict)
            return None
        client, setup = self._client(number), self._reduce(number, found, left)
        assert client
        adopting = asyncio.create_task(self._adopt(client, partial(self._describe, number, found)))
        self._adopting.add(adopting)
        adopting.add_done_callback(self._adopting.discard)
        return setup

    async def _adopt(self, client: EngineClient, describe: Callable[[], Replanned]) -> None:
        """The plan that the client's next engine starts with."""
        with contextlib.suppress(InputError, EngineError):  # It has been logged.
            await self._proposals.carry_out(describe, partial(_until_up, client))

    async def _replan_for_all(self, number: int, client: EngineClient, changed: asyncio.Event) -> None:
        """Back to the first plan, a dwell time after the last change; again and again where that fails, until devices
        have changed."""
        while client.back and (reduced := self._reduced.get(number)):
            due = reduced.since + self._proposals.rules.dwell
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(due - time.monotonic(), 0.0)):
                    await changed.wait()
            if changed.is_set():
                return
            await self._propose(number, self._describe(number, None), partial(self._go_back, number))
            if self._proposals.state.mode != "auto":
                return
            if number in self._reduced:
                self._reduced[number] = replace(reduced, since=time.monotonic())

    async def _go_back(self, number: int) -> Replanned:
        """Raises InputError where the cluster has no room after all; the replica goes on as it was then."""

        async def switch() -> PlanSwitched:
            setup = self._setup(single_plans(self._first)[number])
            if setup.ray:
                setup = with_fields(setup, ray=with_fields(setup.ray, replica=number))
            if isinstance(self._engine, ReplicaSet):
                switched = await self._engine.switch_replica(number, setup)
            else:
                switched = await self._engine.switch_plan(setup)
            self._reduced.pop(number, None)
            self._say()
            return switched

        return await self._carry_out(number, None, switch)

    def _say(self) -> None:
        """Sets what the service's state shows."""
        running = [one.found for _, one in sorted(self._reduced.items())]
        verdicts = [*(one.verdict for one in running), *(self._waiting[number] for number in sorted(self._waiting))]
        state = FewerDevices(
            num_replicas=len(running),
            missed=max((one.missed for one in running), default=1.0),
            verdict="; ".join(verdicts),
        )
        self._proposals.note_devices(state if verdicts else None)


def _plan(found: LeftPlanned) -> Plan:
    return plan_from(found.plan, folder=Path("/"))


async def _until_up(client: EngineClient) -> PlanSwitched:
    """Waits until the client's next engine runs. Raises InputError where that lacks devices, too, or fails."""
    began, recomputed = client.paused_since, sum(len(job.open - job.waiting) for job in client.jobs)
    while client.pause:
        if client.failure or client.left:
            raise InputError(client.failure or "devices that were left are lost, too")
        await asyncio.sleep(_LOOK_SECONDS)
    seconds = time.monotonic() - began
    return PlanSwitched(
        number=0,
        num_blocks=client.num_blocks,
        request_tokens=client.request_tokens,
        seconds=seconds,
        num_recomputed=recomputed,
        num_carried=0,
    )
