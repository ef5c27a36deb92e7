"""A job that has been released is no longer the engine's, whatever still happens with it."""

import asyncio
from dataclasses import asdict

import pytest

from exeplan.core.model import load_model_spec
from exeplan.core.plan import Plan
from exeplan.core.schedule import Schedule, single_stage
from exeplan.runner.compute.sampling import SamplingParams
from exeplan.runner.engine_process.build import engine_setup
from exeplan.runner.engine_process.client import EngineClient, EngineError
from exeplan.runner.engine_process.replicas import ReplicaSet
from exeplan.runner.ipc.messages import Prompt, Sampling


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_job_that_is_released_before_it_is_submitted_is_not_sent(num_replicas: int) -> None:
    """It made room for another client's between its admission and its start."""

    async def run() -> None:
        spec = load_model_spec("demo")
        plan = Plan(model="demo", schedule=Schedule("orca", {"max_num_seqs": 3}), placement=single_stage(spec))
        setup = engine_setup(plan, spec)
        engine: EngineClient | ReplicaSet
        engine = EngineClient(setup) if num_replicas == 1 else ReplicaSet([setup] * 2, [0, 1], "round-robin")
        job = engine.reserve(1)
        job.fail(EngineError("pushed out", status=429))
        engine.release(job)
        engine.submit(job, [Prompt(prompt_token_ids=[1], sampling=Sampling(**asdict(SamplingParams())))])
        assert job.submission is None
        with pytest.raises(EngineError, match="pushed out"):
            await job.next_events()
        await engine.close()

    asyncio.run(run())
