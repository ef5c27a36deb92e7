"""Replicas of a running set start and drain: no request is refused or lost by it."""

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from msgspec.structs import replace as with_fields

from exeplan.core.models.model import load_model_spec
from exeplan.core.plan import Plan
from exeplan.core.profile import Profile, save_profile
from exeplan.core.schedule import Estimate, ReplicaGroup, Schedule, single_stage
from exeplan.errors import InputError
from exeplan.runner.compute.tokens.sampling import SamplingParams
from exeplan.runner.engine_process.build import engine_setup
from exeplan.runner.engine_process.job import EngineError, Job
from exeplan.runner.engine_process.replicas import ReplicaSet, _Replica
from exeplan.runner.ipc.messages import EngineSetup, LengthStatsReport, PlanSwitched, Prompt, Sampling
from exeplan.runner.server.scaler import limits_of

from ..processes import PATIENCE

pytestmark = pytest.mark.usefixtures("shared_forks")
SPEC = load_model_spec("demo")
PLAN = Plan(
    model="demo",
    schedule=Schedule("orca", {"max_num_seqs": 3}),
    placement=single_stage(SPEC),
    replicas=(0, 1),
    router="shortest-queue",
)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not holds():
            await asyncio.sleep(0.01)


def begin(engine: ReplicaSet, num_tokens: int) -> Job:
    sampling = Sampling(**asdict(SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)))
    job = engine.reserve(1)
    engine.submit(job, [Prompt(prompt_token_ids=[1], sampling=sampling)])
    return job


async def answer(engine: ReplicaSet, job: Job) -> list[int]:
    tokens: list[int] = []
    over = False
    while not over:
        events = await job.next_events()
        tokens += [token for event in events for token in event.token_ids]
        over = any(event.finish_reason for event in events)
    engine.release(job)
    return tokens


def test_a_replica_that_an_operator_drains_stays_away_until_it_is_resumed() -> None:
    async def run() -> None:
        setup = engine_setup(PLAN, SPEC, dummy_weights=True)
        engine = ReplicaSet([setup] * 2, "shortest-queue")
        try:
            await engine.until_ready()
            expected = await answer(engine, begin(engine, 200))
            jobs = [begin(engine, 200) for _ in range(4)]
            engine.drain(1)
            assert [one.state for one in engine.states()] == ["serving", "draining"]
            engine.scale_to(2)
            assert engine.num_starting == 0
            with pytest.raises(InputError, match="replica 0 is the only one that serves"):
                engine.drain(0)
            late = [begin(engine, 200) for _ in range(2)]
            assert [client.num_jobs for client in engine._clients] == [4, 2]
            assert [await answer(engine, job) for job in [*jobs, *late]] == [expected] * 6
            await until(lambda: [one.state for one in engine.states()] == ["serving", "drained"])
            engine.resume(1)
            with pytest.raises(InputError, match="replica 1 serves, or will by itself"):
                engine.resume(1)
            await until(lambda: engine.num_serving == 2)
            jobs = [begin(engine, 200) for _ in range(4)]
            assert {client.num_jobs for client in engine._clients} == {2}
            assert [await answer(engine, job) for job in jobs] == [expected] * 4
        finally:
            await engine.close()

    asyncio.run(run())


@pytest.mark.parametrize("comes_up", [True, False])
def test_a_replica_that_starts_goes_on_with_what_the_last_one_had_when_it_failed(comes_up: bool) -> None:
    async def run() -> None:
        setup = engine_setup(PLAN, SPEC, dummy_weights=True)
        engine = ReplicaSet([setup] * 2, "shortest-queue", num_first=1)
        try:
            await engine.until_ready()
            expected = await answer(engine, begin(engine, 1000))
            made, failed = engine._replica, asyncio.Event()

            def late(number: int) -> _Replica:
                replica = made(number)
                load = replica.client._load

                async def once_the_other_has_failed() -> None:
                    await failed.wait()
                    if not comes_up:
                        raise EngineError("there is no room")
                    await load()

                replica.client._load = once_the_other_has_failed
                return replica

            async def for_good(end: object) -> str:
                return "it failed for good"

            engine._replica = late
            engine.scale_to(2)
            jobs = [begin(engine, 1000) for _ in range(2)]
            first = engine.client(0)
            first._replace = for_good
            os.kill(first.pid, signal.SIGKILL)
            await until(lambda: first.failure is not None)
            await asyncio.sleep(0.05)
            assert not engine.ended.is_set()
            assert engine.pause == engine.long_pause == "the replicas have failed, another one is being started"
            assert engine.guarded
            assert engine.num_jobs == 2
            failed.set()
            if comes_up:
                assert [await answer(engine, job) for job in jobs] == [expected] * 2
                assert [one.state for one in engine.states()] == ["failed", "serving"]
                assert engine.pause is None
            else:
                async with asyncio.timeout(PATIENCE):
                    await engine.ended.wait()
                assert engine.failure == "it failed for good"
                with pytest.raises(EngineError, match="there is no room"):
                    await answer(engine, jobs[0])
        finally:
            await engine.close()

    asyncio.run(run())


@pytest.mark.parametrize("before", ["drained", "failed"])
def test_a_replica_that_does_not_start_again_says_why(before: str) -> None:
    async def run() -> None:
        setup = engine_setup(PLAN, SPEC, dummy_weights=True)
        engine = ReplicaSet([setup] * 2, "shortest-queue")
        try:
            await engine.until_ready()
            if before == "drained":
                engine.drain(1)
            else:
                await engine.client(1).close()  # As one that has failed for good.
            await until(lambda: engine.states()[1].state == before)
            model = with_fields(setup.model, directory="/nowhere")
            engine._setups[1] = with_fields(setup, model=model, engine=with_fields(setup.engine, dummy_weights=False))
            engine.resume(1)
            assert engine.states()[1].state == "starting"
            await until(lambda: engine.num_starting == 0)
            assert engine.states()[1].state == "failed"
            assert engine.states()[1].reason.startswith("it could not be started: /nowhere holds no *.safetensors")
            engine._setups[1] = setup
            engine.resume(1)
            await until(lambda: engine.num_serving == 2)
            assert [(one.state, one.reason) for one in engine.states()] == [("serving", None)] * 2
        finally:
            await engine.close()

    asyncio.run(run())


def test_a_replica_that_drains_serves_again_where_the_only_other_one_fails() -> None:
    async def run() -> None:
        setup = engine_setup(PLAN, SPEC, dummy_weights=True)
        engine = ReplicaSet([setup] * 2, "shortest-queue")
        try:
            await engine.until_ready()
            jobs = [begin(engine, 1000) for _ in range(2)]
            engine.drain(0)
            await engine.client(1).close()  # As one that has failed for good.
            await until(lambda: engine.num_draining == 0)
            assert [one.state for one in engine.states()] == ["serving", "failed"]
            assert await answer(engine, jobs[0])
            assert await answer(engine, begin(engine, 200))
            assert not engine.ended.is_set()
            await engine.client(0).close()
            await engine.ended.wait()
            assert engine.failure
        finally:
            await engine.close()

    asyncio.run(run())


def test_what_a_drained_replica_has_goes_on_on_another_with_the_same_tokens() -> None:
    async def run() -> None:
        setup = engine_setup(PLAN, SPEC, dummy_weights=True)
        engine = ReplicaSet([setup] * 2, "shortest-queue")
        try:
            await engine.until_ready()
            expected = await answer(engine, begin(engine, 1000))
            jobs = [begin(engine, 1000) for _ in range(4)]
            await until(lambda: not any(job.waiting for job in jobs))
            for number in (0, 1, 0):  # More often than a request may crash.
                engine.drain(number, move=True)
                assert engine.client(number) is None
                assert engine.client(1 - number).num_jobs == 4
                engine.resume(number)
                assert engine.states()[number].state == "starting"
                await until(lambda: engine.num_serving == 2)
            assert [await answer(engine, job) for job in jobs] == [expected] * 4
        finally:
            await engine.close()

    asyncio.run(run())


def test_a_replica_that_begins_to_serve_while_the_plan_changes_runs_the_new_one_as_well() -> None:
    async def run() -> None:
        setup = engine_setup(PLAN, SPEC, dummy_weights=True)
        other = engine_setup(replace(PLAN, schedule=Schedule("orca", {"max_num_seqs": 7})), SPEC, dummy_weights=True)
        engine = ReplicaSet([setup] * 2, "shortest-queue", num_first=1)
        try:
            await engine.until_ready()
            first = engine.client(0)
            switch = first.switch_plan

            async def late(setup: EngineSetup) -> PlanSwitched:
                engine.scale_to(2)
                await until(lambda: engine.num_serving == 2)
                return await switch(setup)

            first.switch_plan = late
            await engine.switch_plan([other] * 2)
            assert [one.setup for one in engine._replicas] == [other] * 2
            assert [client._setup for client in engine._clients] == [other] * 2  # What their engines have taken.
        finally:
            await engine.close()

    asyncio.run(run())


def test_a_replica_starts_answers_what_it_has_and_ends() -> None:
    async def run() -> None:
        setup = engine_setup(PLAN, SPEC, dummy_weights=True)
        engine = ReplicaSet([setup] * 2, "shortest-queue", num_first=1)
        try:
            await engine.until_ready()
            engine.scale_to(2)
            assert (engine.num_serving, engine.num_starting) == (1, 1)
            expected = await answer(engine, begin(engine, 200))
            await until(lambda: engine.num_serving == 2)
            assert engine.start_seconds > 0
            jobs = [begin(engine, 200) for _ in range(4)]
            assert {client.num_jobs for client in engine._clients} == {2}
            engine.scale_to(1)
            assert (engine.num_serving, engine.num_draining) == (1, 1)
            late = begin(engine, 200)
            assert [client.num_jobs for client in engine._clients] == [3, 2]
            assert [await answer(engine, job) for job in [*jobs, late]] == [expected] * 5
            await until(lambda: engine.num_draining == 0)
            assert len(engine._clients) == 1
            assert engine.num_reserved == 6
            assert engine.failure is None
        finally:
            await engine.close()

    asyncio.run(run())


def test_what_a_crashed_replica_has_goes_on_on_another_where_it_loads_for_long() -> None:
    async def run() -> None:
        setup = engine_setup(PLAN, SPEC, dummy_weights=True)
        engine = ReplicaSet([setup] * 2, "shortest-queue")
        try:
            await engine.until_ready()
            expected = await answer(engine, begin(engine, 1000))
            jobs = [begin(engine, 1000) for _ in range(4)]
            await until(lambda: not any(job.waiting for job in jobs))
            client = engine.client(0)
            load, moved = client._load, asyncio.Event()

            async def for_long() -> None:
                await moved.wait()
                await load()

            client._load, client._load_seconds = for_long, 60.0
            os.kill(client.pid, signal.SIGKILL)
            async with asyncio.timeout(20.0):
                while client.num_jobs:
                    await asyncio.sleep(0.01)
            moved.set()
            assert [await answer(engine, job) for job in jobs] == [expected] * 4
        finally:
            await engine.close()

    asyncio.run(run())


def test_the_lengths_of_the_others_are_known_where_a_replica_fails() -> None:
    async def run() -> None:
        setup = engine_setup(PLAN, SPEC, dummy_weights=True)
        engine = ReplicaSet([setup] * 2, "round-robin")
        try:
            await engine.until_ready()
            await asyncio.gather(*(answer(engine, begin(engine, 5)) for _ in range(4)))

            async def gone() -> LengthStatsReport:
                raise EngineError("the engine is gone")

            engine.client(1).length_stats = gone
            assert [one.output_tokens for one in (await engine.length_stats()).left] == [5, 5]
            engine.client(0).length_stats = gone
            with pytest.raises(EngineError, match="the engine is gone"):
                await engine.length_stats()
        finally:
            await engine.close()

    asyncio.run(run())


FIGURES = Estimate(
    throughput=4.0,
    token_throughput=40.0,
    ttft=0.1,
    tpot=0.01,
    latency=1.0,
    latency_p50=0.5,
    latency_p99=1.0,
    kv_tokens=10.0,
    memory_bytes_per_gpu=10.0,
)


def test_without_its_profile_a_plan_is_taken_by_its_figures() -> None:
    found = limits_of(replace(PLAN, estimate=FIGURES), (1, 2), on_ray=False)
    assert found.curve.rates == (pytest.approx(0.95 * 2.0),)
    assert found.basis.startswith("as 95 % of the plan's throughput, as its profile is not here")
    found = limits_of(replace(PLAN, estimate=FIGURES, arrival_rate=4.0, rate_headroom=0.5), (1, 9), on_ray=True)
    assert found.curve.rates == (3.0,)


@pytest.mark.parametrize(
    ("lacks", "why"),
    [
        ({"workload": None}, "it names no workload"),
        ({"workload": "gone.csv"}, "its workload cannot be read (no workload 'gone.csv'"),
        ({"cluster": "gone"}, "its cluster cannot be read (no cluster file or shipped cluster 'gone'"),
    ],
)
def test_nor_does_it_need_its_workload_or_its_cluster(
    lacks: dict[str, str | None], why: str, profile: Profile, tmp_path: Path
) -> None:
    save_profile(profile, tmp_path / "p.json")
    plan = replace(PLAN, estimate=FIGURES, profile=str(tmp_path / "p.json"), workload="fixed:in=4;out=8")
    found = limits_of(replace(plan, **lacks), (1, 2), on_ray=False)
    assert found.curve.rates == (pytest.approx(0.95 * 2.0),)
    assert f"as {why}" in found.basis
    assert limits_of(plan, (1, 2), on_ray=False).basis.startswith("by the plan's profile and workload")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"estimate": FIGURES}, "--replicas 1:3 needs 3 replicas on this host, the plan has devices for 2"),
        ({"replicas": (0, 1, 2)}, "nothing says what rate a replica of the plan serves"),
    ],
)
def test_what_cannot_be_scaled_is_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        limits_of(replace(PLAN, **changes), (1, 3), on_ray=False)


def test_unequal_replicas_are_no_more_than_the_plan_has() -> None:
    other = ReplicaGroup(schedule=PLAN.schedule, placement=PLAN.placement, first_devices=(2,))
    with pytest.raises(InputError, match="the plan's replicas differ, and it has 3"):
        limits_of(replace(PLAN, more_replicas=(other,), estimate=FIGURES), (1, 4), on_ray=True)
