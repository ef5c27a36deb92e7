"""find the schedule with the most throughput under a latency bound

The workload is a trace (CSV or JSON lines with input_tokens, output_tokens and optionally arrival_s), a shipped name
(plans/workloads), or a law such as `normal:in=128,81,256;out=128,68,320`.
"""

import argparse
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from exeplan.plan import BOUND_ABOUT

if TYPE_CHECKING:
    from exeplan.cluster import Cluster
    from exeplan.optimize import Optimum
    from exeplan.problem import Problem
    from exeplan.profile import Profile

_MOST_SEQS = 65536
"""Residents that a search considers at most: far beyond any device, and small enough to list."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profile", required=True, metavar="FILE", help="a profile made by `exeplan profile`")
    parser.add_argument("--workload", required=True, metavar="W", help="trace file, shipped name, or law")
    parser.add_argument("--latency-bound", required=True, metavar="TIME", help="such as 2s or 500ms; inf for no bound")
    parser.add_argument("--bound-on", choices=BOUND_ABOUT, default="p99-length", help="what the bound is about")
    parser.add_argument(
        "--cluster", metavar="C", help="a cluster file or shipped name (plans/clusters); one device otherwise"
    )
    parser.add_argument("--gpus", type=int, metavar="N", help="only so many GPUs of the cluster")
    parser.add_argument("--policy", default="auto", help="a policy, or auto for the best of all (default)")
    parser.add_argument("--method", default="branch-and-bound", help="branch-and-bound (default), exhaustive, bayesian")
    parser.add_argument("--fit-context", action="store_true", help="scale the lengths to the model's context")
    parser.add_argument(
        "--memory", metavar="SIZE", help="bytes for weights, KV cache and workspace (default: 90 %% of the device)"
    )
    parser.add_argument(
        "--max-num-seqs", type=int, metavar="N", help="residents at once (default: as many as were profiled)"
    )
    parser.add_argument("--model", help="the model directory, if it moved since it was profiled")
    parser.add_argument("-o", "--output", type=Path, metavar="PLAN", help="write the plan as YAML")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the frontier (.png, .svg, .pdf)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    from exeplan.frontier_plot import check_suffix
    from exeplan.optimize import as_json, optimize, resolve_policies
    from exeplan.report import json_line

    started = time.perf_counter()
    if args.plot:
        check_suffix(args.plot)
    problem = _problem(args)
    optimum = optimize(problem, policies=resolve_policies(args.policy, problem.cluster), method=args.method)
    if args.output:
        optimum = _saved(optimum, args)
    if args.plot:
        _plot(optimum, problem, args.plot)
    if args.json:
        print(json_line(as_json(optimum)))
    else:
        print(_report(optimum, problem, time.perf_counter() - started))
        if args.output:
            print(f"\nplan written to {args.output}; run it with `exeplan serve {args.output}`")
    return 0


def _problem(args: argparse.Namespace) -> "Problem":
    from exeplan.errors import InputError
    from exeplan.inputs import fitted, profile_for
    from exeplan.model import load_model_spec
    from exeplan.plan import Bound
    from exeplan.problem import make_problem
    from exeplan.profile import load_profile
    from exeplan.units import num_bytes, seconds
    from exeplan.workload_files import load_workload

    bound = Bound(seconds=seconds(args.latency_bound, "--latency-bound"), about=args.bound_on)
    if args.max_num_seqs is not None and not 1 <= args.max_num_seqs <= _MOST_SEQS:
        raise InputError(f"--max-num-seqs must lie between 1 and {_MOST_SEQS}, found {args.max_num_seqs}")
    profile = load_profile(Path(args.profile))
    if args.model:
        spec = load_model_spec(args.model)
        profile = replace(profile_for(spec, profile), model=spec)
    workload = fitted(load_workload(args.workload), profile.model, fit=args.fit_context)
    memory = num_bytes(args.memory, "--memory") if args.memory else None
    cluster = _cluster(args, profile)
    return make_problem(profile, workload, bound, cluster=cluster, memory=memory, max_seqs=args.max_num_seqs)


def _cluster(args: argparse.Namespace, profile: "Profile") -> "Cluster | None":
    from exeplan.cluster import load_cluster
    from exeplan.errors import InputError

    if args.cluster is None:
        if args.gpus is not None:
            raise InputError("--gpus needs a --cluster")
        return None
    cluster = load_cluster(args.cluster)
    if cluster.device != profile.device.name:
        raise InputError(
            f"cluster {cluster.name} has {cluster.device} GPUs, the profile is of {profile.device.name}; profile the "
            f"model for {cluster.device}"
        )
    return cluster if args.gpus is None else cluster.part(args.gpus)


def _saved(optimum: "Optimum", args: argparse.Namespace) -> "Optimum":
    from exeplan.inputs import refer
    from exeplan.plan import save_plan

    plan = replace(
        optimum.plan,
        model=refer(optimum.plan.model, args.output),
        workload=refer(args.workload, args.output),
        profile=refer(args.profile, args.output),
        fit_context=args.fit_context,
    )
    save_plan(plan, args.output)
    return replace(optimum, plan=plan)


def _report(optimum: "Optimum", problem: "Problem", seconds: float) -> str:
    from exeplan.report import side_by_side, table
    from exeplan.units import show_seconds

    plan, workload = optimum.plan, problem.workload
    bounded = math.isfinite(problem.bound.seconds)
    promise = f"bound {show_seconds(problem.bound.seconds)} on {problem.bound.about}" if bounded else "no latency bound"
    lines = [
        f"{problem.profile.model.name} on {problem.profile.device.name} ({problem.profile.dtype}), workload "
        f"{workload.name}: mean {workload.mean_input:.0f} in, {workload.mean_output:.0f} out, "
        f"p99 {workload.output_quantile(0.99)} out",
        *([f"  {workload.source}"] if workload.source else []),
        f"{promise}: {plan.schedule}",
        "",
        side_by_side(closed_form=plan.estimate, replay=plan.replay),
        "",
    ]
    if plan.drift_headroom is not None:
        lines.append(f"drift headroom: the bound holds until outputs are {100 * plan.drift_headroom:.0f} % longer")
    if not problem.profile.complete:
        lines.append("the profile is unfinished: run `exeplan profile` on it again for a sharper prediction")
    lines += [f"beyond the profile: {sentence}" for sentence in optimum.beyond]
    lines += ["", table(("policy", "best schedule", "req/s", "latency", "points"), _rows(optimum)), ""]
    searched = plan.search
    gap = "" if searched["gap"] is None else f", gap {100 * searched['gap']:.2g} %"
    lines.append(
        f"{searched['method']}: {searched['points']} points in {show_seconds(searched['seconds'])}{gap}; "
        f"{show_seconds(seconds)} in all"
    )
    return "\n".join(lines)


def _rows(optimum: "Optimum") -> list[tuple[str, ...]]:
    from exeplan.units import show_seconds

    rows: list[tuple[str, ...]] = []
    for c in optimum.candidates:
        points = str(c.search.num_points) if c.search else "0"
        if c.schedule is None or c.estimate is None:
            rows.append((c.policy, c.refusal, "-", "-", points))
            continue
        variables = ", ".join(f"{name}={value}" for name, value in c.schedule.variables.items())
        rows.append((c.policy, variables, f"{c.estimate.throughput:.3g}", show_seconds(c.estimate.latency), points))
    return rows


def _plot(optimum: "Optimum", problem: "Problem", path: Path) -> None:
    from exeplan.frontier_plot import draw_frontier
    from exeplan.optimize import with_frontier

    results = {c.policy: with_frontier(problem, c) for c in optimum.candidates if c.search}
    draw_frontier(results, path, bound=problem.bound.seconds)
