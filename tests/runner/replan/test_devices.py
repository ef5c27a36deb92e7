"""A replica that has lost devices goes on with a plan for those that are left, with the same tokens, and back again.

Without Ray: devices of this host are lost for good, and what a launcher on several hosts reports is said here instead.
"""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from exeplan.core.bounds import Bound
from exeplan.core.models.model import load_model_spec
from exeplan.core.plan import Plan, single_plans
from exeplan.core.profile import Profile, save_profile
from exeplan.core.schedule import Estimate, Schedule, Stage, num_devices
from exeplan.drift.state import Rules
from exeplan.runner.compute.tokens.sampling import SamplingParams
from exeplan.runner.engine_process.build import engine_setup
from exeplan.runner.engine_process.client import EngineClient
from exeplan.runner.engine_process.job import EngineError
from exeplan.runner.engine_process.replicas import ReplicaSet
from exeplan.runner.ipc.messages import DevicesBack, DevicesLeft, EngineDown, EngineSetup, Prompt, Sampling
from exeplan.runner.replan.replanner import Replanner

from ..processes import PATIENCE, descendants

pytestmark = pytest.mark.usefixtures("shared_forks")
SPEC = load_model_spec("demo")
PIPELINE = (Stage(devices=(0,), layers=(0, 2)), Stage(devices=(1,), layers=(2, 6)))
ALONE = (Stage(devices=(0,), layers=(0, 6)),)
NUM_TOKENS = 100


@pytest.fixture
def plan(profile: Profile, tmp_path: Path) -> Plan:
    """A pipeline of two devices."""
    save_profile(profile, tmp_path / "p.json")
    return Plan(
        model="demo",
        schedule=Schedule("orca", {"max_num_seqs": 4, "micro_batches": 2}),
        placement=PIPELINE,
        workload="fixed:in=20;out=100",
        profile=str(tmp_path / "p.json"),
        bound=Bound(seconds=20.0),
        kv_cache_tokens=8192,
    )


def setup(plan: Plan) -> EngineSetup:
    return engine_setup(plan, SPEC, dummy_weights=True)


async def answer(engine: EngineClient | ReplicaSet, number: int, begun: asyncio.Event) -> list[int]:
    """Of one of several requests; `begun` is set with its first token."""
    job = engine.reserve(1)
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompt = [(11 * number + 7 * i) % 200 for i in range(20)]
    engine.submit(job, [Prompt(prompt_token_ids=prompt, sampling=Sampling(**asdict(sampling)))])
    tokens: list[int] = []
    try:
        while True:
            for event in await job.next_events():
                tokens += event.token_ids
                begun.set()
                if event.finish_reason:
                    return tokens
    finally:
        engine.release(job)


async def answers(engine: EngineClient | ReplicaSet, meanwhile: Callable[[], None] = lambda: None) -> list[list[int]]:
    """Of several requests at once; `meanwhile` is called once they have begun."""
    begun = [asyncio.Event() for _ in range(3)]
    asking = [asyncio.create_task(answer(engine, number, one)) for number, one in enumerate(begun)]
    await until(lambda: all(one.is_set() for one in begun))
    meanwhile()
    return await asyncio.gather(*asking)


async def until(claim: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not claim():
            await asyncio.sleep(0.02)


def serving(
    plan: Plan,
    what: Callable[[EngineClient | ReplicaSet, Replanner], Awaitable[None]],
    *,
    dwell: float = 0.0,
    mode: str = "auto",
) -> None:
    async def run() -> None:
        engine: EngineClient | ReplicaSet
        if plan.num_replicas == 1:
            engine = EngineClient(setup(plan))
        else:
            engine = ReplicaSet([setup(one) for one in single_plans(plan)], plan.router)
        replanner = Replanner(engine, plan, SPEC, setup=setup, rules=Rules(dwell=dwell), mode=mode)
        try:
            await engine.until_ready()
            replanner.start()
            await what(engine, replanner)
        finally:
            await replanner.close()
            await engine.close()

    asyncio.run(run())


@contextmanager
def second_worker_ends() -> Iterator[Callable[[], None]]:
    """With the call of what it yields, and whenever there is one from then on, the second of two workers is killed."""
    begun, over = threading.Event(), threading.Event()
    parent = os.getpid()

    def kill() -> None:
        """Looks among the children of the process that forks workers, once it is known: a new one is seen sooner."""
        nonlocal parent
        if len(workers := _workers(parent)) == 2:
            with suppress(OSError):
                parent = int(Path(f"/proc/{workers[1]}/stat").read_text().rpartition(")")[2].split()[1])
                os.kill(workers[1], signal.SIGKILL)

    def kill_others() -> None:
        begun.wait()
        while not over.wait(0.001):
            kill()

    def begin() -> None:
        kill()  # Here, before the requests may have ended.
        begun.set()

    thread = threading.Thread(target=kill_others)
    thread.start()
    try:
        yield begin
    finally:
        over.set()
        begun.set()
        thread.join()


def _workers(parent: int | None = None) -> list[int]:
    """Of a process, this one unless given, in the order of their ranks."""
    found = []
    for pid in descendants(parent or os.getpid()):
        with suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() == "exeplan-worker":
                found.append(pid)
    return found


def test_where_no_worker_can_be_started_on_a_device_of_the_host_the_others_go_on_with_the_same_tokens(plan, caplog):
    caplog.set_level(logging.INFO, logger="exeplan.replan")

    async def lose(engine: EngineClient, replanner: Replanner) -> None:
        expected = await answers(engine)
        with second_worker_ends() as end:
            assert await answers(engine, end) == expected
        await until(lambda: replanner.state.last)
        assert replanner.state.plan.placement == ALONE
        assert replanner.state.devices.num_replicas == 1
        assert replanner.state.last.source == "devices"
        assert await answers(engine) == expected

    serving(plan, lose)
    assert "1 of 2 devices are left to replica 0" in caplog.text


def test_with_advise_the_engine_fails_for_good_and_the_log_says_what_the_other_devices_promise(plan, caplog):
    async def lose(engine: EngineClient, replanner: Replanner) -> None:
        with second_worker_ends() as end, pytest.raises(EngineError, match="the engine failed"):
            await answers(engine, end)
        assert engine.failure
        assert replanner.state.plan == plan

    serving(plan, lose, mode="advise")
    assert "1 of 2 devices are left to replica 0" in caplog.text
    assert "--replan auto would go over to that plan" in caplog.text


def report_left(client: EngineClient, *devices: int) -> None:
    """As an engine whose Ray cluster has room for these devices only."""
    client._take(EngineDown(message="a node is lost"))
    client._take(DevicesLeft(by_node=tuple((device,) for device in devices)))


def test_a_pipeline_goes_back_to_its_first_plan_when_its_devices_are_there_again(plan):
    async def lose_and_find(engine: EngineClient, replanner: Replanner) -> None:
        expected = await answers(engine)
        assert await answers(engine, lambda: report_left(engine, 0)) == expected
        await until(lambda: replanner.state.num_replans == 1)
        assert replanner.state.plan.placement == ALONE
        assert await answers(engine, lambda: engine._take(DevicesBack(there=True))) == expected
        await until(lambda: replanner.state.num_replans == 2)
        assert replanner.state.plan == plan
        assert replanner.state.devices is None
        assert len(_workers()) == 2
        assert await answers(engine) == expected

    serving(plan, lose_and_find)


def test_devices_that_come_and_go_make_no_more_than_one_change_in_a_dwell_time(plan):
    async def flap(engine: EngineClient, replanner: Replanner) -> None:
        await answers(engine, lambda: report_left(engine, 0))
        await until(lambda: replanner.state.num_replans == 1)
        for there in (True, False, True, False, True):
            engine._take(DevicesBack(there=there))
            await asyncio.sleep(0.05)
        assert replanner.state.num_replans == 1
        assert replanner.state.proposed is None
        report_left(engine, 0)  # What is lost in the dwell time is replaced at once.
        await until(lambda: replanner.state.num_replans == 2)
        assert replanner.state.plan.placement == ALONE

    serving(plan, flap, dwell=3600.0)


def test_one_replica_falls_back_and_comes_back_beside_the_others(plan):
    async def lose_and_find(engine: ReplicaSet, replanner: Replanner) -> None:
        expected = await answers(engine)
        client = engine.client(1)
        assert await answers(engine, lambda: report_left(client, 3)) == expected
        await until(lambda: replanner.state.num_replans == 1)
        first, second = single_plans(replanner.state.plan)
        assert first.placement == PIPELINE
        assert second.placement == (Stage(devices=(3,), layers=(0, 6)),)
        assert [one.setup.placement for one in engine._replicas] == [first.placement, second.placement]
        client._take(DevicesBack(there=True))
        await until(lambda: replanner.state.num_replans == 2)
        assert replanner.state.plan == plan_of_two
        assert await answers(engine) == expected

    plan_of_two = replace(plan, replicas=(0, 2), router="round-robin")
    serving(plan_of_two, lose_and_find)


def test_replicas_that_go_back_at_once_leave_their_first_plan_the_active_one(plan):
    async def lose_and_find(engine: ReplicaSet, replanner: Replanner) -> None:
        for number in (0, 1):
            report_left(engine.client(number), 2 * number)
        await until(lambda: replanner.state.num_replans == 2)
        assert [len(one.placement) for one in single_plans(replanner.state.plan)] == [1, 1]
        for number in (0, 1):
            engine.client(number)._take(DevicesBack(there=True))
        await until(lambda: replanner.state.num_replans == 4)
        assert (replanner.state.plan, replanner.state.devices) == (plan_of_two, None)

    plan_of_two = replace(plan, replicas=(0, 2), router="round-robin")
    serving(plan_of_two, lose_and_find)


def test_a_replica_with_fewer_devices_gets_its_part_of_the_requests(plan):
    async def lose_and_find(engine: ReplicaSet, replanner: Replanner) -> None:
        report_left(engine.client(1), 3)
        await until(lambda: replanner.state.num_replans == 1)
        whole, left = (one.capacity for one in single_plans(replanner.state.plan))
        assert whole > 3 * left
        assert num_chosen(engine) == pytest.approx([90 * whole / (whole + left), 90 * left / (whole + left)], abs=1)
        engine.client(1)._take(DevicesBack(there=True))
        await until(lambda: replanner.state.num_replans == 2)
        assert num_chosen(engine) == [45, 45]

    figures = Estimate(
        throughput=300.0,
        token_throughput=100.0,
        ttft=0.1,
        tpot=0.01,
        latency=1.0,
        latency_p50=0.5,
        latency_p99=1.0,
        kv_tokens=10.0,
        memory_bytes_per_gpu=10.0,
    )
    serving(replace(plan, replicas=(0, 2), router="shortest-queue", estimate=figures), lose_and_find)


def num_chosen(engine: ReplicaSet) -> list[int]:
    """Of 90 requests at once, by replica."""
    jobs = [engine.reserve(1) for _ in range(90)]
    found = [engine.client(number).num_jobs for number in (0, 1)]
    for job in jobs:
        engine.release(job)
    return found


def test_with_advise_a_plan_for_the_devices_left_waits_to_be_accepted_and_goes_when_they_are_back(plan):
    async def lose_and_find(engine: EngineClient, replanner: Replanner) -> None:
        report_left(engine, 0)
        await until(lambda: replanner.state.proposed)
        assert replanner.state.proposed.plan.placement == ALONE
        assert "until this plan is accepted" in replanner.state.devices.verdict
        engine._note_devices()
        await until(lambda: replanner.state.devices is None)
        assert replanner.state.proposed is None
        report_left(engine, 0)
        await until(lambda: replanner.state.proposed)
        assert (await replanner.accept()).source == "devices"
        assert replanner.state.plan.placement == ALONE
        assert engine.pause is None
        engine._take(DevicesBack(there=True))
        await until(lambda: replanner.state.proposed)
        await replanner.accept()
        assert replanner.state.plan == plan

    serving(plan, lose_and_find, mode="advise")


def proposed_of(replanner: Replanner, number: int, *, devices: int) -> bool:
    """Whether the proposal has this replica on that number of devices, otherwise than the active plan."""
    if replanner.state.proposed is None:
        return False
    old, new = (single_plans(one)[number] for one in (replanner.state.plan, replanner.state.proposed.plan))
    return num_devices(new.placement) == devices != num_devices(old.placement)


def test_a_replica_that_has_its_devices_again_leaves_the_proposal_for_another_one_and_makes_room_for_it(plan):
    async def lose_and_find(engine: ReplicaSet, replanner: Replanner) -> None:
        for number in (0, 1):
            report_left(engine.client(number), 2 * number)
            await until(lambda number=number: proposed_of(replanner, number, devices=1))
        engine.client(0)._note_devices()
        await until(lambda: "replica 0" not in replanner.state.devices.verdict)
        assert proposed_of(replanner, 1, devices=1)
        report_left(engine.client(0), 0)
        await until(lambda: proposed_of(replanner, 0, devices=1))
        engine.client(0)._note_devices()
        await until(lambda: proposed_of(replanner, 1, devices=1))

    serving(replace(plan, replicas=(0, 2), router="round-robin"), lose_and_find, mode="advise")


def test_with_advise_every_replica_that_lost_devices_falls_back_and_goes_back_one_after_the_other(plan):
    async def lose_and_find(engine: ReplicaSet, replanner: Replanner) -> None:
        for number in (0, 1):
            report_left(engine.client(number), 2 * number)
            await until(lambda number=number: proposed_of(replanner, number, devices=1))
        await replanner.accept()
        await until(lambda: proposed_of(replanner, 0, devices=1))
        await replanner.accept()
        for number in (0, 1):
            engine.client(number)._take(DevicesBack(there=True))
            await until(lambda number=number: proposed_of(replanner, number, devices=2))
        await replanner.accept()
        await until(lambda: proposed_of(replanner, 0, devices=2))
        await replanner.accept()
        assert (replanner.state.plan, replanner.state.devices) == (plan_of_two, None)

    plan_of_two = replace(plan, replicas=(0, 2), router="round-robin")
    serving(plan_of_two, lose_and_find, mode="advise")


def test_without_a_profile_a_replica_waits_for_its_devices_and_says_why(plan, caplog):
    async def lose(engine: EngineClient, replanner: Replanner) -> None:
        report_left(engine, 0)
        await until(lambda: replanner.state.devices)
        assert "the plan names no profile" in replanner.state.devices.verdict
        assert replanner.state.devices.num_replicas == 0
        assert replanner.state.proposed is None

    serving(replace(plan, profile=None), lose)
    assert "waits for its devices" in caplog.text
