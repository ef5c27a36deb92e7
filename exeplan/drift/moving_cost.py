"""What moving from one plan to another costs a running service, in seconds without service.

Weights that a device lacks come from host memory, and keys and values go through it; where they cannot, requests are
prefilled again (ExeGPT, ASPLOS 2024, section 5.3 and Table 4). They stay where placement and room stay what they are.
Not here: the difference itself (`plan_diff.py`).
"""

from exeplan.core.batch import Batch, SequenceState
from exeplan.core.models.model import ModelSpec
from exeplan.core.plan import Plan
from exeplan.planner.load_problem import engine_blocks
from exeplan.planner.problems.problem import Problem
from exeplan.planner.reports.plan_diff import DRAM_BYTES_PER_SECOND, diff_plans
from exeplan.simulator.closed_form import steady_state


def keeps_cache(old: Plan, new: Plan, spec: ModelSpec) -> bool:
    """Whether an engine keeps its KV cache."""
    return old.placement == new.placement and engine_blocks(old, spec) >= engine_blocks(new, spec)


def moving_seconds(problem: Problem, old: Plan, new: Plan) -> float:
    """Seconds without tokens; `problem` is the old plan's under the observed traffic."""
    spec = problem.profile.model
    if keeps_cache(old, new, spec):
        return 0.0
    moving = diff_plans(old, new, spec, spec, bytes_per_second={"memory": DRAM_BYTES_PER_SECOND}).moving
    if not moving.kv_carried:
        return moving.load_seconds["memory"] + _recompute_seconds(problem, old, new)
    used = steady_state(old.schedule, problem.workload, problem.cost).cycle.kv_tokens
    copied = 2 * used * spec.kv_bytes_per_token(problem.profile.cache_dtype)  # To host memory, and from there.
    return moving.load_seconds["memory"] + copied / DRAM_BYTES_PER_SECOND


def _recompute_seconds(problem: Problem, old: Plan, new: Plan) -> float:
    """The residents of the old plan prefilled on the new plan's stages, one after the other."""
    cycle = steady_state(old.schedule, problem.workload, problem.cost).cycle
    if cycle.num_seqs < 1:
        return 0.0
    tokens = max(1, round(cycle.kv_tokens / cycle.num_seqs))
    row = SequenceState(request_id="resident", num_prompt_tokens=tokens, max_output_tokens=1)
    there = problem.at(new.placement).cost
    phase = "prefill" if any(stage.phase for stage in new.placement) else ""
    return float(cycle.num_seqs * max(there.stage_seconds(Batch(prefill=(row,), phase=phase))))
