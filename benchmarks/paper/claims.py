"""A figure of the paper next to ours, and a part of the reproduction as a table."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

QUARTER = 0.25
"""The relative difference beyond which a reason is required."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One figure of the paper's text or tables, and ours."""

    what: str
    paper: float | None
    """None where the paper says nothing."""
    ours: float | None
    reason: str = ""
    """Why ours differs, shown where that is by more than a quarter."""

    @property
    def difference(self) -> float | None:
        """Relative to the paper's; None where there is nothing to compare."""
        if self.ours is None or not isfinite(self.ours) or not self.paper:
            return None
        return self.ours / self.paper - 1

    @property
    def owed(self) -> bool:
        """Whether the difference, or the lack of a figure, needs a reason."""
        return (self.difference is None and self.ours != self.paper) or abs(self.difference or 0.0) > QUARTER

    def cells(self) -> list[str]:
        difference = "" if self.difference is None else f"{100 * self.difference:+.0f} %"
        paper = "-" if self.paper is None else show(self.paper)
        return [self.what, paper, show(self.ours), difference, self.reason if self.owed else ""]


CLAIM_HEADER = ("figure of the paper", "paper", "ours", "difference", "why")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the reproduction: a table, the paper's figures next to ours, and notes."""

    title: str
    header: tuple[str, ...]
    rows: Sequence[Sequence[Any]]
    claims: Sequence[Claim] = ()
    notes: Sequence[str] = ()
    curves: Sequence[dict[str, Any]] = ()
    """What a picture is drawn from, where the rows are not."""

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.header) for row in self.rows), f"{self.title}: a row does not fit the header"

    def markdown(self) -> str:
        blocks = [f"## {self.title}", *self.notes, markdown_table(self.header, [[*map(show, r)] for r in self.rows])]
        if self.claims:
            blocks.append(markdown_table(CLAIM_HEADER, [claim.cells() for claim in self.claims]))
        return "\n\n".join(blocks) + "\n"

    def as_json(self) -> dict[str, Any]:
        claims = [{**asdict(claim), "difference": claim.difference} for claim in self.claims]
        rows = [dict(zip(self.header, map(_finite, row), strict=True)) for row in self.rows]
        curves = {"curves": list(self.curves)} if self.curves else {}
        return {"title": self.title, "rows": rows, "claims": claims, "notes": list(self.notes), **curves}


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def show(value: Any) -> str:
    """Three digits for a number, `NS` (the paper's "not satisfied") for what there is not."""
    if value is None:
        return "NS"
    if isinstance(value, float):
        value = 0.0 if abs(value) < 1e-9 else value
        return f"{value:.0f}" if 1000 <= abs(value) < float("inf") else f"{value:.3g}"
    return str(value)


def _finite(value: Any) -> Any:
    return "inf" if isinstance(value, float) and not isfinite(value) else value
