"""The index of the benchmarks, benchmarks/README.md: claim, command, record and date, from modules and records.

python -m benchmarks.lib.index
"""

import ast
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.lib.record import RECORDS

BENCHMARKS = Path(__file__).parents[1]
HEADER = """# Benchmarks

One module a claim, in rooms by subject; `lib/` and modules without a record are shared code. A command runs from the
root of the repository, prints a table and writes its record: figures with command, commit, versions, hardware, workload
and seed. A commit that ends in `-dirty` was made with changes not yet committed.

Timings on a shared machine move: compare ratios within a run, not absolute figures between runs.

This page is written by `python -m benchmarks.lib.index`; a test holds it against the modules and the records.

| claim | command | record | date | commit |
|---|---|---|---|---|
"""


_RECORD = re.compile(r"""(?:write_record\(|record=)\s*f?["']([a-z][\w-]*\{?)""")
"""Where a module names its record; what follows in braces is a model or a part."""


class Entry(NamedTuple):
    claim: str
    command: str
    record: str
    """The literal prefix of the record's name, before the braces of a model or a part."""


def entries(folder: Path = BENCHMARKS) -> Iterator[Entry]:
    """Every module that writes a record, by room and name."""
    for path in sorted(folder.glob("*/*.py")):
        source = path.read_text(encoding="utf-8")
        if path.parent.name == "lib" or not (found := _RECORD.search(source)):
            continue
        doc = ast.get_docstring(ast.parse(source)) or ""
        claim = " ".join(doc.split("\n\n")[0].split())
        module = ".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__main__")
        yield Entry(claim, f"python -m {module}", found[1])


def records(entry: Entry, among: Sequence[Entry]) -> list[Path]:
    """The records of a benchmark: those that match its prefix and no longer prefix of another."""

    def owner(path: Path) -> Entry | None:
        own = [other for other in among if _may_write(other, path.stem)]
        return max(own, key=lambda other: len(other.record), default=None)

    return [path for path in sorted(RECORDS.glob("*.json")) if owner(path) == entry]


def _may_write(entry: Entry, name: str) -> bool:
    if entry.record.endswith("{"):
        return name.startswith(entry.record[:-1])
    return name == entry.record


def page() -> str:
    """The expected text of benchmarks/README.md."""
    found = list(entries())
    return HEADER + "".join(_row(entry, records(entry, found)) for entry in found)


def _row(entry: Entry, paths: Sequence[Path]) -> str:
    bodies = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    files = " ".join(f"[{path.stem}](records/{path.name})" for path in paths) or "none yet"
    dates = " ".join(body["date"] for body in bodies) or "-"
    commits = " ".join(f"`{body['commit']}`" for body in bodies) or "-"
    return f"| {entry.claim} | `{entry.command}` | {files} | {dates} | {commits} |\n"


if __name__ == "__main__":
    (BENCHMARKS / "README.md").write_text(page(), encoding="utf-8")
