"""The figures of the documentation from the records of the benchmarks.

    python -m docs.make_results

Writes docs/results.md, with a section for each record: claim, command, commit, date, machine, and the figures that are
single values or a table. Then writes every marked figure of the other pages anew (`docs/marks.py`, `docs/figures.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.index import entries, records
from docs.figures import FigureError, is_dirty, read, text_of
from docs.marks import ROOT, pages, rewritten

PAGE = Path(__file__).parent / "results.md"
HEAD = """# Results

Every figure comes from a record under `benchmarks/records`; `python -m docs.make_results` writes this page, and a test
holds it against them. No figure was measured on a GPU. The machine is shared: compare ratios within a record.
"""
_DIRTY = "**Dirty tree**: the code had changes that commit `{}` does not hold; these figures cannot be made again."
_ABOUT = ("benchmark", "command", "commit", "date", "hardware", "versions", "python")
_MOST_ROWS, _MOST_COLUMNS, _LONGEST = 30, 8, 250


def main() -> None:
    """Every page is made before the first is written. Raises FigureError."""
    old = {path: path.read_text(encoding="utf-8") for path in pages()}
    new = {path: rewritten(text, text_of) for path, text in old.items()}
    PAGE.write_text(page(), encoding="utf-8")
    for path, text in new.items():
        if text != old[path]:
            path.write_text(text, encoding="utf-8")
            print(f"rewrote {path.relative_to(ROOT)}")


def page() -> str:
    """docs/results.md as it should be."""
    found = list(entries())
    dirty = sorted(path.stem for entry in found for path in records(entry, found) if is_dirty(read(path.stem)))
    sections = [_section(entry.claim, path) for entry in found for path in records(entry, found)]
    return "\n".join([HEAD, _on_dirty(dirty), *sections])


def _on_dirty(names: Sequence[str]) -> str:
    """The sentence about records of trees with changes that no commit holds; nothing where there are none."""
    if not names:
        return ""
    listed = ", ".join(f"[{name}](#{name})" for name in names)
    return f"Records of a dirty tree, with changes that no commit holds, so that they cannot be made again: {listed}.\n"


def _section(claim: str, path: Path) -> str:
    body = read(path.stem)
    cpu = f"{body['hardware'].get('gpu') or body['hardware']['cpu']}, {body['hardware']['cores']} cores"
    lines = [
        f"## {path.stem}",
        "",
        claim,
        "",
        f"`{body['command']}`, commit `{body['commit']}`, {body['date']}, {cpu}.",
        "",
    ]
    if is_dirty(body):
        lines += [_DIRTY.format(body["commit"].removesuffix("-dirty")), ""]
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
    try:
        main()
    except FigureError as error:
        raise SystemExit(str(error)) from None
