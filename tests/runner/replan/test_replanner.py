"""Replanner: when the traffic of a service changes, it proposes another plan or adopts it, and loses no request."""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace as with_fields

from exeplan.core.bounds import Bound
from exeplan.core.models.model import load_model_spec
from exeplan.core.plan import Plan, save_plan, single_plans, with_utilization
from exeplan.core.profile import Profile, save_profile
from exeplan.core.schedule import ReplicaGroup, Schedule, single_stage
from exeplan.drift.state import DriftState, FewerDevices, Lengths, Replanned, Rules
from exeplan.errors import InputError
from exeplan.planner.load_problem import read_plan
from exeplan.runner.compute.tokens.sampling import SamplingParams
from exeplan.runner.engine_process.build import engine_setup
from exeplan.runner.engine_process.client import EngineClient
from exeplan.runner.engine_process.replicas import ReplicaSet
from exeplan.runner.ipc.messages import (
    AdvisorReady,
    AdvisorReply,
    AdvisorRequest,
    EngineSetup,
    LengthStatsReport,
    Look,
    Looked,
    PlanAdopted,
    PlanSwitched,
    Prompt,
    Sampling,
    WatchPlan,
)
from exeplan.runner.replan.advisor_process import AdvisorProcess
from exeplan.runner.replan.replanner import Replanner

from ..processes import PATIENCE

pytestmark = pytest.mark.usefixtures("shared_forks")
SPEC = load_model_spec("demo")
SLOW = Schedule("rra", {"prefill_batch": 1, "decode_steps": 90})
RULES = Rules(every=0.2, dwell=0.0, least_requests=16, least_for_search=32)


@pytest.fixture(autouse=True)
def _no_yielding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The advisor would yield to other tests, and the engine answer for minutes until it is done."""
    monkeypatch.setattr(AdvisorProcess, "start", staticmethod(partial(AdvisorProcess.start, urgent=True)))


@pytest.fixture
def plan(profile: Profile, tmp_path: Path) -> Plan:
    """A plan for outputs of ninety tokens, on a device that has room for some fifty requests of them."""
    small = replace(profile, device=replace(profile.device, memory_bytes=96 << 20))
    save_profile(small, tmp_path / "p.json")
    return Plan(
        model="demo",
        schedule=SLOW,
        placement=single_stage(SPEC),
        workload="fixed:in=40;out=90",
        profile=str(tmp_path / "p.json"),
        bound=Bound(seconds=20.0),
        kv_cache_tokens=4096,
    )


def setup(plan: Plan) -> EngineSetup:
    return engine_setup(plan, SPEC, dummy_weights=True)


async def ask(client: EngineClient, number: int) -> list[int]:
    """A short answer to one of a few prompts, as the engine gives it greedily."""
    job = client.reserve(1)
    prompt = [(11 * (number % 5) + 7 * i) % 200 for i in range(20)]
    sampling = Sampling(**asdict(SamplingParams(temperature=0.0, max_tokens=3 + number % 5, ignore_eos=True)))
    client.submit(job, [Prompt(prompt_token_ids=prompt, sampling=sampling)])
    tokens: list[int] = []
    with contextlib.closing(_Released(client, job)):
        while True:
            for event in await job.next_events():
                tokens += event.token_ids
                if event.finish_reason:
                    return tokens


class _Released:
    def __init__(self, client: EngineClient, job) -> None:
        self.close = lambda: client.release(job)


def serving(
    plan: Plan, what: Callable[[EngineClient, Replanner], Awaitable[None]], *, pause: float = 0.0, **options
) -> list[tuple]:
    """Serves short answers until `what` is done; every answer must equal the first one to that prompt.

    Each of six clients rests for `pause` seconds between two requests: what waits for the advisor waits less where the
    engine is not always busy. Returns the events.
    """
    events: list[tuple] = []

    async def run() -> None:
        client = await EngineClient.start(setup(plan))
        replanner = Replanner(client, plan, SPEC, setup=setup, rules=RULES, **options)
        replanner.on_event = lambda kind, detail: events.append((kind, detail))
        first: dict[int, list[int]] = {}

        async def load(start: int) -> None:
            for number in itertools.count(start):
                found = await ask(client, number)
                assert found == first.setdefault(number % 5, found)
                assert len(found) == 3 + number % 5
                await asyncio.sleep(pause)

        asking = [asyncio.create_task(load(start)) for start in range(6)]
        replanner.start()
        try:
            async with asyncio.timeout(4 * PATIENCE):
                await what(client, replanner)
            await asyncio.sleep(0.3)
            assert not any(task.done() for task in asking)
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            await replanner.close()
            await client.close()

    asyncio.run(run())
    return events


async def until(claim: Callable[[], object]) -> None:
    while not claim():
        await asyncio.sleep(0.05)


def test_a_better_plan_is_adopted_written_and_logged_as_a_diff(plan, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="exeplan.replan")
    file, replanners = tmp_path / "new.yaml", []

    async def wait(client: EngineClient, replanner: Replanner) -> None:
        replanners.append(replanner)
        await until(lambda: replanner.state.last)
        state = replanner.state
        assert state.num_replans >= 1
        assert state.last.source == "drift"
        assert state.plan.schedule != SLOW
        assert state.last.new.throughput > 1.05 * state.last.old.throughput
        assert state.drift.measure > 1
        assert state.last.seconds == pytest.approx(state.drift.seconds, abs=4 * PATIENCE)  # On one clock.
        assert state.planned.outputs.mean == 90
        assert state.observed.outputs.mean < 10
        assert state.proposed is None

    events = serving(plan, wait, pause=0.2, mode="auto", file=file)
    assert [kind for kind, _ in events][:2] == ["proposed", "adopted"]
    adopted, written = replanners[0].state.plan, read_plan(file)
    assert (written.schedule, written.placement) == (adopted.schedule, adopted.placement)
    assert "re-plan 1 is active (drift" in caplog.text
    assert "throughput" in caplog.text


def test_advice_waits_and_can_be_vetoed(plan, tmp_path):
    async def wait(client: EngineClient, replanner: Replanner) -> None:
        assert await replanner.accept() is None
        assert not replanner.veto("nothing there")
        await until(lambda: replanner.state.proposed)
        assert replanner.state.plan.schedule == SLOW
        assert await replanner.frontier()
        assert replanner.veto("not on a Friday")
        assert (replanner.state.proposed, replanner.state.veto) == (None, "not on a Friday")
        assert await replanner.accept() is None
        assert replanner.state.plan.schedule == SLOW

    events = serving(plan, wait, pause=0.5, mode="advise", file=tmp_path / "new.yaml")
    assert [kind for kind, _ in events][:2] == ["proposed", "vetoed"]


def test_what_was_found_for_a_plan_does_not_replace_another_that_was_adopted_meanwhile(plan, tmp_path, monkeypatch):
    other, ask = replace(plan, schedule=Schedule("orca", {"max_num_seqs": 4})), AdvisorProcess.ask

    async def wait(client: EngineClient, replanner: Replanner) -> None:
        adopted = asyncio.Event()

        async def adopt_meanwhile(advisor: AdvisorProcess, request: AdvisorRequest) -> AdvisorReply:
            reply = await ask(advisor, request)
            if isinstance(reply, Looked) and reply.proposal and not adopted.is_set():
                await replanner.adopt(other, source="request")
                adopted.set()
            return reply

        monkeypatch.setattr(AdvisorProcess, "ask", adopt_meanwhile)
        await adopted.wait()
        await asyncio.sleep(0.05)
        assert (replanner.state.plan, replanner.state.proposed) == (other, None)

    events = serving(plan, wait, pause=0.2, mode="auto", file=tmp_path / "new.yaml")
    assert events[0][0] == "adopted"


def test_a_plan_is_adopted_by_hand_as_a_whole_or_not_at_all(plan, tmp_path):
    other = replace(plan, schedule=Schedule("orca", {"max_num_seqs": 4}))
    elsewhere = single_stage(load_model_spec("gpt3-39b"))

    async def wait(client: EngineClient, replanner: Replanner) -> None:
        replanned = await replanner.adopt(other, source="request")
        assert (replanned.num_recomputed, replanner.state.plan) == (0, other)
        with pytest.raises(InputError, match="the plan is for"):
            await replanner.adopt(replace(other, model="gpt3-39b", placement=elsewhere), source="request")
        with pytest.raises(InputError, match="no file"):
            await replanner.load(tmp_path / "none.yaml", source="request")
        smaller = replace(other, kv_cache_tokens=16)
        with pytest.raises(InputError, match="KV blocks"):
            await replanner.adopt(replace(smaller, num_threads=2), source="request")
        assert replanner.state.plan == other
        bigger = replace(other, kv_cache_tokens=8192)
        assert (await replanner.adopt(bigger, source="signal")).number == 2
        assert client.num_blocks == 512

    events = serving(plan, wait, mode="off")
    assert [kind for kind, _ in events] == ["adopted", "failed", "adopted"]


def test_a_plan_that_the_service_cannot_follow_is_refused_before_the_engine_runs_it(plan):
    other = replace(plan, kv_cache_tokens=8192)

    def check(given: Plan) -> None:
        raise InputError("no estimate")

    async def wait(client: EngineClient, replanner: Replanner) -> None:
        before = client.num_blocks
        with pytest.raises(InputError, match="no estimate"):
            await replanner.adopt(other, source="request")
        assert (client.num_blocks, replanner.state.plan, replanner.state.num_replans) == (before, plan, 0)
        assert replanner.state.veto == "it was refused: no estimate"

    assert serving(plan, wait, mode="off", check=check) == [("failed", "no estimate")]


def test_the_advisor_learns_that_what_it_proposed_was_refused_as_of_a_veto(plan, monkeypatch):
    ask, vetoed = AdvisorProcess.ask, []

    def check(given: Plan) -> None:
        raise InputError("no room")

    async def record(advisor: AdvisorProcess, request: AdvisorRequest) -> AdvisorReply:
        vetoed.extend([request.vetoed] if isinstance(request, Look) else [])
        return await ask(advisor, request)

    async def wait(client: EngineClient, replanner: Replanner) -> None:
        await until(lambda: replanner.state.veto)
        assert not any(vetoed)
        await until(lambda: vetoed[-1])

    monkeypatch.setattr(AdvisorProcess, "ask", record)
    serving(plan, wait, pause=0.2, mode="auto", check=check)


def test_a_proposal_is_withdrawn_when_a_later_search_finds_nothing_better(plan):
    other = replace(plan, schedule=Schedule("orca", {"max_num_seqs": 4}))
    looked = Looked(state=DriftState(), planned=Lengths(), observed=None, proposal=None)

    async def look() -> None:
        for source, left in (("devices", True), ("drift", False)):
            replanner = Replanner(None, plan, SPEC, setup=setup)
            await replanner.propose(replanner.describe(other, source, "it is better"), replanner.accept)
            await replanner._take_look(looked, plan)
            assert replanner.state.proposed
            await replanner._take_look(with_fields(looked, none_better=True), plan)
            assert bool(replanner.state.proposed) == left

    asyncio.run(look())


class Taking:
    """An engine that takes every plan."""

    def __init__(self) -> None:
        self.setups: list[EngineSetup] = []
        self.num_blocks = 1

    async def length_stats(self) -> LengthStatsReport:
        return LengthStatsReport(number=1, now=1.0, left=(), running=())

    async def switch_plan(self, setup: EngineSetup) -> PlanSwitched:
        self.setups.append(setup)
        return PlanSwitched(number=1, num_blocks=1, request_tokens=1, seconds=0.0, num_recomputed=0, num_carried=0)


class Looking:
    """An advisor that finds nothing at each look."""

    def __init__(self) -> None:
        self.asked: list[Look | PlanAdopted] = []

    async def ask(self, request: Look | PlanAdopted) -> AdvisorReply:
        self.asked.append(request)
        if isinstance(request, PlanAdopted):
            return AdvisorReady()
        return Looked(state=DriftState(), planned=Lengths(), observed=None, proposal=None)


def test_the_first_look_after_devices_were_lost_says_that_times_before_it_tell_nothing(plan):
    replanner = Replanner(Taking(), plan, SPEC, setup=setup)
    replanner._advisor = advisor = Looking()

    async def look() -> None:
        await replanner._look()
        replanner.note_devices(FewerDevices(num_replicas=1, missed=1.0, verdict="one is left"))
        replanner.note_devices(None)
        await replanner._look()
        await replanner._look()

    asyncio.run(look())
    assert [one.resumed for one in advisor.asked] == [False, True, False]


def test_the_time_of_a_change_of_plans_is_that_of_the_change_not_of_a_look_or_a_proposal(plan):
    replanner = Replanner(Taking(), plan, SPEC, setup=setup)
    replanner._advisor = advisor = Looking()

    async def change() -> None:
        await replanner._look()
        await replanner.propose(
            replanner.describe(plan, "request", "by hand"), partial(replanner.adopt, plan, source="request")
        )
        began = time.perf_counter()
        await replanner.accept()
        assert began <= replanner.state.last.seconds <= advisor.asked[-1].now <= time.perf_counter()

    asyncio.run(change())


def test_a_plan_that_is_read_again_or_given_has_the_memory_share_that_the_server_was_given(plan, tmp_path):
    on_gpu, engine = replace(plan, device="cuda", dtype="float16", gpu_memory_utilization=0.8), Taking()
    save_plan(on_gpu, tmp_path / "plan.yaml")
    served = with_utilization(on_gpu, 0.5)
    replanner = Replanner(engine, served, SPEC, setup=setup, mode="off", gpu_memory_utilization=0.5)

    async def adopt() -> None:
        await replanner.load(tmp_path / "plan.yaml", source="request")
        await replanner.adopt(on_gpu, source="request")

    asyncio.run(adopt())
    assert [one.gpu_memory_utilization for one in engine.setups] == [0.5, 0.5]
    assert replanner.state.plan == served


def test_a_plan_that_is_accepted_twice_is_adopted_once(plan):
    other = replace(plan, schedule=Schedule("orca", {"max_num_seqs": 4}))

    async def wait(client: EngineClient, replanner: Replanner) -> None:
        async def carry_out() -> Replanned:
            return await replanner.carry_out(lambda: proposed, partial(replanner._switch, other))

        proposed = replanner.describe(other, "drift", "it is better")
        await replanner.propose(proposed, carry_out)
        first, second = await asyncio.gather(replanner.accept(), replanner.accept())
        assert (first.plan, second, replanner.state.num_replans) == (other, None, 1)

    serving(plan, wait, mode="off")


def test_a_plan_is_adopted_though_the_advisor_has_ended(plan):
    other = replace(plan, schedule=Schedule("orca", {"max_num_seqs": 4}))

    async def wait(client: EngineClient, replanner: Replanner) -> None:
        replanner._advisor = advisor = await replanner._start_advisor()
        await advisor.close()
        assert (await replanner.adopt(other, source="request")).plan == other
        assert replanner._advisor is None

    serving(plan, wait, mode="off")


def test_a_plan_that_is_adopted_while_the_advisor_starts_is_the_one_that_it_watches(plan, monkeypatch):
    first = replace(plan, workload="fixed:in=40;out=70")
    other, ask = replace(first, workload=plan.workload), AdvisorProcess.ask

    async def wait(client: EngineClient, replanner: Replanner) -> None:
        async def adopt_meanwhile(advisor: AdvisorProcess, request: AdvisorRequest) -> AdvisorReply:
            if isinstance(request, WatchPlan):
                await replanner.adopt(other, source="request")
            return await ask(advisor, request)

        monkeypatch.setattr(AdvisorProcess, "ask", adopt_meanwhile)
        await until(lambda: replanner.state.planned)
        assert replanner.state.plan == other
        assert replanner.state.planned.outputs.mean == 90
        assert replanner._untold is None  # It has been told: an error of the plan's files ends the watch from here on.

    serving(first, wait, pause=0.2, mode="advise")


def test_an_advisor_that_ends_while_it_starts_or_looks_is_followed_by_one_that_is_told_the_same(
    plan, monkeypatch, caplog
):
    ask, ended, looks = AdvisorProcess.ask, set(), []

    async def wait(client: EngineClient, replanner: Replanner) -> None:
        async def end_once(advisor: AdvisorProcess, request: AdvisorRequest) -> AdvisorReply:
            looks.extend([request] if isinstance(request, Look) else [])
            if type(request) not in ended:
                ended.add(type(request))
                await advisor.close()
            return await ask(advisor, request)

        monkeypatch.setattr(AdvisorProcess, "ask", end_once)
        replanner._vetoed = True
        await until(lambda: replanner.state.planned)

    serving(plan, wait, pause=0.2, mode="advise")
    assert ended == {WatchPlan, Look}
    assert "the advisor did not start (IncompleteReadError)" in caplog.text
    first, second = looks[:2]
    assert second.left[: len(first.left)] == first.left
    assert (first.vetoed, second.vetoed) == (True, True)
    assert not any(look.vetoed for look in looks[2:])


def test_a_plan_without_profile_or_workload_is_not_watched(plan):
    async def wait(client: EngineClient, replanner: Replanner) -> None:
        assert "names no profile and no workload" in replanner.state.error

    serving(replace(plan, profile=None, workload=None), wait, mode="auto")


def test_an_unknown_mode_is_refused(plan):
    with pytest.raises(InputError, match="--replan must be one of off, advise, auto, found 'maybe'"):
        Replanner(None, plan, SPEC, setup=setup, mode="maybe")


def test_unequal_replicas_keep_their_gpus_and_each_may_get_another_schedule(plan):
    other = ReplicaGroup(schedule=SLOW, placement=plan.placement, first_devices=(1, 2))
    served = replace(plan, more_replicas=(other,), router="shortest-queue")
    replanner = Replanner(None, served, SPEC, setup=setup)
    orca = Schedule("orca", {"max_num_seqs": 4})
    replanner._check(replace(served, schedule=orca, more_replicas=(replace(other, schedule=orca),)))
    with pytest.raises(InputError, match=r"3 replicas on the GPUs from 0, 1, 3 on .*, this server runs .* 0, 1, 2 on"):
        replanner._check(replace(served, more_replicas=(replace(other, first_devices=(1, 3)),)))
    with pytest.raises(InputError, match="the plan has one replica, this server runs 3"):
        replanner._check(plan)


def test_the_advisor_is_told_the_blocks_of_the_smallest_engine_of_each_group(plan):
    other = ReplicaGroup(schedule=SLOW, placement=plan.placement, first_devices=(1, 2, 3))
    served = replace(plan, more_replicas=(other,), router="shortest-queue")

    async def blocks() -> list[int | None]:
        engines = ReplicaSet([setup(one) for one in single_plans(served)], "shortest-queue")
        for number, blocks in enumerate((40, 30, 20, 0)):  # The last one has not begun.
            engines.client(number).num_blocks = blocks
        found = Replanner(engines, served, SPEC, setup=setup)._num_blocks(served)
        await engines.close()
        return found

    assert asyncio.run(blocks()) == [40, 20]
