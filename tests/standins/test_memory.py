"""Every shipped model starts on a GPU and fills its share of the memory, or is refused with the number; a plan counts
on as many tokens of keys and values as the engine finds.

Two layers of each model are loaded; the memory of the rest of its stage is taken from the GPU beforehand. The stage is
the smallest that the planner's memory model lets hold a pass's tokens: tensor parallelism over up to 8 GPUs, then
pipeline stages.
"""

from dataclasses import replace
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

import exeplan
from exeplan.core.batch import BLOCK_SIZE, Batch, PackedPrompt, Packing, SequenceState
from exeplan.core.models.model import ModelSpec, load_model_spec
from exeplan.core.pass_memory import GRAPHS_SHARE, MEMORY_UTILIZATION
from exeplan.core.profile import Device, Profile
from exeplan.core.schedule import Schedule, Stage
from exeplan.errors import InputError
from exeplan.kernels import tuning
from exeplan.policies import pass_limits
from exeplan.profiler.datasheets.datasheet import load_datasheet, profile_from_datasheet
from exeplan.profiler.measuring.device import device_memory
from exeplan.profiler.measuring.memory import runtime_bytes
from exeplan.profiler.profile_model import _kv_bytes
from exeplan.runner.compute import gpu_memory
from exeplan.runner.compute.gpu_memory import measure_kv_budget, run_passes
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.passes.decode_graphs import DecodeGraphs
from exeplan.runner.compute.warm_up import tune_kernels
from exeplan.runner.compute.weights.shard import Shard
from exeplan.scheduling.largest_passes import most_rows, with_finite_context
from exeplan.simulator.memory import PlacementMemory, kv_capacity_tokens, weight_bytes

from .memory import Ranks, fake_gpu
from .test_streams import SPECS

PLANS = Path(exeplan.__file__).parent / "plans"
GPUS = ["a40-48gb", "a100-40gb", "h100-80gb", "a100-80gb", "h200-141gb"]
NOT_ON_GPUS = {"deepseek-v2-lite", "deepseek-v3", "minimax-m2"}
TOYS = {"demo", "tcb-small"}
"""So small that their caches would have millions of blocks, which takes seconds."""
MODELS = sorted({path.stem for path in (PLANS / "models").glob("*.yaml")} - NOT_ON_GPUS - TOYS)
SMALL = ["demo-experts", "llama-50m", "tcb-transformer"]
"""Whose caches take seconds, too, on the larger GPUs."""
LARGE = [model for model in MODELS if model not in SMALL]
TOKENS, LOADED = 8192, 2
"""Of a pass, and layers."""
SCHEDULE = Schedule("chunked", {"max_num_seqs": 8, "max_num_batched_tokens": TOKENS})
SCHEDULES = {
    "8 rows": SCHEDULE,
    "256 rows": Schedule("chunked", {"max_num_seqs": 256, "max_num_batched_tokens": 2048}),
    "1024 rows": Schedule("chunked", {"max_num_seqs": 1024, "max_num_batched_tokens": 16_384}),
}
CASES = [*zip(MODELS[::2], cycle(GPUS), strict=False), ("opt-13b", "a40-48gb"), ("llama-3.1-8b", "a40-48gb")]
"""The other models start in the next test, which runs no pass."""


def of_depth(spec: ModelSpec, layers: int) -> ModelSpec:
    encoder = round(spec.num_encoder_layers * layers / spec.num_layers)
    experts = spec.experts and replace(spec.experts, num_layers=min(spec.experts.num_layers, layers))
    return replace(spec, num_layers=layers, num_encoder_layers=encoder, experts=experts)


def stage_of(spec: ModelSpec, size: int) -> tuple[Stage]:
    encoder = (0, spec.num_encoder_layers)
    return (Stage(devices=tuple(range(size)), layers=(0, spec.num_layers), encoder_layers=encoder),)


def profile_of(spec: ModelSpec, gpu: str, size: int) -> Profile:
    return profile_from_datasheet(spec, load_datasheet(gpu), dtype="bfloat16", tensor_parallel_sizes=(size,))


def planned_tokens(profile: Profile, size: int, schedule: Schedule = SCHEDULE) -> float:
    memory = MEMORY_UTILIZATION * profile.device.memory_bytes
    return kv_capacity_tokens(profile, stage_of(profile.model, size), memory, schedule)


def stages(spec: ModelSpec):
    """Ever smaller ones: how many layers, and over how many GPUs."""
    sizes = [size for size in (1, 2, 4, 8) if spec.num_heads % size == 0]
    yield from ((spec.num_layers, size) for size in sizes)
    yield from ((spec.num_layers // parts, sizes[-1]) for parts in (2, 4, 8))


def planned(model: str, gpu: str, schedule: Schedule = SCHEDULE) -> tuple[Profile, int]:
    """The profile of the first stage that holds a pass, and over how many GPUs it is split."""
    full = load_model_spec(model)
    for layers, size in stages(full):
        profile = profile_of(of_depth(full, layers), gpu, size)
        if planned_tokens(profile, size, schedule) >= TOKENS:
            return profile, size
    raise AssertionError(f"{model} has no stage on {gpu}")


class Started(NamedTuple):
    kv_tokens: float
    pass_tokens: int
    share: float
    """Of the GPU, in use at the largest pass."""


def start(
    profile: Profile,
    size: int,
    schedule: Schedule = SCHEDULE,
    *,
    utilization: float = MEMORY_UTILIZATION,
    then_passes: bool = True,
) -> Started:
    """What a worker does before its first request, and then the largest pass over a full cache; or without both what it
    does until it has its cache.
    """
    spec, runtime = profile.model, load_datasheet(profile.device.name).runtime_memory
    loaded = of_depth(spec, min(LOADED, spec.num_layers))
    left_out = weight_bytes(profile, stage_of(spec, size), 0) - weight_bytes(profile, stage_of(loaded, size), 0)
    with fake_gpu(round(profile.device.memory_bytes), taken=round(runtime + left_out)) as memory:
        group = Ranks(size)
        shard = Shard(layers=(0, loaded.num_layers), encoder_layers=(0, loaded.num_encoder_layers), group=group)
        options = {"shard": shard, "dtype": "bfloat16", "device": "cuda:0", "dummy_weights": True}
        runner = ModelRunner(with_finite_context(loaded), num_blocks=1, **options)
        budget = measure_kv_budget(runner, schedule, utilization)
        assert budget is not None
        if then_passes:
            runner.capture(most_rows(schedule))
            memory.reset_peak()
            runner.use_blocks = lambda number: None  # Over the cache that there is.
            run_passes(runner, pass_limits(schedule).tokens or budget.pass_tokens, most_rows(schedule))
        kept = BLOCK_SIZE * budget.num_blocks * loaded.num_layers / spec.num_layers
        return Started(kept, budget.pass_tokens, memory.most / memory.total)


@pytest.mark.parametrize(("model", "gpu"), CASES)
def test_a_start_and_the_largest_pass_take_the_share_of_the_gpu_and_no_more(model, gpu):
    """The engine keeps 1 % of the GPU free for graphs, of which so few rows need little."""
    started = start(*planned(model, gpu))
    assert 0.97 * MEMORY_UTILIZATION < started.share <= MEMORY_UTILIZATION, started


def on_a_gpu(number: int) -> tuple[str, str]:
    """Of a large model: a schedule, and the GPU that it meets there; the next model meets others."""
    return list(SCHEDULES)[number % len(SCHEDULES)], GPUS[number % len(GPUS)]


@pytest.mark.parametrize(
    ("model", "rows", "gpu"),
    [(model, *on_a_gpu(number)) for number, model in enumerate(LARGE)]
    + [(model, "8 rows", GPUS[0]) for model in SMALL],
)
def test_a_plan_counts_on_the_tokens_that_the_engine_finds(model, rows, gpu):
    """Of the fewest GPUs that it fits, where least is left beside the weights."""
    schedule = SCHEDULES[rows]
    profile, size = planned(model, gpu, schedule)
    found = start(profile, size, schedule, then_passes=False)
    assert planned_tokens(profile, size, schedule) == pytest.approx(found.kv_tokens, rel=0.03)


@pytest.mark.parametrize(
    ("model", "room"), [("llama-3.1-8b", 0.3e9), ("llama-2-7b", 4e9), ("qwen3-30b-a3b", 1e9), ("llama-3.1-8b", 4e9)]
)
@pytest.mark.parametrize("prompts", [2, 64])
def test_a_plan_counts_on_the_passes_that_the_engine_finds_room_for(model, room, prompts):
    """Of a schedule that limits prompts and no tokens, with so many bytes left beside weights and runtime."""
    spec, schedule = of_depth(load_model_spec(model), LOADED), Schedule("orca", {"max_num_seqs": prompts})
    free = profile_of(spec, "h100-80gb", 1)
    taken = weight_bytes(free, stage_of(spec, 1), 0) + free.runtime_bytes
    sheet = load_datasheet("h100-80gb", {"memory": str(round((taken + room) / (MEMORY_UTILIZATION - GRAPHS_SHARE)))})
    profile = profile_from_datasheet(spec, sheet, dtype="bfloat16", tensor_parallel_sizes=(1,))
    memory = MEMORY_UTILIZATION * profile.device.memory_bytes
    found = start(profile, 1, schedule, then_passes=False)
    passes = PlacementMemory(profile, stage_of(spec, 1)).passes(schedule, memory)
    assert passes.tokens == found.pass_tokens
    assert planned_tokens(profile, 1, schedule) == pytest.approx(found.kv_tokens, rel=0.03)


@pytest.mark.parametrize(("model", "gpu"), [("opt-66b", "h100-80gb"), ("llama-3.1-70b", "h200-141gb")])
def test_weights_that_a_plan_refuses_the_engine_refuses_with_the_number(model, gpu):
    profile = profile_of(load_model_spec(model), gpu, 1)
    assert planned_tokens(profile, 1) < 0
    with pytest.raises(InputError, match=r"[1-9]\S* GiB .*(more GPUs|smallest that suffices)"):
        start(profile, 1)


def test_a_share_that_leaves_no_cache_is_refused_with_the_share_that_suffices():
    profile = profile_of(load_model_spec("opt-13b"), "a40-48gb", 1)
    with pytest.raises(InputError, match=r"need 2[67].* GiB of 4.* the smallest that suffices is 0.[56]"):
        start(profile, 1, utilization=0.55)


def test_passes_that_a_schedule_allows_and_that_do_not_fit_are_refused_not_measured_smaller():
    """Its scheduler would start them all the same."""
    spec = of_depth(load_model_spec("llama-3.1-8b"), LOADED)
    schedule = Schedule("chunked", {"max_num_seqs": 8, "max_num_batched_tokens": 65_536})
    with fake_gpu(8_000_000_000, taken=1 << 30) as memory:
        runner = ModelRunner(spec, dtype="bfloat16", device="cuda:0", num_blocks=1, dummy_weights=True)
        with pytest.raises(InputError, match="a prefill of 65536 tokens; use a smaller max_num_batched_tokens"):
            measure_kv_budget(runner, schedule, MEMORY_UTILIZATION)
        assert measure_kv_budget(runner, SCHEDULE, MEMORY_UTILIZATION).pass_tokens == TOKENS
        assert memory.live < MEMORY_UTILIZATION * memory.total


@pytest.mark.parametrize("taken", [82.9e9, 84.5e9], ids=["no room for a pass", "no room for the weights"])
def test_memory_that_others_hold_is_named_not_a_traceback(taken):
    spec = of_depth(load_model_spec("llama-3.1-8b"), LOADED)

    def started() -> None:
        runner = ModelRunner(spec, dtype="bfloat16", device="cuda:0", num_blocks=1, dummy_weights=True)
        measure_kv_budget(runner, SCHEDULE, 1.0)

    with fake_gpu(85_900_000_000, taken=round(taken)), pytest.raises(InputError, match="use more GPUs"):
        started()


def test_a_profile_measures_what_driver_and_libraries_hold_beside_tensors():
    with fake_gpu(1 << 36, taken=3 << 30):
        weights = torch.empty(1 << 30, dtype=torch.uint8, device="cuda:0")
        assert runtime_bytes(weights.device) == 3 << 30
    assert runtime_bytes(torch.device("cpu")) is None


def test_a_profiled_gpus_memory_is_all_of_it_and_driver_and_libraries_are_subtracted_once():
    with fake_gpu(1 << 36, taken=3 << 30):
        place = torch.empty(1 << 30, dtype=torch.uint8, device="cuda:0").device
        memory, runtime = device_memory(place), runtime_bytes(place)
        assert memory - runtime == (1 << 36) - (3 << 30)
    device = Device(name="any", kind="cuda", memory_bytes=memory, copy_bytes_per_second=1e12, flops_per_second=1e14)
    with fake_gpu(1 << 36, taken=3 << 34):
        assert _kv_bytes(device, place, 60.0) == 1 << 32  # A quarter of what is free.


@pytest.mark.parametrize("model", sorted(NOT_ON_GPUS))
def test_models_that_gpus_do_not_run_are_refused_before_anything_is_loaded(model):
    with fake_gpu(1 << 36) as memory:
        with pytest.raises(InputError, match=r"runs on a CPU only|is run only of"):
            ModelRunner(load_model_spec(model), device="cuda:0", num_blocks=1, dummy_weights=True)
        assert memory.peak == 0


@pytest.mark.parametrize("family", SPECS)
def test_packed_rows_meet_no_configuration_that_the_start_has_not_chosen(family):
    """Slots of any length: what is not chosen before the first request is chosen, and stored, in one of its passes."""
    keys, spec, begin = [], SPECS[family], int(SPECS[family].is_encoder_decoder)
    with fake_gpu(1 << 34), pytest.MonkeyPatch.context() as patch:
        table = SimpleNamespace(best=lambda key, configs, seconds: keys.append(key) or configs[0])
        patch.setattr(tuning, "_table", lambda device: table)
        runner = ModelRunner(spec, num_blocks=256, device="cuda:0", dummy_weights=True)
        tune_kernels(runner)
        chosen = set(keys)
        keys.clear()
        for number, slot_tokens in enumerate((16, 128, 129, 600)):
            row = SequenceState(request_id=f"{number}", num_prompt_tokens=9 + begin, max_output_tokens=1, num_blocks=1)
            packing = Packing(slot_tokens, slot_tokens, (PackedPrompt(0, 0),))
            runner.forward(Batch(prefill=(row,), packing=packing), {row.request_id: [1] * (9 + begin)})
    assert len({key for key in keys if key.startswith("slot_attention")}) == 2
    assert set(keys) <= chosen


def tuning_in_a_fixed_cache(patch):
    """As before: 40,960 tokens of keys and values in all layers, whatever the weights leave."""
    patch.setattr(gpu_memory, "tuning_blocks", lambda runner, meter: 2560 * 40 // LOADED)


def measuring_passes_of_a_few_tokens(patch):
    """Not the largest that the schedule allows."""
    patch.setattr(gpu_memory, "pass_sizes", lambda spec, schedule: (64,))


def a_graph_over_its_share(patch):
    """Each keeps logits over a whole cache of its own."""
    original = DecodeGraphs.iteration

    def iteration(self, size):
        self.__dict__.setdefault("kept", []).append(torch.empty(1 << 30, dtype=torch.uint8, device=self._cache.device))
        return original(self, size)

    patch.setattr(DecodeGraphs, "iteration", iteration)


FAULTS = {
    tuning_in_a_fixed_cache: (InputError, "the weights leave .* too little for one pass"),
    measuring_passes_of_a_few_tokens: (AssertionError, "share=0.9[1-9]"),
    a_graph_over_its_share: (AssertionError, "share=0.9[1-9]"),
}


@pytest.mark.parametrize(("fault", "found"), FAULTS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_seeded_fault_is_found(fault, found, monkeypatch):
    kind, text = found
    fault(monkeypatch)
    with pytest.raises(kind, match=text):
        test_a_start_and_the_largest_pass_take_the_share_of_the_gpu_and_no_more("opt-13b", "a40-48gb")
