"""Engines take the whole prefill of an `rra` plan in one pass: their limit on its tokens lets it through."""

from dataclasses import replace

import pytest

from exeplan.core.models.model import load_model_spec
from exeplan.core.plan import Plan
from exeplan.core.schedule import Schedule, Stage
from exeplan.export import load_exporter
from exeplan.export.interface import Export
from exeplan.export.shape import option_value

PLAN = Plan(
    model="llama-3.1-8b",
    schedule=Schedule("rra", {"prefill_batch": 100, "decode_steps": 200, "decode_batch": 120}),
    placement=(Stage(devices=(0,), layers=(0, 32)),),
    cluster="h100",
    dtype="bfloat16",
    device="cuda",
    kv_cache_tokens=350_000,
    longest_stall={"seconds": 4.0, "num_prompts": 100, "num_tokens": 180_000},
)
LIMITS = {
    "sglang": "--max-prefill-tokens",
    "vllm": "--max-num-batched-tokens",
    "lmdeploy": "--max-prefill-token-num",
    "tgi": "--max-batch-prefill-tokens",
    "lightllm": "--batch_max_tokens",
}
engines = pytest.mark.parametrize("engine", LIMITS)


def exported(engine: str, plan: Plan = PLAN) -> Export:
    return load_exporter(engine).export(plan, load_model_spec("llama-3.1-8b"), model="organisation/name")


def limit(engine: str, plan: Plan = PLAN) -> int:
    return option_value(exported(engine, plan).instances[0].options, LIMITS[engine])


@engines
def test_as_many_tokens_as_the_prompts_of_a_prefill_hardly_ever_exceed(engine: str) -> None:
    of_rows = 170 if engine == "vllm" else 0  # Which decode in the same pass.
    assert limit(engine) == 180_000 + of_rows
    remarks = " ".join(exported(engine).remarks)
    # 3 hidden sizes and 3 feed-forward ones of two bytes a token, its angles and indices.
    assert (
        f"180000 tokens, whose activations take about {180e3 * (6 * (4096 + 14336) + 552) / 2**30:.1f} GiB" in remarks
    )


@engines
def test_no_more_than_the_cache_holds(engine: str) -> None:
    held = limit(engine, replace(PLAN, kv_cache_tokens=150_000))
    assert held == 150_000 + (170 if engine == "vllm" else 0)


@engines
def test_a_prefill_that_engines_have_by_default_is_not_remarked_on(engine: str) -> None:
    stall = {"seconds": 0.4, "num_prompts": 100, "num_tokens": 12_000}
    found = exported(engine, replace(PLAN, longest_stall=stall))
    assert "activations" not in " ".join(found.remarks)


@engines
def test_where_nothing_says_how_long_prompts_are_this_is_said(engine: str) -> None:
    found = exported(engine, replace(PLAN, longest_stall={}))
    assert f"nothing says how long prompts are; where those of a prefill exceed {LIMITS[engine]}" in " ".join(
        found.remarks
    )


def test_lightllm_starts_with_no_less_than_its_longest_request() -> None:
    few = {"prefill_batch": 100, "decode_steps": 200, "decode_batch": 120, "max_num_batched_tokens": 4096}
    assert limit("lightllm", replace(PLAN, schedule=Schedule("rra", few))) == 131_072
