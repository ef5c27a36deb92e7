"""An engine's KV cache has room for one request of any length, where the model sets a limit to it."""

import math

from exeplan.core.batch import BLOCK_SIZE
from exeplan.core.bounds import Bound
from exeplan.core.models.model import load_model_spec
from exeplan.core.plan import Plan
from exeplan.core.schedule import Schedule, Stage
from exeplan.planner.load_problem import engine_blocks
from exeplan.planner.problems.problem import make_problem
from exeplan.planner.problems.replays import KV_SLACK, kv_cache_tokens
from exeplan.profiler.datasheets.datasheet import load_datasheet, profile_from_datasheet
from exeplan.simulator.closed_form import steady_state
from exeplan.workload.files import load_workload

SCHEDULE = Schedule("orca", {"max_num_seqs": 1})
T5_CONTEXT = 16_384
"""Relative positions have no end; GPUs keep memory for as many."""


def reserve(model: str, lengths: str) -> int:
    """Tokens of KV cache beyond what the schedule needs."""
    profile = profile_from_datasheet(load_model_spec(model), load_datasheet("h200-141gb"), dtype="bfloat16")
    problem = make_problem(profile, load_workload(lengths), Bound(seconds=math.inf))
    needed = steady_state(SCHEDULE, problem.workload, problem.cost).kv_tokens * KV_SLACK
    return round(kv_cache_tokens(problem, SCHEDULE) - needed)


def test_one_request_of_the_whole_context_fits() -> None:
    context = load_model_spec("opt-13b").max_context
    assert context - BLOCK_SIZE <= reserve("opt-13b", "fixed:in=100;out=20") <= context


def test_where_positions_have_no_end_the_room_is_that_of_gpus_or_the_longest_request() -> None:
    assert T5_CONTEXT - BLOCK_SIZE <= reserve("t5-11b", "fixed:in=100;out=20") <= T5_CONTEXT
    assert 20_020 - BLOCK_SIZE <= reserve("t5-11b", "fixed:in=20000;out=20") <= 20_020


def test_a_plan_by_hand_has_eight_contexts() -> None:
    for model, context in (("opt-13b", 2048), ("t5-11b", T5_CONTEXT)):
        plan = Plan(model=model, schedule=SCHEDULE, placement=(Stage(layers=(0, 1)),))
        assert engine_blocks(plan, load_model_spec(model)) * BLOCK_SIZE == 8 * context
