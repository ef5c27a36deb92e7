"""Profiles of one device made apart in time: how far their predictions of the same schedules differ.

    python -m benchmarks.fidelity.profile_repeats [FILE ...] [--model demo] [--profiles 3] [--pause 30m] [--budget 40s]

Measures that many profiles, with pauses between them, or takes those given. Every policy is planned with the first one
on three traces, under a bound of four times what one request alone needs; the closed form of those schedules is then
evaluated with each profile. Printed and recorded: throughput and latency of each profile over the mean of all, and
their largest ratio, as they are and at the speed of the first one, which the profiles' reference passes tell; and how
steady each profile says that its machine was. Writes records/profile-repeats.json.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.fidelity.one_device import WORKLOADS, plans_of
from benchmarks.lib.record import write_record
from exeplan.core.models.model import load_model_spec
from exeplan.core.profile import Profile, load_profile
from exeplan.core.runs.machine_speed import slowness_between
from exeplan.planner.choice.optimize import resolve_policies
from exeplan.planner.load_problem import fitted, profile_for
from exeplan.planner.problems.problem import make_problem
from exeplan.planner.reports.tables import table
from exeplan.units import seconds
from exeplan.workload.files import load_workload

_FIGURES = ("throughput", "latency")
_CLOCKS = ("at one speed", "as they are")
_SLACK = 4.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE", help="finished profiles of the same model")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--profiles", type=int, default=3)
    parser.add_argument("--pause", default="30m", help="between one and the next")
    parser.add_argument("--budget", default="40s", help="of each profile")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spec = load_model_spec(args.model)
        profiles = [profile_for(spec, load_profile(path)) for path in args.files or _measured(args, Path(folder))]
    slower = [slowness_between(profiles[0].reference_passes, one.reference_passes) for one in profiles]
    rows = list(_rows(profiles, slower))
    header = ("", *(f"{number + 1}, {slow:.2f} times slower" for number, slow in enumerate(slower)))
    for figure in _FIGURES:
        print(f"\n{figure}, at one speed\n\n{table((*header, 'apart', 'as they are'), _cells(rows, figure))}")
    summary = {figure: _summary(rows, figure) for figure in _FIGURES}
    print()
    for figure, found in summary.items():
        for clock, one in found.items():
            print(f"{figure}, {clock}: {one['median']:.1%} apart in the median, {one['worst']:.1%} at worst")
    made = [{"created": p.created, "speed_spread": p.speed_spread, "error": p.calibration_error} for p in profiles]
    body = {"profiles": made, "slower": slower, "rows": rows, "summary": summary}
    print(f"\nrecord: {write_record('profile-repeats', body)}")


def _cells(rows: Sequence[dict[str, Any]], figure: str) -> list[tuple[str, ...]]:
    found = []
    for row in rows:
        even = row["figures"][figure]["at one speed"]
        off = (f"{value / fmean(even) - 1:+.1%}" for value in even)
        found.append((row["case"], *off, *(f"{_apart(row['figures'][figure][clock]):.1%}" for clock in _CLOCKS)))
    return found


def _measured(args: argparse.Namespace, folder: Path) -> Iterator[Path]:
    for number in range(args.profiles):
        if number:
            print(f"{number} of {args.profiles} profiles; the next one after a pause of {args.pause}", flush=True)
            time.sleep(seconds(args.pause, "--pause"))
        path = folder / f"{number}.json"
        command = [sys.executable, "-m", "exeplan", "profile", args.model, "-o", str(path), "--budget", args.budget]
        subprocess.run(command, check=True)
        yield path


def _rows(profiles: Sequence[Profile], slower: Sequence[float]) -> Iterator[dict[str, Any]]:
    """A row a schedule: its figures by profile, at the speed of the first one and as they are."""
    for name in WORKLOADS:
        workload = fitted(load_workload(name), profiles[0].model, fit=True)
        for plan in plans_of(profiles[0], workload, resolve_policies("auto"), slack=_SLACK):
            assert plan.bound is not None
            found = [make_problem(profile, workload, plan.bound).evaluate(plan.schedule) for profile in profiles]
            figures = {}
            for figure, power in zip(_FIGURES, (1, -1), strict=True):
                values = [getattr(estimate, figure) for estimate in found]
                even = [value * slow**power for value, slow in zip(values, slower, strict=True)]
                figures[figure] = dict(zip(_CLOCKS, (even, values), strict=True))
            yield {"case": f"{name} {plan.schedule}", "figures": figures}


def _apart(values: Sequence[float]) -> float:
    """The largest ratio, less 1."""
    return max(values) / min(values) - 1


def _summary(rows: Sequence[dict[str, Any]], figure: str) -> dict[str, dict[str, float]]:
    apart = {clock: [_apart(row["figures"][figure][clock]) for row in rows] for clock in _CLOCKS}
    return {clock: {"median": median(values), "worst": max(values)} for clock, values in apart.items()}


if __name__ == "__main__":
    main()
