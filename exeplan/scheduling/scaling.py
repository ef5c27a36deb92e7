"""Scaling: how many replicas the observed load needs. The server and the replay of a changing number of them share it.

    needed   the fewest replicas that serve the observed rate within the plan's bounds (`RateCurve`)
    rate     the mean of a window, or more where a shorter one shows it: of windows of 1, 2, 4, ... looks the lowest
             rate that `SIGMAS` standard deviations of a Poisson count allow; and what waits, to be begun within a start
    wanted   the most that was needed within the last `hold_seconds`, between `least` and `most`

Starts are at once, and a stop is as late as a start takes: a replica that may be needed again costs its devices while
it idles, and as much while it loads again, so that a rule without knowledge of the future wastes at most twice what one
with it does. Source: the break-even rule of ski rental (Karlin et al., Algorithmica 3, 1988), as AutoScale has it
for servers (Gandhi et al., ACM TOCS 30(4), 2012).

Not here: where the curve is from (`planner/rate_curve.py`), and what starts and stops (`runner/server/scaler.py`,
`simulator/scaled.py`).
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from exeplan.errors import InputError

LOOK_SECONDS = 1.0
"""Between two looks."""
WINDOW_SECONDS = 60.0
"""Of the mean rate."""
SIGMAS = 3.0
"""A look in a thousand takes chance for a rise by that."""


@dataclass(frozen=True, slots=True)
class RateCurve:
    """What a number of replicas serves within the bounds."""

    rates: tuple[float, ...]
    """Requests/s of 1, 2, ... replicas, rising; beyond the last each adds as much as those before in the mean."""

    def __post_init__(self) -> None:
        assert self.rates
        assert self.rates[0] > 0
        assert all(low < high for low, high in zip(self.rates, self.rates[1:], strict=False))

    @classmethod
    def proportional(cls, rate: float) -> "RateCurve":
        """Of replicas that serve that many requests/s each."""
        return cls((rate,))

    def needed(self, rate: float) -> int:
        """The fewest replicas that serve a rate; 0 for none."""
        if rate <= 0:
            return 0
        if rate > self.rates[-1]:
            return math.ceil(rate / self.rates[-1] * len(self.rates) - 1e-9)
        return bisect_left(self.rates, rate) + 1

    def share_needed(self, rate: float) -> float:
        """The same without rounding up: what servers that each see a part of the load add up to."""
        number = min(self.needed(rate), len(self.rates))
        if number == 0:
            return 0.0
        if rate > self.rates[-1]:
            return rate / self.rates[-1] * len(self.rates)
        below = self.rates[number - 2] if number > 1 else 0.0
        return number - 1 + (rate - below) / (self.rates[number - 1] - below)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRule:
    """What the wanted number follows from, besides what is observed."""

    curve: RateCurve
    least: int = 1
    most: int
    start_seconds: float
    """From the start of a replica until it serves."""
    window_seconds: float = WINDOW_SECONDS
    starts_held: float = 1.0
    """How long a replica stays that is not needed any more, over what starting it again would take."""

    @property
    def hold_seconds(self) -> float:
        return self.starts_held * self.start_seconds


class Look(NamedTuple):
    """What was seen."""

    time: float
    """Seconds on any one clock."""
    num_arrived: int
    """Sequences that have come since the beginning, refused ones too."""
    needed: int
    share: float
    """`needed` before it was rounded up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What is known of the load after some looks; begin with `Demand()`."""

    looks: tuple[Look, ...] = ()
    """As far back as a rule looks, the first one at its far end or before."""
    rate: float = 0.0
    """Sequences/s, at the latest look."""
    wanted: int = 0
    """Replicas."""
    share: float = 0.0
    """The same without rounding and limits."""


def look(rule: ScalingRule, before: Demand, *, now: float, num_arrived: int, num_waiting: int) -> Demand:
    """The demand at one more look. `num_arrived` counts from the beginning; `num_waiting` have not begun."""
    rate = _rate(rule, before.looks, now, num_arrived)
    # What waits is to begin within a start: later ones would be no help with it.
    rate_wanted = rate + num_waiting / max(rule.start_seconds, rule.window_seconds)
    needed, share = rule.curve.needed(rate_wanted), rule.curve.share_needed(rate_wanted)
    looks = (*before.looks, Look(now, num_arrived, needed, share))
    held = [one for one in looks if one.time >= now - rule.hold_seconds]
    far = now - max(rule.window_seconds, rule.hold_seconds)
    first = max(sum(one.time <= far for one in looks) - 1, 0)
    return Demand(
        looks=looks[first:],
        rate=rate,
        wanted=min(max(max(one.needed for one in held), rule.least), rule.most),
        share=max(one.share for one in held),
    )


def _rate(rule: ScalingRule, looks: Sequence[Look], now: float, num_arrived: int) -> float:
    """The highest rate that some window up to now shows."""
    within = [one for one in looks if one.time > now - rule.window_seconds - 1e-9]
    if not within:
        return 0.0
    oldest, found = within[0], 0.0
    if _is_whole(rule, oldest, now):
        found = (num_arrived - oldest.num_arrived) / (now - oldest.time)
    for begin in (oldest, *(within[-(1 << power)] for power in range(len(within).bit_length()))):
        count = num_arrived - begin.num_arrived
        found = max(found, (count - SIGMAS * math.sqrt(count)) / max(now - begin.time, 1e-9))
    return found


def _is_whole(rule: ScalingRule, oldest: Look, now: float) -> bool:
    """Whether the looks cover most of the window; before that its mean would be of a few requests."""
    return now - oldest.time >= rule.window_seconds / 2


def with_start_seconds(rule: ScalingRule, seconds: float) -> ScalingRule:
    """The rule for replicas of which one took that long to start."""
    return replace(rule, start_seconds=seconds)


def to_drain(num_open: Mapping[int, int]) -> int:
    """Of the replicas that serve, by number with their sequences that have not finished: the one to stop next, which is
    soonest empty; of equal ones the last."""
    return min(num_open, key=lambda number: (num_open[number], -number))


def parse_replicas(text: str) -> tuple[int, int]:
    """`1:8`, the fewest and the most replicas, or one number for both. Raises InputError naming what is wrong."""
    least, colon, most = text.partition(":")
    if not (least.isdecimal() and (most.isdecimal() or not colon)) or int(least) < 1:
        raise InputError(f"--replicas must be MIN:MAX such as 1:4, MIN at least 1, found '{text}'")
    found = int(least), int(most if colon else least)
    if found[0] > found[1]:
        raise InputError(f"--replicas must be MIN:MAX with MIN at most MAX, found '{text}'")
    return found
