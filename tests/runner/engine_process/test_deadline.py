"""A deadline is to begin by: once a sequence of a request has begun, all of the request is finished."""

from dataclasses import asdict

import pytest
from msgspec.structs import replace

from exeplan.core.models.model import load_model_spec
from exeplan.core.schedule import Schedule
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.tokens.sampling import SamplingParams
from exeplan.runner.engine.engine import Engine
from exeplan.runner.engine.executor import InProcessExecutor
from exeplan.runner.engine_process.job import Job
from exeplan.runner.engine_process.process import _EngineLoop
from exeplan.runner.ipc.messages import Begun, Prompt, Sampling, Submit

BLOCKS = 8


class Process:
    """An engine of one place and its loop, at the time `now`."""

    def __init__(self, runner: ModelRunner) -> None:
        self.now, self.begun = 0.0, []
        schedule = Schedule("orca", {"max_num_seqs": 1})
        self._engine = Engine(InProcessExecutor(runner), schedule, num_blocks=BLOCKS, clock=lambda: self.now)
        self._loop = _EngineLoop(self._engine, None, self._take, None)

    def _take(self, event: object) -> None:
        self.begun += event.request_ids if isinstance(event, Begun) else []

    def submit(self, submission: Submit) -> None:
        assert self._loop._submit(replace(submission, arrival=0.0)) is None

    def step(self) -> dict[str, str]:
        """What has ended, and how."""
        return {one.request_id: one.finish_reason for one in self._engine.step() if one.finish_reason}

    def run(self) -> dict[str, str]:
        ended: dict[str, str] = {}
        while self._engine.has_work:
            ended |= self.step()
        return ended


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    spec = load_model_spec("demo")
    return ModelRunner(spec, dtype="float32", device="cpu", num_blocks=BLOCKS, dummy_weights=True)


def job(number: int) -> Job:
    """Two choices for each of two prompts, to begin within a second."""
    sampling = Sampling(**asdict(SamplingParams(max_tokens=3, ignore_eos=True)))
    names = tuple(f"{number}-{index}" for index in range(4))
    made = Job(str(number), names, set(names), set(names))
    prompts = [Prompt(prompt_token_ids=[token], sampling=sampling, n=2, deadline=1.0) for token in (1, 2)]
    made.submit(prompts, stream=True)
    return made


def test_the_others_of_a_request_of_which_a_sequence_has_begun_begin_after_the_deadline(runner):
    process, first, second = Process(runner), job(1), job(2)
    for one in (first, second):
        assert one.submission
        process.submit(one.submission)
    ended = process.step()
    assert process.begun == ["1-0"]
    process.now = 9.0
    ended |= process.run()
    assert ended == dict.fromkeys(first.request_ids, "length") | dict.fromkeys(second.request_ids, "expired")


@pytest.mark.parametrize("begun", [True, False])
def test_another_engine_goes_on_with_all_of_a_request_that_had_begun(begun, runner):
    process, one = Process(runner), job(1)
    if begun:
        one.note_begun("1-0", 0.5)
        one.open.discard("1-0")  # It has ended.
    again = one.resubmit()
    assert again
    process.submit(again)
    process.now = 9.0
    assert process.run() == dict.fromkeys(one.open, "length" if begun else "expired")
