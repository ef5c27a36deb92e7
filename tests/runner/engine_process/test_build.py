"""A batch counts as hanging only where no batch that requests may lead to takes as long."""

from dataclasses import replace
from typing import Any

import pytest

from exeplan.core.models.layer_costs import layer_parameters_used
from exeplan.core.models.model import load_model_spec
from exeplan.core.plan import Plan
from exeplan.core.schedule import Estimate, Schedule, single_stage
from exeplan.runner.engine_process.build import engine_setup

SPEC = replace(load_model_spec("demo"), max_context=8192)
ESTIMATE = Estimate(
    throughput=10.0, token_throughput=500.0, ttft=0.1, tpot=0.05, latency=2.0, latency_p50=2.0, latency_p99=3.0,
    kv_tokens=4000.0, memory_bytes_per_gpu=1e9,
)  # fmt: skip
STALL = {"seconds": 0.5, "num_prompts": 4, "num_tokens": 400}


def deadline(schedule: Schedule, **plan: Any) -> float:
    given = {"estimate": ESTIMATE, "longest_stall": STALL, "kv_cache_tokens": 16_000, **plan}
    return engine_setup(
        Plan(model="demo", schedule=schedule, placement=single_stage(SPEC), **given), SPEC
    ).deadline_seconds


def growth(context: float, tokens: float) -> float:
    """Of the planned 100 tokens a prompt, 400 in all, to as many."""
    weights, attended = layer_parameters_used(SPEC), 2 * SPEC.num_heads * SPEC.head_dim
    return tokens / 400 * (weights + attended * context) / (weights + attended * 100)


@pytest.mark.parametrize(
    ("schedule", "longest", "tokens"),
    [
        (Schedule("orca", {"max_num_seqs": 4}), 8192, 16_000),
        (Schedule("rra", {"prefill_batch": 1, "decode_steps": 4}), 8192, 8192),
        (Schedule("static", {"batch_size": 4}), 8192, 4 * 8192),
        (Schedule("chunked", {"max_num_seqs": 4, "max_num_batched_tokens": 2048}), 8192, 2048),
    ],
    ids=lambda value: getattr(value, "policy", None),
)
def test_the_largest_pass_that_requests_may_lead_to_takes_less_than_the_deadline(
    schedule: Schedule, longest: int, tokens: int
) -> None:
    """By as many tokens as the cache holds, padding of static included, or as a chunked pass may have."""
    found = deadline(schedule)
    assert found == pytest.approx(5 * 0.5 * growth(longest, tokens))
    assert found > 5 * 0.5 * tokens / 400


def test_a_deadline_is_the_planned_one_where_no_pass_is_larger_than_planned() -> None:
    stall = {"seconds": 0.5, "num_prompts": 2, "num_tokens": 16_384}
    chunked = Schedule("chunked", {"max_num_seqs": 4, "max_num_batched_tokens": 64})
    assert deadline(chunked, longest_stall=stall) == 5.0
    assert deadline(chunked, longest_stall=stall, estimate=replace(ESTIMATE, ttft=1.0)) == 20.0


def test_a_plan_that_does_not_say_what_its_longest_pass_takes_has_a_minute_unless_prompts_are_cut() -> None:
    chunked = Schedule("chunked", {"max_num_seqs": 4, "max_num_batched_tokens": 64})
    orca = Schedule("orca", {"max_num_seqs": 4})
    assert (deadline(chunked, longest_stall={}), deadline(orca, longest_stall={})) == (5.0, 60.0)
    assert deadline(orca, longest_stall={"seconds": 0.1, "num_prompts": 0, "num_tokens": 0}) == 60.0
    assert deadline(orca, estimate=None) == 60.0
    assert deadline(orca, longest_stall={"seconds": 0.1, "num_tokens": "many"}) == 60.0
