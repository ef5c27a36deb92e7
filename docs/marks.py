"""Marks in Markdown: text between two comments that a record of a benchmark determines.

    detected after <!-- kills/detected -->22 ms<!--/-->

`kills` is the record, benchmarks/records/kills.json; `detected` is a function of `docs/figures.py` that makes the text
from it. `python -m docs.make_results` writes every mark anew. A mark inside a paragraph must not begin a line, where
Markdown would take the whole line for HTML; a table stands between its comments with an empty line on both sides.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
MARK = re.compile(r"<!-- ([\w-]+)/([\w-]+) -->(.*?)<!--/-->", re.DOTALL)
_LEFT_OVER = re.compile(r"<!--.*?-->|<!--", re.DOTALL)
_CODE = re.compile(r"^```.*?^```|`(?:(?!\n\n)[^`])+`", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\([^)]*\)|\{doc\}")

Figure = Callable[[str, str], str]
"""From the names of a record and of a figure to the text."""


class Mark(NamedTuple):
    record: str
    figure: str
    text: str


def pages(root: Path = ROOT) -> list[Path]:
    """The pages that may have marks; docs/results.md is written whole."""
    found = [root / "README.md", root / "benchmarks" / "README.md", *sorted((root / "docs").rglob("*.md"))]
    return [path for path in found if path.name != "results.md" and "_build" not in path.parts]


def marks(text: str) -> list[Mark]:
    """The marks of a text in their order. Raises ValueError for a comment that is no mark, or is not closed."""
    found = [Mark(*match.groups()) for match in MARK.finditer(text)]
    left = _LEFT_OVER.search(MARK.sub("", text))
    nested = next((mark for mark in found if "<!--" in mark.text), None)
    if left or nested:
        raise ValueError(f"{left[0] if left else nested!r} is not a mark: `<!-- RECORD/FIGURE -->text<!--/-->`")
    return found


def rewritten(text: str, figure: Figure) -> str:
    """The text with every mark as its record has it; one that differs only in its line breaks is left as it is."""

    def fresh(match: re.Match[str]) -> str:
        record, name, old = match.groups()
        new = figure(record, name)
        if "\n" in new:
            new = f"\n\n{new.strip()}\n\n"
        elif old.split() == new.split():
            new = old
        return f"<!-- {record}/{name} -->{new}<!--/-->"

    marks(text)
    return MARK.sub(fresh, text)


def sections(text: str) -> list[str]:
    """A page cut at its headings."""
    return re.split(r"^(?=#+ )", text, flags=re.MULTILINE)


def prose(text: str) -> str:
    """What is left of a page without marks, code, and addresses of links."""
    return _LINK.sub("]", _CODE.sub("", MARK.sub("", text)))
