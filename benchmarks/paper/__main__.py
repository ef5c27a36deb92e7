"""The evaluations of ExeGPT (ASPLOS 2024), ORCA (OSDI 2022) and TCB (ICPP 2022) predicted, next to their figures.

    python -m benchmarks.paper                      everything: minutes
    python -m benchmarks.paper fig6 table6 --quick  parts of it, with the tightest bound and without one
    python -m benchmarks.paper --profiles FOLDER    measured profiles <model>-<device>.json instead of datasheets

Writes records/paper.json and records/paper.md; parts that were not run stay in both as they were.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.lib.record import RECORDS, commit, write_record
from benchmarks.paper import drift as paper_drift
from benchmarks.paper import figures as paper_figures
from benchmarks.paper import memory, orca, real, splits, tcb, today
from benchmarks.paper.claims import Part
from benchmarks.paper.monotone import table_5
from benchmarks.paper.setting import FIGURES, Settings
from benchmarks.paper.tables import search_time, table_4, table_6, table_7
from exeplan.planner.reports.tables import json_line
from exeplan.policies import policy_names

_TABLES: dict[str, Callable[[Settings], Part]] = {
    "fig9": memory.part,
    "splits": splits.part,
    "fig10": real.part,
    "table4": table_4,
    "table5": table_5,
    "table6": table_6,
    "table7": table_7,
    "drift": paper_drift.part,
    **orca.parts(),
    "tcb": tcb.part,
    "today": today.part,
}
_ORDER = (*FIGURES, *_TABLES, "search")
"""Figures 6 to 8 take minutes, the others seconds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(_ORDER)}; default: all")
    parser.add_argument("--quick", action="store_true", help="coarser sweeps; of the bounds the tightest and none")
    parser.add_argument("--profiles", type=Path, help="a folder of profiles")
    parser.add_argument("--traces", type=Path, help="a folder of traces for figure 10 instead of shipped length laws")
    parser.add_argument("--policies", nargs="+", choices=policy_names(), default=policy_names(), help="default: all")
    args = parser.parse_args()
    if unknown := sorted(set(args.parts) - set(_ORDER)):
        parser.error(f"no part '{unknown[0]}'; there are {', '.join(_ORDER)}")
    settings = Settings(profiles=args.profiles, traces=args.traces, policies=tuple(args.policies), quick=args.quick)
    began = time.perf_counter()
    for name, part in _made(set(args.parts) or set(_ORDER), settings):
        print(part.markdown(), flush=True)
        _write(name, part)
    print(f"{time.perf_counter() - began:.0f} s; record: {RECORDS / 'paper.json'} and paper.md")


def _made(names: set[str], settings: Settings) -> Iterator[tuple[str, Part]]:
    """Quick ones first."""
    for name, make in _TABLES.items():
        if name in names:
            yield name, make(settings)
    figures = [name for name in FIGURES if name in names or "search" in names]
    rows = paper_figures.rows(figures, settings) if figures else {}
    for name in figures:
        if name in names:
            yield name, paper_figures.part(name, rows[name])
    if "search" in names:
        yield "search", search_time([row for of_figure in rows.values() for row in of_figure])


def _write(name: str, part: Part) -> None:
    """Parts of an earlier run stay."""
    path = RECORDS / "paper.json"
    parts = json.loads(path.read_text())["parts"] if path.exists() else {}
    words = ("PATH" if Path(word).is_absolute() else word for word in sys.argv[1:])
    command = " ".join(["python", "-m", "benchmarks.paper", *words])
    made = {"command": command, "commit": commit(), "date": time.strftime("%Y-%m-%d")}
    parts[name] = {**made, **json.loads(json_line(part.as_json())), "markdown": part.markdown()}
    parts = {name: parts[name] for name in _ORDER if name in parts}
    write_record("paper", {"today": parts["today"]["rows"] if "today" in parts else [], "parts": parts})
    text = "\n".join(part["markdown"] for part in parts.values())
    (RECORDS / "paper.md").write_text(f"# The papers' evaluations, predicted by exeplan\n\n{text}")


if __name__ == "__main__":
    main()
