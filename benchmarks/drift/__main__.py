"""Drifting and stationary traces served without re-planning, with re-planning, and with a plan made in hindsight.

    python -m benchmarks.drift --data FOLDER [--traces NAME ...] [--seconds 180]

Every `drift-*.csv` of the folder and the two stationary traces are played against the engine of the demo model on one
CPU. Lengths are scaled to means at which the engine serves dozens of requests a second, and every n-th row is taken so
that a run lasts about `--seconds`. The plan is made from the first part of the rows (`--planned`). Its bound is
`--slack` times the latency of a request of the 99th-percentile length that runs alone. The other rows are played in
order as a backlog, because a plan's throughput is defined for a backlog. The plan in hindsight is made from the rows
that are played, under a bound tight enough that 99 % of them are predicted to meet it: a plan for the mean of the trace
would break the bound while outputs are longest. The bound applies from the start of a request's prefill.

Prints for each run the share of requests within the bound, the lowest share in a window of one dwell time, the share in
the last two thirds, the throughput, and the times of the re-plans. Writes records/drift.json.
"""

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.drift.figures import AHEAD, Served, figures_of
from benchmarks.drift.predicted import play_predicted
from benchmarks.lib.record import write_record
from exeplan.core.bounds import Bound
from exeplan.core.models.model import ModelSpec
from exeplan.core.plan import Plan, save_plan
from exeplan.core.profile import Profile, load_profile
from exeplan.core.schedule import Schedule
from exeplan.drift.state import Rules
from exeplan.errors import Infeasible
from exeplan.planner.choice.optimize import optimize, resolve_policies
from exeplan.planner.load_problem import read_plan
from exeplan.planner.problems.problem import Problem, make_problem
from exeplan.planner.reports.tables import table
from exeplan.runner.compute.tokens.sampling import SamplingParams
from exeplan.runner.engine_process.build import engine_setup
from exeplan.runner.engine_process.client import EngineClient
from exeplan.runner.ipc.messages import EngineSetup, Prompt, Sampling
from exeplan.runner.replan.replanner import Replanner
from exeplan.simulator.closed_form import steady_state
from exeplan.workload.files import load_workload
from exeplan.workload.workload import Trace, Workload

STATIONARY = ("azure-2023-code", "mooncake-conv")
RUNS = ("as planned", "re-planned", "hindsight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="a folder with drift-*.csv and other traces")
    parser.add_argument("--traces", nargs="*", help="names without .csv (default: all that drift, and two that do not)")
    parser.add_argument("--profile", type=Path, help="of the demo model (default: made now)")
    parser.add_argument("--seconds", type=float, default=180.0, help="of a run, about")
    parser.add_argument("--dwell", type=float, default=30.0)
    parser.add_argument("--planned", type=float, default=0.2, help="share of the rows that the plan is made from")
    parser.add_argument("--slack", type=float, default=3.0)
    parser.add_argument("--means", type=float, nargs=2, default=(48.0, 32.0), metavar=("IN", "OUT"))
    parser.add_argument("--predicted", action="store_true", help="on a device that takes as long as predicted")
    parser.add_argument("--slowdown", type=float, default=1.0, help="with --predicted: factor on every batch time")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        profile = load_profile(args.profile or _profiled(Path(folder)))
        names = args.traces or [*sorted(p.stem for p in args.data.glob("drift-*.csv")), *STATIONARY]
        results = [_trace(args, profile, name, Path(folder)) for name in names]
    rows = [row for result in results for row in _rows(result)]
    print(table(("trace", "run", "in bound", "worst window", "last 2/3", "req/s", "re-plans"), rows))
    figures = {"options": _plain(args), "traces": results}
    device = "-predicted" if args.predicted else ""
    record = write_record(f"drift{device}", figures)
    print(f"\nrecord: {record}")


def _profiled(folder: Path) -> Path:
    path = folder / "demo.json"
    subprocess.run([sys.executable, "-m", "exeplan", "profile", "demo", "-o", str(path), "--budget", "60s"], check=True)
    return path


def _trace(args: argparse.Namespace, profile: Profile, name: str, folder: Path) -> dict[str, Any]:
    trace = _scaled(load_workload(str(args.data / f"{name}.csv")), args.means, profile.model.max_context)
    first = int(args.planned * len(trace.inputs))
    before, after = _part(trace, slice(0, first)), _part(trace, slice(first, None))
    planned = _problem(profile, before, folder / f"{name}-planned.csv", args.slack)
    plan = _plan(planned, folder / f"{name}-planned.csv", folder, args)
    hindsight = _problem(profile, after, folder / f"{name}-played.csv", args.slack, bound=planned.bound)
    best = _plan(hindsight, folder / f"{name}-played.csv", folder, args)
    # As many rows as the plan serves in that time, spread evenly over the rest of the trace.
    count = min(int(best.replay.throughput * args.seconds), len(after.inputs)) if best.replay else len(after.inputs)
    chosen = np.linspace(0, len(after.inputs) - 1, count).astype(int)
    played = Trace(after.inputs[chosen], after.outputs[chosen])
    best = _kept_in_hindsight(hindsight, best, played, folder / f"{name}-played.csv", folder, args)
    found = {"trace": name, "bound_s": planned.bound.seconds, "requests": count, "plan": str(plan.schedule)}
    for run in RUNS:
        served = plan if run != "hindsight" else best
        rules = Rules(dwell=args.dwell, every=2.0) if run == "re-planned" else None
        if args.predicted:
            done, replans = play_predicted(served, played, rules=rules, slowdown=args.slowdown)
        else:
            done, replans = asyncio.run(_play(rules, profile.model, served, played, folder))
        found[run] = {**figures_of(done, planned.bound.seconds, args.dwell), "replans": replans}
        print(name, run, found[run], flush=True)
    return {**found, "hindsight plan": str(best.schedule)}


def _kept_in_hindsight(
    problem: Problem, best: Plan, played: Trace, workload: Path, folder: Path, args: argparse.Namespace
) -> Plan:
    """The best plan that keeps 99 % of what is played within the bound, on a device that is as slow as this one."""
    bound = problem.bound.seconds
    for factor in (1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6):
        tighter = problem.held_to([Bound(seconds=factor * bound)])
        best = replace(_plan(tighter, workload, folder, args), bound=problem.bound)
        served, _ = play_predicted(best, played, rules=None, slowdown=args.slowdown)
        if figures_of(served, bound, args.dwell)["in_bound"] >= 0.99:
            return best
    return best


def _scaled(workload: Workload, means: tuple[float, float], context: int) -> Trace:
    trace = workload.trace
    assert trace is not None
    sides = zip((trace.inputs, trace.outputs), means, strict=True)
    inputs, outputs = (np.maximum(np.rint(side * mean / side.mean()), 1).astype(np.int64) for side, mean in sides)
    return Trace(np.minimum(inputs, context // 2), np.minimum(outputs, context // 2 - 1))


def _part(trace: Trace, rows: slice) -> Trace:
    return Trace(trace.inputs[rows], trace.outputs[rows])


def _problem(profile: Profile, trace: Trace, path: Path, slack: float, bound: Bound | None = None) -> Problem:
    rows = "\n".join(f"{i},{o}" for i, o in zip(trace.inputs, trace.outputs, strict=True))
    path.write_text(f"input_tokens,output_tokens\n{rows}\n")
    problem = make_problem(profile, load_workload(str(path)), bound or Bound(seconds=np.inf))
    if bound is None:
        alone = steady_state(Schedule("orca", {"max_num_seqs": 1}), problem.workload, problem.cost)
        problem = replace(problem, bound=Bound(seconds=round(slack * alone.bound_latency("p99-length"), 3)))
    return problem


def _plan(problem: Problem, workload: Path, folder: Path, args: argparse.Namespace) -> Plan:
    try:
        plan = optimize(problem, policies=resolve_policies("auto"), advise=False).plan
    except Infeasible as error:
        raise SystemExit(f"{workload.stem}: {error}; a larger --slack may do") from None
    profile = args.profile or folder / "demo.json"
    plan = replace(plan, workload=str(workload), profile=str(profile.resolve()))
    save_plan(plan, folder / f"{workload.stem}.yaml")
    return read_plan(folder / f"{workload.stem}.yaml")


async def _play(
    rules: Rules | None, spec: ModelSpec, plan: Plan, trace: Trace, folder: Path
) -> tuple[list[Served], list[tuple[float, str, str]]]:
    def setup(other: Plan) -> EngineSetup:
        return engine_setup(other, spec, dummy_weights=True)

    client = await EngineClient.start(setup(plan))
    replans: list[tuple[float, str, str]] = []
    mode, file = "auto" if rules else "off", folder / "replanned.yaml"
    replanner = Replanner(client, plan, spec, setup=setup, mode=mode, rules=rules, file=file)
    began = time.perf_counter()

    def note(kind: str, what: Any) -> None:
        if kind == "adopted":
            replans.append((round(time.perf_counter() - began, 1), str(what.plan.schedule), what.reason))

    replanner.on_event = note
    replanner.start()
    try:
        served = await _backlog(client, spec, trace)
    finally:
        await replanner.close()
        await client.close()
    return served, replans


async def _backlog(client: EngineClient, spec: ModelSpec, trace: Trace) -> list[Served]:
    """All requests in order, as a backlog."""
    ahead = asyncio.Semaphore(AHEAD)
    served: list[Served] = []
    draw = np.random.default_rng(0)

    async def one(prompt: list[int], count: int) -> None:
        job = client.reserve(1)
        sampling = Sampling(**asdict(SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)))
        client.submit(job, [Prompt(prompt_token_ids=prompt, sampling=sampling)], stream=False)
        begun = False
        while True:
            for event in await job.next_events():
                if not begun:
                    begun = True
                    ahead.release()
                if event.finish_reason:
                    client.release(job)
                    served.append(Served(event.start, event.time))
                    return

    asking = []
    for inputs, outputs in zip(trace.inputs.tolist(), trace.outputs.tolist(), strict=True):
        await ahead.acquire()
        prompt = draw.integers(100, spec.vocab_size, inputs).tolist()
        asking.append(asyncio.create_task(one(prompt, outputs)))
    await asyncio.gather(*asking)
    return served


def _rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    found = []
    for run in RUNS:
        one = result[run]
        shares = (one["in_bound"], min(one["windows"]), one["last_in_bound"])
        replans = "; ".join(f"{when:.0f} s {schedule}" for when, schedule, _ in one["replans"]) or "-"
        found.append(
            (result["trace"], run, *(f"{100 * share:.2f} %" for share in shares), f"{one['throughput']:.2f}", replans)
        )
    return found


def _plain(args: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(args).items() if name not in ("data", "profile")}


if __name__ == "__main__":
    main()
