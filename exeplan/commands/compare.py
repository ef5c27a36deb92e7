"""optimize several models, clusters, workloads and bounds, as one table

Profiles are matched to clusters by their device; without --cluster each stands for one device. A row without a plan
says why below the table. Exit status 2 when no row has a plan.
"""

import argparse
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exeplan.core.bounds import Bound
    from exeplan.core.cluster import Cluster
    from exeplan.core.profile import Profile
    from exeplan.planner.comparison import Comparison


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profile", required=True, nargs="+", metavar="FILE", help="profiles, one a model and device")
    parser.add_argument("--cluster", nargs="+", default=[], metavar="C", help="cluster files or shipped names")
    parser.add_argument("--gpus", metavar="N,N", help="only so many GPUs of each cluster, such as 2,4,8")
    parser.add_argument("--workload", required=True, nargs="+", metavar="W", help="trace files, shipped names, or laws")
    parser.add_argument("--latency-bound", required=True, metavar="T,T", help="such as 5s,10s,inf")
    parser.add_argument("--bound-on", default="p99-length", metavar="WHAT", help="p99-length (default) or p99-requests")
    parser.add_argument(
        "--policy", default="auto", help="a policy, a file such as ./mine.py, or auto for the best of all (default)"
    )
    parser.add_argument("--fit-context", action="store_true", help="scale the lengths to each model's context")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the rows as CSV too")
    parser.add_argument("--json", action="store_true", help="print one JSON object a row instead of a table")


def run(args: argparse.Namespace) -> int:
    from exeplan.files import write_text
    from exeplan.planner.comparison import as_json, comparison_table, csv_text
    from exeplan.planner.tables import json_line

    rows = _rows(args)
    if args.csv:
        write_text(args.csv, csv_text(rows))
    if args.json:
        print(json_line({"rows": [as_json(row) for row in rows]}))
    else:
        print(comparison_table(rows))
    return 0 if any(row.schedule for row in rows) else 2


def _rows(args: argparse.Namespace) -> "list[Comparison]":
    from exeplan.core.profile import load_profile
    from exeplan.planner.comparison import compare
    from exeplan.planner.load_problem import fitted
    from exeplan.planner.optimize import resolve_policies
    from exeplan.workload.files import load_workload

    bounds = _bounds(args.latency_bound, args.bound_on)
    resolve_policies(args.policy)  # A wrong name is refused before anything is searched.
    pairs = _pairs([load_profile(Path(path)) for path in args.profile], args.cluster, _counts(args.gpus))
    workloads = [load_workload(name) for name in args.workload]
    return [
        compare(profile, cluster, fitted(workload, profile.model, fit=args.fit_context), bound, policy=args.policy)
        for (profile, cluster), workload, bound in product(pairs, workloads, bounds)
    ]


def _bounds(text: str, about: str) -> "list[Bound]":
    from exeplan.core.bounds import Bound, check_together
    from exeplan.units import seconds

    bounds = [Bound(seconds=seconds(word, "--latency-bound"), metric=about) for word in text.split(",")]
    check_together(bounds[:1])
    return bounds


def _counts(text: str | None) -> list[int]:
    from exeplan.errors import InputError

    words = text.split(",") if text is not None else []
    if not all(word.strip().isascii() and word.strip().isdigit() and int(word) > 0 for word in words):
        raise InputError(f"--gpus must be whole numbers such as 2,4,8, found '{text}'")
    return [int(word) for word in words]


def _pairs(
    profiles: "Sequence[Profile]", references: Sequence[str], counts: Sequence[int]
) -> "Sequence[tuple[Profile, Cluster | None]]":
    """Every profile with the clusters of its device, or so many GPUs of them."""
    from exeplan.core.cluster import load_cluster
    from exeplan.errors import InputError
    from exeplan.planner.comparison import matched

    if not references:
        if counts:
            raise InputError("--gpus needs a --cluster")
        return [(profile, None) for profile in profiles]
    whole = matched(profiles, [load_cluster(reference) for reference in references])
    return [(p, part) for p, cluster in whole for part in ([cluster.part(n) for n in counts] or [cluster])]
