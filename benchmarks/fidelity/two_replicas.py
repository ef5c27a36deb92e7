"""Predicted against measured behind a router: one engine and two, over HTTP, on the road that a user takes.

    python -m benchmarks.fidelity.two_replicas [--model demo llama-50m] [--workload alpaca] [--slack 8]
        [--duration 20] [--rounds 3] [--budget 90s]

`exeplan profile --devices 2`, `optimize --gpus 2`, `serve` and `bench --url`, each as a command. The plan has to be one
of two replicas, each an engine process of one thread; the same plan with one of them is served in turn with it. The
bound is `--slack` times what one request alone needs. What is
predicted is the replay of just the requests that are sent, behind the same router. What was measured is as the client
saw it, and at the speed that the machine had while it was profiled, which reference passes of the engines tell (`serve
--watch-speed`). On two cores the front end and the load have no core of their own: with two replicas the engines wait
for them, which no plan of engines alone foresees, and which reference passes see in part.

Writes records/fidelity-replicas.json. Not here: where the CPU seconds go (`benchmarks/service/replica_cost.py`).
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engine.throughput import VOCABULARY, make_checkpoint
from benchmarks.fidelity.bench_runs import errors_of
from benchmarks.fidelity.one_device import bound_of
from benchmarks.lib.record import write_record
from benchmarks.lib.vllm_server import write_tokenizer
from benchmarks.service.serving import served
from exeplan.core.models.model import load_model_spec
from exeplan.core.plan import save_plan, single_plans
from exeplan.core.profile import load_profile
from exeplan.planner.load_problem import fitted, profile_for, read_plan
from exeplan.planner.reports.tables import table
from exeplan.workload.files import load_workload

_KINDS = {"replay": "predicted", "measured": "measured", "measured_at_profile_speed": "at profiling speed"}
_FIGURES = ("throughput", "latency")
_HEADER = (
    *("model", "engines", "schedule"),
    *("requests/s, predicted", "measured", "error", "at profiling speed", "error"),
    *("latency, s, predicted", "measured", "error", "at profiling speed", "error"),
)
_EXEPLAN = [sys.executable, "-m", "exeplan"]
_MAX_QUEUE = 20_000
"""Requests that a server accepts at once: the whole backlog."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=["demo", "llama-50m"])
    parser.add_argument("--workload", default="alpaca")
    parser.add_argument("--slack", type=float, default=8.0, help="bound over what one request alone needs")
    parser.add_argument("--duration", type=float, default=20.0, help="seconds of each run, about")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", default="90s", help="of each profile")
    args = parser.parse_args()
    rows = [row for model in args.model for row in _rows(model, args)]
    print(f"\n{table(_HEADER, [_cells(row) for row in rows])}\n")
    gains = {model: _gains([row for row in rows if row["model"] == model]) for model in args.model}
    for model, gain in gains.items():
        print(f"{model}, two over one: " + ", ".join(f"{_KINDS[kind]} {value:.2f}" for kind, value in gain.items()))
    body = {**vars(args), "rows": rows, "two over one": gains}
    print(f"\nrecord: {write_record('fidelity-replicas', body)}")


def _rows(model: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Of one engine and of two."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plans = _plans(_model_in(folder, model), folder, args)
        runs: dict[int, list[dict[str, Any]]] = {count: [] for count in plans}
        for number in range(args.rounds):
            for count in sorted(plans, reverse=bool(number % 2)):
                runs[count].append(_run(plans[count], args.duration, seed=number))
                print(f"{model}: round {number + 1}/{args.rounds}, {count} engines", runs[count][-1], flush=True)
        for count, file in plans.items():
            yield {"model": model, "engines": count, "schedule": str(read_plan(file).schedule), "runs": runs[count]}


def _model_in(folder: Path, model: str) -> str:
    """As a command names it: what is shipped, or a checkpoint that is made."""
    if model == "demo":
        return model
    make_checkpoint(str(folder / "model"), model)
    write_tokenizer(folder / "model", VOCABULARY)
    return str(folder / "model")


def _plans(model: str, folder: Path, args: argparse.Namespace) -> dict[int, Path]:
    """The plan of two engines that `optimize` found, and the same of one."""
    profile, file, alone = folder / "profile.json", folder / "2.yaml", folder / "1.yaml"
    _exeplan("profile", model, "--devices", "2", "--budget", args.budget, "-o", str(profile))
    spec = load_model_spec(model)
    workload = fitted(load_workload(args.workload), spec, fit=True)
    bound = bound_of(profile_for(spec, load_profile(profile)), workload, args.slack)
    asked = ["--gpus", "2", "--workload", args.workload, "--fit-context", "--latency-bound", f"{bound.seconds}s"]
    _exeplan("optimize", "--profile", str(profile), *asked, "-o", str(file))
    plan = read_plan(file)
    if plan.num_replicas != 2:
        raise SystemExit(f"the plan of {model} is not one of two replicas: {plan.schedule} on {plan.placement}")
    assert plan.estimate
    half = replace(plan.estimate, throughput=plan.estimate.throughput / 2)
    save_plan(replace(single_plans(plan)[0], estimate=half, replay=None), alone)
    return {1: alone, 2: file}


def _exeplan(*words: str) -> None:
    if status := subprocess.run([*_EXEPLAN, *words], check=False).returncode:
        raise SystemExit(status)


def _run(file: Path, seconds: float, *, seed: int) -> dict[str, Any]:
    """Throughput and latency by kind, and how the engines' reference passes went."""
    with served(file, "--replan", "off", "--max-queue", str(_MAX_QUEUE), "--watch-speed") as server:
        command = ["bench", str(file), "--url", server.url, "--duration", f"{seconds}s", "--seed", str(seed), "--json"]
        answer = subprocess.run([*_EXEPLAN, *command], check=True, stdout=subprocess.PIPE, text=True)
    body = json.loads(answer.stdout)
    return {kind: {figure: body[kind][figure] for figure in _FIGURES} for kind in _KINDS}


def _cells(row: dict[str, Any]) -> list[str]:
    cells = [row["model"], str(row["engines"]), row["schedule"]]
    for name in _FIGURES:
        predicted, measured, even = (median(run[kind][name] for run in row["runs"]) for kind in _KINDS)
        errors = [f"{100 * error:+.1f} %" for error in errors_of(row, name)]
        cells += [f"{predicted:.3g}", f"{measured:.3g}", errors[0], f"{even:.3g}", errors[1]]
    return cells


def _gains(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Throughput of two engines over that of one, by kind."""
    one, two = (next(row["runs"] for row in rows if row["engines"] == count) for count in (1, 2))
    return {
        kind: median(run[kind]["throughput"] for run in two) / median(run[kind]["throughput"] for run in one)
        for kind in _KINDS
    }


if __name__ == "__main__":
    main()
