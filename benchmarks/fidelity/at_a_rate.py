"""Predicted against measured where requests arrive at a rate, on one device: below the capacity, waits included.

    python -m benchmarks.fidelity.at_a_rate [--model demo] [--workloads alpaca wmt17-ende] [--loads 0.3 0.6 0.8]
        [--policies orca chunked rra] [--slack 8] [--duration 15] [--rounds 2] [--budget 40s]

Each round profiles the model anew. A policy's best plan under a bound of `--slack` times what one request alone needs
is played by `exeplan bench PLAN --rate R` at shares of what its full batches serve, by its replay. Errors are those of
the replay of just these requests: as it was predicted, and at the speed that the machine had meanwhile, by the
reference passes of the run. Latency is to the 99th-percentile length. Near the capacity a pass that takes a tenth
longer may double the wait, so that errors of the profile and of the speed grow with the load.

Writes records/fidelity-rate-<model>.json.
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

from benchmarks.fidelity.one_device import plans_of
from benchmarks.lib.record import write_record
from exeplan.core.models.model import load_model_spec
from exeplan.core.plan import Plan, save_plan
from exeplan.core.profile import load_profile
from exeplan.planner.load_problem import fitted, profile_for
from exeplan.planner.reports.tables import table
from exeplan.workload.files import load_workload

_FIGURES = ("ttft", "tpot", "latency", "latency_p99")
_KINDS = {"replay": "as predicted", "replay_at_measured_speed": "at the measured speed"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--workloads", nargs="+", default=["alpaca", "wmt17-ende"])
    parser.add_argument("--loads", nargs="+", type=float, default=[0.3, 0.6, 0.8], help="shares of the capacity")
    parser.add_argument("--policies", nargs="+", default=["orca", "chunked", "rra"])
    parser.add_argument("--slack", type=float, default=8.0, help="bound over what one request alone needs")
    parser.add_argument("--duration", type=float, default=15.0, help="seconds of each run, about")
    parser.add_argument("--rounds", type=int, default=2, help="each with a profile of its own")
    parser.add_argument("--budget", default="40s", help="of each profile")
    args = parser.parse_args()
    rows = [row for number in range(args.rounds) for row in _round(args, number)]
    print("\n".join(_report(rows, args.loads)))
    print(f"\nrecord: {write_record(f'fidelity-rate-{args.model}', {**vars(args), 'rows': rows})}")


def _round(args: argparse.Namespace, number: int) -> Iterator[dict[str, Any]]:
    spec = load_model_spec(args.model)
    with tempfile.TemporaryDirectory() as folder:
        path, file = Path(folder) / "profile.json", Path(folder) / "plan.yaml"
        _exeplan("profile", args.model, "-o", str(path), "--budget", args.budget)
        profile = profile_for(spec, load_profile(path))
        for name in args.workloads:
            for plan in plans_of(profile, fitted(load_workload(name), spec, fit=True), args.policies, slack=args.slack):
                save_plan(replace(plan, workload=name, profile=str(path), fit_context=True), file)
                for load in args.loads:
                    row = _row(plan, name, load, _run(file, plan, load, args.duration, seed=number))
                    print(f"round {number + 1}/{args.rounds}", *_cells(row), flush=True)
                    yield {**row, "round": number}


def _run(file: Path, plan: Plan, load: float, seconds: float, *, seed: int) -> dict[str, Any]:
    assert plan.replay
    rate = load * plan.replay.throughput
    asked = ["--rate", f"{rate}", "--requests", str(round(rate * seconds)), "--seed", str(seed), "--json"]
    return json.loads(_exeplan("bench", str(file), *asked))


def _exeplan(*words: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "exeplan", *words], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def _row(plan: Plan, workload: str, load: float, run: dict[str, Any]) -> dict[str, Any]:
    """One run; errors are predicted over measured, less 1."""
    kinds = {kind: {name: run[kind][name] for name in _FIGURES} for kind in (*_KINDS, "measured")}
    errors = {kind: {name: kinds[kind][name] / kinds["measured"][name] - 1 for name in _FIGURES} for kind in _KINDS}
    return {
        "workload": workload,
        "schedule": str(plan.schedule),
        "load": load,
        "slowness": run["speed"]["slowness"],
        **kinds,
        "errors": errors,
    }


def _cells(row: dict[str, Any]) -> list[str]:
    errors = [f"{100 * row['errors'][kind][name]:+.1f} %" for kind in _KINDS for name in _FIGURES]
    return [row["workload"], row["schedule"], f"{row['load']:g}", f"{row['slowness']:.2f}", *errors]


def _report(rows: list[dict[str, Any]], loads: list[float]) -> Iterator[str]:
    columns = [f"{name.replace('_', ' ')}, {words}" for words in _KINDS.values() for name in _FIGURES]
    yield table(("workload", "schedule", "load", "slowness", *columns), [_cells(row) for row in rows])
    yield ""
    for load in loads:
        some = [row["errors"] for row in rows if row["load"] == load]
        for kind, words in _KINDS.items():
            sizes = {name: [abs(one[kind][name]) for one in some] for name in _FIGURES}
            found = ", ".join(f"{name} {median(each):.1%} (worst {max(each):.1%})" for name, each in sizes.items())
            yield f"{load:g} of the capacity, {words}: {found}"


if __name__ == "__main__":
    main()
