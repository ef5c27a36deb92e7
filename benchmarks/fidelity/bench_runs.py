"""Runs of `exeplan bench` in processes of their own, in rounds, with the machine's speed by a fixed loop around each.

For plans of several workers; plans of one device are compared by reference passes (`one_device.py`). Figures are
medians over the rounds. A run lasts as long as is asked, or three times the planned latency, whichever is longer: a
shorter run has no steady state.
"""

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, median

import torch

from benchmarks.lib.record import write_record
from exeplan.core.plan import save_plan
from exeplan.core.profile import Profile
from exeplan.planner.tables import table

_UNITS = {"throughput": "requests/s", "latency": "seconds to the 99th-percentile output"}


def profiled(model: str, given: Path | None, folder: Path, *options: str) -> tuple[Path, float]:
    """A profile of the model, made now unless one is given, and the speed that the machine has meanwhile."""
    path = (given or folder / "profile.json").resolve()
    before = _speed()
    if given is None:
        subprocess.run([sys.executable, "-m", "exeplan", "profile", model, "-o", str(path), *options], check=True)
    return path, mean((before, _speed()))


def run_rounds(rows: list[dict], profile: Path, *, rounds: int, speed: float, least: float) -> None:
    """Runs the plan of every row once a round; a row's `runs` are what was replayed and measured."""
    for number in range(rounds):
        for row in rows:
            with tempfile.TemporaryDirectory() as folder:
                row["runs"].append(_run(row, profile, Path(folder) / "plan.yaml", number, speed=speed, least=least))
            print(f"{number + 1}/{rounds}", *_cells({**row, "runs": row["runs"][-1:]}, "throughput"), flush=True)


def report(rows: list[dict], profile: Profile, *, record: str) -> None:
    """Prints a table a quantity and the worst and median cases, and writes the record."""
    for key, unit in _UNITS.items():
        print(f"\n{unit}\n\n{table(_HEADER, [_cells(row, key) for row in rows])}")
    print("\n".join(["", *_summary(rows)]))
    figures = [{"case": row["case"], "estimate": asdict(row["plan"].estimate), "runs": row["runs"]} for row in rows]
    print(f"\nrecord: {write_record(record, {'device': asdict(profile.device), 'rows': figures})}")


_HEADER = ("", "plan", "replay", "measured", "error", "machine's speed", "error at equal speed")


def _run(row: dict, profile: Path, file: Path, seed: int, *, speed: float, least: float) -> dict:
    """One run in a process of its own, as a user would do it, and the machine's speed around it."""
    plan = replace(row["plan"], workload=row["name"], profile=str(profile), fit_context=True)
    save_plan(plan, file)
    duration = max(least, 3 * plan.estimate.latency)
    command = ["bench", str(file), "--duration", f"{duration}s", "--seed", str(seed), "--json"]
    before = _speed()
    answer = subprocess.run([sys.executable, "-m", "exeplan", *command], check=True, capture_output=True, text=True)
    body = json.loads(answer.stdout)
    kinds = {kind: {key: body[kind][key] for key in (*_UNITS, "ttft", "tpot")} for kind in ("replay", "measured")}
    return {**kinds, "speed": mean((before, _speed())) / speed}


def _speed(seconds: float = 0.6) -> float:
    """How fast this core is now: turns a second of a product and a read like those of a decode step."""
    torch.set_num_threads(1)
    x, w, keys, query = torch.ones(32, 512), torch.ones(512, 512), torch.ones(8, 4096, 64), torch.ones(8, 1, 64)
    began, turns = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        torch.mm(x, w)
        torch.bmm(query, keys.transpose(1, 2))
        turns += 1
    return turns / (time.perf_counter() - began)


def _cells(row: dict, key: str) -> list[str]:
    plan = getattr(row["plan"].estimate, key)
    replayed, measured = (median(run[kind][key] for run in row["runs"]) for kind in ("replay", "measured"))
    speed = median(run["speed"] for run in row["runs"])
    errors = [f"{100 * error:+.1f} %" for error in _errors(row, key)]
    return [row["case"], f"{plan:.3f}", f"{replayed:.3f}", f"{measured:.3f}", errors[0], f"{speed:.2f}", errors[1]]


def _errors(row: dict, key: str) -> tuple[float, float]:
    """Plan over measurement, less 1: as measured, and at the speed that the machine had when it was profiled."""
    plan = getattr(row["plan"].estimate, key)
    measured = median(run["measured"][key] for run in row["runs"])
    # A faster machine serves more requests a second, and needs fewer seconds for each.
    equal = median(run["measured"][key] * run["speed"] ** (-1 if key == "throughput" else 1) for run in row["runs"])
    return plan / measured - 1, plan / equal - 1


def _summary(rows: list[dict]) -> list[str]:
    """The worst and the median case of each quantity."""
    lines = []
    for key in _UNITS:
        pairs = [_errors(row, key) for row in rows]
        for number, kind in enumerate(("as measured", "at equal speed")):
            sizes = [100 * abs(pair[number]) for pair in pairs]
            worst = f"worst {max(sizes):.1f} % off, median {median(sizes):.1f} %"
            lines.append(f"{key} {kind}: {worst}, of {len(sizes)} cases")
    return lines
