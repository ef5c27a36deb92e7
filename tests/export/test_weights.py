"""A plan in fp8 has the engine quantize the weights as it loads them only where the checkpoint has them in 16 bits."""

from dataclasses import replace

import pytest

from exeplan.core.models.model import load_model_sizes
from exeplan.core.plan import Plan
from exeplan.core.schedule import Schedule, Stage
from exeplan.export import load_exporter
from exeplan.export.interface import Export

PLAN = Plan(
    model="qwen3-8b",
    schedule=Schedule("rra", {"prefill_batch": 8, "decode_steps": 24, "decode_batch": 120}),
    placement=(Stage(devices=(0,), layers=(0, 36)),),
    cluster="h100",
    dtype="fp8",
    device="cuda",
    kv_cache_tokens=64_000,
)
engines = pytest.mark.parametrize(
    ("engine", "option"),
    [("vllm", "--quantization fp8_per_tensor"), ("sglang", "--quantization fp8"), ("tgi", "--quantize fp8")],
)


def exported(engine: str, model: str, plan: Plan = PLAN) -> Export:
    return load_exporter(engine).export(plan, load_model_sizes(plan.model), model=model)


def command(export: Export) -> str:
    return " ".join(export.instances[0].command)


@engines
@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B-FP8", "somewhere/qwen3-8b-fp8-dynamic"])
def test_a_quantized_checkpoint_is_loaded_as_it_is(engine: str, option: str, model: str) -> None:
    found = exported(engine, model)
    assert "--quanti" not in command(found)
    assert option not in " ".join(found.remarks)


@engines
def test_a_checkpoint_in_16_bits_is_quantized_and_this_is_said(engine: str, option: str) -> None:
    found = exported(engine, "Qwen/Qwen3-8B")
    assert option in command(found)
    assert "quantizes the weights of Qwen/Qwen3-8B, which are in 16 bits, to fp8" in found.remarks[0]


@engines
def test_a_plan_for_a_quantized_checkpoint_has_one_in_16_bits_quantized_too(engine: str, option: str) -> None:
    assert option in command(exported(engine, "Qwen/Qwen3-8B", replace(PLAN, model="Qwen/Qwen3-8B-FP8")))


@engines
def test_one_that_nothing_is_known_of_is_taken_to_be_as_the_plans(engine: str, option: str) -> None:
    found = exported(engine, "somewhere/mine")
    assert option in command(found)
    assert f"if they are quantized already, leave out {option}" in found.remarks[0]
    quantized = exported(engine, "somewhere/mine", replace(PLAN, model="Qwen/Qwen3-8B-FP8"))
    assert option not in command(quantized)
    assert f"if they are in 16 bits, add {option}" in quantized.remarks[0]


@engines
def test_of_a_plan_in_16_bits_nothing_is_said(engine: str, option: str) -> None:
    found = exported(engine, "somewhere/mine", replace(PLAN, dtype="bfloat16"))
    assert option not in f"{command(found)} {found.remarks}"
