"""Branch and bound against exhaustive search on the models, clusters, tasks and bounds of the paper's figures.

    python -m benchmarks.planner.search_paper [--most 40000] [--drawn 1000] [--figures fig6 fig7 fig8] [--workers N]

All points of a policy in a scenario are tried where at most --most of them may fit the memory, and always for OPT-13B
with task S; one pass serves all bounds. Where there are more, --drawn points are drawn at random, evenly over variants
and over the logarithm of every control variable, and none may be better than the optimum found. Writes
records/search-paper.json.
"""

import argparse
import math
import os
from concurrent.futures import ProcessPoolExecutor
from statistics import median

from benchmarks.lib.record import write_record
from benchmarks.paper.setting import FIGURES, OPT_13B, Scenario, bounded, problem_of
from benchmarks.paper.systems import bounds, on_whole_machines, static_points
from benchmarks.planner.referee import counts, judged, referee
from exeplan.planner.choice.search_space import search_variants
from exeplan.planner.reports.tables import table
from exeplan.policies import policy_names

_WHOLE = Scenario(OPT_13B, "S")
"""Tried whole whatever its size."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, default=40_000)
    parser.add_argument("--drawn", type=int, default=1000)
    parser.add_argument("--figures", nargs="+", default=list(FIGURES), choices=list(FIGURES))
    parser.add_argument("--policies", nargs="+", default=list(policy_names()), choices=policy_names())
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    args = parser.parse_args()
    scenarios = list(dict.fromkeys(scenario for name in args.figures for scenario in FIGURES[name]))
    jobs = [(scenario, policy, args.most, args.drawn) for scenario in scenarios for policy in args.policies]
    found = []
    with ProcessPoolExecutor(args.workers) as pool:
        for cases in pool.map(compare, *zip(*jobs, strict=True)):
            found += cases
            for case in cases:
                print(_line(case), flush=True)
    for title, whole in (("tried whole", True), ("drawn from", False)):
        rows = [
            _row(policy, [c for c in found if c["policy"] == policy and c["whole"] == whole])
            for policy in args.policies
        ]
        print(f"\n{title}\n\n{table(_HEADER, [row for row in rows if row])}")
    print(f"\nrecord: {write_record('search-paper', {'cases': found})}")


_HEADER = ("", "scenarios", "cases", "same optimum", "above it", "largest loss", "median points", "median share tried")


def _row(policy: str, cases: list[dict]) -> tuple[str, ...] | None:
    if not cases:
        return None
    same, above = counts([case["loss"] for case in cases])
    shares = [case["tried"] / case["grid"] for case in cases]
    return (
        policy,
        str(len({case["scenario"] for case in cases})),
        str(len(cases)),
        str(same),
        str(above),
        f"{100 * max(0.0, *(case['loss'] for case in cases)):.2g} %",
        f"{median(case['points'] for case in cases):.0f}",
        f"{100 * median(shares):.2g} %",
    )


def _line(case: dict) -> str:
    how = "whole" if case["whole"] else "drawn"
    return (
        f"{case['scenario']}, {case['policy']}, {case['bound']:.3g} s: {case['found']:.4g} requests/s, {case['said']}, "
        f"{case['tried']} of {case['grid']} points; {how}, {case['points']} may fit"
    )


def compare(scenario: Scenario, policy: str, most: int, drawn: int) -> list[dict]:
    """Both methods at the scenario's four bounds; nothing where the policy has no point, which the referee says."""
    problem = problem_of(scenario.deployment, scenario.task)
    tried = referee(problem, policy, most=math.inf if scenario == _WHOLE else most, drawn=drawn)
    cases = []
    for bound in bounds(static_points(on_whole_machines(problem))):
        asked = bounded(problem, bound)
        result = search_variants(asked, policy, method="branch-and-bound", bound=bound)
        if result is None and not tried.points:
            return []
        verdict = judged(asked, policy, result, best=tried.best(bound), bound=bound)
        cases.append(
            {
                "scenario": str(scenario),
                "policy": policy,
                "bound": bound,
                "found": verdict.found,
                "loss": verdict.loss,
                "said": verdict.said,
                "tried": result[0].num_points if result else 0,
                "grid": result[0].grid_size if result else tried.points,
                "whole": tried.whole,
                "points": tried.points,
            }
        )
    return cases


if __name__ == "__main__":
    main()
