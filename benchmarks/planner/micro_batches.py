"""The best number of micro-batches of a pipeline: from a quarter of the number of stages to four times as many.

    python -m benchmarks.planner.micro_batches

Scenarios of the paper under the bound that 10 % of FasterTransformer's latencies keep, and without one; every placement
of several stages. The planner tries half as many as stages, as many, and twice as many. Writes
records/micro-batches.json.
"""

from typing import Any

from benchmarks.lib.record import write_record
from benchmarks.paper.setting import GPT3_39B, OPT_13B, T5_11B, Scenario, bounded, problem_of
from benchmarks.paper.systems import bounds, on_whole_machines, static_points
from exeplan.planner.choice.search_space import Variant, variants
from exeplan.planner.problems.problem import Problem
from exeplan.planner.reports.tables import table
from exeplan.policies import load_policy
from exeplan.search.grid import Grid, Limits
from exeplan.search.line import reach
from exeplan.search.search import search_grid

SCENARIOS = (Scenario(OPT_13B, "S"), Scenario(OPT_13B, "T"), Scenario(T5_11B, "S"), Scenario(GPT3_39B, "T"))
POLICIES = ("orca", "rra", "waa-c")
RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Micro-batches for each stage."""


def main() -> None:
    rows: list[tuple[Any, ...]] = []
    for scenario in SCENARIOS:
        problem = problem_of(scenario.deployment, scenario.task)
        found = bounds(static_points(on_whole_machines(problem)))
        for bound in (found[0], found[-1]):
            for policy in POLICIES:
                most = [_most(bounded(problem, bound), policy, ratio, bound) for ratio in RATIOS]
                rows.append((f"{scenario}, {policy}, {bound:.3g} s", *most))
                print(rows[-1], flush=True)
    print(f"\n{table(('micro-batches a stage', *map(str, RATIOS)), [_cells(row) for row in rows])}")
    for outside, ratio in ((0, "a quarter"), (-1, "four times")):
        gains = [row[1:][outside] / max(row[2:-1]) - 1 for row in rows if max(row[2:-1]) > 0]
        print(f"{ratio}: {100 * max(gains):+.2g} % at best over what the planner tries")
    print(f"record: {write_record('micro-batches', {'rows': rows})}")


def _most(problem: Problem, policy: str, ratio: float, bound: float) -> float:
    """Requests/s of the best schedule on any placement of several stages with `ratio` micro-batches a stage."""
    module, limits = load_policy(policy), Limits(bound, 1.0)
    knobs = module.knobs(problem.workload, problem.max_seqs)
    placed = {v.problem.cost.placement: v for v in variants(problem, module) if len(v.problem.cost.decode_stages) > 1}
    best = 0.0
    for variant in placed.values():
        count = max(1, round(ratio * len(variant.problem.cost.decode_stages)))
        grid = Variant(problem=variant.problem, enumerated={"micro_batches": count}).grid(module, knobs, limits)
        best = max(best, _found(grid, best))
    return best


def _found(grid: Grid, at_least: float) -> float:
    if len(grid.shape) == 1:
        return reach(grid, grid.bottom, at_least=at_least, slack=0.0)
    grid.at_least = at_least
    result = search_grid(grid)
    return result.best.outcome.throughput if result.best else 0.0


def _cells(row: tuple[Any, ...]) -> tuple[str, ...]:
    return (row[0], *(f"{value:.4g}" for value in row[1:]))


if __name__ == "__main__":
    main()
