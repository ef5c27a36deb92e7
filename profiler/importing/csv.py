"""The plain CSV: one measurement a row, every cell checked.

    op,phase,tensor_parallel_size,num_seqs,num_tokens,context_tokens,bytes,seconds

Cells that do not apply are empty (or 0). Columns may stand in any order. Rows that time the same point again count with
their median. A cell that is wrong is named by its line; nothing is guessed or left out. Not here: whether the times
are believable (`lint.py`) and whether the rows suffice (`__init__.py`).
"""

import csv
import gzip
import math
import statistics
import zlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path

from exeplan.core.profile import LINKS, OPS, Measurement
from exeplan.errors import InputError
from exeplan.files import MAX_BYTES

COLUMNS = ("op", "phase", "tensor_parallel_size", "num_seqs", "num_tokens", "context_tokens", "bytes", "seconds")
_WHOLE = ("tensor_parallel_size", "num_seqs", "num_tokens", "context_tokens", "bytes")
_LARGEST = 2.0**53
_NEEDED = {
    ("attention", "prefill"): ("num_seqs", "num_tokens"),
    ("attention", "decode"): ("num_seqs", "context_tokens"),
    ("rest", ""): ("num_tokens",),
    ("rest", "prefill"): ("num_tokens",),
    ("rest", "decode"): ("num_tokens",),
    ("embed", ""): ("num_tokens",),
    ("head", ""): ("num_seqs",),
    ("overhead", "prefill"): ("num_seqs",),
    ("overhead", "decode"): ("num_seqs",),
    ("control", ""): ("num_seqs",),
    **{("all_reduce", link): ("bytes", "tensor_parallel_size") for link in LINKS},
    **{("send", link): ("bytes",) for link in LINKS},
}
"""The phases that an op may have, and the cells that its rows need."""
_NAMED = 3
"""Faults listed in one message."""


def read_csv(*paths: Path) -> tuple[tuple[Measurement, ...], tuple[str, ...]]:
    """The rows of the files in their order, and a sentence about points timed more than once, in one file or several.

    Raises InputError naming the line of what is missing, wrong, or cut short.
    """
    return _merged([(path, number, row) for path in paths for number, row in _numbered(path)])


def _numbered(path: Path) -> list[tuple[int, Measurement]]:
    """The rows of a file by their lines."""
    lines = read_lines(path)
    header = _header(path, lines[0])
    if not lines[-1].endswith("\n"):
        raise InputError(
            f"{path} ends within line {len(lines)}, without a line end, so it may be cut short; add one if it is whole"
        )
    rows: list[tuple[int, Measurement]] = []
    faults: list[str] = []
    for number, cells in enumerate(csv.reader(lines[1:]), start=2):
        if not cells:
            continue
        try:
            rows.append((number, _row(header, cells)))
        except InputError as fault:
            faults.append(f"line {number}: {fault}")
    if faults:
        more = f"; and {len(faults) - _NAMED} more lines" if len(faults) > _NAMED else ""
        raise InputError(f"{path} {'; '.join(faults[:_NAMED])}{more}")
    if not rows:
        raise InputError(f"{path} holds a header and no rows")
    return rows


def read_lines(path: Path, number: int | None = None) -> list[str]:
    """The first lines, or all, of a text file that may be gzip'd. Raises InputError when it is none."""
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8-sig")
            if path.suffix == ".gz"
            else open(path, encoding="utf-8-sig") as f
        ):
            lines, size = [], 0
            for line in islice(f, number):
                lines.append(line)
                size += len(line)
                if size > MAX_BYTES:
                    raise InputError(f"{path} is larger than {MAX_BYTES >> 20} MiB")
    except FileNotFoundError:
        raise InputError(f"no file {path}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start})") from None
    except EOFError:
        raise InputError(f"{path} is cut short: its gzip stream does not end") from None
    except (OSError, zlib.error) as error:
        raise InputError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if not lines:
        raise InputError(f"{path} is empty")
    return lines


def _header(path: Path, line: str) -> list[str]:
    names = [name.strip() for name in next(csv.reader([line]))]
    missing = [name for name in COLUMNS if name not in names]
    odd = [name for name in names if name not in COLUMNS]
    if missing or odd or len(names) != len(COLUMNS):
        faults = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has unknown {', '.join(map(repr, odd))}"] * bool(
            odd
        )
        faults = faults or ["names a column twice"]
        raise InputError(f"{path} line 1: the header {' and '.join(faults)}; the columns are {','.join(COLUMNS)}")
    return names


def _row(header: list[str], cells: list[str]) -> Measurement:
    if len(cells) != len(header):
        raise InputError(f"{len(cells)} cells where the header has {len(header)}")
    row = {name: cell.strip() for name, cell in zip(header, cells, strict=True)}
    op, phase = row["op"], row["phase"]
    if op not in OPS:
        raise InputError(f"no op '{op}'; there are {', '.join(OPS)}")
    if (op, phase) not in _NEEDED:
        phases = sorted(p for o, p in _NEEDED if o == op)
        raise InputError(f"{op} has no phase '{phase}'; it has {' or '.join(p or 'an empty one' for p in phases)}")
    sizes = {name: _whole(name, row[name]) for name in _WHOLE}
    sizes["tensor_parallel_size"] = sizes["tensor_parallel_size"] or 1
    for name in _NEEDED[op, phase]:
        least = 2 if name == "tensor_parallel_size" else 1  # Only all_reduce needs one, and is none of one device.
        if sizes[name] < least:
            raise InputError(f"{op} needs {name} of at least {least}")
    return Measurement(op=op, phase=phase, seconds=_seconds(row["seconds"]), **sizes)


def _whole(name: str, cell: str) -> int:
    try:
        value = float(cell or 0)
    except ValueError:
        value = math.nan
    if not (0 <= value < _LARGEST and value.is_integer()):
        raise InputError(f"{name} must be a whole number of at least 0, found '{cell}'")
    return int(value)


def _seconds(cell: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise InputError(f"seconds must be a finite number above 0, found '{cell}'")
    return value


def _merged(rows: Iterable[tuple[Path, int, Measurement]]) -> tuple[tuple[Measurement, ...], tuple[str, ...]]:
    points: dict[Measurement, list[tuple[Path, int, float]]] = defaultdict(list)
    for path, number, row in rows:
        points[replace(row, seconds=1.0)].append((path, number, row.seconds))
    merged = tuple(
        replace(point, seconds=statistics.median(s for _, _, s in timed), repeats=len(timed))
        for point, timed in points.items()
    )
    again = [timed for timed in points.values() if len(timed) > 1]
    if not again:
        return merged, ()
    (path, number, _), (other, further, _) = again[0][:2]
    first = f"{path} lines {number} and" if path == other else f"{path} line {number} and {other} line"
    others = f", and {len(again) - 1} other points so" if len(again) > 1 else ""
    return merged, (f"{first} {further} time the same point{others}; the median counts",)
