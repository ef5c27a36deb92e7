"""find the schedule with the most throughput under a latency bound

The workload is a trace (CSV or JSON lines with input_tokens, output_tokens and optionally arrival_s; or as Azure,
BurstGPT, Mooncake, Qwen-Bailian, ShareGPT, vllm bench serve or guidellm write it), a shipped name (plans/workloads), or
a law such as `normal:in=128,81,256;out=128,68,320`.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exeplan.core.models.model import ModelSpec
    from exeplan.core.plan import Plan
    from exeplan.core.profile import Profile
    from exeplan.planner.choice.answers import Optimum
    from exeplan.planner.problems.problem import Problem
    from exeplan.planner.reports.explain import Explanation
    from exeplan.planner.sizing import Tried
    from exeplan.progress import Told

POSITION = 20
_OPTIONS = (
    "profile",
    "workload",
    "latency_bound",
    "bound_on",
    "deadline",
    "deadline_share",
    "order",
    "ttft",
    "tpot",
    "itl",
    "attainment",
    "arrival_rate",
    "arrivals",
    "min_throughput",
    "risk",
    "errors",
    "cluster",
    "gpus",
    "across_nodes",
    "one_pipeline",
    "policy",
    "method",
    "fit_context",
    "memory",
    "gpu_memory_utilization",
    "max_num_seqs",
    "model",
    "engine",
    "routing",
)
"""Options of the command line that are arguments of `exeplan.optimize`."""
_PLOT, _EXPLAIN = 0.5, 2.0
"""How long the frontier and the explanation take, relative to the search."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--profile",
        metavar="FILE",
        help="a profile made by `exeplan profile`; without one, --model and --cluster give the times of a datasheet",
    )
    parser.add_argument("--workload", required=True, metavar="W", help="trace file, shipped name, or law")
    parser.add_argument("--latency-bound", metavar="TIME", help="such as 2s or 500ms; inf for no bound")
    parser.add_argument(
        "--bound-on",
        metavar="WHAT",
        help="p99-length (default), or p99-requests, p50-requests...",
    )
    parser.add_argument(
        "--deadline",
        metavar="TIME",
        help="from the arrival of a request to its deadline, 2s or 1s,4s (evenly spread)",
    )
    parser.add_argument("--deadline-share", metavar="SHARE", help="share of requests that must meet it (default 99%%)")
    parser.add_argument(
        "--order",
        metavar="ORDER",
        help="queue order: fcfs, sjf, edf, das (default: das with --deadline, else fcfs)",
    )
    parser.add_argument(
        "--ttft",
        metavar="BOUND",
        help="further bound on the time to the first token: p99:500ms for a percentile over requests, 500ms for the "
        "mean; several after commas",
    )
    parser.add_argument("--tpot", metavar="BOUND", help="the same of the time per later token, such as p95:50ms")
    parser.add_argument(
        "--itl",
        metavar="TIME",
        help="further bound on every gap between two tokens of a request, such as 200ms: on the longest pass, not on "
        "the mean",
    )
    parser.add_argument(
        "--attainment",
        metavar="SHARE",
        help="share of the requests, such as 99%%, each of which must keep --ttft, --tpot and --latency-bound together",
    )
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--arrival-rate", metavar="R", help="requests/s that arrive, Poisson; waiting then counts in all bounds"
    )
    load.add_argument("--arrivals", choices=("trace",), help="requests arrive at the times of the workload's trace")
    load.add_argument("--min-throughput", metavar="R", help="requests/s that are required, under a backlog")
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
        help="number of GPUs of the cluster, or of the profiled host without one; auto for the fewest that meet rate "
        "and bounds",
    )
    parser.add_argument("--across-nodes", action="store_true", help="allow tensor parallelism across nodes")
    parser.add_argument(
        "--one-pipeline", action="store_true", help="use all GPUs as one pipeline, never as replicas of smaller ones"
    )
    parser.add_argument(
        "--policy",
        default="auto",
        help="a policy, a file such as ./mine.py, or auto for the best of those that apply",
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
        "--max-num-seqs", type=int, metavar="N", help="requests that run at once (default: as many as were profiled)"
    )
    parser.add_argument("--model", help="without --profile; or the model directory, if it moved since it was profiled")
    parser.add_argument(
        "--engine",
        metavar="NAME",
        help="without --profile: constants of a serving engine (plans/engines, YAML file)",
    )
    parser.add_argument(
        "--routing",
        metavar="R",
        help="without --profile: of tokens to experts, even (default) or power_law_1.2",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="PLAN", help="write the plan as YAML")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the frontier (.png, .svg, .pdf)")
    parser.add_argument(
        "--explain", action="store_true", help="explain why the winner wins and what more GPUs or latency would gain"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    from exeplan import api
    from exeplan.core.schedule import needs_other_engine
    from exeplan.figures import check_picture
    from exeplan.garbage import collected_seldom
    from exeplan.outputs import check_output, refuse, unwritten
    from exeplan.planner.load_problem import with_relative_references
    from exeplan.planner.reports.explain_text import explanation_lines
    from exeplan.planner.reports.report import optimum_report, search_line
    from exeplan.planner.reports.tables import json_line
    from exeplan.planner.reports.thread_table import thread_table
    from exeplan.planner.sizing import sizes_table
    from exeplan.progress import Shown, note
    from exeplan.units import show_seconds

    started = time.perf_counter()
    if args.plot:
        check_picture(args.plot)
    for path in filter(None, (args.output, args.plot)):
        check_output(path)
    with Shown("optimize") as shown, collected_seldom():
        search, frontier, what_if = _parts(shown, plot=args.plot is not None, explain=args.explain)
        solution = api.optimize(**{name: getattr(args, name) for name in _OPTIONS}, told=search)
        if not args.profile:
            note(_by_datasheet(solution.problem.profile))
        note(_kept_to(args.policy, solution.problem.profile))
        note(_without_effect(args))
        plan = with_relative_references(solution.plan, args.output) if args.output else solution.plan
        optimum = replace(solution.optimum, plan=plan)
        files = (
            (args.output, partial(solution.save, args.output)),
            (args.plot, partial(solution.write_plot, args.plot, told=frontier)),
        )
        failed = unwritten({path: write for path, write in files if path})
        explanation = solution.explain(told=what_if) if args.explain else None
    if args.json:
        body = _as_json(optimum, solution.problem, solution.tried, explanation)
        print(json_line({**body, "threads": [one.to_dict() for one in solution.threads]}))
        refuse(failed)
        return 0
    if solution.tried:
        print(f"fewest GPUs of cluster {args.cluster}: {optimum.plan.gpus}\n\n{sizes_table(solution.tried)}\n")
    print(optimum_report(optimum, solution.problem))
    if solution.threads:
        print(f"\n{thread_table(solution.threads)}")
    print(f"\n{search_line(optimum)}; {show_seconds(time.perf_counter() - started)} in all")
    if explanation:
        print(f"\n{explanation_lines(explanation)}")
    if args.plot and args.plot not in failed:
        print(f"\nfrontier drawn in {args.plot}")
    if args.output and args.output not in failed:
        note(_unplaced(solution.problem.profile.model, args.output))
        where = ""
        if solution.problem.profile.model.is_only_planned:
            where = "; other engines run this model, `exeplan serve` does not"
        elif any(needs_other_engine(group.placement) for group in optimum.plan.groups):
            where = "; other engines run this placement, `exeplan serve` does not"
        where = where or f"; run it with `exeplan serve {args.output}`"
        profile = solution.problem.profile
        where += _exported_by(optimum.plan, profile.model, profile.engine, args.output)
        print(f"\nplan written to {args.output}{where}")
    refuse(failed)
    return 0


def _by_datasheet(profile: "Profile") -> list[str]:
    """What a reader should know of times that nothing has measured."""
    from exeplan.commands.profile import CORRECTED_EVENLY

    source = f"times are of the {profile.source}; a profile that was measured or imported is closer"
    twice = [CORRECTED_EVENLY] if profile.correction and profile.routing else []
    return [*profile.model.datasheet_remarks, f"{source} (`exeplan profile --help`)", *twice]


def _without_effect(args: argparse.Namespace) -> list[str]:
    """Options that were given and change nothing."""
    without = []
    if args.order == "edf" and not args.deadline:
        without.append("--order edf changes nothing without a --deadline: all requests are as urgent, as with fcfs")
    if not args.cluster and not args.gpus:
        given = [option for option in ("across_nodes", "one_pipeline") if getattr(args, option)]
        without += [f"--{option.replace('_', '-')} changes nothing without a --cluster or --gpus" for option in given]
    return without


def _kept_to(policy: str, profile: "Profile") -> list[str]:
    """Where `auto` was not all policies."""
    from exeplan.profiler.datasheets.engine_constants import engine_policies

    names = engine_policies(profile) if policy == "auto" else ()
    engine = profile.engine
    return [f"searched what {engine} schedules by: {', '.join(names)}; --policy NAME takes another"] if names else []


def _exported_by(plan: "Plan", model: "ModelSpec", engine: str, file: Path) -> str:
    """How the engine of a profile is started with the plan, or why it is not."""
    from exeplan.export import exporter_names, refused

    if engine not in exporter_names():
        return ""
    if why := refused(plan, model, engine):
        return f"; not for {engine}: {why}"
    return f"; for {engine}: `exeplan export {file} --to {engine}`"


def _unplaced(model: "ModelSpec", plan: Path) -> list[str]:
    """A sentence where the profile does not say where the model is, so that the plan cannot either."""
    if model.reference is not None:
        return []
    return [
        f"the profile does not say where '{model.name}' is; `exeplan serve {plan}` will need --model-dir, or give "
        "--model here"
    ]


def _parts(shown: "Told", *, plot: bool, explain: bool) -> "tuple[Told, Told, Told]":
    """The search, the frontier and the explanation, by how long each takes."""
    total = 1.0 + (_PLOT if plot else 0.0) + (_EXPLAIN if explain else 0.0)
    searched, drawn = 1 / total, (1.0 + (_PLOT if plot else 0.0)) / total
    return shown.part(0.0, searched), shown.part(searched, drawn), shown.part(drawn, 1.0, "explanation")


def _as_json(
    optimum: "Optimum", problem: "Problem", tried: "Sequence[Tried]", explanation: "Explanation | None"
) -> dict[str, Any]:
    from dataclasses import asdict

    from exeplan.planner.choice.optimize import as_json
    from exeplan.planner.problems.replays import most_of_trace, trace_part
    from exeplan.planner.reports.explain_text import as_json as explanation_json
    from exeplan.planner.reports.report import remarks
    from exeplan.planner.sizing import sizes_json

    part = trace_part(problem, most_of_trace(optimum.plan.num_replicas))
    body = {
        **as_json(optimum),
        "remarks": remarks(optimum, problem),
        "workload_source": problem.workload.source or None,
        "trace_part": asdict(part) if part else None,
    }
    if tried:
        body["sizes"] = sizes_json(tried)
    return {**body, "explanation": explanation_json(explanation)} if explanation else body
