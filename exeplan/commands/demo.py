"""profile, optimize, serve and bench a small model on this machine: predicted against measured

Profiles the demo model on the CPU, plans it for each policy under one latency bound and one workload, serves each plan,
plays the workload against the server, and prints predicted beside measured. About two minutes on two cores.
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exeplan.core.plan import Plan
    from exeplan.core.schedule import Estimate
    from exeplan.planner.problem import Problem

POLICIES = ("static", "orca", "rra")
_BOUND_FACTOR = 4.0
"""The demo's bound over what one request alone needs, so that there is something to trade on any machine."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", type=Path, default=Path("exeplan-demo"), help="where profile and plans go")
    parser.add_argument("--model", default="demo", help="a shipped name or a model directory")
    parser.add_argument("--workload", default="alpaca", metavar="W")
    parser.add_argument("--latency-bound", metavar="TIME", help="default: four times what one request alone needs")
    parser.add_argument("--budget", default="40s", metavar="TIME", help="for profiling (default 40s)")
    parser.add_argument("--duration", default="16s", metavar="TIME", help="of each load (default 16s)")


def run(args: argparse.Namespace) -> int:
    from exeplan.units import seconds, show_seconds

    duration, budget = seconds(args.duration), seconds(args.budget)
    profile = args.dir / f"{Path(args.model).name}.profile.json"
    _say(f"1. profile {args.model} for at most {show_seconds(budget)}")
    _exeplan("profile", args.model, "-o", str(profile), "--budget", args.budget)
    problem = _problem(args, profile)
    bound = show_seconds(problem.bound.seconds)
    workload = problem.workload
    length = workload.output_quantile(0.99)
    _say(f"2. optimize for {workload.name} under {bound} for the 99th-percentile output of {length} tokens")
    rows = []
    for policy in POLICIES:
        plan, path = _plan(args, problem, policy)
        _say(f"3. serve {plan.schedule} and play {show_seconds(duration)} of load against it")
        rows.append((plan, _measured(args, problem, plan, path, duration)))
    device = problem.profile.device.name
    _say(f"predicted against measured: {problem.profile.model.name} on {device}, {workload.name}, bound {bound}")
    print(_table(rows))
    print(f"\nprofile and plans are in {args.dir}; next: exeplan serve {args.dir}/rra.yaml")
    return 0


def _say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def _exeplan(*arguments: str) -> None:
    status = subprocess.run([sys.executable, "-m", "exeplan", *arguments], check=False).returncode
    if status:
        raise SystemExit(status)


def _problem(args: argparse.Namespace, profile: Path) -> "Problem":
    import numpy as np

    from exeplan.core.bounds import Bound
    from exeplan.core.profile import load_profile
    from exeplan.core.schedule import Schedule
    from exeplan.planner.load_problem import fitted
    from exeplan.planner.problem import make_problem
    from exeplan.units import seconds
    from exeplan.workload.files import load_workload

    measured = load_profile(profile)
    workload = fitted(load_workload(args.workload), measured.model, fit=True)
    problem = make_problem(measured, workload, Bound(seconds=np.inf))
    if args.latency_bound:
        return replace(problem, bound=Bound(seconds=seconds(args.latency_bound)))
    alone = problem.evaluate(Schedule("static", {"batch_size": 1})).latency
    return replace(problem, bound=Bound(seconds=float(f"{_BOUND_FACTOR * alone:.1g}")))


def _plan(args: argparse.Namespace, problem: "Problem", policy: str) -> "tuple[Plan, Path]":
    from exeplan.core.plan import save_plan
    from exeplan.planner.load_problem import refer
    from exeplan.planner.optimize import optimize

    path = args.dir / f"{policy}.yaml"
    plan = optimize(problem, policies=(policy,)).plan
    profile = str(args.dir / f"{Path(args.model).name}.profile.json")
    saved = replace(
        plan,
        model=refer(args.model, path),
        workload=refer(args.workload, path),
        profile=refer(profile, path),
        fit_context=True,
    )
    save_plan(saved, path)
    return plan, path


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
