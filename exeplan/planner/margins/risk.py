"""Risk: how far below a bound to stay so that the chance of breaking it stays under a stated share.

    error     measured / predicted, of a latency, a ttft or a tpot; laws are kept in logarithms, where errors multiply
    margin    the prediction times (1 + margin) is what the measurement exceeds with at most the stated risk

From n errors the margin is the larger of Student's prediction bound, mean + t(n - 1) s sqrt(1 + 1/n), which accounts
for a small sample, and the sample's own quantile at rank (n + 1)(1 - risk), which needs no normal law.

Which errors there are is said in `margins.py`, where their laws are compounded, and why the best of several candidates
needs no larger margin. Not here: prediction (`simulator/`),
and changes of the traffic since (`exeplan/drift`).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from exeplan.errors import InputError
from exeplan.files import read_json_value

QUANTITIES = ("latency", "ttft", "tpot")
"""Quantities with an error law. Every bound on whole requests is on `latency`."""
_NORMAL = 1e9
"""Degrees of freedom at which Student's law is the normal one."""


class ErrorPair(TypedDict):
    """An entry of an error file: seconds by quantity, null where there is no value."""

    predicted: Mapping[str, float | None]
    measured: Mapping[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorLaw:
    """Errors as logarithms of measured / predicted."""

    logs: tuple[float, ...]
    """A sample of them, rising."""
    spread: float
    """Standard deviation of a new error, the uncertainty of the law's centre included."""
    freedom: float
    """Degrees of freedom of the spread."""
    count: int
    """Observations behind the law."""
    source: str

    def margin(self, risk: float) -> float:
        """What to add to a prediction, relative; never below 0."""
        from scipy.special import stdtrit

        share = check_risk(risk)
        student = stdtrit(min(self.freedom, _NORMAL), 1 - share) * self.spread
        rank = min(math.ceil((len(self.logs) + 1) * (1 - share)), len(self.logs))
        return max(0.0, math.expm1(max(float(np.mean(self.logs)) + float(student), self.logs[rank - 1])))


def check_risk(risk: float) -> float:
    """The risk itself. Raises InputError unless it lies between 0 and a half."""
    if not 0 < risk < 0.5:
        raise InputError(f"a risk must lie above 0 % and below 50 %, found {100 * risk:g} %")
    return risk


def error_law(ratios: Sequence[float], source: str) -> ErrorLaw:
    """The law of measured / predicted ratios, each above 0. Raises InputError for fewer than two."""
    if len(ratios) < 2:
        raise InputError(f"{source}: {len(ratios)} of the at least 2 errors that a spread needs")
    logs = np.sort(np.log(np.asarray(ratios, dtype=float)))
    n = len(logs)
    spread = float(logs.std(ddof=1)) * math.sqrt(1 + 1 / n)
    return ErrorLaw(logs=tuple(logs.tolist()), spread=spread, freedom=n - 1.0, count=n, source=source)


def compound(one: ErrorLaw, other: ErrorLaw) -> ErrorLaw:
    """The law of the product of two independent errors, its freedom by Welch and Satterthwaite."""
    sums = np.sort(np.add.outer(one.logs, other.logs), axis=None)
    parts = [(law.spread**2, law.freedom) for law in (one, other)]
    variance = sum(part for part, _ in parts)
    freedom = variance**2 / sum(part**2 / n for part, n in parts) if variance else min(n for _, n in parts)
    return ErrorLaw(
        logs=tuple(sums.tolist()),
        spread=math.sqrt(variance),
        freedom=freedom,
        count=one.count + other.count,
        source=f"{one.source}; {other.source}",
    )


def load_errors(path: Path) -> dict[str, ErrorLaw]:
    """The laws of a JSON file of predicted and measured values, by quantity; quantities without values are left out.

    A list of {"predicted": {"latency": 1.9, ...}, "measured": {"latency": 2.0, ...}}, in seconds, or a record of
    `benchmarks/fidelity/one_device.py`. Raises InputError naming what is wrong.
    """
    body = read_json_value(path)
    ratios: dict[str, list[float]] = {}
    for number, pair in enumerate(_pairs(body, path), 1):
        for name in QUANTITIES:
            if (ratio := _ratio(pair, name, f"{path}: pair {number}")) is not None:
                ratios.setdefault(name, []).append(ratio)
    if not ratios:
        raise InputError(f"{path} pairs no predicted with a measured {', '.join(QUANTITIES)}")
    return {
        name: error_law(found, f"{len(found)} pair{'s' * (len(found) > 1)} in {path.name}")
        for name, found in ratios.items()
    }


def parse_risk(text: str) -> float:
    """`1%` or `0.01`. Raises InputError for other text, and for a share outside 0 to 50 %."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise InputError(f"--risk must be a share such as 1% or 0.01, found '{text}'") from None
    if not 0 < value < 0.5:
        raise InputError(f"--risk must lie above 0 % and below 50 %, found '{text}'")
    return value


def _pairs(body: Any, path: Path) -> Iterator[ErrorPair]:
    if isinstance(body, Mapping) and isinstance(body.get("rows"), list):
        runs = [run for row in body["rows"] if isinstance(row, Mapping) for run in row.get("runs", ())]
        body = [
            {"predicted": run["replay"], "measured": run["measured"]}
            for run in runs
            if {"replay", "measured"} <= set(run)
        ]
    if not isinstance(body, list):
        raise InputError(f"{path} must hold a list of predicted and measured pairs, or a record of them")
    for number, pair in enumerate(body, 1):
        if not isinstance(pair, Mapping) or not all(
            isinstance(pair.get(k), Mapping) for k in ("predicted", "measured")
        ):
            raise InputError(
                f'{path}: pair {number} is not of the form {{"predicted": {{"latency": 1.9}}, "measured": '
                f'{{"latency": 2.0}}}}'
            )
        yield ErrorPair(predicted=pair["predicted"], measured=pair["measured"])


def _ratio(pair: ErrorPair, name: str, where: str) -> float | None:
    predicted, measured = pair["predicted"].get(name), pair["measured"].get(name)
    if predicted is None or measured is None:
        return None
    for value in (predicted, measured):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-9 < value < 1e9:
            raise InputError(f"{where}: {name} must be seconds between 1e-9 and 1e9, found {value!r}")
    return float(measured / predicted)
