"""replay a plan request by request, closed form and replay side by side

Fills in the estimate of a plan that was written by hand (model, schedule and placement suffice, with --profile and
--workload). Exit status 2 when the replay breaks a bound of the plan, or its passes one on gaps.
"""

import argparse
from dataclasses import asdict
from functools import partial
from pathlib import Path

POSITION = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, metavar="PLAN")
    parser.add_argument("--profile", metavar="FILE", help="instead of the plan's own")
    parser.add_argument("--workload", metavar="W", help="instead of the plan's own")
    parser.add_argument("--cluster", metavar="C", help="instead of the plan's own; one node where there is none")
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--arrival-rate",
        metavar="R",
        help="requests/s that arrive, Poisson, whatever the plan was made for; waiting then counts in all bounds",
    )
    load.add_argument("--arrivals", choices=("trace",), help="requests arrive at the times of the workload's trace")
    parser.add_argument(
        "--requests",
        type=int,
        metavar="N",
        help="requests to replay, at most ten million (default: enough for a steady window)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--steady-state",
        choices=("comb", "paper"),
        default="comb",
        help="how the closed form fills a batch: exactly (default), or by ExeGPT's formula, to reproduce its figures",
    )
    parser.add_argument(
        "--timeline",
        type=Path,
        metavar="FILE",
        help="write the passes, of the first replica (.json for Perfetto; .png, .svg, .pdf)",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="PLAN", help="write the plan with its estimate filled in")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    from exeplan import api
    from exeplan.core.plan import as_json, bound_json
    from exeplan.outputs import check_output, refuse, unwritten
    from exeplan.planner.load_problem import other_times, read_plan
    from exeplan.planner.reports.tables import evidence_rows, json_line
    from exeplan.planner.simulation import check_saved
    from exeplan.progress import Shown, note
    from exeplan.simulator.timeline import check_timeline

    if args.output:
        check_saved(args.steady_state)
    if args.timeline:
        check_timeline(args.timeline)
    for path in filter(None, (args.timeline, args.output)):
        check_output(path)
    options = ("profile", "workload", "cluster", "arrival_rate", "arrivals", "requests", "seed", "steady_state")
    with Shown("simulate") as shown:
        simulation = api.simulate(args.plan, **{name: getattr(args, name) for name in options}, told=shown)
    if args.profile is None:
        note(other_times(read_plan(args.plan), simulation.request.profile))
    if args.json:
        more = {"preemptions": simulation.whole.num_preemptions, "extrapolated": simulation.extrapolated}
        more["groups"] = [one.to_dict() for one in simulation.groups]
        more["full_batches"] = asdict(simulation.full) if simulation.full else None
        more["broken_bound"] = bound_json(simulation.broken_bound) if simulation.broken_bound else None
        more["workload_source"] = simulation.problem.workload.source or None
        more["trace_part"] = asdict(simulation.trace_part) if simulation.trace_part else None
        more["evidence"] = evidence_rows(replay=simulation.plan.replay)
        print(json_line({**as_json(simulation.request.named(simulation.plan)), **more}))
    else:
        print(simulation)
    files = ((args.timeline, simulation.write_timeline), (args.output, simulation.save))
    failed = unwritten({path: partial(write, path) for path, write in files if path})
    if not args.json:
        for path, _ in files:
            if path and path not in failed:
                print(f"wrote {path}")
    refuse(failed)
    return 2 if simulation.broken_bound else 0
