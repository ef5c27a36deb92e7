"""Jobs that leave before they begin, questions that fail, and an engine that nothing listens to."""

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import asdict, replace

import pytest
from msgspec.structs import replace as with_fields

from exeplan.core.models.model import load_model_spec
from exeplan.core.plan import Plan
from exeplan.core.schedule import Schedule, single_stage
from exeplan.errors import InputError
from exeplan.runner.compute.reference_passes import canonical_passes
from exeplan.runner.compute.tokens.sampling import SamplingParams
from exeplan.runner.engine_process.build import engine_setup
from exeplan.runner.engine_process.client import EngineClient
from exeplan.runner.engine_process.job import EngineError, Job
from exeplan.runner.engine_process.link import _IMPORTED
from exeplan.runner.engine_process.replicas import ReplicaSet
from exeplan.runner.ipc.fork_server import ForkServer
from exeplan.runner.ipc.messages import EngineSetup, Event, IterationDone, Prompt, Sampling, SetupRefused, Stats

from ..processes import PATIENCE, is_alive

pytestmark = pytest.mark.usefixtures("shared_forks")


def setup(max_num_seqs: int = 3) -> EngineSetup:
    spec = load_model_spec("demo")
    schedule = Schedule("orca", {"max_num_seqs": max_num_seqs})
    return engine_setup(Plan(model="demo", schedule=schedule, placement=single_stage(spec)), spec)


def prompt(token: int = 1, *, n: int = 1) -> Prompt:
    return Prompt(
        prompt_token_ids=[token],
        sampling=Sampling(**asdict(SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True))),
        n=n,
    )


def test_an_engine_that_cannot_start_its_workers_again_says_why() -> None:
    async def run() -> str:
        engine = EngineClient(setup())
        end = engine._take(SetupRefused(message="the plan needs 2 x 1 GPU"))
        await engine.close()
        assert end
        return end.reason

    assert asyncio.run(run()) == "the plan needs 2 x 1 GPU"


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_job_that_is_released_before_it_is_submitted_is_not_sent(num_replicas: int) -> None:
    """It made room for another client's between its admission and its start."""

    async def run() -> None:
        engine: EngineClient | ReplicaSet
        engine = EngineClient(setup()) if num_replicas == 1 else ReplicaSet([setup()] * 2, "round-robin")
        job = engine.reserve(2)
        assert engine.num_waiting == 2
        job.fail(EngineError("pushed out", status=429))
        for _ in range(2):
            engine.release(job)
            assert engine.num_waiting == 0
        engine.submit(job, [prompt(n=2)])
        assert job.submission is None
        with pytest.raises(EngineError, match="pushed out"):
            await job.next_events()
        await engine.close()

    asyncio.run(run())


@pytest.mark.parametrize(("question", "error"), [("length_stats", EngineError), ("switch_plan", InputError)])
def test_a_question_at_which_two_engines_ended_is_not_asked_a_third_time(question: str, error: type) -> None:
    """A plan is refused then; for lengths the next engine is as good, so that drift is watched on."""

    async def run() -> None:
        engine = EngineClient(setup())
        engine._supervising = asyncio.create_task(asyncio.sleep(0))  # It counts as started.
        asking = asyncio.create_task(getattr(engine, question)(*([setup()] if question == "switch_plan" else [])))
        await asyncio.sleep(0)
        for _ in range(2):
            assert not asking.done()
            engine._resume()
        with pytest.raises(error, match="ended twice"):
            await asking
        assert not engine._switches
        await engine.close()

    asyncio.run(run())


def test_an_engine_whose_events_cannot_be_taken_is_ended() -> None:
    """Its client has failed, and nothing else would end the process before the server does."""

    async def run() -> None:
        engine = EngineClient(setup())
        try:
            await engine.until_ready()

            def broken(events: object, stats: object) -> None:
                raise RuntimeError("no more")

            engine.on_step = broken
            engine.submit(job := engine.reserve(1), [prompt()])
            await asyncio.wait_for(engine.ended.wait(), PATIENCE)
            await job.next_events()  # The first token had been taken.
            with pytest.raises(EngineError, match="could not be replaced"):
                await job.next_events()
            assert engine.pid is not None
            assert not is_alive(engine.pid)
        finally:
            await engine.close()

    asyncio.run(run())


def test_a_watched_engine_says_how_slow_the_machine_is_while_it_works_and_answers_the_same() -> None:
    passes = tuple(replace(one, seconds=1e-9) for one in canonical_passes(num_layers=2, longest=64))

    async def answer(watched: bool) -> tuple[list[int], list[Stats]]:
        engine = EngineClient(with_fields(setup(), reference_passes=passes if watched else ()))
        found: list[Stats] = []
        try:
            await engine.until_ready()
            engine.on_step = lambda events, stats: found.append(stats)
            engine.submit(job := engine.reserve(1), [prompt()])
            tokens: list[int] = []
            while len(tokens) < 50:
                tokens += [token for event in await job.next_events() for token in event.token_ids]
            return tokens, found
        finally:
            await engine.close()

    tokens, plain = asyncio.run(answer(watched=False))
    assert not any(stats.slowness or stats.reference_seconds for stats in plain)
    same, watched = asyncio.run(answer(watched=True))
    assert same == tokens
    told = [stats for stats in watched if stats.slowness]
    assert told
    assert all(stats.slowness > 1 and stats.reference_seconds > 0 for stats in told)


def test_what_an_iteration_brought_is_told_once_though_its_engine_ends_or_another_reports() -> None:
    """A counter that sums it would fall, or jump, otherwise."""
    ran = [Stats(num_running=1, num_preemptions=number, iteration_tokens=7) for number in (2, 3)]
    told: list[tuple[int, int, int]] = []

    def note(events: Sequence[Event], stats: Stats) -> None:
        told.append((stats.num_preemptions, stats.iteration_tokens, stats.num_running))

    async def run() -> None:
        engines = ReplicaSet([setup()] * 2, "round-robin")
        engines.on_step = note
        for client, stats in zip(engines._clients, ran, strict=True):
            client._take(IterationDone(events=[], stats=stats))
        engines._clients[0]._count_crash()
        assert engines.stats.num_preemptions == 0
        await engines.close()

    asyncio.run(run())
    assert told == [(2, 7, 1), (3, 7, 2), (0, 0, 2)]


def test_jobs_of_a_replica_that_has_failed_go_on_on_the_others_until_none_is_left(monkeypatch) -> None:
    """Each has a job that runs and one that waits; the fifth has its place, and is submitted after the failure.

    Before that, one of them is switched to another plan and back, and the other is left alone.
    """
    monkeypatch.setattr("exeplan.runner.engine_process.client.MAX_FAILED_STARTS", 0)

    async def run() -> None:
        engine = ReplicaSet([setup(max_num_seqs=1)] * 2, "round-robin")
        try:
            await engine.until_ready()
            own = setup(max_num_seqs=1)
            for number, other in enumerate((setup(max_num_seqs=2), own), 1):
                assert (await engine.switch_plan([own, other])).number == number  # One question each.
                assert [replica.setup for replica in engine._replicas] == [own, other]
            jobs = [engine.reserve(1) for _ in range(5)]
            for job in jobs[:4]:
                engine.submit(job, [prompt()])
            running = [await job.next_events() for job in jobs[:2]]
            os.kill(engine._clients[0].pid or 0, signal.SIGKILL)
            await asyncio.wait_for(engine._clients[0].ended.wait(), PATIENCE)
            engine.submit(jobs[4], [prompt()])
            found = [await tokens(job, events) for job, events in zip(jobs, [*running, [], [], []], strict=True)]
            assert len(found[0]) == 50
            assert found == [found[0]] * 5
            assert engine.failure is None
            for job in jobs:
                engine.release(job)
            assert (engine.num_jobs, engine.num_waiting) == (0, 0)
            engine.submit(last := engine.reserve(1), [prompt()])
            os.kill(engine._clients[1].pid or 0, signal.SIGKILL)
            await asyncio.wait_for(engine.ended.wait(), PATIENCE)
            with pytest.raises(EngineError, match="ended before they ran a batch") as error:
                await tokens(last, [])
            assert error.value.status == 503
        finally:
            await engine.close()

    asyncio.run(run())


def test_requests_wait_for_a_restart_only_if_loading_was_short(monkeypatch) -> None:
    async def run() -> None:
        engine = await EngineClient.start(setup())
        try:
            engine.pause = "restarted"
            monkeypatch.setattr("exeplan.runner.engine_process.client.SHORT_LOAD_SECONDS", PATIENCE)
            assert engine.long_pause is None
            monkeypatch.setattr("exeplan.runner.engine_process.client.SHORT_LOAD_SECONDS", 0.0)
            assert engine.long_pause == "restarted"
        finally:
            await engine.close()

    asyncio.run(run())


def test_an_engine_with_nothing_left_to_do_is_not_stalled_by_a_client_that_reads_slowly() -> None:
    async def run() -> None:
        engine = EngineClient(setup())
        engine.submit(slow := engine.reserve(1), [prompt()])
        engine._progress -= 2 * setup().deadline_seconds
        assert "no iteration for" in (engine.stall or "")
        engine._deliver(last_event(slow.request_ids[0]))
        assert (engine.stall, engine.num_jobs, engine.num_sequences) == (None, 1, 0)
        engine.reserve(1)  # Only from now on there is work.
        assert engine.stall is None
        await engine.close()

    asyncio.run(run())


def last_event(request_id: str) -> Event:
    return Event(
        request_id=request_id, token_ids=[1], text="a", finish_reason="length", first=True, arrival=0.0, start=0.0,
        time=0.0, num_prompt_tokens=1,
    )  # fmt: skip


async def tokens(job: Job, events: Sequence[Event]) -> list[int]:
    """All tokens of a job, with those of events that have been taken."""
    found = list(events)
    while not (found and found[-1].finish_reason):
        found += await asyncio.wait_for(job.next_events(), PATIENCE)
    return [token for event in found for token in event.token_ids]


ADMISSION = """
import os
from exeplan.runner.engine import admit_request
from exeplan.scheduling.fair_scheduler import FairScheduler

admitted, add = admit_request._admitted, FairScheduler.add

def fail_or_admit(request, *rest):
    if request.prompt_token_ids[0] == 7:
        raise MemoryError
    if request.prompt_token_ids[0] == 8:
        os._exit(3)
    return admitted(request, *rest)

def fail_or_add(self, sequence):
    if sequence.token_ids[0] == 9:
        raise RuntimeError("halfway")
    add(self, sequence)

admit_request._admitted, FairScheduler.add = fail_or_admit, fail_or_add
"""


def test_a_request_that_cannot_be_added_ends_alone(tmp_path, monkeypatch):
    """At once where the engine is as it was (7), otherwise after the second engine that ended with it (8, 9). What runs
    meanwhile and what waits behind it go on, as they were not the cause."""
    (tmp_path / "faulty_admission.py").write_text(ADMISSION)
    monkeypatch.syspath_prepend(tmp_path)

    async def run() -> None:
        forks = ForkServer([*_IMPORTED, "faulty_admission"])
        engine = EngineClient(setup(), forks=forks)
        try:
            await engine.until_ready()
            found = []
            for token in (7, 8, 9):
                engine.submit(good := engine.reserve(1), [prompt()])
                events = await good.next_events()
                engine.submit(bad := engine.reserve(2), [prompt(), prompt(token)])
                engine.submit(behind := engine.reserve(1), [prompt()])
                with pytest.raises(EngineError) as error:
                    await asyncio.wait_for(bad.next_events(), PATIENCE)
                engine.release(bad)
                assert len(await tokens(good, events)) == len(await tokens(behind, [])) == 50
                engine.release(good)
                engine.release(behind)
                assert (engine.num_waiting, engine.stats.num_running, engine.stats.num_waiting) == (0, 0, 0)
                found.append((token, engine.num_restarts, error.value.status, str(error.value)))
            lost = (
                "the engine or its workers died more than once while this request was running, so it is not tried again"
            )
            assert found == [
                (7, 0, 500, "the engine could not take this request (MemoryError); the server's log says more"),
                (8, 2, 500, lost),
                (9, 4, 500, lost),
            ]
        finally:
            await engine.close()
            forks.close()

    asyncio.run(run())
