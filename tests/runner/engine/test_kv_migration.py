"""Running requests keep their keys and values when layers and heads move to other devices, and tokens do not change."""

import contextlib
import functools
import os
import signal
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from exeplan.core.models.model import ModelSpec, load_model_spec
from exeplan.core.plan import Plan
from exeplan.core.schedule import Schedule, Stage
from exeplan.kernels.select import REFERENCE
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.passes.kv_cache import KVCache
from exeplan.runner.compute.tokens.sampling import SamplingParams
from exeplan.runner.compute.weights.shard import Shard
from exeplan.runner.engine import kv_migration
from exeplan.runner.engine.async_executor import AsyncExecutor
from exeplan.runner.engine.engine import Engine, PlanSwitch, Request
from exeplan.runner.engine.executor import Executor, InProcessExecutor, WorkerError
from exeplan.runner.engine.kv_regions import KVRegion, shard_view
from exeplan.runner.engine_process.build import build_executor, engine_setup

VOCAB, BLOCKS = 300, 60
LLAMA = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 3, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
T5 = {
    "vocab_size": VOCAB, "d_model": 48, "d_kv": 16, "num_heads": 4, "d_ff": 64, "num_layers": 2,
    "num_decoder_layers": 3, "decoder_start_token_id": 0, "eos_token_id": None, "feed_forward_proj": "gated-gelu",
}  # fmt: skip
ORCA = Schedule("orca", {"max_num_seqs": 6})
RRA = Schedule("rra", {"prefill_batch": 4, "decode_steps": 5})
GROUPS = Schedule("rra", {"prefill_batch": 3, "decode_steps": 4, "micro_batches": 2})
WAA = Schedule("waa-c", {"decode_batch": 4, "prefill_batch": 3})
STATIC = Schedule("static", {"batch_size": 5})
REQUESTS = [([(7 * n + 11 * i) % VOCAB for i in range(1 + (13 * n) % 37)], 20 + (5 * n) % 23) for n in range(9)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Saves a tiny random model once; weights are large enough that tokens depend on all keys and values."""

    @functools.cache
    def make(family: str) -> str:
        torch.manual_seed(0)
        model = (
            LlamaForCausalLM(LlamaConfig(**LLAMA)) if family == "llama" else T5ForConditionalGeneration(T5Config(**T5))
        )
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.15)
        directory = tmp_path_factory.mktemp(family)
        model.eval().save_pretrained(directory)
        return str(directory)

    return make


@pytest.fixture(scope="module")
def runners(checkpoint):
    """Two runners of the same model, with blocks for all requests."""

    @functools.cache
    def make(family: str) -> tuple[ModelRunner, ModelRunner]:
        spec = load_model_spec(checkpoint(family))
        return ModelRunner(spec, num_blocks=BLOCKS), ModelRunner(spec, num_blocks=BLOCKS, paged_with=REFERENCE)

    return make


@pytest.fixture(scope="module")
def expected(runners):
    """The tokens of an engine that keeps its plan."""

    @functools.cache
    def make(family: str) -> dict[str, list[int]]:
        return run(Engine(InProcessExecutor(runners(family)[0]), ORCA, num_blocks=BLOCKS), {})

    return make


class Counting:
    """An executor that counts the tokens of all prefills."""

    def __init__(self, executor: Executor, counts: list[int]) -> None:
        self._executor, self._counts = executor, counts

    def __getattr__(self, name: str):
        return getattr(self._executor, name)

    def start(self, batch) -> None:
        self._counts += [row.num_tokens for row in batch.prefill]
        self._executor.start(batch)


def run(engine: Engine, plans: dict[int, object]) -> dict[str, list[int]]:
    """Runs all requests at once; before some steps the engine switches its plan, by calling it."""
    found: dict[str, list[int]] = {}
    for number, (prompt, count) in enumerate(REQUESTS):
        sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        engine.add(Request(request_id=str(number), prompt_token_ids=prompt, sampling=sampling))
    step = 0
    while engine.has_work:
        outputs = plans[step]().outputs if step in plans else []
        for output in outputs + (engine.step() if engine.has_work else []):
            found.setdefault(output.request_id, []).extend(output.token_ids)
        step += 1
    assert engine.free_blocks == engine.num_blocks
    return found


def adopting(engine: Engine, switched: list, schedule: Schedule, executor, **options):
    """A plan as `run` switches to it; keys and values are float32."""

    def adopt():
        options.setdefault("kv_dtype", "float32")
        switched.append(engine.switch_plan(schedule, executor=executor, **options))
        return switched[-1]

    return adopt


def prompt_tokens(family: str) -> int:
    return sum(len(prompt) + (family == "t5") for prompt, _ in REQUESTS)


def widths(spec: ModelSpec, *sizes: int, phase: str = "", first: int = 0) -> tuple[Stage, ...]:
    """Stages of these numbers of devices, with uneven layers; prefill stages hold no decoder layers of a T5."""
    at = [number / len(sizes) for number in range(len(sizes) + 1)]
    cuts, encoder = ([round(count * share) for share in at] for count in (spec.num_layers, spec.num_encoder_layers))
    if phase and spec.is_encoder_decoder:
        cuts, encoder = (cuts, [0] * len(at)) if phase == "decode" else ([0] * len(at), encoder)
    stages = []
    for size, layers, encoder_layers in zip(sizes, pairwise(cuts), pairwise(encoder), strict=True):
        devices = tuple(range(first, first + size))
        stages.append(Stage(devices=devices, layers=layers, encoder_layers=encoder_layers, phase=phase))
        first += size
    return tuple(stages)


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_no_request_is_prefilled_again_when_all_layers_move(family, runners, expected):
    counts: list[int] = []
    cpu, paged = runners(family)
    engine = Engine(Counting(InProcessExecutor(cpu), counts), ORCA, num_blocks=BLOCKS)
    switched: list = []

    def to(make, runner: ModelRunner):
        def begin() -> Executor:
            runner.use_blocks(BLOCKS)
            return Counting(make(runner), counts)

        return begin

    plans = [
        (RRA, to(AsyncExecutor, paged)),
        (STATIC, to(InProcessExecutor, cpu)),
        (GROUPS, to(AsyncExecutor, paged)),
        (ORCA, to(InProcessExecutor, cpu)),
    ]
    moves = {4 + 5 * number: adopting(engine, switched, *plan) for number, plan in enumerate(plans)}
    assert run(engine, moves) == expected(family)
    assert [one.num_recomputed for one in switched] == [0] * len(plans)
    assert min(one.num_carried for one in switched) > 2
    assert sum(counts) == prompt_tokens(family)
    assert cpu.cache.free_blocks == BLOCKS


CHAIN = [
    (RRA, [2]), (WAA, ([1], [1])), (GROUPS, [1, 1]), (WAA, ([1], [2])), (WAA, ([1, 1], [1])), (ORCA, [1]),
]  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_layers_and_heads_move_between_workers(family, checkpoint, runners, expected):
    spec, counts, switched = load_model_spec(checkpoint(family)), [], []

    def plan(schedule: Schedule, sizes) -> Plan:
        apart = isinstance(sizes, tuple)
        stages = (
            widths(spec, *sizes[0], phase="prefill") + widths(spec, *sizes[1], phase="decode", first=sum(sizes[0]))
            if apart
            else widths(spec, *sizes)
        )
        return Plan(model=checkpoint(family), schedule=schedule, placement=stages, kv_cache_tokens=16 * BLOCKS)

    with contextlib.ExitStack() as stack:
        runner = ModelRunner(spec, num_blocks=BLOCKS)
        engine = Engine(Counting(InProcessExecutor(runner), counts), ORCA, num_blocks=BLOCKS)
        stack.callback(lambda: engine.close())
        setups = [engine_setup(plan(*link), spec) for link in CHAIN]
        makers = [lambda setup=setup: Counting(build_executor(setup), counts) for setup in setups]
        moves = {
            5 + 6 * number: adopting(engine, switched, schedule, make)
            for number, ((schedule, _), make) in enumerate(zip(CHAIN, makers, strict=True))
        }
        assert run(engine, moves) == expected(family)
    assert [one.num_recomputed for one in switched] == [0] * len(CHAIN)
    assert [one.num_carried > 1 for one in switched] == [True] * len(CHAIN)
    assert sum(counts) == prompt_tokens(family)


def moved(runners, schedule: Schedule, executor, *, num_blocks: int = BLOCKS, cls=InProcessExecutor, **options):
    """A llama that moves once while requests run: its tokens, the result of the move, and the prefilled tokens."""
    runner, counts, switched = runners("llama")[0], [], []
    runner.use_blocks(BLOCKS)
    engine = Engine(Counting(cls(runner), counts), RRA, num_blocks=BLOCKS)

    def counting() -> Executor:
        return Counting(executor(), counts)

    found = run(engine, {7: adopting(engine, switched, schedule, counting, num_blocks=num_blocks, **options)})
    return found, switched, len(counts)


def fresh(checkpoint, num_blocks: int = BLOCKS, cls=InProcessExecutor):
    return lambda: cls(ModelRunner(load_model_spec(checkpoint("llama")), num_blocks=num_blocks))


def test_requests_that_do_not_fit_into_a_smaller_cache_are_recomputed(checkpoint, runners, expected):
    found, (switched,), num_prefilled = moved(runners, ORCA, fresh(checkpoint, 9), num_blocks=9)
    assert found == expected("llama")
    assert switched.num_carried > 0 < switched.num_recomputed
    assert num_prefilled >= len(REQUESTS) + switched.num_recomputed


def test_host_memory_bounds_how_many_migrate(checkpoint, runners, expected, monkeypatch, caplog):
    token_bytes = load_model_spec(checkpoint("llama")).kv_bytes_per_token("float32")
    monkeypatch.setattr(kv_migration, "available_bytes", lambda: 2 * 40 * token_bytes)
    found, (switched,), num_prefilled = moved(runners, ORCA, fresh(checkpoint))
    assert found == expected("llama")
    assert switched.num_carried > 0 < switched.num_recomputed
    assert num_prefilled == len(REQUESTS) + switched.num_recomputed
    assert "host memory is too small for the keys and values of" in caplog.text


def test_requests_are_recomputed_where_a_gpu_is_too_full_to_read_them(
    checkpoint, runners, expected, monkeypatch, caplog
):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(InProcessExecutor, "save", full)
    found, (switched,), _ = moved(runners, ORCA, fresh(checkpoint))
    assert found == expected("llama")
    assert switched.num_carried == 0 < switched.num_recomputed
    assert "running requests are recomputed" in caplog.text


def test_requests_are_recomputed_where_the_caches_differ(checkpoint, runners, expected):
    found, (switched,), num_prefilled = moved(runners, ORCA, fresh(checkpoint), kv_dtype=None)
    assert found == expected("llama")
    assert switched.num_carried == 0 < switched.num_recomputed
    assert num_prefilled == len(REQUESTS) + switched.num_recomputed


class Gone(InProcessExecutor):
    """Behaves like workers of which one has died."""

    def save(self, path: str, regions: Sequence[KVRegion]) -> Sequence[int]:
        raise WorkerError("worker 0 died")


class GoneAtFirst(InProcessExecutor):
    """Behaves like workers that die when they restore keys and values, and are restarted."""

    def restore(self, path: str, regions: Sequence[KVRegion]) -> None:
        super().restore(path, regions[:1])
        raise WorkerError("worker 1 died")

    def restart(self) -> None:
        self.runner.use_blocks(BLOCKS)


@pytest.mark.parametrize(("old", "new"), [(Gone, InProcessExecutor), (InProcessExecutor, GoneAtFirst)])
def test_workers_that_die_meanwhile_cost_no_request(old, new, checkpoint, runners, expected, caplog):
    found, (switched,), _ = moved(runners, ORCA, fresh(checkpoint, cls=new), cls=old)
    assert found == expected("llama")
    assert switched.num_carried == 0 < switched.num_recomputed
    assert "running requests are recomputed" in caplog.text


def test_a_dead_worker_has_nothing_to_migrate(checkpoint, expected):
    spec = load_model_spec(checkpoint("llama"))
    plan = Plan(model=checkpoint("llama"), schedule=ORCA, placement=widths(spec, 1, 1), kv_cache_tokens=16 * BLOCKS)
    switched: list = []
    with contextlib.ExitStack() as stack:
        workers = build_executor(engine_setup(plan, spec))
        stack.callback(workers.close)
        engine = Engine(workers, ORCA, num_blocks=BLOCKS)
        adopt = adopting(engine, switched, RRA, fresh(checkpoint))

        def after_a_death() -> PlanSwitch:
            os.kill(workers.pids[-1], signal.SIGKILL)
            return adopt()

        assert run(engine, {9: after_a_death}) == expected("llama")
    assert switched[0].num_carried == 0


def test_rebuilt_old_workers_restore_their_keys_and_values(checkpoint, runners, expected):
    """The batches that were running at the switch are delivered as well."""
    runner, counts = runners("llama")[1], []
    runner.use_blocks(BLOCKS)
    engine = Engine(Counting(AsyncExecutor(runner), counts), RRA, num_blocks=BLOCKS)

    def fails() -> Executor:
        raise WorkerError("no such device")

    def attempt() -> PlanSwitch:
        again = fresh(checkpoint)
        with pytest.raises(WorkerError):
            engine.switch_plan(ORCA, executor=fails, restore=lambda: Counting(again(), counts), kv_dtype="float32")
        return PlanSwitch([], 0.0, 0, 0)

    assert run(engine, {7: attempt}) == expected("llama")
    assert len(counts) == len(REQUESTS)


class Ranks:
    """A group with nothing but a size and a rank."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_any_shards_read_what_any_others_wrote(checkpoint, dtype):
    """Keys and values are equal bit for bit, in other blocks, layers and heads; a head may be on two ranks."""
    spec = load_model_spec(checkpoint("llama"))
    head_bytes, tokens = spec.head_dim * dtype.itemsize, 37

    def caches(*stages: tuple[tuple[int, int], int]) -> list[tuple[Shard, KVCache]]:
        shards = [Shard(layers=layers, group=Ranks(size, rank)) for layers, size in stages for rank in range(size)]
        return [(shard, KVCache(spec, 8, dtype, torch.device("cpu"), shard=shard)) for shard in shards]

    def fill(memory: torch.Tensor, where: list[tuple[Shard, KVCache]], method: str, other: int) -> None:
        for shard, cache in where:
            cache.resize("other", other, other)
            cache.resize("one", 3, 3)
            getattr(cache, method)("one", shard_view(memory, region, spec, shard, head_bytes))

    region = KVRegion(None, 64, tokens, tokens)
    count = 64 + tokens * 2 * spec.num_layers * spec.num_kv_heads * head_bytes
    memory = torch.from_numpy(np.random.default_rng(0).integers(0, 256, count, dtype=np.uint8))
    wanted, between, found = memory.clone(), torch.zeros_like(memory), torch.zeros_like(memory)
    split, regrouped = caches(((0, 2), 1), ((2, 3), 2)), caches(((0, 1), 4), ((1, 3), 1))
    fill(memory, split, "write", 2)
    fill(between, split, "read", 2)
    fill(between, regrouped, "write", 4)
    fill(found, regrouped, "read", 4)
    assert torch.equal(found[64:], wanted[64:])
    assert not found[:64].any()


def test_an_output_that_is_to_be_recomputed_does_not_count_as_stored(runners, expected):
    """T5's requests that are prefilled again: the prompts' keys and values are cached, those of the outputs are not."""
    (cpu, paged), switched = runners("t5"), []
    paged.use_blocks(BLOCKS)
    engine = Engine(AsyncExecutor(paged), RRA, num_blocks=BLOCKS)

    def to(runner: ModelRunner, make):
        def begin() -> Executor:
            runner.use_blocks(BLOCKS)
            return make(runner)

        return begin

    again = adopting(engine, switched, RRA, to(cpu, InProcessExecutor), kv_dtype=None)
    carry = adopting(engine, switched, ORCA, to(paged, AsyncExecutor))
    assert run(engine, {8: again, 9: carry}) == expected("t5")
    assert [one.num_carried for one in switched] == [0, 4]
