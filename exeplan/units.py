"""Durations and sizes as people write them; inside, everything is seconds and bytes."""

import math
import re

from exeplan.errors import InputError

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_BYTES = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_NUMBER = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|[-+]?inf|nan)\s*([a-z]*)\s*", re.IGNORECASE)
_LONGEST_RUN = 30 * 86_400.0
_MOST_DIGITS = 9
"""Of a time that is hardly beyond a bound."""


def seconds(text: str, name: str = "the duration") -> float:
    """`2s`, `500ms`, `1.5m` or a bare number of seconds, above zero; `inf` means no limit.

    Raises InputError naming what `name` says, such as an option.
    """
    return _positive(text, _SECONDS, name, "a duration such as 2s, 500ms or 1m")


def seconds_of_run(text: str, name: str) -> float:
    """As `seconds`, of work that is to end: at most 30 days."""
    if (value := seconds(text, name)) > _LONGEST_RUN:
        raise InputError(f"{name} must be at most 30 days (720h), found '{text}'")
    return value


def num_bytes(text: str, name: str = "the size") -> int:
    """`4GiB`, `500MB` or a bare number of bytes, at least one. Raises InputError as `seconds` does."""
    value = _positive(text, _BYTES, name, "a size such as 4GiB or 500MB")
    if math.isinf(value) or value < 1:
        raise InputError(f"{name} must be a finite number of bytes, at least 1, found '{text}'")
    return int(value)


def _positive(text: str, units: dict[str, float] | dict[str, int], name: str, what: str) -> float:
    match = _NUMBER.fullmatch(text)
    if match is None or match[2].lower() not in units:
        raise InputError(f"{name} must be {what}, found '{text}'")
    value = float(match[1]) * units[match[2].lower()]
    if math.isnan(value) or value <= 0:
        raise InputError(f"{name} must be above zero, found '{text}'")
    return value


def show_seconds(value: float | None, *, digits: int = 3) -> str:
    """Seconds for people, three digits: 4.21 s, 38.2 ms, 920 us; from 1000 s on whole ones: 1205 s."""
    if value is None:
        return "-"
    if math.isinf(value):
        return "no limit"
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if float(f"{value / scale:.{digits}g}") >= 1:
            return f"{_without_exponent(value / scale, digits)} {unit}"
    return f"{value / 1e-6:.{digits}g} us"


def show_apart(value: float, bound: float) -> tuple[str, str]:
    """Seconds that break a bound, and the bound, with the digits that tell them apart: 2.004 s and 2 s."""
    shown = ((show_seconds(value, digits=n), show_seconds(bound, digits=n)) for n in range(3, _MOST_DIGITS + 1))
    return next((pair for pair in shown if pair[0] != pair[1]), (show_seconds(value), show_seconds(bound)))


def _without_exponent(value: float, digits: int) -> str:
    shown = f"{value:.{digits}g}"
    return f"{value:.0f}" if "e" in shown else shown


def show_bytes(value: float) -> str:
    """Bytes for people, in MiB or GiB."""
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"
