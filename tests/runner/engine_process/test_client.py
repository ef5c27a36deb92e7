"""What a client of an engine does of which no process runs: jobs that leave before they begin, questions that fail."""

import asyncio
from dataclasses import asdict

import pytest

from exeplan.core.model import load_model_spec
from exeplan.core.plan import Plan
from exeplan.core.schedule import Schedule, single_stage
from exeplan.errors import InputError
from exeplan.runner.compute.sampling import SamplingParams
from exeplan.runner.engine_process.build import engine_setup
from exeplan.runner.engine_process.client import EngineClient, EngineError
from exeplan.runner.engine_process.replicas import ReplicaSet
from exeplan.runner.ipc.messages import EngineSetup, Prompt, Sampling


def setup() -> EngineSetup:
    spec = load_model_spec("demo")
    plan = Plan(model="demo", schedule=Schedule("orca", {"max_num_seqs": 3}), placement=single_stage(spec))
    return engine_setup(plan, spec)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_job_that_is_released_before_it_is_submitted_is_not_sent(num_replicas: int) -> None:
    """It made room for another client's between its admission and its start."""

    async def run() -> None:
        engine: EngineClient | ReplicaSet
        engine = EngineClient(setup()) if num_replicas == 1 else ReplicaSet([setup()] * 2, [0, 1], "round-robin")
        job = engine.reserve(2)
        assert engine.num_waiting == 2
        job.fail(EngineError("pushed out", status=429))
        for _ in range(2):
            engine.release(job)
            assert engine.num_waiting == 0
        engine.submit(job, [Prompt(prompt_token_ids=[1], sampling=Sampling(**asdict(SamplingParams())), n=2)])
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
