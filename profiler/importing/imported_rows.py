"""Rows that a reader made of a table, with its remarks.

`repeats` of a row is how often its point was measured; 0 means derived: scaled, fitted, or counted from constants.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from exeplan.core.profile import Measurement


@dataclass(frozen=True, slots=True)
class ImportedRows:
    """Notes are remarks for the user, a sentence each."""

    rows: tuple[Measurement, ...] = ()
    notes: tuple[str, ...] = ()

    def __add__(self, other: "ImportedRows") -> "ImportedRows":
        return ImportedRows(self.rows + other.rows, self.notes + other.notes)


def thinned(values: Iterable[float], ratio: float) -> list[float]:
    """The distinct values, rising, each at least `ratio` times the one before; the smallest and the largest stay."""
    kept: list[float] = []
    rising = sorted(set(values))
    for value in rising:
        if not kept or value >= ratio * kept[-1]:
            kept.append(value)
    return sorted({*kept, *rising[-1:]})


def rounded(seconds: float) -> float:
    """Six digits: more than any clock has."""
    return float(f"{seconds:.6g}")
