"""Replanner: the server's side of re-planning: reads the lengths of requests, has them judged, and carries plans out.

Lengths come from the engine process (`EngineClient.length_stats`), judgement from the advisor process (`advisor.py`),
which is started when enough requests are known and yields to everything else. The engine adopts a plan as a whole or
not at all; the plan is written to disk before, and the log shows what changes, with the old and the new prediction.

    off       nothing is watched; plans can be adopted by hand
    advise    better plans are proposed, and wait for `accept` or `veto`
    auto      better plans are adopted

Not here: routes and signals (`exeplan.runner.server`), when a plan is better (`exeplan.drift.watch`).
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from exeplan.core.models.model import ModelSpec
from exeplan.core.plan import Plan, as_json, single_plans, with_utilization
from exeplan.core.schedule import Estimate
from exeplan.drift.state import MODES, FewerDevices, Replanned, ReplanState, RequestLengths, Rules
from exeplan.errors import InputError
from exeplan.planner.load_problem import plan_from, plan_model, read_plan
from exeplan.planner.reports.plan_diff import DRAM_BYTES_PER_SECOND, diff_plans
from exeplan.planner.reports.plan_diff_text import diff_text
from exeplan.runner.engine_process.client import EngineClient
from exeplan.runner.engine_process.job import EngineError
from exeplan.runner.engine_process.replicas import ReplicaSet
from exeplan.runner.ipc.messages import (
    AdvisorReady,
    AdvisorRefused,
    EngineSetup,
    FrontierRows,
    GetFrontier,
    Look,
    Looked,
    PlanAdopted,
    PlanSwitched,
    ProposedPlan,
    WatchPlan,
)
from exeplan.runner.replan.advisor_process import AdvisorProcess
from exeplan.runner.replan.devices import CarryOut, DeviceFollower

log = logging.getLogger("exeplan.replan")
_MOST_KEPT = 4096

OnEvent = Callable[[str, Replanned | str], None]
"""Called with `proposed`, `adopted`, `vetoed` or `failed`, and what that concerns."""


class Replanner:
    """The plan of one service over time. `state` has all that is known."""

    def __init__(
        self,
        engine: EngineClient | ReplicaSet,
        plan: Plan,
        spec: ModelSpec,
        *,
        setup: Callable[[Plan], EngineSetup],
        mode: str = "advise",
        rules: Rules | None = None,
        file: Path | None = None,
        plan_file: Path | None = None,
        model: str | None = None,
        gpu_memory_utilization: float | None = None,
        follow_devices: bool = True,
        check: Callable[[Plan], None] = lambda plan: None,
        on_adopted: Callable[[Plan], None] = lambda plan: None,
        on_event: OnEvent = lambda kind, what: None,
    ) -> None:
        """`setup` makes the engine's setup of a plan of one replica; `file` is where plans of the advisor are written,
        `plan_file` where `plan` came from.

        `model` is where the model of a plan that is read lies, if not where the plan says, and `gpu_memory_utilization`
        what each plan that is adopted gets in place of its own, as `plan` has it. Without `follow_devices` a replica
        that has lost devices waits for them. `check` raises InputError for a plan that the service cannot follow;
        `on_adopted` is called where the engine runs another one.
        Raises InputError for an unknown mode.
        """
        if mode not in MODES:
            raise InputError(f"--replan must be one of {', '.join(MODES)}, found '{mode}'")
        self.state = ReplanState(mode=mode, plan=plan)
        self._in_file, self._written = plan, plan_file and _written(plan_file)
        """What the server's plan file said when it was last adopted, and when it had been written."""
        self._engine, self._spec, self._setup = engine, spec, setup
        self.rules, self._file, self._model = rules or Rules(), file, model
        self._utilization = gpu_memory_utilization
        self._may_follow, self._on_adopted, self.on_event = check, on_adopted, on_event
        self._advisor: AdvisorProcess | None = None
        self._untold: Plan | None = None
        """Adopted while the advisor was not there to be told."""
        self._left: deque[RequestLengths] = deque(maxlen=_MOST_KEPT)
        self._adopting = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None
        self._vetoed = self._resumed = False
        """Since the advisor last looked: its proposal was vetoed; replicas had lost devices."""
        self._carrying: CarryOut | None = None
        """Carries the proposed plan out."""
        self._devices, self._follow_devices = DeviceFollower(engine, self, setup=setup), follow_devices

    def start(self) -> None:
        """Begins to watch, unless the mode is off."""
        if self.state.mode == "off":
            return
        if self._follow_devices:
            self._devices.start()
        if missing := [name for name in ("profile", "workload") if getattr(self.state.plan, name) is None]:
            self._set(error=f"nothing is watched: the plan names no {' and no '.join(missing)}")
            return
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Stops watching."""
        if self._watching:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self._devices.close()
        await self._end_advisor()

    async def load(self, path: Path, *, source: str) -> Replanned:
        """Reads the server's plan again and adopts it. Raises InputError, and nothing has changed, where that fails."""
        return await self._adopt_file(*self._read(path), path, source)

    async def load_changed(self, path: Path, *, source: str) -> Replanned | None:
        """Reads the server's plan again, and adopts it where the file was written since it was last adopted, if only
        touched. None where it was not: a plan that has taken its place since then is to stay. Raises as `load`."""
        plan, written = self._read(path)
        if plan == self.state.plan:
            self._in_file, self._written = plan, written
            log.info("the plan of %s is the active one", path)
        elif plan != self._in_file or written != self._written:
            return await self._adopt_file(plan, written, path, source)
        else:
            log.info("%s has not changed, so the active plan stays; touch it before the signal to adopt it", path)
        if self._watching is None or self._watching.done():  # It may have ended for files that are there now.
            self.start()
        return None

    def _read(self, path: Path) -> tuple[Plan, int | None]:
        """The plan, and when its file had been written."""
        written = _written(path)
        return with_utilization(read_plan(path, model=self._model), self._utilization), written

    async def _adopt_file(self, plan: Plan, written: int | None, path: Path, source: str) -> Replanned:
        replanned = await self.adopt(plan, source=source, reason=f"{path} was loaded")
        self._in_file, self._written = replanned.plan, written
        return replanned

    async def adopt(self, plan: Plan, *, source: str, reason: str = "") -> Replanned:
        """Switches to another plan, as a whole. Raises InputError, and nothing has changed, where that fails."""
        plan = with_utilization(plan, self._utilization)
        self._check(plan)
        describe = partial(self.describe, plan, source, reason, new=plan.replay or plan.estimate)
        replanned = await self.carry_out(describe, partial(self._switch, plan))
        self._devices.adopted(plan)
        await self._tell_adopted(plan)
        return replanned

    async def accept(self) -> Replanned | None:
        """Adopts the proposed plan; None where there is none."""
        if self.state.proposed is None:
            return None
        assert self._carrying
        self._set(proposed=None)  # Another call meanwhile finds none.
        return await self._carrying()

    async def propose(self, replanned: Replanned, carry_out: CarryOut) -> None:
        """Proposes a plan that `carry_out` adopts; with `auto` that is done here, and a failure is only logged."""
        self._carrying = carry_out
        self._set(proposed=replanned)
        log.info("re-plan %d is proposed: %s\n%s", replanned.number, replanned.reason, replanned.diff)
        self.on_event("proposed", replanned)
        if self.state.mode == "auto":
            with contextlib.suppress(InputError, EngineError):  # It has been logged, and the old plan stays active.
                await self.accept()

    def withdraw(self, replanned: Replanned) -> bool:
        """Drops this proposal; False where it does not wait, or another one has taken its place."""
        if self.state.proposed is not replanned:
            return False
        self._set(proposed=None)
        return True

    def note_devices(self, devices: FewerDevices | None) -> None:
        """What replicas that have lost devices do."""
        self._resumed |= devices is not None
        self._set(devices=devices)

    def veto(self, reason: str) -> bool:
        """Drops the proposed plan; False where there is none. For a dwell time there is no other proposal."""
        if (proposed := self.state.proposed) is None:
            return False
        self._set(proposed=None, veto=reason)
        log.info("re-plan %d was vetoed: %s", proposed.number, reason)
        self._vetoed = True
        self.on_event("vetoed", proposed)
        return True

    async def frontier(self) -> list[dict[str, Any]] | None:
        """Points of the frontier under the observed lengths: none where no plan keeps the bounds; None while too few
        requests are known."""
        if not self._advisor:
            return None
        reply = await self._advisor.ask(GetFrontier())
        return reply.rows if isinstance(reply, FrontierRows) else []

    async def _tell_adopted(self, plan: Plan | int) -> None:
        """Has the advisor watch another plan: its proposal of this number, or this one, whose files may be missing."""
        if self._advisor is None:
            self._untold = self.state.plan if isinstance(plan, int) else plan
            if self._watching is None or self._watching.done():
                self.start()
            return
        adopted = PlanAdopted(now=_now(), plan=plan if isinstance(plan, int) else as_json(plan))
        try:
            reply = await self._advisor.ask(adopted)
        except (TimeoutError, EOFError, ConnectionError) as error:  # The next one begins with this plan.
            log.warning("the advisor did not answer (%s); it is restarted", type(error).__name__)
            await self._end_advisor()
            return
        if isinstance(reply, AdvisorRefused):
            await self._end_advisor()
            self._set(error=f"nothing is watched: {reply.message}")

    async def _end_advisor(self) -> None:
        if self._advisor:
            advisor, self._advisor = self._advisor, None
            await advisor.close()

    def _set(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)

    def _check(self, plan: Plan) -> None:
        spec = plan_model(plan)
        if (spec.fingerprint, spec.directory) != (self._spec.fingerprint, self._spec.directory):
            raise InputError(f"the plan is for {spec.name}, this server has {self._spec.name}; start another server")
        served = self.state.plan
        if (_first_devices(plan), plan.router) != (_first_devices(served), served.router):
            raise InputError(
                f"the plan has {_replicas(plan)}, this server runs {_replicas(served)}; a running server keeps its "
                "replicas, so start another server"
            )

    def describe(
        self, plan: Plan, source: str, reason: str, *, old: Estimate | None = None, new: Estimate | None = None
    ) -> Replanned:
        """The change from the active plan to this one, by the estimates of both."""
        speeds = {"from host memory": DRAM_BYTES_PER_SECOND}
        before = replace(self.state.plan, estimate=old or self.state.plan.estimate)
        diff = diff_plans(before, plan, self._spec, self._spec, bytes_per_second=speeds)
        return Replanned(
            number=self.state.num_replans + 1,
            seconds=_now(),
            source=source,
            reason=reason,
            plan=plan,
            old=old,
            new=new,
            diff=diff_text(diff),
        )

    async def carry_out(
        self, describe: Callable[[], Replanned], switch: Callable[[], Awaitable[PlanSwitched]]
    ) -> Replanned:
        """Goes over to a plan by `switch`; `describe` is asked for it when no other change of plans is in progress.

        Raises what `switch` raises, and nothing has changed then; InputError before it where the service cannot follow
        the plan.
        """
        async with self._adopting:
            replanned = describe()
            try:
                self._may_follow(replanned.plan)
                switched = await switch()
            except (InputError, EngineError) as error:
                self._set(veto=f"it was refused: {error}", proposed=None)
                log.warning("re-plan %d was not adopted: %s", replanned.number, error)
                self.on_event("failed", str(error))
                raise
            replanned = replace(
                replanned,
                number=self.state.num_replans + 1,
                seconds=_now(),
                pause_seconds=switched.seconds,
                num_recomputed=switched.num_recomputed,
                num_carried=switched.num_carried,
            )
            self._set(plan=replanned.plan, num_replans=replanned.number, last=replanned, proposed=None, veto="")
            if isinstance(self._engine, ReplicaSet):  # Of all replicas, also where another one only has changed.
                self._engine.set_capacities([one.capacity for one in single_plans(replanned.plan)])
            self._on_adopted(replanned.plan)
            log.info(
                "re-plan %d is active (%s: %s); paused for %.3f s, %d requests carried over, %d computed again\n%s",
                replanned.number,
                replanned.source,
                replanned.reason,
                replanned.pause_seconds,
                replanned.num_carried,
                replanned.num_recomputed,
                replanned.diff,
            )
            self.on_event("adopted", replanned)
            return replanned

    async def _switch(self, plan: Plan) -> PlanSwitched:
        """Each replica to its part of the plan."""
        setups = [self._setup(one) for one in single_plans(plan)]
        if isinstance(self._engine, ReplicaSet):
            return await self._engine.switch_plan(setups)
        (setup,) = setups
        return await self._engine.switch_plan(setup)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self.rules.every)
            if self.state.devices:  # What is seen then says little of the plan for all devices.
                continue
            try:
                await self._look()
            except (EngineError, InputError, OSError) as error:
                log.warning("drift was not checked: %s", error)
                self._set(error=str(error))
                alike = isinstance(error, InputError) and self._untold is None
                if self._engine.failure or alike:  # The next look would fail in the same way.
                    return

    async def _look(self) -> None:
        stats = await self._engine.length_stats()
        self._left.extend(stats.left)
        if self._advisor is None:
            if len(self._left) < self.rules.least_requests:
                return
            self._advisor = await self._start_advisor()
            untold, self._untold = self._untold, None
            if untold:  # It begins with the plan that was active when its start began.
                await self._tell_adopted(untold)
            if self._advisor is None:
                return
        active, vetoed, resumed = self.state.plan, self._vetoed, self._resumed
        look = Look(
            now=stats.now,
            left=[*self._left],
            running=stats.running,
            vetoed=vetoed,
            num_blocks=self._num_blocks(active),
            resumed=resumed,
        )
        self._vetoed = self._resumed = False
        try:
            reply = await self._advisor.ask(look)
        except (TimeoutError, EOFError, ConnectionError) as error:  # The next one is told the same.
            self._vetoed |= vetoed
            self._resumed |= resumed
            await self._end_advisor()
            raise OSError(f"the advisor did not answer ({type(error).__name__}); it is restarted") from None
        self._left.clear()
        if isinstance(reply, AdvisorRefused):
            raise OSError(f"the advisor did not look: {reply.message}")
        assert isinstance(reply, Looked)
        await self._take_look(reply, active)

    def _num_blocks(self, plan: Plan) -> list[int | None]:
        """Of the smallest engine of each group of the plan's replicas, which the set numbers group by group."""
        if not isinstance(self._engine, ReplicaSet) or not plan.more_replicas:
            return [self._engine.num_blocks]
        ends = [0, *itertools.accumulate(group.num_replicas for group in plan.groups)]
        return [self._engine.num_blocks_of(range(*both)) for both in itertools.pairwise(ends)]

    async def _take_look(self, looked: Looked, active: Plan) -> None:
        """`active` is the plan that was looked at: what was found in its place is of no use in that of another."""
        drift = looked.state
        if drift.missed and drift.verdict != self.state.drift.verdict:
            log.warning("%s", drift.verdict)
        self._set(drift=drift, planned=looked.planned, observed=looked.observed, error="")
        proposed = self.state.proposed
        if looked.none_better and proposed and proposed.source == "drift" and self.withdraw(proposed):
            log.info("re-plan %d is no longer proposed: %s", proposed.number, drift.verdict)
        if looked.proposal and self.state.plan is active and not self.state.devices:
            await self._take_proposal(looked.proposal)

    async def _start_advisor(self) -> "AdvisorProcess":
        """Raises InputError where the files of the plan cannot be read, OSError where the process ended before that."""
        request = WatchPlan(
            plan=as_json(self.state.plan),
            rules=self.rules,
            file=str(self._file) if self._file else None,
        )
        self._untold = None
        advisor = await AdvisorProcess.start()
        try:
            reply = await advisor.ask(request)
        except (TimeoutError, EOFError, ConnectionError) as error:
            await advisor.close()
            raise OSError(f"the advisor did not start ({type(error).__name__}); it is started again") from None
        if isinstance(reply, AdvisorRefused):
            await advisor.close()
            raise InputError(f"nothing is watched: {reply.message}")
        assert isinstance(reply, AdvisorReady)
        return advisor

    async def _take_proposal(self, found: ProposedPlan) -> None:
        plan, active, advisor = plan_from(found.plan, folder=Path("/")), self.state.plan, self._advisor

        async def switch() -> PlanSwitched:
            if self.state.plan is not active:
                raise InputError("another plan has been adopted meanwhile")
            return await self._switch(plan)

        async def carry_out() -> Replanned:
            try:
                replanned = await self.carry_out(lambda: proposed, switch)
            except (InputError, EngineError):
                self._vetoed = True  # What is proposed next does not contain it.
                raise
            self._devices.adopted(plan)
            await self._tell_adopted(found.number if self._advisor is advisor else plan)
            return replanned

        described = self.describe(plan, "drift", found.reason, old=found.old, new=found.new)
        proposed = replace(described, file=found.file)
        await self.propose(proposed, carry_out)


def _first_devices(plan: Plan) -> tuple[int, ...]:
    """Of each replica, in the order in which a server has them."""
    return tuple(first for group in plan.groups for first in group.first_devices)


def _replicas(plan: Plan) -> str:
    if plan.num_replicas == 1:
        return "one replica"
    firsts = ", ".join(map(str, _first_devices(plan)))
    return f"{plan.num_replicas} replicas on the GPUs from {firsts} on ({plan.router})"


def _now() -> float:
    """On the service's clock, which is that of its engine processes on this host."""
    return time.perf_counter()


def _written(path: Path) -> int | None:
    """When the file was last written, in nanoseconds; None without it."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None
