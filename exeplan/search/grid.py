"""Grid: the points a search may try, each evaluated once, and the best of those tried."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from exeplan.policies.interface import Knob

Index = tuple[int, ...]
"""A position in the grid: which value of each knob."""
Rank = tuple[float, float, Index]
"""Minus throughput, latency, position: the lower the better."""

MOST_COMPARED = 1000
"""Points among which dips are looked for: each is compared with all."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a point gives: requests/s, seconds, and memory in any one unit."""

    throughput: float
    latency: float
    memory: float


@dataclass(frozen=True, slots=True)
class Limits:
    """Latency and memory may not exceed these; infinity is no limit."""

    bound: float
    capacity: float

    def broken(self, outcome: Outcome, slack: float = 0.0) -> tuple[str, ...]:
        """Which limits the outcome exceeds by more than the slack, relative."""
        latency = ("latency",) if outcome.latency > self.bound * (1 + slack) else ()
        memory = ("memory",) if outcome.memory > self.capacity * (1 + slack) else ()
        return latency + memory

    def load(self, outcome: Outcome) -> float:
        """The fuller limit's share in use; above 1 it is broken."""
        latency = outcome.latency / self.bound if self.bound > 0 else math.inf
        memory = outcome.memory / self.capacity if self.capacity > 0 else math.inf
        return max(latency, memory)


@dataclass(frozen=True, slots=True)
class Slack:
    """How far throughput, and load, may fall while a knob rises, relative."""

    throughput: float = 0.0
    load: float = 0.0

    @property
    def most(self) -> float:
        return max(self.throughput, self.load)

    def above(self, other: "Slack") -> "Slack":
        """The falls that are larger than another's, 0 for one that is not."""
        return Slack(
            self.throughput if self.throughput > other.throughput else 0.0,
            self.load if self.load > other.load else 0.0,
        )

    def joined(self, other: "Slack") -> "Slack":
        """The larger of both, each."""
        return Slack(max(self.throughput, other.throughput), max(self.load, other.load))


class Grid:
    """Remembers every outcome; `best` is the rank of the best point tried that breaks no limit."""

    def __init__(
        self,
        knobs: Sequence[Knob],
        evaluate: Callable[[Mapping[str, int]], Outcome],
        limits: Limits,
        at_least: float = 0.0,
    ) -> None:
        assert all(knob.values for knob in knobs), "a knob without a value"
        self.at_least = at_least
        """Throughput below which no point is of interest."""
        self.knobs, self.evaluate, self.limits = tuple(knobs), evaluate, limits
        self.shape = tuple(len(knob.values) for knob in knobs)
        self.bottom: Index = tuple(knob.first for knob in self.knobs)
        """The point of least throughput and load, but for what lies below the first values of knobs (`lower`)."""
        self.top: Index = tuple(n - 1 for n in self.shape)
        self.falls = max((knob.falls for knob in self.knobs), default=0.0)
        """How far throughput and load may fall while a knob rises, as declared."""
        self.tried: dict[Index, Outcome] = {}
        self.best: Rank | None = None

    def __call__(self, index: Index) -> Outcome:
        """The outcome at a position."""
        if (known := self.tried.get(index)) is not None:
            return known
        outcome = self.tried[index] = self.evaluate(self.point(index))
        rank = (-outcome.throughput, outcome.latency, index)
        if not self.limits.broken(outcome) and (self.best is None or rank < self.best):
            self.best = rank
        return outcome

    def lower(self) -> bool:
        """Moves a bottom that breaks a limit towards values below the first ones, by halves, while the load falls and
        may yet come within the limits; whether it has moved.

        On the way down the load is convex: it does not come below the line through the last two points.
        """
        start = self.bottom
        for number, knob in enumerate(self.knobs):
            while knob.first and self.bottom[number] and not self.fits(self.bottom):
                here, half = self.bottom, self.bottom[number] // 2
                below = (*here[:number], half, *here[number + 1 :])
                load, less = self.limits.load(self(here)), self.limits.load(self(below))
                if less >= load:
                    break
                self.bottom = below
                if less - (load - less) * half / (here[number] - half) > 1:
                    break
        return self.bottom != start

    def __contains__(self, index: Index) -> bool:
        return all(0 <= i < n for i, n in zip(index, self.shape, strict=True))

    def point(self, index: Index) -> dict[str, int]:
        """Knob values by name."""
        return {knob.name: knob.values[i] for knob, i in zip(self.knobs, index, strict=True)}

    def fits(self, index: Index, slack: float = 0.0) -> bool:
        """No limit is broken by more than the slack."""
        return not self.limits.broken(self(index), slack)

    def excess(self, index: Index, slack: float = 0.0) -> float:
        """How far the fuller limit is exceeded, relative; above 0 exactly where the point does not fit."""
        over = self.limits.load(self(index)) / (1 + slack) - 1
        return min(over, 0.0) if self.fits(index, slack) else max(over, 1e-12)

    def lowest_latency(self) -> Index:
        """The point tried with the least latency among those that fit the memory, or the least of all if none does."""

        def harshness(index: Index) -> tuple[float, float, Index]:
            outcome = self.tried[index]
            return max(0.0, outcome.memory - self.limits.capacity), outcome.latency, index

        return min(self.tried, key=harshness)

    def frontier(self) -> list[Index]:
        """Points tried that fit the memory and have more throughput than all with less latency, by latency."""
        by_latency = sorted((o.latency, -o.throughput, index) for index, o in self.tried.items())
        found, most = [], -math.inf
        for _, minus_throughput, index in by_latency:
            if self.tried[index].memory <= self.limits.capacity and -minus_throughput > most:
                most = -minus_throughput
                found.append(index)
        return found

    def dips(self) -> Slack:
        """The largest relative falls of throughput and of load from a point to one above it, of those tried last."""
        last = list(self.tried.items())[-MOST_COMPARED:]
        rows = np.array([index for index, _ in last], dtype=np.int32).reshape(len(last), len(self.shape))
        throughput = np.array([outcome.throughput for _, outcome in last])
        load = np.array([self.limits.load(outcome) for _, outcome in last])
        falls = [0.0, 0.0]
        for row, t, x in zip(rows, throughput, load, strict=True):
            above = (rows >= row).all(axis=1)
            for i, (value, values) in enumerate(((t, throughput), (x, load))):
                least = values[above].min()
                if 0 < least < value < math.inf:
                    falls[i] = max(falls[i], float(value / least) - 1)
        return Slack(*(fall if fall > 1e-9 else 0.0 for fall in falls))
