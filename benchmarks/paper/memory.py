"""Figure 9 of ExeGPT: the memory of FasterTransformer and of WAA without a bound, weights and KV cache apart.

OPT-13B on four A40 and GPT-3 101B on sixteen A100, tasks T and G. FasterTransformer at its fastest batch, each row with
room for the longest prompt and output; WAA as planned, with the tokens that its steady state holds.
"""

from dataclasses import replace

from benchmarks.paper.claims import Claim, Part
from benchmarks.paper.setting import GPT3_101B, OPT_13B, Deployment, Settings, problem_of
from benchmarks.paper.systems import fastest, on_whole_machines, static_points
from exeplan.core.schedule import Placement
from exeplan.errors import Infeasible
from exeplan.planner.choice.optimize import optimize
from exeplan.planner.problems.problem import Problem
from exeplan.simulator.closed_form import steady_state
from exeplan.simulator.memory import kv_bytes_per_token, weight_bytes

_GB = 1e9


def part(settings: Settings) -> Part:
    rows, claims = [], []
    for deployment, paper in ((OPT_13B, 18.0), (GPT3_101B, 29.0)):
        for task in ("T", "G"):
            problem = problem_of(deployment, task, settings.profiles)
            ft = _ft(problem)
            found = {"FT": ft} | {policy: _waa(problem, policy) for policy in ("waa-c", "waa-m")}
            rows += [(f"{deployment}, {task}", name, *cells) for name, cells in found.items() if cells]
            extra = [cells[0] for name, cells in found.items() if cells and name != "FT"]
            claims += [_claim(deployment, task, problem, ft, extra[0], paper)] if extra else []
    return Part(
        title="Figure 9: GB of weights and KV cache over all GPUs, without a bound",
        header=("scenario", "system", "weights GB", "KV GB", "fullest prefill GPU GB", "fullest other GPU GB"),
        rows=rows,
        claims=claims,
        notes=((__doc__ or "").partition("\n\n")[2].strip().replace("\n", " "),),
    )


def _claim(
    deployment: Deployment, task: str, problem: Problem, ft: tuple[float, ...], weights: float, paper: float
) -> Claim:
    assert problem.cluster is not None
    share = 100 * (weights - ft[0]) * _GB / (problem.memory * problem.cluster.num_gpus)
    what = f"{deployment}, {task}: WAA's weights over FT's, % of the memory that may be used"
    return Claim(what=what, paper=paper, ours=share, reason=_TWICE)


def _ft(problem: Problem) -> tuple[float, ...]:
    placed = on_whole_machines(problem)
    best = fastest(static_points(placed), float("inf"))
    assert best is not None
    tokens = best.schedule["batch_size"] * (problem.workload.max_input + problem.workload.max_output)
    return _gigabytes(placed, placed.cost.placement, float(tokens), 0.0)


def _waa(problem: Problem, policy: str) -> tuple[float, ...] | None:
    try:
        plan = optimize(replace(problem, one_pipeline=True), policies=(policy,)).plan
    except Infeasible:
        return None
    steady = steady_state(plan.schedule, problem.workload, problem.at(plan.placement).cost)
    return _gigabytes(problem, plan.placement, steady.kv_tokens, steady.cycle.prefill_kv_tokens)


def _gigabytes(problem: Problem, placement: Placement, tokens: float, prefill_tokens: float) -> tuple[float, ...]:
    """Weights and KV cache over all GPUs; both together on the fullest GPU that only prefills, and of the others."""
    weights = cache = 0.0
    fullest = {True: 0.0, False: 0.0}
    for number, stage in enumerate(placement):
        apart = stage.phase == "prefill"
        own = weight_bytes(problem.profile, placement, number)
        held = (prefill_tokens if apart else tokens) * kv_bytes_per_token(problem.profile, placement, number)
        weights += own * len(stage.devices)
        cache += held * len(stage.devices)
        fullest[apart] = max(fullest[apart], own + held)
    return tuple(value / _GB for value in (weights, cache, fullest[True], fullest[False]))


_TWICE = (
    "WAA holds the weights of a decoder-only model twice, once for each phase; the paper does not print of what its "
    "percentages are"
)
