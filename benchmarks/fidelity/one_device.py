"""Predicted against measured on this device: every policy on real traces, planned under one bound, side by side.

    python -m benchmarks.fidelity.one_device [--model demo | demo-experts] [--workloads alpaca FILE.csv ...]
        [--policies rra ...] [--slacks 4] [--rounds 3] [--seconds 7] [--budget 40s] [--name NAME] [--http]

Each round profiles the model anew, plans every policy for every workload and bound, and plays the plans on one engine
in slices of load, in the order A B C C B A (`runner/fidelity/interleaved.py`). A prediction is the replay of just the
requests of its slices. Errors are given as measured, and at the speed that the machine had while it was profiled, which
reference passes between the engine's own tell. With --http the best plan of each workload and bound is also served, and
played by a load generator in a process of its own, whose CPU time is told; its figures at profiling speed are by the
server's mean slowness (`exeplan serve --watch-speed`).

Printed and recorded: for each case predicted, measured and both errors; their medians over cases with a bootstrap
interval, and the worst; bounds kept with a Wilson interval; throughput times latency, which the machine's speed does
not change; whether the policy that was planned best was measured best, or within noise of it; and Kendall's tau of the
two rankings. Writes records/fidelity-<name>.json.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binomtest, kendalltau

from benchmarks.lib.record import write_record
from benchmarks.service.serving import served
from exeplan.core.bounds import Bound
from exeplan.core.models.model import ModelSpec, load_model_spec
from exeplan.core.plan import Plan, save_plan
from exeplan.core.profile import Profile, load_profile
from exeplan.core.schedule import Schedule
from exeplan.errors import Infeasible
from exeplan.planner.choice.optimize import optimize, resolve_policies
from exeplan.planner.load_problem import fitted, profile_for
from exeplan.planner.problems.problem import make_problem
from exeplan.planner.reports.tables import table
from exeplan.runner.fidelity.interleaved import Error, Measured, differ, play_interleaved
from exeplan.workload.files import load_workload
from exeplan.workload.workload import Workload

WORKLOADS = ("alpaca", "azure-2023-conv", "wmt17-ende")
_FIGURES = ("throughput", "latency")
_COLUMNS = {"as measured": "measured", "at profiling speed": "at_profile_speed"}
_RESAMPLES = 2000
_MAX_QUEUE = 20_000
"""Requests that a server accepts at once: the whole backlog."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="demo, demo-experts (a mixture of experts), or another")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), help="shipped names or files")
    parser.add_argument("--policies", nargs="+", default=list(resolve_policies("auto")))
    parser.add_argument(
        "--slacks", type=float, nargs="+", default=[4.0], help="bounds over what one request alone needs"
    )
    parser.add_argument("--rounds", type=int, default=3, help="each with a profile of its own")
    parser.add_argument("--seconds", type=float, default=7.0, help="of each of the two slices of a plan")
    parser.add_argument("--budget", default="40s", help="of each profile")
    parser.add_argument("--name", help="writes records/fidelity-NAME.json (default: the model's)")
    parser.add_argument("--http", action="store_true", help="also serve the best plan of each workload and bound")
    args = parser.parse_args()
    rows = [row for number in range(args.rounds) for row in _round(args, number)]
    for line in _report(rows):
        print(line)
    body = {"rows": rows, "summary": dict(_summaries(rows)), "rankings": _rankings(rows)}
    print(f"\nrecord: {write_record(f'fidelity-{args.name or args.model}', body)}")


def _round(args: argparse.Namespace, number: int) -> Iterator[dict[str, Any]]:
    spec = load_model_spec(args.model)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        command = [sys.executable, "-m", "exeplan", "profile", args.model, "-o", str(path), "--budget", args.budget]
        subprocess.run(command, check=True)
        profile = profile_for(spec, load_profile(path))
        for name in args.workloads:
            workload = fitted(load_workload(name), spec, fit=True)
            for slack in args.slacks:
                plans = plans_of(profile, workload, args.policies, slack=slack)
                told = f"round {number + 1}/{args.rounds}, {workload.name}, {slack:g} times"
                measured = play_interleaved(
                    plans,
                    spec=spec,
                    profile=profile,
                    workload=workload,
                    seconds=args.seconds,
                    seed=100 * number,
                    on_slice=lambda n, of, plan, told=told: print(f"{told}: {n + 1}/{of} {plan.schedule}", flush=True),
                )
                http = _over_http(args, measured, spec, name, path) if args.http else {}
                for one in measured:
                    yield _row(one, measured, workload, slack, number) | http.get(one.plan.schedule.policy, {})


def plans_of(profile: Profile, workload: Workload, policies: Sequence[str], *, slack: float) -> list[Plan]:
    """The best of each policy that keeps the bound."""
    problem = make_problem(profile, workload, bound_of(profile, workload, slack))
    plans = []
    for policy in policies:
        try:
            plans.append(optimize(problem, policies=(policy,)).plan)
        except Infeasible as error:
            print(f"{workload.name}: {error}", flush=True)
    return plans


def bound_of(profile: Profile, workload: Workload, slack: float) -> Bound:
    """`slack` times what one request alone needs, to two digits: it follows the machine."""
    alone = make_problem(profile, workload, Bound(seconds=float("inf")))
    latency = alone.evaluate(Schedule("static", {"batch_size": 1})).latency
    return Bound(seconds=float(f"{slack * latency:.2g}"))


def _row(
    one: Measured, all_of_them: Sequence[Measured], workload: Workload, slack: float, number: int
) -> dict[str, Any]:
    plan, bound = one.plan, one.plan.bound
    assert bound is not None
    columns = {"replay": "predicted", "measured": "measured", "at_profile_speed": "at_profile_speed"}
    figures = (*_FIGURES, "ttft", "tpot")
    run = {key: {figure: one.mean(column, figure) for figure in figures} for key, column in columns.items()}
    errors = {
        name: {figure: _error_json(one.error(figure, column=column)) for figure in _FIGURES}
        for name, column in _COLUMNS.items()
    }
    return {
        "case": f"{workload.name} x{slack:g} {plan.schedule}",
        "round": number,
        "workload": workload.name,
        "bound": bound.seconds,
        "policy": plan.schedule.policy,
        "estimate": plan.estimate.to_dict() if plan.estimate else None,
        "runs": [run],
        "errors": errors,
        "passes": [asdict(part.passes) if part.passes else None for part in one.slices],
        "same_passes": all(part.passes is not None and part.passes.same for part in one.slices),
        "planned": (plan.replay or plan.estimate).throughput,
        "sustained": one.sustained(),
        "within_noise_of": [
            other.plan.schedule.policy for other in all_of_them if other is not one and differ(one, other) is False
        ],
    }


def _error_json(error: Error | None) -> dict[str, float | None] | None:
    return None if error is None else asdict(error)


def _over_http(
    args: argparse.Namespace, measured: Sequence[Measured], spec: ModelSpec, workload: str, profile: Path
) -> dict[str, dict[str, Any]]:
    """The plan with the most planned throughput, served and played by a client in a process of its own."""
    best = max(measured, key=lambda one: one.plan.estimate.throughput)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.yaml"
        save_plan(replace(best.plan, workload=workload, profile=str(profile), fit_context=True), file)
        with served(file, "--replan", "off", "--max-queue", str(_MAX_QUEUE), "--watch-speed") as server:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            command = ["bench", str(file), "--url", server.url, "--duration", f"{2 * args.seconds}s", "--json"]
            answer = subprocess.run(
                [sys.executable, "-m", "exeplan", *command], check=True, stdout=subprocess.PIPE, text=True
            )
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
    body = json.loads(answer.stdout)
    kinds = {"replay": "replay", "measured": "measured", "at_profile_speed": "measured_at_profile_speed"}
    figures = {kind: {name: body[key][name] for name in _FIGURES} for kind, key in kinds.items()}
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {best.plan.schedule.policy: {"http": {**figures, "client_cpu_seconds": seconds}}}


def _report(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    header = ("", "figure", "predicted", "measured", "error", "at profiling speed", "error", "90 % interval", "passes")
    cells = []
    for row in rows:
        for figure in _FIGURES:
            run, even = row["runs"][0], row["errors"]["at profiling speed"][figure]
            cells.append(
                [
                    f"{row['round'] + 1}: {row['case']}" if figure == "throughput" else "",
                    figure,
                    _number(run["replay"][figure]),
                    _number(run["measured"][figure]),
                    _percent(row["errors"]["as measured"][figure]),
                    _number(run["at_profile_speed"][figure]),
                    _percent(even),
                    ""
                    if even is None or even["low"] is None
                    else f"{100 * even['low']:+.1f} to {100 * even['high']:+.1f} %",
                    "same" if row["same_passes"] else "differ",
                ]
            )
    yield table(header, cells)
    yield ""
    for name, value in _summaries(rows):
        yield f"{name}: {value['text']}"
    for ranking in _rankings(rows):
        yield ranking["text"]


def _summaries(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Median absolute errors over cases, bounds kept, and the score that the machine's speed does not change."""
    for name in _COLUMNS:
        for figure in _FIGURES:
            found = [error for row in rows if (error := row["errors"][name][figure]) is not None]
            sizes = np.array([abs(error["value"]) for error in found if error["low"] is not None])
            if len(sizes):
                yield f"{figure}, {name}", _median(sizes, num_short=len(rows) - len(sizes))
    products = [
        abs(_product(row, "replay") / _product(row, "measured") - 1) for row in rows if _product(row, "measured")
    ]
    if products:
        yield "throughput x latency", _median(np.array(products))
    for name, column in {"as measured": "measured", "at profiling speed": "at_profile_speed"}.items():
        latencies = [(row["runs"][0][column]["latency"], row["bound"]) for row in rows]
        kept = [latency <= bound for latency, bound in latencies if latency is not None]
        if not kept:
            continue
        low, high = binomtest(sum(kept), len(kept)).proportion_ci(0.95, method="wilson")
        text = f"{sum(kept)} of {len(kept)} ({low:.0%} to {high:.0%})"
        yield f"bounds kept, {name}", {"kept": sum(kept), "of": len(kept), "low": low, "high": high, "text": text}


def _median(sizes: "np.ndarray", num_short: int = 0) -> dict[str, Any]:
    """The median with its 90 % bootstrap interval, and the worst; `num_short` cases had slices too short for either."""
    draws = np.random.default_rng(0).choice(sizes, (_RESAMPLES, len(sizes)))
    low, high = np.quantile(np.median(draws, axis=1), (0.05, 0.95)).tolist()
    middle, worst = float(np.median(sizes)), float(sizes.max())
    text = f"median {middle:.1%} off ({low:.1%} to {high:.1%}), worst {worst:.1%}, of {len(sizes)} cases"
    text += f", {num_short} more had too short slices" if num_short else ""
    return {"median": middle, "low": low, "high": high, "worst": worst, "cases": len(sizes), "text": text}


def _product(row: dict[str, Any], key: str) -> float | None:
    throughput, latency = (row["runs"][0][key][figure] for figure in _FIGURES)
    return throughput * latency if throughput and latency else None


def _rankings(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each round, workload and bound: the planned order of the policies against the measured one."""
    found = []
    for (number, name, bound), group in groupby(rows, key=lambda row: (row["round"], row["workload"], row["bound"])):
        cases = list(group)
        if len(cases) < 2:
            continue
        planned, measured = ([row[key] for row in cases] for key in ("planned", "sustained"))
        tau = float(kendalltau(planned, measured).statistic)
        first = max(cases, key=lambda row: row["planned"])
        best = max(cases, key=lambda row: row["sustained"])
        right = (
            "is" if first is best else "is within noise of" if best["policy"] in first["within_noise_of"] else "is NOT"
        )
        text = (
            f"round {number + 1}, {name}, {bound:g} s: {first['policy']}, planned best, {right} the one measured best, "
            f"{best['policy']}; Kendall's tau {tau:.2f} over {len(cases)} policies"
        )
        found.append({"tau": tau, "planned_best": first["policy"], "measured_best": best["policy"], "text": text})
    return found


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _interval(error: dict[str, float | None] | None) -> str:
    if error is None or error["low"] is None:
        return "-"
    return f"{100 * error['low']:+.1f} to {100 * error['high']:+.1f} %"


def _percent(error: dict[str, float | None] | None) -> str:
    return "-" if error is None or error["value"] is None else f"{100 * error['value']:+.1f} %"


if __name__ == "__main__":
    main()
