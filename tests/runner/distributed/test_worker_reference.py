"""Reference passes of workers change no token, are subtracted once, and survive a generation of workers."""

import signal
import time
from contextlib import closing
from dataclasses import dataclass, field
from os import kill

import numpy as np
import pytest

from exeplan.core.models.model import load_model_spec
from exeplan.core.plan import Plan
from exeplan.core.schedule import Schedule, Stage
from exeplan.runner.compute.reference_passes import canonical_passes
from exeplan.runner.compute.tokens.sampling import SamplingParams
from exeplan.runner.distributed import worker_reference
from exeplan.runner.distributed.worker_reference import WorkerReferencePasses
from exeplan.runner.engine.engine import Engine, Request
from exeplan.runner.engine.executor import WorkerError
from exeplan.runner.engine_process.build import build_engine, engine_setup
from exeplan.runner.ipc.messages import ReferenceRan
from exeplan.runner.load import Load, _share_of, play_engine

from ..recorded import recorded

PASSES = canonical_passes(num_layers=1, longest=32)
LOAD = Load(input_tokens=np.array([5, 9, 3, 7]), output_tokens=np.array([9, 1, 16, 12]))
PIPELINE = Plan(
    model="demo",
    schedule=Schedule("orca", {"max_num_seqs": 2, "micro_batches": 2}),
    placement=(Stage(devices=(0,), layers=(0, 3)), Stage(devices=(1,), layers=(3, 6))),
    kv_cache_tokens=1024,
)


def run_on(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def test_two_workers_repeat_them_between_their_batches_and_the_tokens_are_the_same(monkeypatch) -> None:
    monkeypatch.setattr(WorkerReferencePasses.repeat_if_due, "__defaults__", (0.0,))
    with closing(build_engine(engine_setup(PIPELINE, load_model_spec("demo"), dummy_weights=True))) as engine:
        outputs = recorded(engine, monkeypatch)
        for passes in ((), PASSES):
            outputs.append([])
            reference = engine.reference_passes(passes)
            run = play_engine(engine, LOAD, vocab_size=2048, reference=reference)
        assert run.speed is not None
        assert len(run.speed.samples) > 3
        assert 0 < run.reference_share.max() <= 1
        assert sum(step is not None for step in run.steps) > 16
        assert sorted(outputs[0]) == sorted(outputs[1])
        for pid in engine._executor.pids:
            kill(pid, signal.SIGKILL)
        engine.add(Request(request_id="late", prompt_token_ids=[5], sampling=SamplingParams(max_tokens=3)))
        with pytest.raises(WorkerError):
            run_on(engine)
        engine.restart()
        assert reference is not None
        before = len(reference.samples)  # Those of the run, and a round that ended behind it.
        assert reference.repeat_if_due()
        run_on(engine)
        assert len(reference.samples) == before + 1


@dataclass
class Asked:
    """Two workers that answer when a test says so."""

    num_workers: int = 2
    num_generations: int = 1
    asked: list[object] = field(default_factory=list)
    on_reference: object = None

    def prepare_reference(self, passes: object) -> None:
        self.asked.clear()

    def repeat_reference(self, passes: object) -> None:
        self.asked.append(passes)


def test_a_round_is_a_sample_when_all_have_reported_and_the_next_is_not_asked_for_before(monkeypatch) -> None:
    workers = Asked()
    reference = WorkerReferencePasses(workers, PASSES)
    assert reference.repeat_if_due(0.0)
    workers.on_reference(ReferenceRan(number=1, seconds=0.002, cost=0.005, others=1.0))
    assert not reference.repeat_if_due(0.0)
    assert reference.samples == []
    workers.on_reference(ReferenceRan(number=1, seconds=0.008, cost=0.02, others=4.0))
    (sample,) = reference.samples
    assert (sample.number, sample.cost) == (1, 0.02)
    assert (sample.seconds, sample.others) == (pytest.approx(0.004), pytest.approx(2.0))
    reference._round.began -= 1.0
    assert reference.repeat_if_due(0.0)
    workers.num_generations += 1
    assert reference.repeat_if_due(1e9)
    assert len(workers.asked) == 3


def test_what_ran_beside_the_engine_is_taken_from_the_intervals_in_which_it_ran() -> None:
    samples = (
        worker_reference.SpeedSample(number=0, time=0.5, seconds=0.1, cost=1.0),
        worker_reference.SpeedSample(number=1, time=3.0, seconds=0.1, cost=0.5),
    )
    speed = worker_reference.MachineSpeed(passes=PASSES, samples=samples)
    share = _share_of(speed, np.array([0.0, 1.0, 1.0, 2.0, 4.0]))
    assert share.tolist() == pytest.approx([0.5, 0.0, 0.5, 0.25])
    assert _share_of(None, np.array([0.0, 1.0])).tolist() == [0.0]


def test_a_round_is_asked_for_sooner_on_a_restless_machine() -> None:
    workers = Asked(num_workers=1)
    reference = WorkerReferencePasses(workers, PASSES)
    for number in range(30):
        assert reference.repeat_if_due(0.0)
        slow = 1.5 if number % 2 else 1.0
        workers.on_reference(ReferenceRan(number=number % 3, seconds=0.002 * slow, cost=0.0, others=1.0))
    assert reference.repeat_if_due(0.0)
    workers.on_reference(ReferenceRan(number=0, seconds=0.002, cost=0.0, others=1.0))
    asked, reference._round.began = len(workers.asked), time.perf_counter() - 1.0
    assert not reference.repeat_if_due(10.0)
    assert reference.repeat_if_due(3.0)
    assert len(workers.asked) == asked + 1


def test_a_long_pass_is_asked_for_less_often() -> None:
    workers = Asked(num_workers=1)
    reference = WorkerReferencePasses(workers, PASSES)
    assert reference.repeat_if_due(0.0)
    workers.on_reference(ReferenceRan(number=0, seconds=0.9, cost=1.0, others=1.0))
    for seconds, due in ((4.5, False), (5.5, True)):
        reference._round.began = time.perf_counter() - seconds
        assert reference.repeat_if_due(0.0) is due
