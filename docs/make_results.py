"""The results page, docs/results.md, from the records of the benchmarks.

    python -m docs.make_results

A section for each record: claim, command, commit, date, machine, and the figures that are single values or a table.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.index import entries, records

PAGE = Path(__file__).parent / "results.md"
HEAD = """# Results

Every figure comes from a record under `benchmarks/records`; `python -m docs.make_results` writes this page, and a test
holds it against them. No figure was measured on a GPU. The machine is shared: compare ratios within a record.
"""
_ABOUT = ("benchmark", "command", "commit", "date", "hardware", "versions", "python")
_MOST_ROWS, _MOST_COLUMNS, _LONGEST = 30, 8, 250


def page() -> str:
    """docs/results.md as it should be."""
    found = list(entries())
    sections = [_section(entry.claim, path) for entry in found for path in records(entry, found)]
    return "\n".join([HEAD, *sections])


def _section(claim: str, path: Path) -> str:
    body = json.loads(path.read_text(encoding="utf-8"))
    cpu = f"{body['hardware'].get('gpu') or body['hardware']['cpu']}, {body['hardware']['cores']} cores"
    lines = [
        f"## {path.stem}",
        "",
        claim,
        "",
        f"`{body['command']}`, commit `{body['commit']}`, {body['date']}, {cpu}.",
        "",
    ]
    return "\n".join([*lines, *_figures({key: value for key, value in body.items() if key not in _ABOUT})])


def _figures(figures: Mapping[str, Any]) -> Iterator[str]:
    single = [(key, value) for key, value in figures.items() if isinstance(value, str | int | float)]
    if single:
        yield from _table(["figure", "value"], [[key, value] for key, value in single])
    for key, value in figures.items():
        rows = _rows(value)
        if rows:
            columns = list(rows[0])[:_MOST_COLUMNS]
            yield from (f"**{key}**", "")
            yield from _table(columns, [[row.get(column, "") for column in columns] for row in rows[:_MOST_ROWS]])
            if len(rows) > _MOST_ROWS:
                yield from (f"{len(rows) - _MOST_ROWS} more rows are in the record.", "")


def _rows(value: Any) -> list[dict[str, Any]]:
    """A list of flat mappings or of lists as rows; nothing else is a table."""
    if not isinstance(value, list) or not value:
        return []
    if all(isinstance(row, list) for row in value):
        return [{str(n): cell for n, cell in enumerate(row)} for row in value if all(map(_plain, row))]
    if not all(isinstance(row, dict) for row in value):
        return []
    flat = [{key: cell for key, cell in row.items() if _plain(cell)} for row in value]
    return [row for row in flat if row]


def _plain(value: Any) -> bool:
    """Whether the value fits a cell; a sentence that a command printed stays in the record."""
    return value is None or isinstance(value, int | float) or (isinstance(value, str) and len(value) <= _LONGEST)


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for row in rows:
        yield f"| {' | '.join(_shown(cell) for cell in row)} |"
    yield ""


def _shown(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
