"""replay a plan request by request, closed form and replay side by side

Fills in the estimate of a plan that was written by hand (model, schedule and placement suffice, with --profile and
--workload). Exit status 2 when the replay breaks the plan's bound.
"""

import argparse
from dataclasses import replace
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, metavar="PLAN")
    parser.add_argument("--profile", metavar="FILE", help="instead of the plan's own")
    parser.add_argument("--workload", metavar="W", help="instead of the plan's own")
    parser.add_argument("--cluster", metavar="C", help="instead of the plan's own; one node where there is none")
    parser.add_argument(
        "--requests", type=int, metavar="N", help="requests to replay (default: enough for a steady window)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--steady-state",
        choices=("comb", "paper"),
        default="comb",
        help="how the closed form fills a batch: exactly (default), or by ExeGPT's formula, to reproduce its figures",
    )
    parser.add_argument(
        "--timeline", type=Path, metavar="FILE", help="write the passes (.json for Perfetto; .png, .svg, .pdf)"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="PLAN", help="write the plan with its estimate filled in")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    from exeplan.core.bounds import binding
    from exeplan.core.plan import as_json, save_plan
    from exeplan.errors import InputError
    from exeplan.planner.load_problem import plan_problem, read_plan, refer
    from exeplan.planner.problem import drift_headroom, kv_cache_tokens, rate_headroom, replay_estimate
    from exeplan.planner.tables import json_line, side_by_side
    from exeplan.simulator.closed_form import steady_state
    from exeplan.simulator.timeline import write_timeline

    if args.requests is not None and args.requests < 1:
        raise InputError(f"--requests must be at least 1, found {args.requests}")
    if args.seed < 0:
        raise InputError(f"--seed must be at least 0, found {args.seed}")
    if args.output and args.steady_state == "paper":
        raise InputError(
            "--steady-state paper reproduces figures; plans are written with the exact steady state (comb)"
        )
    plan = read_plan(args.plan)
    problem = plan_problem(plan, profile=args.profile, workload=args.workload, cluster=args.cluster)
    if args.steady_state == "paper":
        problem = replace(problem, workload=replace(problem.workload, as_paper=True))
    schedule = plan.schedule
    run_, replayed = replay_estimate(
        problem, schedule, seed=args.seed, num_requests=args.requests, kv_tokens=plan.kv_cache_tokens
    )
    filled = replace(
        plan,
        estimate=problem.estimate(schedule),
        replay=replayed,
        drift_headroom=drift_headroom(problem, schedule),
        rate_headroom=rate_headroom(problem, schedule),
        kv_cache_tokens=plan.kv_cache_tokens or kv_cache_tokens(problem, schedule),
        model_fingerprint=problem.profile.model.fingerprint,
        profile_fingerprint=problem.profile.fingerprint,
        workload_fingerprint=problem.workload.fingerprint,
        dtype=plan.dtype or problem.profile.dtype,
        kv_dtype=plan.kv_dtype or problem.profile.kv_dtype,
        device=plan.device or problem.profile.device.kind,
        max_seqs=plan.max_seqs or problem.max_seqs,
    )
    if args.timeline:
        write_timeline(run_, args.timeline, title=f"{schedule} on {problem.workload.name}, predicted")
    if args.output:
        # Both are there, or the plan could not have been replayed.
        workload, profile = args.workload or plan.workload or "", args.profile or plan.profile or ""
        cluster = args.cluster or plan.cluster
        saved = replace(
            filled,
            model=refer(plan.model, args.output),
            workload=refer(workload, args.output),
            profile=refer(profile, args.output),
            cluster=refer(cluster, args.output) if cluster else None,
            gpus=None if args.cluster else plan.gpus,
        )
        save_plan(saved, args.output)
    full = binding(problem.bounds, replayed)
    broken = full is not None and full[1] > 1
    if args.json:
        beyond = problem.cost.beyond(steady_state(schedule, problem.workload, problem.cost).cycle)
        print(json_line({**as_json(filled), "preemptions": run_.num_preemptions, "extrapolated": beyond}))
    else:
        print(f"{schedule} on {problem.workload.name}, {len(run_.requests)} requests, {len(run_.passes)} passes\n")
        print(side_by_side(closed_form=filled.estimate, replay=replayed))
        if full is not None and broken:
            print(f"\nthe replay breaks the {full[0]}")
    return 2 if broken else 0
