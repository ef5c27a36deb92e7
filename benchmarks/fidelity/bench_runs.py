"""Runs of `exeplan bench` in processes of their own: replayed, as measured, and at the speed of the profile.

For plans of several workers, which repeat reference passes between their batches; plans of one device run side by side
on one engine (`one_device.py`). Figures are medians over the rounds. A run lasts as long as is asked, or three times
the planned latency, whichever is longer: a shorter run has no steady state.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

from benchmarks.lib.record import write_record
from exeplan.core.plan import save_plan
from exeplan.core.profile import Profile
from exeplan.planner.reports.tables import table

_UNITS = {"throughput": "requests/s", "latency": "seconds to the 99th-percentile output"}
_KINDS = ("replay", "measured", "measured_at_profile_speed")


def profiled(model: str, given: Path | None, folder: Path, *options: str) -> Path:
    """A profile of the model, made now unless one is given."""
    path = (given or folder / "profile.json").resolve()
    if given is None:
        subprocess.run([sys.executable, "-m", "exeplan", "profile", model, "-o", str(path), *options], check=True)
    return path


def run_rounds(rows: list[dict], profile: Path, *, rounds: int, least: float) -> None:
    """Runs the plan of every row once a round; a row's `runs` are what was replayed and measured."""
    for number in range(rounds):
        for row in rows:
            with tempfile.TemporaryDirectory() as folder:
                row["runs"].append(_run(row, profile, Path(folder) / "plan.yaml", number, least=least))
            print(f"{number + 1}/{rounds}", *_cells({**row, "runs": row["runs"][-1:]}, "throughput"), flush=True)


def report(rows: list[dict], profile: Profile, *, record: str) -> None:
    """Prints a table a quantity and the worst and median cases, and writes the record."""
    for key, unit in _UNITS.items():
        print(f"\n{unit}\n\n{table(_HEADER, [_cells(row, key) for row in rows])}")
    print("\n".join(["", *_summary(rows)]))
    figures = [{"case": row["case"], "estimate": asdict(row["plan"].estimate), "runs": row["runs"]} for row in rows]
    about = {"device": asdict(profile.device), "profile": _between(profile)}
    print(f"\nrecord: {write_record(record, {**about, 'rows': figures})}")


def _between(profile: Profile) -> dict:
    """What predictions for several workers are made of, beside the layers."""
    rows = [m for m in profile.measurements if m.op in ("pass", "control", "all_reduce", "send", "overhead")]
    calibrations = (profile.calibration, profile.kept_rows_calibration, profile.prefill_calibration)
    return {"calibrations": calibrations, "speed_spread": profile.speed_spread, "rows": [asdict(m) for m in rows]}


_HEADER = ("", "replay", "measured", "error", "at profiling speed", "error", "other processes", "machine slower")


def _run(row: dict, profile: Path, file: Path, seed: int, *, least: float) -> dict:
    """One run in a process of its own, as a user would do it."""
    plan = replace(row["plan"], workload=row["name"], profile=str(profile), fit_context=True)
    save_plan(plan, file)
    duration = max(least, 3 * plan.estimate.latency)
    command = ["bench", str(file), "--duration", f"{duration}s", "--seed", str(seed), "--json"]
    answer = subprocess.run([sys.executable, "-m", "exeplan", *command], check=True, capture_output=True, text=True)
    body = json.loads(answer.stdout)
    found = {kind: {key: body[kind][key] for key in (*_UNITS, "ttft", "tpot")} for kind in _KINDS}
    return {**found, "passes": body["passes"], "speed": body["speed"]}


def _cells(row: dict, key: str) -> list[str]:
    replayed, measured, even = (median(run[kind][key] for run in row["runs"]) for kind in _KINDS)
    errors = [f"{100 * error:+.1f} %" for error in errors_of(row, key)]
    others, slower = (median(run["speed"][name] for run in row["runs"]) for name in ("others", "slowness"))
    shown = [f"{replayed:.3f}", f"{measured:.3f}", errors[0], f"{even:.3f}", errors[1]]
    return [row["case"], *shown, f"{others:.2f}", f"{slower:.2f}"]


def errors_of(row: dict, key: str) -> tuple[float, float]:
    """Replay over measurement, less 1: as measured, and at the speed that the machine had while it was profiled."""
    replayed, measured, even = (median(run[kind][key] for run in row["runs"]) for kind in _KINDS)
    return replayed / measured - 1, replayed / even - 1


def _summary(rows: list[dict]) -> list[str]:
    """The worst and the median case of each quantity."""
    lines = []
    for key in _UNITS:
        pairs = [errors_of(row, key) for row in rows]
        for number, kind in enumerate(("as measured", "at profiling speed")):
            sizes = [100 * abs(pair[number]) for pair in pairs]
            worst = f"worst {max(sizes):.1f} % off, median {median(sizes):.1f} %"
            lines.append(f"{key} {kind}: {worst}, of {len(sizes)} cases")
    return lines
