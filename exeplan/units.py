"""Durations and sizes as people write them; inside, everything is seconds and bytes."""

import math
import re

from exeplan.errors import InputError

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_BYTES = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_NUMBER = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|[-+]?inf|nan)\s*([a-z]*)\s*", re.IGNORECASE)


def seconds(text: str, name: str = "the duration") -> float:
    """`2s`, `500ms`, `1.5m` or a bare number of seconds, above zero; `inf` means no limit.

    Raises InputError naming what `name` says, such as an option.
    """
    return _positive(text, _SECONDS, name, "a duration such as 2s, 500ms or 1m")


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


def show_seconds(value: float | None) -> str:
    """Seconds for people, three digits: 4.21 s, 38.2 ms, 920 us."""
    if value is None:
        return "-"
    if math.isinf(value):
        return "no limit"
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-6:.3g} us"


def show_bytes(value: float) -> str:
    """Bytes for people, in MiB or GiB."""
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"
