"""find the schedule with the most throughput under a latency bound

The workload is a trace (CSV or JSON lines with input_tokens, output_tokens and optionally arrival_s), a shipped name
(plans/workloads), or a law such as `normal:in=128,81,256;out=128,68,320`.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exeplan.core.bounds import Bound
    from exeplan.core.cluster import Cluster
    from exeplan.core.profile import Profile
    from exeplan.planner.explain import Explanation
    from exeplan.planner.margins import Risk
    from exeplan.planner.optimize import Optimum
    from exeplan.planner.problem import Problem
    from exeplan.planner.sizing import Tried
    from exeplan.workload.deadlines import Deadlines

_MOST_SEQS = 65536
"""Residents that a search considers at most: far beyond any device, and small enough to list."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profile", required=True, metavar="FILE", help="a profile made by `exeplan profile`")
    parser.add_argument("--workload", required=True, metavar="W", help="trace file, shipped name, or law")
    parser.add_argument("--latency-bound", metavar="TIME", help="such as 2s or 500ms; inf for no bound")
    parser.add_argument(
        "--bound-on",
        default="p99-length",
        metavar="WHAT",
        help="p99-length (default), or p99-requests, p50-requests...",
    )
    parser.add_argument(
        "--deadline",
        metavar="TIME",
        help="after its arrival a request's answer is of use so long, 2s or 1s,4s (evenly)",
    )
    parser.add_argument("--deadline-share", metavar="SHARE", help="of the requests that meet it (default 99%%)")
    parser.add_argument(
        "--order",
        metavar="ORDER",
        help="who goes first of those that wait: fcfs, sjf, edf, das (default: das with --deadline, else fcfs)",
    )
    parser.add_argument("--ttft", metavar="TIME", help="bound on the mean time to the first token, beside the others")
    parser.add_argument("--tpot", metavar="TIME", help="bound on the mean time per later token, beside the others")
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--arrival-rate", metavar="R", help="requests/s that come, Poisson; waiting counts in all bounds on times"
    )
    load.add_argument("--arrivals", choices=("trace",), help="requests come at the times of the workload's trace")
    load.add_argument("--min-throughput", metavar="R", help="requests/s that are wanted at least, under a backlog")
    parser.add_argument(
        "--risk", metavar="SHARE", help="chance of breaking a bound, such as 1%%: keeps a margin for it"
    )
    parser.add_argument(
        "--errors", type=Path, metavar="FILE", help="predicted and measured pairs (JSON) for the margin"
    )
    parser.add_argument(
        "--cluster", metavar="C", help="a cluster file or shipped name (plans/clusters); one device otherwise"
    )
    parser.add_argument(
        "--gpus",
        metavar="N",
        help="only so many GPUs of the cluster, without one so many of the profiled host; auto for the fewest that "
        "meet rate and bounds",
    )
    parser.add_argument("--across-nodes", action="store_true", help="let tensor parallelism span nodes")
    parser.add_argument(
        "--policy", default="auto", help="a policy, a file such as ./mine.py, or auto for the best of all (default)"
    )
    parser.add_argument("--method", default="branch-and-bound", help="branch-and-bound (default), exhaustive, bayesian")
    parser.add_argument("--fit-context", action="store_true", help="scale the lengths to the model's context")
    room = parser.add_mutually_exclusive_group()
    room.add_argument(
        "--memory", metavar="SIZE", help="bytes for weights, KV cache and workspace (default: 90 %% of the device)"
    )
    room.add_argument(
        "--gpu-memory-utilization", type=float, metavar="SHARE", help="the same as a share of each GPU (default 0.9)"
    )
    parser.add_argument(
        "--max-num-seqs", type=int, metavar="N", help="residents at once (default: as many as were profiled)"
    )
    parser.add_argument("--model", help="the model directory, if it moved since it was profiled")
    parser.add_argument("-o", "--output", type=Path, metavar="PLAN", help="write the plan as YAML")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the frontier (.png, .svg, .pdf)")
    parser.add_argument("--explain", action="store_true", help="say why the winner wins and what more would buy")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    from exeplan.planner.explain_text import as_json as explanation_json
    from exeplan.planner.explain_text import explanation_lines
    from exeplan.planner.frontier_plot import check_suffix
    from exeplan.planner.optimize import as_json
    from exeplan.planner.sizing import sizes_table
    from exeplan.planner.tables import json_line

    started = time.perf_counter()
    if args.plot:
        check_suffix(args.plot)
    problem, optimum, tried = _solved(args)
    if args.output:
        optimum = _saved(optimum, args)
    if args.plot:
        _plot(optimum, problem, args.plot)
    explanation = _explanation(args, optimum, problem) if args.explain else None
    if args.json:
        body = as_json(optimum)
        if tried:
            body["sizes"] = [{"gpus": size.num_gpus, "refusal": size.refusal or None} for size in tried]
        print(json_line({**body, "explanation": explanation_json(explanation)} if explanation else body))
    else:
        if tried:
            print(f"the fewest GPUs of cluster {args.cluster} that do: {optimum.plan.gpus}\n\n{sizes_table(tried)}\n")
        print(_report(optimum, problem, time.perf_counter() - started))
        if explanation:
            print(f"\n{explanation_lines(explanation)}")
        if args.output:
            print(f"\nplan written to {args.output}; run it with `exeplan serve {args.output}`")
    return 0


def _solved(args: argparse.Namespace) -> "tuple[Problem, Optimum, tuple[Tried, ...]]":
    """The problem on the GPUs asked for, or on the fewest that do; its best plan; and the sizes that were tried."""
    from exeplan.errors import Infeasible
    from exeplan.planner.optimize import optimize, resolve_policies
    from exeplan.planner.sizing import fewest_gpus, with_more_gpus

    risk = _risk(args)
    make, cluster, whole = _asked(args)

    def solve(gpus: "Cluster | None", *, advise: bool = False) -> "Optimum":
        policies = resolve_policies(args.policy, gpus, deadlines=args.deadline is not None)
        return optimize(make(gpus), policies=policies, method=args.method, risk=risk, advise=advise)

    if args.gpus == "auto":
        assert whole is not None
        found, tried = fewest_gpus(whole, solve)
        assert found.optimum is not None
        return make(whole.part(found.num_gpus)), found.optimum, tried
    try:
        return make(cluster), solve(cluster, advise=True), ()
    except Infeasible as error:
        if cluster is None or whole is None:
            raise
        raise with_more_gpus(error, cluster, whole, solve) from None


def _risk(args: argparse.Namespace) -> "Risk | None":
    from exeplan.errors import InputError
    from exeplan.planner.margins import Risk
    from exeplan.planner.risk import default_laws, load_errors, parse_risk

    if args.risk is None:
        if args.errors is not None:
            raise InputError("--errors needs a --risk, such as 1%")
        return None
    share = parse_risk(args.risk)
    return Risk(share=share, laws={**default_laws(), **(load_errors(args.errors) if args.errors else {})})


def _asked(
    args: argparse.Namespace,
) -> "tuple[Callable[[Cluster | None], Problem], Cluster | None, Cluster | None]":
    """What makes the problem on some GPUs, the GPUs that were asked for, and the cluster they are of."""
    from exeplan.core.bounds import parse_bounds
    from exeplan.core.model import load_model_spec
    from exeplan.core.plan import check_utilization
    from exeplan.core.profile import load_profile
    from exeplan.errors import InputError
    from exeplan.planner.load_problem import fitted, profile_for
    from exeplan.planner.problem import make_problem
    from exeplan.units import num_bytes
    from exeplan.workload.arrivals import parse_arrivals, parse_rate
    from exeplan.workload.files import load_workload

    deadlines, due = _deadlines(args)
    bounds = parse_bounds(args.latency_bound, args.bound_on, ttft=args.ttft, tpot=args.tpot, due=due)
    if args.max_num_seqs is not None and not 1 <= args.max_num_seqs <= _MOST_SEQS:
        raise InputError(f"--max-num-seqs must lie between 1 and {_MOST_SEQS}, found {args.max_num_seqs}")
    profile = load_profile(Path(args.profile))
    if args.model:
        spec = load_model_spec(args.model)
        profile = replace(profile_for(spec, profile), model=spec)
    workload = fitted(load_workload(args.workload), profile.model, fit=args.fit_context)
    workload = replace(workload, deadlines=deadlines)
    memory = num_bytes(args.memory, "--memory") if args.memory else None
    share = args.gpu_memory_utilization
    if share is not None:
        check_utilization(share, "--gpu-memory-utilization")
        if profile.device.kind != "cuda":
            raise InputError("--gpu-memory-utilization is for GPUs, the profile is of a CPU; use --memory")
    arrivals = parse_arrivals(args.arrival_rate, workload, of_trace=args.arrivals == "trace")
    least = parse_rate(args.min_throughput, "--min-throughput") if args.min_throughput is not None else 0.0
    cluster, whole = _clusters(args, profile)

    def make(gpus: "Cluster | None") -> "Problem":
        problem = make_problem(
            profile,
            workload,
            bounds[0],
            cluster=gpus,
            memory=memory,
            utilization=share,
            max_seqs=args.max_num_seqs,
        )
        order = args.order or ("das" if deadlines else "fcfs")
        problem = replace(problem, across_nodes=args.across_nodes, order=order)
        return replace(problem, more_bounds=bounds[1:], arrivals=arrivals, min_throughput=least)

    return make, cluster, whole


def _deadlines(args: argparse.Namespace) -> "tuple[Deadlines | None, Bound | None]":
    """The deadlines that were asked for, and the bound that they make."""
    from exeplan.core.bounds import deadline_bound
    from exeplan.errors import InputError
    from exeplan.workload.deadlines import parse_deadlines

    if args.deadline is None:
        if args.deadline_share is not None:
            raise InputError("--deadline-share needs a --deadline, such as 2s")
        return None, None
    if args.arrival_rate is None and args.arrivals is None:
        raise InputError(
            "a deadline counts from the arrival; give --arrival-rate or --arrivals trace beside --deadline"
        )
    deadlines = parse_deadlines(args.deadline)
    return deadlines, deadline_bound(deadlines.mean, args.deadline_share or "99%")


def _clusters(args: argparse.Namespace, profile: "Profile") -> "tuple[Cluster | None, Cluster | None]":
    """The GPUs that were asked for, all of them for `auto`, and the whole cluster."""
    from exeplan.errors import InputError
    from exeplan.planner.load_problem import cluster_for, profiled_host

    if args.gpus not in (None, "auto") and not args.gpus.isdecimal():
        raise InputError(f"--gpus must be a number of GPUs or auto, found '{args.gpus}'")
    if args.cluster is None:
        if args.gpus == "auto":
            raise InputError("--gpus auto needs a --cluster")
        return (profiled_host(profile, int(args.gpus)) if args.gpus else None), None
    whole = cluster_for(profile, args.cluster)
    if args.gpus == "auto":
        if args.arrival_rate is None and args.arrivals is None and args.min_throughput is None:
            raise InputError("--gpus auto needs an --arrival-rate, --arrivals trace or --min-throughput to meet")
        return whole, whole
    return whole if args.gpus is None else whole.part(int(args.gpus)), whole


def _explanation(args: argparse.Namespace, optimum: "Optimum", problem: "Problem") -> "Explanation":
    from exeplan.core.cluster import load_cluster
    from exeplan.planner.explain import explain
    from exeplan.planner.optimize import optimize

    policies = (optimum.plan.schedule.policy,)
    again = partial(optimize, policies=policies, method=args.method, risk=_risk(args))
    return explain(problem, optimum, again=again, whole=load_cluster(args.cluster) if args.cluster else None)


def _saved(optimum: "Optimum", args: argparse.Namespace) -> "Optimum":
    from exeplan.core.plan import save_plan
    from exeplan.planner.load_problem import refer

    plan = replace(
        optimum.plan,
        model=refer(optimum.plan.model, args.output),
        workload=refer(args.workload, args.output),
        profile=refer(args.profile, args.output),
        cluster=refer(args.cluster, args.output) if args.cluster else None,
        fit_context=args.fit_context,
    )
    save_plan(plan, args.output)
    return replace(optimum, plan=plan)


def _report(optimum: "Optimum", problem: "Problem", seconds: float) -> str:
    from exeplan.planner.promise_text import promise_lines, show_bounds
    from exeplan.planner.tables import side_by_side, table
    from exeplan.units import show_seconds

    plan, workload = optimum.plan, problem.workload
    lines = [
        f"{problem.profile.model.name} on {problem.profile.device.name} ({problem.profile.dtype}), workload "
        f"{workload.name}: mean {workload.mean_input:.0f} in, {workload.mean_output:.0f} out, "
        f"p99 {workload.output_quantile(0.99)} out",
        *([f"  {workload.source}"] if workload.source else []),
        f"{show_bounds(problem.bounds)}: {plan.schedule}",
        *_placement_lines(optimum, problem),
        "",
        side_by_side(closed_form=plan.estimate, replay=plan.replay),
        "",
    ]
    lines += promise_lines(problem, plan)
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


def _placement_lines(optimum: "Optimum", problem: "Problem") -> list[str]:
    """Where the plan runs and what that takes of each GPU; nothing for one device without a cluster."""
    from exeplan.planner.placement_text import show_placement
    from exeplan.simulator.memory import weight_bytes
    from exeplan.units import show_bytes

    plan = optimum.plan
    if problem.cluster is None or plan.estimate is None:
        return []
    weights = [weight_bytes(problem.profile, plan.placement, number) for number in range(len(plan.placement))]
    least, most = show_bytes(min(weights)), show_bytes(max(weights))
    return [
        f"{plan.gpus} GPU{'s' if plan.gpus != 1 else ''} of cluster {problem.cluster.name}, "
        f"{show_placement(plan.placement)}",
        f"memory per GPU: {show_bytes(plan.estimate.memory_bytes_per_gpu)} of {show_bytes(problem.memory)} on the "
        f"fullest; weights {least if least == most else f'{least} to {most}'}",
    ]


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
    from exeplan.planner.frontier_plot import draw_frontier
    from exeplan.planner.optimize import with_frontier

    results = {c.policy: with_frontier(problem, c) for c in optimum.candidates if c.search}
    draw_frontier(results, path, bound=problem.limit)
