"""optimize several models, clusters, workloads, bounds and engines, as one table

Profiles are matched to clusters by their device; without --cluster each stands for one device. --model with --engine
has times by the datasheets of the clusters' devices. After the best settings of an engine comes a row of it without
options. A row without a plan says why below the table. Exit status 2 when no row has a plan.
"""

import argparse
from pathlib import Path

POSITION = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profile", nargs="+", default=[], metavar="FILE", help="profiles, one a model and device")
    parser.add_argument("--model", nargs="+", default=[], metavar="M", help="instead: times by datasheets, of --engine")
    parser.add_argument(
        "--engine", metavar="E,E", help="with --model: such as vllm,sglang,exeplan (default: exeplan, kernels alone)"
    )
    parser.add_argument("--cluster", nargs="+", default=[], metavar="C", help="cluster files or shipped names")
    parser.add_argument("--gpus", metavar="N,N", help="numbers of GPUs to take of each cluster, such as 2,4,8")
    parser.add_argument("--workload", required=True, nargs="+", metavar="W", help="trace files, shipped names, or laws")
    parser.add_argument("--latency-bound", required=True, metavar="T,T", help="such as 5s,10s,inf")
    parser.add_argument("--bound-on", default="p99-length", metavar="WHAT", help="p99-length (default) or p99-requests")
    parser.add_argument(
        "--policy",
        default="auto",
        help="a policy, a file such as ./mine.py, or auto for the best of those that apply",
    )
    parser.add_argument("--fit-context", action="store_true", help="scale the lengths to each model's context")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the rows as CSV too")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    from exeplan import api
    from exeplan.errors import InputError
    from exeplan.files import write_text
    from exeplan.outputs import check_output
    from exeplan.planner.comparison import as_json, csv_text
    from exeplan.planner.reports.tables import json_line
    from exeplan.progress import Shown, note

    if not args.profile and not args.model:
        raise InputError("give --profile FILE, or --model and --cluster for times by the datasheet of its devices")
    if args.engine and not args.model:
        raise InputError("--engine goes with --model; a profile has its engine's times already")
    if args.model and not args.cluster:
        raise InputError("--model needs a --cluster, by whose devices the times are")
    if args.csv:
        check_output(args.csv)
    with Shown("compare") as shown:
        comparison = api.compare(
            args.profile,
            args.workload,
            args.latency_bound.split(","),
            models=args.model,
            engines=list(dict.fromkeys((args.engine or "exeplan").split(","))),
            bound_on=args.bound_on,
            clusters=args.cluster,
            gpus=_counts(args.gpus),
            policy=args.policy,
            fit_context=args.fit_context,
            told=shown,
        )
    sources = dict.fromkeys((row.workload, row.workload_source) for row in comparison if row.workload_source)
    note(f"workload {name}: {source}" for name, source in sources)
    print(json_line({"rows": [as_json(row) for row in comparison]}) if args.json else comparison)
    if args.csv:
        write_text(args.csv, csv_text(comparison.rows))
    return 0 if any(row.plan for row in comparison) else 2


def _counts(text: str | None) -> list[int]:
    from exeplan.errors import InputError

    words = text.split(",") if text is not None else []
    if not all(word.strip().isascii() and word.strip().isdigit() and int(word) > 0 for word in words):
        raise InputError(f"--gpus must be whole numbers such as 2,4,8, found '{text}'")
    return [int(word) for word in words]
