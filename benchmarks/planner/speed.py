"""Planning time as a user has it: `exeplan optimize` in a new process each time, start-up included.

    python -m benchmarks.planner.speed [--repeats 3] [--cases 8]

The first cases of `CASES`: plans and refusals over all policies, on profiles from datasheets, whose making is not
timed. Wall and CPU seconds of each run, the processes that it starts included; the median and the most of the repeats,
which go through all cases one after the other. The paper's search takes three seconds to five minutes (section 7.7).
Writes records/planner-speed.json.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.lib.record import write_record
from exeplan.planner.reports.tables import table

INPUTS = Path(__file__).parents[2] / "plans"


@dataclass(frozen=True, slots=True)
class Case:
    """A question, and the seconds in which it should be answered."""

    model: str
    cluster: str
    gpus: int
    workload: str
    options: tuple[str, ...]
    aim: float


CASES = (
    Case("opt-13b", "a40", 4, "S", ("--latency-bound", "9.7s"), 1.0),
    Case("opt-13b", "a40", 4, "S", ("--latency-bound", "100ms"), 1.0),
    Case("opt-13b", "a40", 4, "S", ("--latency-bound", "9.7s", "--arrival-rate", "20"), 1.0),
    Case("llama-3.1-70b", "h100", 48, "azure-2023-conv", ("--latency-bound", "30s"), 10.0),
    Case("llama-3.1-70b", "h100", 48, "azure-2023-conv", ("--latency-bound", "100ms"), 10.0),
    Case("llama-3.1-70b", "h100", 48, "azure-2023-conv", ("--latency-bound", "30s", "--arrival-rate", "500"), 10.0),
    Case("llama-3.1-70b", "h100", 256, "azure-2023-conv", ("--latency-bound", "30s"), 20.0),
    Case("gpt3-341b", "a40", 1024, "G", ("--latency-bound", "150s"), 60.0),
)
DATASHEETS = {"a40": "a40-48gb", "h100": "h100-80gb"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cases", type=int, default=len(CASES))
    args = parser.parse_args()
    cases = CASES[: args.cases]
    with tempfile.TemporaryDirectory() as name:
        commands = [_command(case, Path(name)) for case in cases]
        runs = [[_timed(command) for command in commands] for _ in range(args.repeats)]
    rows = [_row(case, [run[number] for run in runs]) for number, case in enumerate(cases)]
    columns = ("case", "answer", "aim s", "wall s", "most s", "CPU s")
    print(table(columns, [tuple(str(row[name]) for name in columns) for row in rows]))
    print(f"\nrecord: {write_record('planner-speed', {'repeats': args.repeats, 'rows': rows})}")


def _command(case: Case, folder: Path) -> list[str]:
    """Of the question, with its profile and its cluster made in a folder."""
    profile, cluster = folder / f"{case.model}.json", folder / f"{case.cluster}-{case.gpus}.yaml"
    if not profile.exists():
        sheet = ["--datasheet", DATASHEETS[case.cluster], "--cluster", case.cluster]
        subprocess.run([*_EXEPLAN, "profile", case.model, *sheet, "-o", str(profile)], check=True, capture_output=True)
    lines = (INPUTS / "clusters" / f"{case.cluster}.yaml").read_text().splitlines()
    nodes = f"nodes: {-(-case.gpus // 8)}"
    cluster.write_text("\n".join(nodes if line.startswith("nodes:") else line for line in lines))
    asked = ["--profile", str(profile), "--cluster", str(cluster), "--gpus", str(case.gpus)]
    return [*_EXEPLAN, "optimize", *asked, "--workload", case.workload, *case.options, "--json"]


_EXEPLAN = [sys.executable, "-m", "exeplan"]


@dataclass(frozen=True, slots=True)
class Run:
    """Seconds of one process and of those that it started, and what it answered."""

    wall: float
    cpu: float
    answer: str


def _timed(command: list[str]) -> Run:
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if done.returncode == 0:
        replayed = json.loads(done.stdout)["replay"]["throughput"]
        return Run(wall, cpu, f"{replayed:.3g} requests/s")
    reason = done.stderr.strip().removeprefix("exeplan optimize: ")
    if "but the lowest-latency schedule" not in reason and "but within the bounds the most is" not in reason:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
    return Run(wall, cpu, "refused")


def _row(case: Case, runs: list[Run]) -> dict[str, str | float]:
    return {
        "case": f"{case.model} on {case.gpus}, {case.workload}, {' '.join(case.options)}",
        "answer": runs[0].answer,
        "aim s": case.aim,
        "wall s": round(median(run.wall for run in runs), 2),
        "most s": round(max(run.wall for run in runs), 2),
        "CPU s": round(median(run.cpu for run in runs), 2),
    }


if __name__ == "__main__":
    main()
