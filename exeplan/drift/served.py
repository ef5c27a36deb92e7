"""What one replica of a plan serves under other lengths than planned, with the KV cache that its engine has.

The closed form has full batches. Where the cache is too small to hold them, the engine runs fewer requests at once and
computes preempted ones again: that is replayed. At a rate only the throughput under a backlog is, which must be above
the rate: where it is, few requests are preempted, and latencies are those of the closed form.
"""

from dataclasses import replace

from exeplan.core.batch import BLOCK_SIZE, num_blocks_for
from exeplan.core.plan import Plan
from exeplan.core.schedule import Estimate
from exeplan.errors import Infeasible
from exeplan.planner.load_problem import engine_blocks
from exeplan.planner.problems.problem import Problem
from exeplan.planner.problems.replays import promised, replay_estimate
from exeplan.policies import sampled_evenly
from exeplan.simulator.closed_form import steady_state

_SEED = 0
_FEWEST, _GENERATIONS = 500, 12
"""Requests of a replay, and those over the requests that the cache holds at once: it is repeated at every look."""


def served(problem: Problem, plan: Plan, num_blocks: int | None = None) -> Estimate:
    """The Estimate of one replica of the plan; `num_blocks` as of `cache_tokens`.

    Raises Infeasible where it does not sustain the problem's rate.
    """
    found = problem.estimate(plan.schedule)
    tokens = cache_tokens(problem, plan, num_blocks)
    if found.kv_tokens <= tokens:
        return found
    longest = num_blocks_for(problem.workload.longest) * BLOCK_SIZE
    full = replace(problem, arrivals=None)
    steady = steady_state(plan.schedule, problem.workload, problem.cost)
    residents = steady.cycle.num_seqs * min(tokens / steady.kv_tokens, 1.0)
    _, replayed = replay_estimate(
        full,
        plan.schedule,
        seed=_SEED,
        num_requests=max(_FEWEST, int(_GENERATIONS * residents)) if sampled_evenly(plan.schedule) else None,
        kv_tokens=max(tokens, longest),
        record_passes=False,
    )
    if problem.arrivals is None:
        return promised(replayed, found)
    if replayed.throughput <= problem.arrivals.rate:
        raise Infeasible(
            f"{plan.schedule} sustains {replayed.throughput:.3g} requests/s with a KV cache of {tokens} tokens, "
            f"{problem.arrivals} come"
        )
    return found


def cache_tokens(problem: Problem, plan: Plan, num_blocks: int | None = None) -> int:
    """Tokens of KV cache of a replica's engine, which has `num_blocks` blocks.

    Where that is not known, an engine on CPUs has as many as the plan says, others take the memory that there is.
    """
    if num_blocks:
        return num_blocks * BLOCK_SIZE
    profile = problem.profile
    planned = engine_blocks(plan, profile.model) * BLOCK_SIZE
    if profile.device.kind == "cpu" and not profile.engine:
        return planned
    return max(planned, int(problem.kv_capacity_tokens(plan.schedule)))
