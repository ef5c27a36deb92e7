"""show what a new plan changes, what it gains and what moving to it costs

Both plans must be for models of one shape. Gains are those of the plans' estimates.
"""

import argparse
from pathlib import Path

POSITION = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", type=Path, metavar="OLD")
    parser.add_argument("new", type=Path, metavar="NEW")
    parser.add_argument(
        "--load-bandwidth",
        metavar="SIZE",
        help="bytes of weights that one GPU loads in a second (default: 5GB from host memory and 0.93GB from disk, as "
        "ExeGPT's Table 4 has it)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    from exeplan.planner.load_problem import plan_sizes, read_plan
    from exeplan.planner.reports.plan_diff import DRAM_BYTES_PER_SECOND, SSD_BYTES_PER_SECOND, diff_plans
    from exeplan.planner.reports.plan_diff_text import as_json, diff_text
    from exeplan.planner.reports.tables import json_line
    from exeplan.units import num_bytes

    speeds = {"from host memory": DRAM_BYTES_PER_SECOND, "from disk": SSD_BYTES_PER_SECOND}
    if args.load_bandwidth:
        speeds = {f"at {args.load_bandwidth}/s": float(num_bytes(args.load_bandwidth, "--load-bandwidth"))}
    old, new = read_plan(args.old), read_plan(args.new)
    diff = diff_plans(old, new, plan_sizes(old), plan_sizes(new), bytes_per_second=speeds)
    print(json_line(as_json(diff)) if args.json else diff_text(diff))
    return 0
