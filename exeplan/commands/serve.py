"""serve a plan over an OpenAI-compatible HTTP API

Completions, chat completions, models, health, metrics and the plan itself. Listens on 127.0.0.1 unless told otherwise.
SIGTERM stops taking requests and finishes the running ones.
"""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, metavar="PLAN")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument("--api-key", metavar="KEY", help="required from clients (default: $EXEPLAN_API_KEY, or none)")
    parser.add_argument(
        "--max-queue", type=int, metavar="N", help="waiting requests before 429 (default: from the plan)"
    )
    parser.add_argument("--served-model-name", metavar="NAME", help="what clients call the model")
    parser.add_argument("--weights", choices=("auto", "dummy"), default="auto", help="dummy: random weights")
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="write what runs when, for Perfetto")
    parser.add_argument(
        "--deadline", metavar="TIME", help="a batch that takes longer means a hanging worker (default: from the plan)"
    )
    parser.add_argument(
        "--gpu-memory-utilization",
        type=float,
        metavar="SHARE",
        help="of each GPU's memory that may be in use (default: the plan's, 0.9)",
    )
    parser.add_argument("--drain", default="30s", metavar="TIME", help="time for running requests after SIGTERM")


def run(args: argparse.Namespace, hosts: Mapping[str, Any] | None = None) -> int:
    """`hosts` is what `python -m exeplan.runner` adds where a plan runs on several."""
    from exeplan.errors import InputError
    from exeplan.inputs import plan_model, read_plan
    from exeplan.plan import with_utilization
    from exeplan.runner.server import serve
    from exeplan.units import seconds

    if not 0 <= args.port <= 65535:
        raise InputError(f"--port must lie between 0 and 65535, found {args.port}")
    plan = with_utilization(read_plan(args.plan), args.gpu_memory_utilization)
    spec = plan_model(plan)
    return serve(
        plan,
        spec,
        host=args.host,
        port=args.port,
        api_key=args.api_key or os.environ.get("EXEPLAN_API_KEY"),
        max_queue=args.max_queue,
        served_model_name=args.served_model_name,
        dummy_weights=args.weights == "dummy",
        drain_seconds=seconds(args.drain, "--drain"),
        timeline=args.timeline,
        deadline_seconds=seconds(args.deadline, "--deadline") if args.deadline else None,
        hosts=hosts,
    )
