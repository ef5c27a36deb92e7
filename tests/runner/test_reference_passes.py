"""Reference passes use the run's own weights, leave its cache alone, and take no time from its records."""

from dataclasses import replace

import numpy as np
import pytest

from exeplan.core.models.model import load_model_spec
from exeplan.core.plan import Plan
from exeplan.core.profile import ReferencePass
from exeplan.core.runs.machine_speed import Restlessness, why_none
from exeplan.core.runs.metrics import RequestRecord, summarize
from exeplan.core.schedule import Schedule, Stage
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.reference_passes import ReferencePasses, canonical_passes
from exeplan.runner.engine.engine import Engine
from exeplan.runner.engine_process.build import build_engine, engine_setup
from exeplan.runner.fidelity.pass_comparison import compare_passes
from exeplan.runner.load import AFTER_CUT, EngineRun, Load, cut_at, play_engine
from exeplan.simulator.run import PassRecord

from .recorded import recorded

PASSES = canonical_passes(num_layers=2, longest=64)
LOAD = Load(input_tokens=np.array([5, 9, 3, 7]), output_tokens=np.array([9, 1, 16, 12]))


@pytest.fixture(scope="module")
def engine() -> Engine:
    plan = Plan(
        model="demo",
        schedule=Schedule("orca", {"max_num_seqs": 2}),
        placement=(Stage(layers=(0, 6)),),
        kv_cache_tokens=1024,
    )
    return build_engine(engine_setup(plan, load_model_spec("demo")))


def test_the_passes_are_a_small_and_a_full_decode_and_a_prefill_within_the_context() -> None:
    assert [(one.kind, one.num_seqs) for one in PASSES] == [("decode", 1), ("decode", 16), ("prefill", 1)]
    assert all(one.num_tokens <= 32 and one.num_layers == 2 for one in PASSES)


def test_they_are_repeated_in_turn_and_only_when_due() -> None:
    runner = ModelRunner(load_model_spec("demo"), num_blocks=4, dummy_weights=True)
    reference = ReferencePasses(runner, PASSES)
    assert reference.repeat_if_due()
    assert not reference.repeat_if_due(every=1e9)
    for number in (1, 2, 0):
        while not reference.repeat_if_due(every=0.0):
            pass
        assert reference.samples[-1].number == number
    assert all(0 < sample.seconds <= sample.cost for sample in reference.samples)
    assert runner.cache.free_blocks == 4


def test_an_encoder_decoder_model_has_them_too() -> None:
    spec = replace(load_model_spec("tcb-small"), num_layers=2, num_encoder_layers=2)
    runner = ModelRunner(spec, num_blocks=4, dummy_weights=True)
    reference = ReferencePasses(runner, canonical_passes(num_layers=1, longest=32))
    for number in range(3):
        assert min(reference._run(number)) > 0


def test_tokens_are_the_same_with_and_without(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exeplan.runner.compute.reference_passes.EVERY_SECONDS", 0.0)
    outputs = recorded(engine, monkeypatch)
    for passes in ((), PASSES):
        outputs.append([])
        reference = engine.reference_passes(passes)
        run = play_engine(engine, LOAD, vocab_size=2048, reference=reference)
        assert bool(run.reference_share.any()) == bool(passes)
    assert outputs[0] == outputs[1]


def made_run(*, cut: bool = False) -> EngineRun:
    """Two steps of 1 s, a reference pass of 5 s between them; the thread had half of the second step's time."""
    steps = (made_step(prefill=1), None, made_step(prefill=0))
    record = RequestRecord(input_tokens=3, arrival=0.0, start=0.0, token_times=(1.0, 7.0))
    return EngineRun(
        raw=[record],
        wall=np.array([0.0, 1.0, 6.0, 7.0]),
        cpu=np.array([0.0, 1.0, 6.0, 6.5]),
        steps=steps,
        reference_share=np.array([0.0, 1.0, 0.0]),
        cut=cut,
    )


def made_step(*, prefill: int):
    from exeplan.runner.engine.engine import StepRecord

    return StepRecord(0.0, 1.0, prefill, 1 - prefill, 3 if prefill else 1, 0 if prefill else 4)


def test_a_record_does_not_count_a_reference_pass() -> None:
    (record,) = made_run().records
    assert record.token_times == (1.0, 2.0)
    (alone,) = made_run().on_cpu_clock()
    assert alone.token_times == (1.0, 1.5)


PLANNED = [
    PassRecord(0.0, 0.8, ((0, 0.0, 0.8),), num_prefill=1, num_decode=0, num_new_tokens=3),
    PassRecord(0.8, 1.6, ((0, 0.8, 1.6),), num_prefill=0, num_decode=1, num_new_tokens=1),
]


def test_passes_as_planned_are_split_into_others_and_what_is_left() -> None:
    found = compare_passes(made_run(), PLANNED, one_thread=True)
    assert found is not None
    assert found.same
    assert found.took.value == pytest.approx(2.0 / 1.6)
    assert found.others == pytest.approx(2.0 / 1.5)
    assert found.left.value == pytest.approx(1.5 / 1.6)
    assert (found.num_reference, found.reference_share) == (0, pytest.approx(5 / 7))
    assert "all 2 passes as planned; they took 1.25 times" in str(found)


def test_the_first_pass_that_was_not_planned_is_named() -> None:
    other = [PLANNED[0], PLANNED[1]._replace(num_decode=2)]
    found = compare_passes(made_run(), other, one_thread=False)
    assert found is not None
    assert (found.same, found.first_other, found.num_passes) == (False, 2, 1)
    assert str(found).startswith("pass 2 was not the planned one")
    assert compare_passes(made_run(), other[1:], one_thread=False) is None


def test_a_cut_run_has_fewer_passes_than_planned() -> None:
    more = [*PLANNED, PLANNED[1]]
    for cut in (False, True):
        found = compare_passes(made_run(cut=cut), more, one_thread=False)
        assert found is not None
        assert found.same == cut


def test_a_cut_engine_forgets_its_requests_and_says_that_they_had_not_ended(engine: Engine) -> None:
    load = Load(input_tokens=np.full(50, 4), output_tokens=np.full(50, 200))
    run = play_engine(engine, load, vocab_size=2048, seconds=0.3)
    assert run.cut
    assert not engine.has_work
    assert engine.free_blocks == engine.num_blocks
    assert 1 <= len(run.records) < 50
    assert {record.output_tokens for record in run.records} == {200}
    assert max(record.token_times[-1] for record in run.records) == pytest.approx(run.wall[-1] + AFTER_CUT)
    end = run.end(np.diff(run.wall))
    found = summarize(run.records, p99_output=200, until=end)
    tokens = sum(time <= end for record in run.records for time in record.token_times)
    assert found.token_throughput == pytest.approx(tokens / end, rel=0.2)
    assert found.latency is not None
    assert found.latency > 50 * found.tpot


def test_records_are_cut_at_a_time() -> None:
    records = [
        RequestRecord(input_tokens=1, arrival=0.0, start=start, token_times=times)
        for start, times in ((0.0, (1.0, 2.0, 3.0)), (2.0, (2.5, 3.5)))
    ]
    assert [record.token_times for record in cut_at(records, 2.2)] == [(1.0, 2.0, 2.2 + AFTER_CUT)]


def test_a_gpu_and_several_workers_have_none() -> None:
    assert "cuda" in why_none("cuda")
    assert why_none("cpu") == ""


def test_a_reference_pass_is_repeated_with_the_layers_it_was_profiled_with() -> None:
    runner = ModelRunner(load_model_spec("demo"), num_blocks=4, dummy_weights=True)
    one, all_of_them = (
        ReferencePasses(runner, [ReferencePass(kind="decode", num_seqs=1, num_tokens=8, num_layers=n)]) for n in (1, 6)
    )
    assert len(one._runner.model.layers) == 1
    assert len(all_of_them._runner.model.layers) == 6
    assert len(runner.model.layers) == 6


def test_they_are_due_sooner_on_a_restless_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = ReferencePasses(ModelRunner(load_model_spec("demo"), num_blocks=4, dummy_weights=True), PASSES)
    assert reference.repeat_if_due()
    assert not reference.repeat_if_due(every=1e9)
    assert not reference.restless
    monkeypatch.setattr(Restlessness, "share", property(lambda self: 1e-18))
    assert reference.restless
    reference._last_cost = 0.0
    assert reference.repeat_if_due(every=1e9)
