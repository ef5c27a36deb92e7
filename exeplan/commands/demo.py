"""profile, optimize, serve and bench a small model on this machine: predicted against measured

Profiles the demo model on the CPU, plans it for each policy under one latency bound and one workload, serves each plan,
plays the workload against the server, and prints predicted against measured. About two minutes on two cores.
"""

import argparse
import contextlib
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from exeplan.extras import SERVING, require

if TYPE_CHECKING:
    from exeplan.core.plan import Plan
    from exeplan.core.schedule import Estimate
    from exeplan.planner.plan_request import PlanRequest
    from exeplan.planner.problem import Problem

POSITION = 90
POLICIES = ("static", "orca", "rra")
_BOUND_FACTOR = 4.0
"""The demo's bound over what one request alone needs, so that there is a trade-off on any machine."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", type=Path, default=Path("exeplan-demo"), help="where profile and plans go")
    parser.add_argument("--model", default="demo", help="a shipped name or a model directory")
    parser.add_argument("--workload", default="alpaca", metavar="W")
    parser.add_argument("--latency-bound", metavar="TIME", help="default: four times what one request alone needs")
    parser.add_argument("--budget", default="40s", metavar="TIME", help="for profiling (default 40s)")
    parser.add_argument("--duration", default="16s", metavar="TIME", help="of each load (default 16s)")


def run(args: argparse.Namespace) -> int:
    from exeplan.planner.solution import solve
    from exeplan.units import seconds, show_seconds

    require("the demo", *SERVING, "aiohttp")
    duration, budget = seconds(args.duration), seconds(args.budget)
    profile = args.dir / f"{Path(args.model).name}.profile.json"
    _say(f"1. profile {args.model} for at most {show_seconds(budget)}")
    _exeplan("profile", args.model, "-o", str(profile), "--budget", args.budget)
    request = _request(args, profile)
    problem = request.problem(None)
    bound = show_seconds(problem.bound.seconds)
    workload = problem.workload
    length = workload.output_quantile(0.99)
    _say(f"2. optimize for {workload.name} under {bound} for the 99th-percentile output of {length} tokens")
    rows = []
    for policy in POLICIES:
        path = args.dir / f"{policy}.yaml"
        plan = solve(replace(request, policy=policy)).save(path)
        _say(f"3. serve {plan.schedule} and play {show_seconds(duration)} of load against it")
        rows.append((plan, _measured(args, problem, plan, path, duration)))
    device = problem.profile.device.name
    _say(f"predicted against measured: {problem.profile.model.name} on {device}, {workload.name}, bound {bound}")
    print(_table(rows))
    for plan, measured in rows:
        for note in measured.notes:
            print(f"\n{plan.schedule}: {note}")
    print(f"\nprofile and plans are in {args.dir}; next: exeplan serve {args.dir}/rra.yaml")
    return 0


def _say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def _exeplan(*arguments: str) -> None:
    status = subprocess.run([sys.executable, "-m", "exeplan", *arguments], check=False).returncode
    if status:
        raise SystemExit(status)


def _request(args: argparse.Namespace, profile: Path) -> "PlanRequest":
    """The demo's problem; without a bound given, under one that a request alone meets several times over."""
    from exeplan import api
    from exeplan.core.bounds import Bound
    from exeplan.core.schedule import Schedule
    from exeplan.planner.plan_request import PlanRequest
    from exeplan.units import seconds

    measured = api.load_profile(profile)
    asked = PlanRequest(
        profile=replace(measured, model=api.load_model(args.model)),
        workload=api.load_workload(args.workload),
        fit_context=True,
        bounds=(Bound(seconds=math.inf),),
    )
    if args.latency_bound:
        return replace(asked, bounds=(Bound(seconds=seconds(args.latency_bound)),))
    alone = asked.problem(None).evaluate(Schedule("static", {"batch_size": 1})).latency
    return replace(asked, bounds=(Bound(seconds=float(f"{_BOUND_FACTOR * alone:.1g}")),))


def _measured(args: argparse.Namespace, problem: "Problem", plan: "Plan", path: Path, duration: float) -> "Estimate":
    import asyncio

    from exeplan.core.metrics import summarize
    from exeplan.runner.load import draw_load, enough_requests, play_url, served_model

    assert plan.estimate is not None
    throughput = plan.estimate.throughput
    number = enough_requests(plan.schedule, throughput=throughput, seconds=duration)
    load = draw_load(problem.workload, number)
    with served(path, max_queue=len(load.input_tokens)) as url:
        vocab_size = problem.profile.model.vocab_size
        records = asyncio.run(play_url(url, load, model=served_model(url), vocab_size=vocab_size, stream=False))
    return summarize(records, p99_output=problem.workload.output_quantile(0.99))


@contextlib.contextmanager
def served(plan: Path, *, max_queue: int) -> Iterator[str]:
    """The base URL of a server that runs the plan in a process of its own, until the block ends."""
    command = [sys.executable, "-m", "exeplan", "serve", str(plan), "--port", "0", "--max-queue", str(max_queue)]
    command += ["--log-level", "warning", "--replan", "off"]  # Nothing else is to compute while this measures.
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        assert server.stdout is not None
        for line in server.stdout:
            if found := re.search(r"http://\S+", line):
                print(f"   {line.strip()}", flush=True)
                yield found[0].rstrip(".,")
                break
        else:
            raise SystemExit(server.wait() or 1)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)


def _table(rows: "list[tuple[Plan, Estimate]]") -> str:
    from exeplan.planner.tables import error_percent, table
    from exeplan.units import show_seconds

    header = (
        "",
        "req/s predicted",
        "measured",
        "error",
        "latency predicted",
        "measured",
        "error",
        "ttft predicted",
        "measured",
    )
    cells = []
    for plan, measured in rows:
        predicted = plan.estimate
        assert predicted is not None
        cells.append(
            (
                str(plan.schedule),
                f"{predicted.throughput:.3g}",
                f"{measured.throughput:.3g}",
                error_percent(predicted.throughput, measured.throughput),
                show_seconds(predicted.latency),
                show_seconds(measured.latency),
                error_percent(predicted.latency, measured.latency),
                show_seconds(predicted.ttft),
                show_seconds(measured.ttft),
            )
        )
    return table(header, cells)
