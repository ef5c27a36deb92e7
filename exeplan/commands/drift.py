"""play a trace as a running service would see it: when it would have re-planned, and what that gains

TRACE is a CSV or JSON lines with input_tokens, output_tokens and optionally arrival_s. It is compared with the workload
that the plan was made for, and scaled to the context as that was. Exit status 0 whether or not a re-plan is found,
with -o 2 where there is none to write.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exeplan.core.plan import Plan
    from exeplan.drift.state import Rules
    from exeplan.drift.trace import TraceLook

POSITION = 60
_EVERY = (0.01, 86_400.0)
"""Seconds between two looks, at least and at most."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE")
    parser.add_argument("--plan", type=Path, required=True, metavar="PLAN", help="the plan that serves it")
    parser.add_argument("--profile", metavar="FILE", help="instead of the plan's own")
    parser.add_argument(
        "--workload", metavar="W", help="the lengths that the plan was made for, instead of the plan's own"
    )
    parser.add_argument("--rate", metavar="R", help="requests/s, instead of the trace's own; its pattern stays")
    add_rules(parser)
    parser.add_argument(
        "--policy",
        default="auto",
        help="a policy, a file such as ./mine.py, or auto for the best of those that apply",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="PLAN", help="write the last plan that was adopted")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def add_rules(parser: argparse.ArgumentParser) -> None:
    """When to re-plan."""
    parser.add_argument("--dwell", default="60s", metavar="TIME", help="between two re-plans, at least (default: 60s)")
    parser.add_argument("--every", default="5s", metavar="TIME", help="between two looks (default: 5s)")
    parser.add_argument("--gain", default="3%", metavar="SHARE", help="throughput worth a re-plan (default: 3%%)")


def run(args: argparse.Namespace) -> int:
    from exeplan import api
    from exeplan.drift.save_proposal import save_proposal
    from exeplan.drift.trace import arrivals_of, look_times, play_trace
    from exeplan.drift.watch import Watch
    from exeplan.errors import InputError
    from exeplan.outputs import check_output
    from exeplan.planner.choice.optimize import resolve_policies
    from exeplan.planner.load_problem import other_times, plan_problem, read_plan
    from exeplan.planner.reports.tables import json_line
    from exeplan.progress import followed, note
    from exeplan.workload.arrivals import parse_rate
    from exeplan.workload.files import load_workload

    if args.output:
        check_output(args.output)
    plan = read_plan(args.plan)
    problem = plan_problem(plan, profile=args.profile or api.plan_profile(plan), workload=args.workload)
    if args.profile is None:
        note(other_times(plan, problem.profile))
    workload = load_workload(args.trace)
    if plan.fit_context:
        reference = args.workload or plan.workload or ""
        workload = workload.fit_context(problem.profile.model.max_context, like=load_workload(reference))
    if workload.trace is None:
        raise InputError(f"{args.trace} is a law, not a trace: there are no requests to play")
    note([f"workload {workload.name}: {workload.source}"])
    rate = parse_rate(args.rate, "--rate") if args.rate else None
    arrivals = arrivals_of(workload.trace, problem, plan, rate)
    policies = None if args.policy == "auto" else resolve_policies(args.policy, problem.cluster)
    watch = Watch(plan, problem, rules=rules_of(args), policies=policies)
    played = play_trace(watch, problem, workload.trace, arrivals, predict=args.json)
    looks = list(followed(played, "drift", count=len(look_times(watch, arrivals))))
    adopted = [look.adopted for look in looks if look.adopted]
    print(json_line(_as_json(plan, looks, workload.source)) if args.json else _text(plan, looks))
    if args.output and adopted:
        save_proposal(adopted[-1], args.output)
    if args.output and not adopted:
        raise InputError(f"no plan to write to {args.output}: none would have been adopted")
    return 0


def rules_of(args: argparse.Namespace) -> "Rules":
    """Of these options. Raises InputError."""
    from exeplan.drift.state import Rules
    from exeplan.errors import InputError
    from exeplan.units import seconds

    dwell, every = seconds(args.dwell, "--dwell"), seconds(args.every, "--every")
    if not _EVERY[0] <= every <= _EVERY[1]:
        raise InputError(f"--every must lie between 10 ms and 24 h, found '{args.every}'")
    try:
        gain = float(args.gain.removesuffix("%")) / (100 if args.gain.endswith("%") else 1)
    except ValueError:
        raise InputError(f"--gain must be a share such as 5% or 0.05, found '{args.gain}'") from None
    if not 0 <= gain < 10:
        raise InputError(f"--gain must lie between 0 % and 1000 %, found {args.gain}")
    return Rules(dwell=dwell, every=every, gain=gain)


def _text(plan: "Plan", looks: "list[TraceLook]") -> str:
    from exeplan.planner.reports.tables import table
    from exeplan.units import show_seconds

    last = looks[-1].state if looks else None
    count = looks[-1].num_arrived if looks else 0
    lines = [f"{count} request{'' if count == 1 else 's'} under {plan.schedule}"]
    rows = []
    for look in looks:
        if (found := look.adopted) is None:
            continue
        gain = f"{100 * (found.new.throughput / found.old.throughput - 1):+.1f} %" if found.old else "-"
        latencies = [show_seconds(e.latency) if e else "-" for e in (found.old, found.new)]
        when = show_seconds(look.state.seconds)
        rows.append((when, str(look.num_arrived), str(found.plan.schedule), gain, *latencies, found.reason))
    if rows:
        header = ("when", "requests", "new plan", "gain", "old latency", "new latency", "why")
        lines += ["", table(header, rows)]
    else:
        lines.append("no re-plan")
    furthest = max((look.state.measure for look in looks), default=0.0)
    lines += ["", f"largest drift measure {furthest:.2f} (above 1 the lengths have changed)"]
    if last:
        if last.missed:
            lines.append(f"no plan keeps the bound: the tightest that a plan keeps is {last.missed:.3g} times as wide")
        lines.append(f"at the end: {'just re-planned' if looks[-1].adopted else last.verdict}")
    return "\n".join(lines)


def _as_json(plan: "Plan", looks: "list[TraceLook]", source: str) -> dict[str, Any]:
    from dataclasses import asdict

    from exeplan.core.plan import as_json

    replans = [
        {
            "seconds": look.state.seconds,
            "requests": look.num_arrived,
            "reason": found.reason,
            "plan": as_json(found.plan),
            "old": found.old.to_dict() if found.old else None,
            "new": found.new.to_dict(),
            "gain": found.new.throughput / found.old.throughput - 1 if found.old else None,
            "moving_seconds": found.moving_seconds,
        }
        for look in looks
        if (found := look.adopted)
    ]
    states = [{**asdict(look.state), "requests": look.num_arrived} for look in looks]
    return {"plan": as_json(plan), "workload_source": source, "replans": replans, "looks": states}
