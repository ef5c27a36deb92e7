"""A GPU's KV cache takes the memory left by weights and a measured workspace; no prefill exceeds the measured one."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exeplan.core.batch import SequenceState
from exeplan.core.models.model import load_model_spec, model_spec
from exeplan.core.plan import Plan, with_utilization
from exeplan.core.schedule import Schedule, single_stage
from exeplan.errors import InputError
from exeplan.kernels.select import REFERENCE
from exeplan.runner.compute.gpu_memory import fit_cache, logits_bytes, run_passes, tuning_blocks
from exeplan.runner.compute.kv_budget import (
    GPUMemory,
    KVBudget,
    num_kv_blocks,
    pass_limit,
    smallest_budget,
    warn_if_below_plan,
)
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.tokens.sampling import SamplingParams
from exeplan.runner.compute.weights.shard import whole
from exeplan.runner.engine.engine import Engine, Request
from exeplan.runner.engine.executor import InProcessExecutor
from exeplan.runner.engine_process.build import engine_setup
from exeplan.scheduling.scheduler import Scheduler

SPEC = replace(load_model_spec("demo"), max_context=64)
ORCA = Schedule("orca", {"max_num_seqs": 4})
CHUNKED = Schedule("chunked", {"max_num_seqs": 4, "max_num_batched_tokens": 96})


def test_the_cache_takes_what_the_share_leaves():
    memory = GPUMemory(total=1000, free=700)
    assert num_kv_blocks(memory, utilization=0.9, workspace=100, block_bytes=10) == 50
    assert num_kv_blocks(memory, utilization=1.0, workspace=100, block_bytes=10) == 60


@given(
    total=st.integers(1, 10**12),
    used=st.floats(0, 1),
    share=st.floats(0.01, 1),
    workspace=st.integers(0, 10**11),
    block=st.integers(1, 10**9),
)
def test_what_is_in_use_never_exceeds_the_share(total, used, share, workspace, block):
    memory = GPUMemory(total, total - int(used * total))
    try:
        blocks = num_kv_blocks(memory, utilization=share, workspace=workspace, block_bytes=block)
    except InputError:
        return
    in_use = memory.total - memory.free + workspace + blocks * block
    assert blocks >= 1
    assert in_use <= round(share * total) < in_use + block


def test_a_refusal_names_the_smallest_sufficient_share():
    memory = GPUMemory(total=1000, free=300)
    with pytest.raises(InputError, match=r"--gpu-memory-utilization 0.7 .* the smallest that suffices is 0.760"):
        num_kv_blocks(memory, utilization=0.7, workspace=50, block_bytes=10)
    assert num_kv_blocks(memory, utilization=0.76, workspace=50, block_bytes=10) == 1
    with pytest.raises(InputError, match="use more GPUs"):
        num_kv_blocks(memory, utilization=0.7, workspace=300, block_bytes=10)


def test_a_refusal_counts_in_shares_as_the_person_gives_them():
    # 0.7604 are needed, and 0.01 for captured graphs: 0.770 would not suffice.
    memory = GPUMemory(total=10_000, free=3_000)
    options = {"reserve": 0.01, "workspace": 504, "block_bytes": 100}
    with pytest.raises(InputError, match=r"--gpu-memory-utilization 0.77 .* the smallest that suffices is 0.771"):
        num_kv_blocks(memory, utilization=0.77, **options)
    assert num_kv_blocks(memory, utilization=0.771, **options) == 1


class ToyGpu:
    """A device of `total` bytes on which a pass takes 100 bytes a token next to the cache, and its meter."""

    def __init__(self, runner: ModelRunner, total: int) -> None:
        self.runner, self.total = runner, total

    def memory(self) -> GPUMemory:
        return GPUMemory(self.total, self.total - self.runner.cache.num_bytes)

    def workspace(self, work: Callable[[], object]) -> int | None:
        before = self.runner.cache.num_bytes
        seen: list[int] = []
        forward = self.runner.forward

        def counted(batch, *others, **named):
            seen.append(batch.num_new_tokens)
            if self.runner.cache.num_bytes + 100 * max(seen) > self.total:
                raise MemoryError
            return forward(batch, *others, **named)

        self.runner.forward = counted  # type: ignore[method-assign]
        try:
            work()
        except MemoryError:
            return None
        finally:
            self.runner.forward = forward  # type: ignore[method-assign]
        return self.runner.cache.num_bytes - before + 100 * max(seen)


@pytest.fixture
def runner() -> ModelRunner:
    return ModelRunner(SPEC, num_blocks=1)


def test_the_runner_gets_the_cache_that_fits(runner):
    block = runner.cache.num_bytes
    gpu = ToyGpu(runner, total=100 * block + 100 * 4096)
    budget = fit_cache(runner, Schedule("orca", {"max_num_seqs": 64}), gpu, utilization=1.0)
    # 4096 tokens need more cache than there is, so that smaller passes are tried.
    assert budget.pass_tokens == 1024
    assert budget.num_blocks == (gpu.total - 100 * 1024) // block
    assert runner.cache.num_blocks == budget.num_blocks


class FullerRank:
    """The group of two ranks, as seen by the one whose GPU has three more blocks free."""

    size, rank = 2, 0

    def all_reduce(self, x):
        return 2 * x

    def all_gather(self, x):
        return torch.cat([x, x - 3 if x.dtype == torch.int64 else x], -1)

    def muted(self):
        return nullcontext()


def test_all_ranks_of_a_stage_have_the_cache_of_the_fullest():
    runner = ModelRunner(SPEC, shard=replace(whole(SPEC), group=FullerRank()), num_blocks=1)
    block = runner.cache.num_bytes
    budget = fit_cache(runner, CHUNKED, ToyGpu(runner, total=50 * block + 9600), utilization=1.0)
    assert budget.num_blocks == runner.cache.num_blocks == 50 - 3


@pytest.mark.parametrize(("room", "blocks"), [(6000, 2560), (5000, 1280), (300, 80), (3, 5)])
def test_kernels_are_tuned_in_half_of_what_the_weights_leave(runner, room, blocks):
    """Room in blocks; at least a few are taken, which are refused where even those do not fit."""
    meter = ToyGpu(runner, total=(room + runner.cache.num_blocks) * runner.cache.num_bytes // runner.cache.num_blocks)
    assert tuning_blocks(runner, meter) == blocks


def test_logits_of_captured_iterations_are_kept_free(runner):
    assert logits_bytes(runner, ORCA) == 0  # A CPU captures none.
    paged = ModelRunner(SPEC, num_blocks=1, dummy_weights=True, paged_with=REFERENCE)
    paged.capture(4)
    assert logits_bytes(paged, ORCA) == 4 * SPEC.vocab_size * 4 <= paged.graphs._logits_BV.nbytes


def test_a_schedule_that_limits_its_passes_is_measured_at_its_limit(runner):
    block = runner.cache.num_bytes
    budget = fit_cache(runner, CHUNKED, ToyGpu(runner, total=50 * block + 9600), utilization=1.0)
    assert budget == KVBudget(num_blocks=50, pass_tokens=96)
    assert pass_limit(CHUNKED, budget) is None
    assert pass_limit(ORCA, budget) == 96
    assert pass_limit(ORCA, None) is None


def test_no_memory_at_all_is_an_error(runner):
    with pytest.raises(InputError, match="no memory for a prefill of"):
        fit_cache(runner, ORCA, ToyGpu(runner, total=1000), utilization=1.0)


def test_devices_agree_on_the_smallest_budget():
    assert smallest_budget([KVBudget(10, 900), KVBudget(12, 800)]) == KVBudget(10, 800)
    assert smallest_budget([]) is None


@pytest.mark.parametrize("model", ["demo", "t5-11b"])
def test_the_measured_passes_leave_nothing_behind(model):
    spec = load_model_spec(model)
    if spec.is_encoder_decoder:
        config = {**spec.config, "d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 64, "vocab_size": 64}
        config |= {"num_layers": 2, "num_decoder_layers": 2}
        spec = replace(model_spec(config, name="tiny"), max_context=40)
    runner = ModelRunner(spec, num_blocks=1)
    run_passes(runner, 100, 3)
    assert runner.cache.free_blocks == runner.cache.num_blocks


def test_padding_counts_where_prompts_are_padded():
    scheduler = Scheduler(Schedule("static", {"batch_size": 8}), 1000, pass_tokens=100)
    for number, tokens in enumerate((30, 30, 40, 30)):
        scheduler.add(SequenceState(request_id=str(number), num_prompt_tokens=tokens, max_output_tokens=5))
    assert [row.request_id for row in scheduler.admissible(8)] == ["0", "1"]


def test_no_prefill_outgrows_the_memory_that_was_measured():
    scheduler = Scheduler(Schedule("rra", {"prefill_batch": 8, "decode_steps": 1}), 1000, pass_tokens=100)
    for number, tokens in enumerate((30, 30, 40, 30, 20)):
        scheduler.add(SequenceState(request_id=str(number), num_prompt_tokens=tokens, max_output_tokens=5))
    assert [row.request_id for row in scheduler.admissible(8)] == ["0", "1", "2"]
    with pytest.raises(InputError, match="more than the 100 that the device's memory can prefill at once"):
        scheduler.add(SequenceState(request_id="long", num_prompt_tokens=96, max_output_tokens=5))


@pytest.mark.parametrize("policy", ["static", "rra", "orca"])
def test_a_limited_engine_answers_every_request(runner, policy):
    variables = {"static": {"batch_size": 4}, "rra": {"prefill_batch": 4, "decode_steps": 2}, "orca": ORCA.variables}
    runner.use_blocks(40)
    engine = Engine(
        InProcessExecutor(runner, kv_budget=KVBudget(40, 50)), Schedule(policy, variables[policy]), num_blocks=40
    )
    for number in range(7):
        sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        engine.add(Request(request_id=str(number), prompt_token_ids=[5] * (10 + 5 * number), sampling=sampling))
    found = []
    while engine.has_work:
        found += [output.request_id for output in engine.step() if output.finish_reason == "length"]
        assert all(step.num_new_tokens - step.num_decode <= 50 for step in engine.last_steps)
    assert sorted(found) == [str(number) for number in range(7)]


def test_a_budget_below_the_plan_is_logged(caplog):
    warn_if_below_plan(KVBudget(10, 100), 10)
    assert not caplog.records
    warn_if_below_plan(KVBudget(9, 100), 10)
    assert "the KV cache holds 144 tokens, the plan counts on 160" in caplog.text


def test_only_a_plan_for_gpus_measures():
    plan = Plan(model="demo", schedule=ORCA, placement=single_stage(SPEC), device="cuda", kv_cache_tokens=160)
    assert engine_setup(plan, SPEC).gpu_memory_utilization == 0.9
    assert engine_setup(with_utilization(plan, 0.5), SPEC).gpu_memory_utilization == 0.5
    on_cpu = replace(plan, device="cpu")
    assert engine_setup(on_cpu, SPEC).gpu_memory_utilization is None
    with pytest.raises(InputError, match="on a CPU the KV cache has the plan's kv_cache_tokens"):
        with_utilization(on_cpu, 0.5)
    with pytest.raises(InputError, match="above 0 and at most 1, found 1"):
        with_utilization(plan, 1.5)
