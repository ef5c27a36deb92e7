"""Correction: by how much the predictions of a profile were off where they were measured, and what that changes.

    level        logarithm of a factor on all times of all passes
    slope        on times of passes without prompts, for each unit of ln(rows / 16); rows from 1 to 512
    prefill      on what prompts take of a pass, in addition to level
    links        on sums over a tensor parallel group, in addition: engines have faster ones than NCCL's
    first        on the time to the first token as serving reports it, in addition
    first_seconds  added to that time, in seconds: what happens in front of the engine, or what passes with prompts take
                 at least, whatever their prompts

The first four change a profile's times where they are read (`simulator/corrected_rows.py`), so that rates, latencies
and every policy's passes move with them. The last two change a time to the first token that is reported, and the centre
of its error law.

Not here: where the numbers come from (`profiler/calibration`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exeplan.errors import InputError

THETA = ("level", "slope", "prefill", "links", "first", "first_seconds")
REFERENCE_ROWS = 16
_FEWEST_ROWS, _MOST_ROWS = 1, 512
MOST_LOG = 5.0
"""Of a factor: what is further off is another deployment's, or in another unit."""
_LEAST_SHARE = 0.2
"""Of a time to the first token by the passes, which is left when seconds below 0 are added to a short one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What was found, from how many runs, and how sure it is."""

    level: float = 0.0
    slope: float = 0.0
    prefill: float = 0.0
    links: float = 0.0
    first: float = 0.0
    first_seconds: float = 0.0
    own_runs: int = 0
    """Of this placement's deployment."""
    other_runs: int = 0
    """Of other deployments, with which it shares effects."""
    deployments: int = 0
    """All that were measured, this one included if it was."""
    shared: tuple[str, ...] = ()
    """What other measured deployments have in common with it: `engine`, `device`, `family`..."""
    spreads: Mapping[str, float] = field(default_factory=dict)
    """Standard deviation of the logarithm of a new error of `ttft`, `tpot` and `latency`, and of `first_seconds`."""

    def first_token(self, seconds: float) -> float:
        """What is reported for a time to the first token by the passes."""
        return max(math.exp(self.first) * seconds + self.first_seconds, _LEAST_SHARE * seconds)

    @property
    def said(self) -> str:
        """One sentence: what was corrected, by how much, from what."""
        factors = (
            f"passes of {REFERENCE_ROWS} rows x{math.exp(self.level):.2f}, prompts "
            f"x{math.exp(self.level + self.prefill):.2f}, sums over GPUs x{math.exp(self.level + self.links):.2f}, "
            f"the first token x{math.exp(self.first):.2f} {1e3 * self.first_seconds:+.0f} ms"
        )
        own = f"{self.own_runs} measured runs of this deployment" if self.own_runs else "no run of this deployment"
        others = f"{self.other_runs} of others (in common: {', '.join(self.shared) or 'nothing'})"
        relative = {name: value for name, value in sorted(self.spreads.items()) if name != "first_seconds"}
        spread = ", ".join(f"{name} +-{100 * value:.0f} %" for name, value in relative.items())
        if seconds := self.spreads.get("first_seconds"):
            spread += f", the first token another +-{1e3 * seconds:.0f} ms"
        return f"corrected by measured serving runs: {factors}; from {own} and {others}; a new error: {spread}"


def rows_distance(rows: float) -> float:
    """ln(rows / 16), for rows in the range that was measured."""
    return math.log(min(max(rows, _FEWEST_ROWS), _MOST_ROWS) / REFERENCE_ROWS)


def correction_from(body: Any, path: Path) -> Correction:
    """As a profile has it. Raises InputError naming the field that is wrong."""
    try:
        found = Correction(**{**body, "shared": tuple(body.get("shared", ()))})
    except (TypeError, AttributeError) as error:
        raise InputError(f"{path}: its correction is malformed: {error}") from None
    for name in THETA:
        value = getattr(found, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MOST_LOG:
            raise InputError(
                f"{path}: correction.{name} is a logarithm from -{MOST_LOG:g} to {MOST_LOG:g}, found {value!r}"
            )
    for name, value in found.spreads.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_LOG:
            raise InputError(f"{path}: correction.spreads.{name} lies from 0 to {MOST_LOG:g}, found {value!r}")
    return found
