"""An engine that switches plans repeatedly gives every request the tokens that it gets without a switch."""

import contextlib
import gc
import itertools
import queue
import threading
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import LlamaConfig, LlamaForCausalLM

from exeplan.core.models.model import load_model_spec
from exeplan.core.plan import Plan
from exeplan.core.schedule import Schedule, Stage
from exeplan.errors import InputError
from exeplan.runner.compute.kv_budget import KVBudget
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.tokens.sampling import SamplingParams
from exeplan.runner.engine.engine import Engine, Request
from exeplan.runner.engine.executor import InProcessExecutor, WorkerError
from exeplan.runner.engine_process.build import build_engine, build_executor, engine_setup
from exeplan.runner.engine_process.switch_plan import ExecutorBuilt, PlanSwitcher
from exeplan.runner.ipc.messages import EngineSetup, PlanRefused, PlanSwitched, RaySetup, SwitchPlan

from ..processes import PATIENCE, eventually

VOCAB, BLOCKS = 300, 24
ONE = (Stage(layers=(0, 3)),)
PIPELINE = (Stage(layers=(0, 2)), Stage(devices=(1,), layers=(2, 3)))
TENSOR = (Stage(devices=(0, 1), layers=(0, 3)),)
APART = (Stage(layers=(0, 3), phase="prefill"), Stage(devices=(1,), layers=(0, 3), phase="decode"))
ON_ONE = [
    Schedule("rra", {"prefill_batch": 3, "decode_steps": 4}),
    Schedule("orca", {"max_num_seqs": 5}),
    Schedule("chunked", {"max_num_seqs": 5, "max_num_batched_tokens": 16}),
    Schedule("static", {"batch_size": 4}),
    Schedule("turbo", {"batch_size": 3}),
    Schedule("concat", {"rows": 2, "row_tokens": 64}),
    Schedule("rra", {"prefill_batch": 6, "decode_steps": 9}),
]
REQUESTS = [([(7 * n + 11 * i) % VOCAB for i in range(1 + (13 * n) % 37)], 8 + (5 * n) % 23) for n in range(12)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> str:
    """A tiny random Llama with three layers."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        **sizes,
        vocab_size=VOCAB,
        num_hidden_layers=3,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.4,
    )
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).eval().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def runner(directory) -> ModelRunner:
    return ModelRunner(load_model_spec(directory), dtype="float32", device="cpu", num_blocks=BLOCKS)


@pytest.fixture(scope="module")
def expected(runner) -> dict[str, list[int]]:
    """The tokens of an engine that keeps its schedule."""
    found: dict[str, list[int]] = {}
    run(Engine(InProcessExecutor(runner), ON_ONE[1], num_blocks=BLOCKS), found)
    return found


def request(number: int) -> Request:
    prompt, count = REQUESTS[number]
    sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    return Request(request_id=str(number), prompt_token_ids=prompt, sampling=sampling)


def take(outputs: list, found: dict[str, list[int]], finished: list[str]) -> None:
    for output in outputs:
        found.setdefault(output.request_id, []).extend(output.token_ids)
        finished += [output.request_id] if output.finish_reason else []


def run(engine: Engine, found: dict[str, list[int]], between=lambda step, outputs: None) -> None:
    """All requests, two at a time as they come; `between` may do something before each step."""
    finished: list[str] = []
    coming = iter(range(len(REQUESTS)))
    for step in itertools.count():
        for number in itertools.islice(coming, 2):
            engine.add(request(number))
        outputs: list = []
        between(step, outputs)
        take(outputs + engine.step(), found, finished)
        if not engine.has_work and len(finished) == len(REQUESTS):
            break
    assert sorted(finished, key=int) == [str(number) for number in range(len(REQUESTS))]
    assert engine.free_blocks == engine.num_blocks


def test_schedules_change_between_two_batches_without_changing_tokens(runner, expected):
    engine, found = Engine(InProcessExecutor(runner), ON_ONE[0], num_blocks=BLOCKS), {}
    schedules = itertools.cycle(ON_ONE[1:] + ON_ONE[:1])
    kept = []

    def switch(step: int, outputs: list) -> None:
        if step % 3 == 2:
            switched = engine.switch_plan(next(schedules))
            outputs += switched.outputs
            kept.append(engine.num_running)

    run(engine, found, switch)
    assert found == expected
    assert runner.cache.free_blocks == BLOCKS
    assert max(kept) > 2


def test_a_schedule_that_does_not_fit_is_refused_and_the_old_one_goes_on(runner, expected):
    engine, found = Engine(InProcessExecutor(runner), ON_ONE[0], num_blocks=BLOCKS), {}

    def refused(step: int, outputs: list) -> None:
        if step == 3:
            with pytest.raises(InputError, match="KV blocks"):
                engine.switch_plan(ON_ONE[1], num_blocks=1)

    run(engine, found, refused)
    assert found == expected


@pytest.mark.parametrize("closed_first", [True, False])
def test_workers_that_cannot_be_started_leave_the_old_ones_in_place(closed_first, runner, expected):
    engine, found = Engine(InProcessExecutor(runner), ON_ONE[0], num_blocks=BLOCKS), {}

    def fails() -> Any:
        raise WorkerError("no such device")

    def attempt(step: int, outputs: list) -> None:
        if step == 5:
            with pytest.raises(WorkerError):
                engine.switch_plan(
                    ON_ONE[1], executor=fails, restore=(lambda: InProcessExecutor(runner)) if closed_first else None
                )

    run(engine, found, attempt)
    assert found == expected


@pytest.mark.parametrize("closed_first", [True, False])
def test_a_device_that_measures_too_few_blocks_leaves_the_old_workers_in_place(closed_first, runner, expected):
    engine, found = Engine(InProcessExecutor(runner), ON_ONE[0], num_blocks=BLOCKS), {}

    def attempt(step: int, outputs: list) -> None:
        if step == 5:
            with pytest.raises(InputError, match="KV blocks, the cache has 1 "):
                engine.switch_plan(
                    ON_ONE[1],
                    executor=lambda: InProcessExecutor(runner, kv_budget=KVBudget(1, 1000)),
                    restore=(lambda: InProcessExecutor(runner)) if closed_first else None,
                )
            assert engine.has_work

    run(engine, found, attempt)
    assert found == expected


def test_the_old_weights_are_freed_before_new_ones_are_loaded_and_those_before_the_old_ones_again(directory):
    """Where a device has no memory for both."""
    alive: list[weakref.ref[ModelRunner]] = []

    def executor(fails: bool = False) -> InProcessExecutor:
        gc.collect()
        assert not any(one() for one in alive)
        runner = ModelRunner(load_model_spec(directory), dtype="float32", device="cpu", num_blocks=BLOCKS)
        alive.append(weakref.ref(runner))
        if fails:
            raise WorkerError("no memory for the cache")
        return InProcessExecutor(runner)

    engine = Engine(executor(), ON_ONE[1], num_blocks=BLOCKS)
    engine.switch_plan(ON_ONE[1], executor=executor, restore=executor)
    with pytest.raises(WorkerError):
        engine.switch_plan(ON_ONE[1], executor=partial(executor, fails=True), restore=executor)
    assert len(alive) == 4


def test_length_stats_report_a_request_that_left_once(runner):
    engine = Engine(InProcessExecutor(runner), ON_ONE[1], num_blocks=BLOCKS)
    for number in (1, 2, 3):
        engine.add(request(number))
    for _ in range(9):
        engine.step()
    engine.abort("3")
    for _ in range(5):
        engine.step()
    stats = engine.length_stats()
    assert [(seen.input_tokens, seen.output_tokens, seen.complete) for seen in stats.left] == [
        (len(REQUESTS[3][0]), 9, False),
        (len(REQUESTS[1][0]), REQUESTS[1][1], True),
    ]
    assert [(seen.input_tokens, seen.output_tokens, seen.complete) for seen in stats.running] == [
        (len(REQUESTS[2][0]), 14, False)
    ]
    assert engine.length_stats().left == ()
    engine.abort("2")


def plan_setup(directory: str, placement: tuple[Stage, ...], schedule: Schedule, blocks: int = BLOCKS) -> EngineSetup:
    plan = Plan(model=directory, schedule=schedule, placement=placement, kv_cache_tokens=16 * blocks)
    return engine_setup(plan, load_model_spec(directory))


def gpu_setup(schedule: Schedule, placement: tuple[Stage, ...] = ONE) -> EngineSetup:
    plan = Plan(
        model="demo", schedule=schedule, placement=placement, device="cuda", dtype="float32", kv_cache_tokens=384
    )
    return engine_setup(plan, load_model_spec("demo"), dummy_weights=True)


def test_gpus_start_anew_for_more_micro_batches_or_more_sequences_than_they_were_started_for(runner):
    """On a CPU nothing depends on them."""

    def schedule(rows: int, micro_batches: int) -> Schedule:
        return Schedule("orca", {"max_num_seqs": rows, "micro_batches": micro_batches})

    built: list[Schedule] = []

    def build(setup: EngineSetup) -> InProcessExecutor:
        built.append(setup.schedule)
        return InProcessExecutor(runner)

    first = gpu_setup(schedule(8, 2), PIPELINE)
    engine = Engine(InProcessExecutor(runner), first.schedule, num_blocks=BLOCKS)
    switcher = PlanSwitcher(engine, first, build=build, put=lambda built: None)
    for number, (rows, micro_batches) in enumerate(
        [(4, 2), (8, 2), (16, 2), (12, 2), (12, 4), (24, 4), (2, 4), (2, 1)]
    ):
        setup = gpu_setup(schedule(rows, micro_batches), PIPELINE)
        assert isinstance(switcher.take(SwitchPlan(number=number, setup=setup), []), PlanSwitched)
    assert built == [schedule(16, 2), schedule(12, 4), schedule(24, 4), schedule(2, 1)]


@pytest.mark.parametrize(
    ("placement", "ray", "has_workers"),
    [(PIPELINE, None, True), (ONE, RaySetup(address="auto", replica=0), True), (ONE, None, False)],
)
def test_workers_start_anew_for_batches_that_may_take_longer_than_they_were_started_for(
    placement, ray, has_workers, runner
):
    """They and their links are given up after the deadline that they know, a multiple of what their passes take."""
    built: list[float] = []

    def build(setup: EngineSetup) -> InProcessExecutor:
        built.append(setup.deadline_seconds)
        return InProcessExecutor(runner)

    first = replace(gpu_setup(ON_ONE[1], placement), deadline_seconds=5.0, ray=ray)
    engine = Engine(InProcessExecutor(runner), first.schedule, num_blocks=BLOCKS)
    switcher = PlanSwitcher(engine, first, build=build, put=lambda built: None)
    for number, seconds in enumerate([5.0, 10.0, 11.0, 5.0, 22.0, 23.0]):
        setup = replace(first, deadline_seconds=seconds)
        assert isinstance(switcher.take(SwitchPlan(number=number, setup=setup), []), PlanSwitched)
    assert built == [11.0, 23.0] * has_workers


@pytest.mark.parametrize("restored", [True, False])
def test_a_plan_is_refused_where_its_workers_cannot_be_started_and_the_old_ones_can(restored, runner):
    old = gpu_setup(ON_ONE[1])
    new = replace(old, engine=replace(old.engine, dtype="float16"))

    def build(setup: EngineSetup) -> InProcessExecutor:
        if setup is new or not restored:
            raise WorkerError("no such device")
        return InProcessExecutor(runner)

    engine, found, finished = Engine(InProcessExecutor(runner), old.schedule, num_blocks=BLOCKS), {}, []
    engine.add(request(0))
    switcher, answered = PlanSwitcher(engine, old, build=build, put=lambda built: None), []
    with contextlib.nullcontext() if restored else pytest.raises(WorkerError):
        answered.append(switcher.take(SwitchPlan(number=1, setup=new), []))
        while engine.has_work:
            take(engine.step(), found, finished)
    refused = PlanRefused(number=1, message="its workers could not be started: no such device")
    assert answered == [refused] * restored
    assert finished == ["0"] * restored


def test_an_engine_computes_with_the_threads_of_the_plan_that_runs(directory, runner):
    before = torch.get_num_threads()
    first = replace(plan_setup(directory, ONE, ON_ONE[1]), num_threads=before)
    inbox: queue.SimpleQueue[ExecutorBuilt] = queue.SimpleQueue()

    def build(setup: EngineSetup) -> InProcessExecutor:
        if setup.num_threads == before + 2:
            raise InputError("no room")
        return InProcessExecutor(runner)

    engine = Engine(InProcessExecutor(runner), first.schedule, num_blocks=BLOCKS)
    switcher = PlanSwitcher(engine, first, build=build, put=inbox.put)
    try:
        for more, answer in ((1, PlanSwitched), (2, PlanRefused)):
            setup = replace(first, num_threads=before + more)
            assert switcher.take(SwitchPlan(number=more, setup=setup), []) is None
            assert isinstance(switcher.take(inbox.get(timeout=PATIENCE), []), answer)
            assert torch.get_num_threads() == switcher.setup.num_threads == before + 1
    finally:
        torch.set_num_threads(before)


def test_layers_move_between_workers_and_policies_change_with_them(directory, expected):
    """What `process.py` does with the commands, in this process."""
    plans = [
        (APART, Schedule("waa-c", {"decode_batch": 4, "prefill_batch": 2})),
        (APART, Schedule("waa-m", {"decode_batch": 6, "prefill_batch": 1, "micro_batches": 2})),
        (TENSOR, ON_ONE[0]),
        (ONE, ON_ONE[1]),
        (PIPELINE, Schedule("rra", {"prefill_batch": 4, "decode_steps": 6, "micro_batches": 2})),
    ]
    setups = [plan_setup(directory, *plan) for plan in plans]
    inbox: queue.SimpleQueue[ExecutorBuilt] = queue.SimpleQueue()
    threads = set(threading.enumerate())
    found: dict[str, list[int]] = {}
    answers = []
    with contextlib.ExitStack() as stack:
        engine = build_engine(setups[-1])
        stack.callback(lambda: engine.close())
        switcher = PlanSwitcher(engine, setups[-1], build=build_executor, put=inbox.put)

        def switch(step: int, outputs: list) -> None:
            if step % 4 == 3 and len(answers) < len(setups):
                answer = switcher.take(SwitchPlan(number=step, setup=setups[len(answers)]), outputs)
                while answer is None:  # The old workers go on meanwhile.
                    with contextlib.suppress(queue.Empty):
                        answer = switcher.take(inbox.get(timeout=0.01), outputs)
                    if answer is None and engine.has_work:
                        outputs += engine.step()
                answers.append(answer)

        run(engine, found, switch)
    assert found == expected
    assert [type(answer) for answer in answers] == [PlanSwitched] * len(setups)
    assert [answer.num_recomputed for answer in answers] == [0] * len(setups)
    eventually(lambda: set(threading.enumerate()) <= threads)
