"""README's first command as a newcomer runs it, several times, also with a busy loop on another core.

    python -m benchmarks.fidelity.demos [--runs 6] [--busy 2]

`exeplan demo` in a new process and an empty folder each time; in the last `--busy` runs another process counts all the
while. An error is the prediction over what was measured, less 1, at profiling speed: it should be within 5 % (10 % of
latency) or within its own 90 % interval, that interval not wider than +-10 %, and a demo not take over 100 s. Every run
has a profile of its own, so that `held`, the share of intervals that hold 0, and `told`, the root mean square of errors
over the standard errors of their intervals, judge what profiles say of their error.

Writes records/fidelity-demos.json.
"""

import argparse
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from benchmarks.lib.intervals import wilson
from benchmarks.lib.record import write_record
from exeplan.core.runs.estimators import NORMAL_90
from exeplan.planner.reports.tables import table

_WITHIN = {"throughput": 5.0, "latency": 10.0}
"""Percent."""
_WIDEST, _LONGEST = 10.0, 100.0
"""Percent to either side, and seconds."""
_PERCENT = r"([+-][\d.]+)"
_ERRORS = re.compile(rf"{_PERCENT} % +\S+ (?:req/s|ms|s) +{_PERCENT} % +{_PERCENT} to {_PERCENT} %$")
_TOOK = re.compile(r"^all this took ([\d.]+) s$", re.MULTILINE)
_HEADER = ("run", "schedule", "figure", "error as measured", "at profiling speed", "90 % interval", "as asked")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--busy", type=int, default=2, help="of these, with a busy loop on another core")
    args = parser.parse_args()
    runs = [_run(busy=number >= args.runs - args.busy) for number in range(args.runs)]
    rows = [row for run in runs for row in run["rows"]]
    found = {
        "as asked": sum(row["as asked"] for row in rows),
        "held": sum(row["held"] for row in rows),
        "rows": len(rows),
        "told": math.sqrt(sum((NORMAL_90 * row["error"] / row["half"]) ** 2 for row in rows) / len(rows)),
        "widest": max(row["half"] for row in rows),
        "longest": max(run["seconds"] for run in runs),
    }
    print(table(_HEADER, [_cells(number, row) for number, run in enumerate(runs, 1) for row in run["rows"]]))
    low, high = wilson(found["held"], len(rows))
    print(
        f"\n{found['as asked']} of {len(rows)} as asked; {found['held']} of {len(rows)} intervals hold the measurement "
        f"({low:.0%} to {high:.0%}), errors are {found['told']:.1f} times what these tell; "
        f"the widest +-{found['widest']:.1f} % (asked {_WIDEST:g}); the longest demo "
        f"{found['longest']:.0f} s (asked {_LONGEST:g})"
    )
    print(f"\nrecord: {write_record('fidelity-demos', {'busy': args.busy, 'found': found, 'runs': runs})}")


def _run(*, busy: bool) -> dict[str, Any]:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        if busy:
            loop = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(loop.kill)
        command = [sys.executable, "-m", "exeplan", "demo", "--dir", folder]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    took = _TOOK.search(text)
    if took is None:
        raise SystemExit(f"the demo does not say what it took:\n{text}")
    seconds = float(took[1])
    rows = list(_rows(text))
    print(f"{seconds:.0f} s{', busy' if busy else ''}:", *(f"{row['error']:+.1f} %" for row in rows), flush=True)
    return {"busy": busy, "seconds": seconds, "rows": rows}


def _rows(text: str) -> Iterator[dict[str, Any]]:
    """Of the demo's table: a schedule's throughput stands above its latency."""
    schedule = ""
    for line in text.splitlines():
        if found := _ERRORS.search(line):
            schedule, figure = (line.split()[0], "throughput") if " req/s " in line else (schedule, "latency")
            measured, error, low, high = map(float, found.groups())
            held, half = low <= 0 <= high, (high - low) / 2
            yield {
                "schedule": schedule,
                "figure": figure,
                "as measured": measured,
                "error": error,
                "interval": [low, high],
                "half": half,
                "held": held,
                "as asked": abs(error) <= _WITHIN[figure] or (held and half <= _WIDEST),
            }


def _cells(number: int, row: dict[str, Any]) -> tuple[str, ...]:
    low, high = row["interval"]
    errors = (f"{row[name]:+.1f} %" for name in ("as measured", "error"))
    asked = "yes" if row["as asked"] else "no"
    return (str(number), row["schedule"], row["figure"], *errors, f"{low:+.1f} to {high:+.1f} %", asked)


if __name__ == "__main__":
    main()
