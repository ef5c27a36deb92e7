"""Figures of a run from all that was seen in its steady window, each with an interval and its number of observations.

    latency at n   mean ttft + sum over k < n of the mean gap between token k and k + 1, over all gaps that end in the
                   window: those of requests that began before it or end after it count, as in a product limit
    percentile     of request times, by the product limit (Kaplan and Meier, 1958) over requests that begin in it
                   and are censored at its end
    throughput     output tokens in the window over its length

A request that lives as long as the window hardly ever fits into it, yet its gaps do. Where few requests have a gap of
some length, the neighbouring lengths share one mean, `LEAST_GAPS` gaps at least.

Intervals hold the true value with 90 %: the window is cut into blocks of time at starts of prefills, and the spread of
what each block adds to the figure (its influence) is that of the figure (batch means; Student's t). None where there
are fewer than `LEAST_BLOCKS`.

Not here: where the window is, and what belongs to an Estimate (`metrics.py`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from exeplan.arrays import Floats
from exeplan.core.schedule import Figure
from exeplan.core.token_times import TokenTimes
from exeplan.units import show_seconds
from exeplan.workload.length_law import Ints

CONFIDENCE = 0.9
LEAST_BLOCKS, MOST_BLOCKS = 4, 12
LEAST_GAPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthLatency:
    """The latency at a length."""

    figure: Figure
    num_ended: int
    """Requests that began in the window and reached the length in it."""
    num_pooled: int
    """Lengths below it without any gap in the window: they have the mean of the nearest ones."""

    def sentences(self, length: int) -> list[str]:
        """What a reader should know of it, where that is anything; the length in tokens."""
        if self.num_ended and not self.num_pooled:
            return []
        what = (
            f"{self.num_ended:,} requests" if self.num_ended > 1 else "one request" if self.num_ended else "no request"
        )
        text = f"{what} of the 99th-percentile length, {length} tokens, began and ended in the steady window; latency "
        text += f"from {self.figure.num_observations:,} {self.figure.of}: {shown(self.figure)}"
        if self.num_pooled:
            text += f"; {self.num_pooled} of {length - 1} gaps were not seen and have the mean of the nearest"
        return [text]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Seconds at which the steady window opens and closes, and the edges of its blocks, both included."""

    edges: Floats

    @classmethod
    def of(cls, opens: float, closes: float, starts: Floats) -> "Window":
        """Blocks of about equal length that begin with a prefill, so that each holds whole cycles of a policy that
        has cycles."""
        even = np.linspace(opens, closes, MOST_BLOCKS + 1)[1:-1]
        inside = np.unique(starts[(starts > opens) & (starts < closes)])
        if not len(inside):
            return cls(edges=np.array([opens, closes]))
        after = np.searchsorted(inside, even).clip(1, max(len(inside) - 1, 1))
        before = inside[after - 1]
        after = inside[after.clip(max=len(inside) - 1)]
        nearest = np.where(even - before < after - even, before, after)
        return cls(edges=np.unique([opens, *nearest, closes]))

    @property
    def opens(self) -> float:
        return float(self.edges[0])

    @property
    def closes(self) -> float:
        return float(self.edges[-1])

    @property
    def num_blocks(self) -> int:
        return len(self.edges) - 1

    def holds(self, times: Floats) -> NDArray[np.bool_]:
        """After its opening and not after its close."""
        return (times > self.opens) & (times <= self.closes)

    def sums(self, times: Floats, values: Floats) -> Floats:
        """[blocks] Of the values by their times; times outside count in the nearest block."""
        blocks = (np.searchsorted(self.edges, times, side="left") - 1).clip(0, self.num_blocks - 1)
        return np.bincount(blocks, values, self.num_blocks).astype(float)


def shown(found: Figure) -> str:
    """Seconds with their interval."""
    if found.low is None or found.high is None:
        return f"{show_seconds(found.value)} (too short a window for an interval)"
    return f"{show_seconds(found.value)} ({show_seconds(found.low)} to {show_seconds(found.high)})"


def scaled(found: Figure, factor: float) -> Figure:
    """The figure in another unit."""
    low, high = (None if side is None else factor * side for side in (found.low, found.high))
    return replace(found, value=factor * found.value, low=low, high=high)


def figure(value: float, influences: Floats, *, num_observations: int, of: str) -> Figure:
    """A figure with the interval that follows from what each block adds to its error."""
    half = _half_width(influences)
    low, high = (None, None) if half is None else (value - half, value + half)
    return Figure(value=value, low=low, high=high, num_observations=num_observations, of=of)


def token_rate(times: TokenTimes, window: Window) -> Figure:
    """Output tokens a second."""
    counts, seconds = times.num_between(window.edges), np.diff(window.edges)
    rate = float(counts.sum() / seconds.sum())
    influences = (counts - rate * seconds) / seconds.sum()
    return figure(rate, influences, num_observations=int(counts.sum()), of="tokens")


def length_latency(
    times: TokenTimes, *, begins: Floats, firsts: Floats, length: int, window: Window, counted: NDArray[np.bool_]
) -> LengthLatency | None:
    """Seconds from the beginning of a request to its token of this number; None where no request reached it, or none
    of `counted` had its first token. The mean ttft is over `counted` requests."""
    then = times.nth(length)
    if np.isnan(then).all() or not counted.any():
        return None
    ttft, known = (firsts - begins)[counted], firsts[counted]
    influences = window.sums(known, (ttft - ttft.mean()) / len(ttft))
    gaps = Gaps.within(times, window, length)
    seconds, gap_influences, num_pooled = gaps.total(window)
    return LengthLatency(
        figure=figure(
            float(ttft.mean() + seconds),
            influences + gap_influences,
            num_observations=gaps.number or len(ttft),
            of="gaps" if gaps.number else "requests",
        ),
        num_ended=int(np.count_nonzero((begins >= window.opens) & (then <= window.closes))),
        num_pooled=num_pooled,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Shared:
    """Gaps between neighbours of one track, each had by many requests. Stretch `i` has `seconds[lows[i]:highs[i]]`, the
    first of them being its gap of number `numbers[i]`."""

    ends: Floats
    """[track] When each gap ends."""
    seconds: Floats
    """[track]"""
    lows: Ints
    highs: Ints
    numbers: Ints

    def slices(self) -> Iterator[tuple[slice, slice]]:
        """Of each stretch: its part of the track, and the numbers of these gaps."""
        lows, highs, numbers = self.lows.tolist(), self.highs.tolist(), self.numbers.tolist()
        for low, high, number in zip(lows, highs, numbers, strict=True):
            yield slice(low, high), slice(number, number + high - low)

    def deviations(self, weights: Floats, centres: Floats) -> Floats:
        """[track] Seconds less the centres by number, weighted, summed over the stretches; centres are weighted."""
        times, less = np.zeros(len(self.ends)), np.zeros(len(self.ends))
        for own, gaps in self.slices():
            times[own] += weights[gaps]
            less[own] += centres[gaps]
        return np.where(times > 0, times * self.seconds - less, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gaps:
    """The gaps below a length that end in a window. Gap k lies between token k and k + 1, from 1; index 0 is unused."""

    counts: Ints
    """[length] By number."""
    sums: Floats
    """[length] Seconds."""
    shared: tuple[_Shared, ...]
    """Within stretches."""
    ends: Floats
    """[gaps] Between one stretch, or the token before all of them, and the next."""
    seconds: Floats
    numbers: Ints

    @classmethod
    def within(cls, times: TokenTimes, window: Window, length: int) -> "Gaps":
        """No list of all tokens is made: tracks are walked stretch by stretch."""
        before, previous, begun = _before_stretches(times)
        some = (before >= 1) & (before < length) & window.holds(begun)
        ends, seconds, numbers = begun[some], (begun - previous)[some], before[some]
        shared = tuple(_shared(times, number, before, window, length) for number in range(len(times.tracks)))
        sums = np.bincount(numbers, seconds, length)[:length].astype(float)
        steps = np.zeros(length + 1, dtype=np.int64)
        for part in shared:
            for own, gaps in part.slices():
                sums[gaps] += part.seconds[own]
            steps += np.bincount(part.numbers, minlength=length + 1)
            steps -= np.bincount(part.numbers + part.highs - part.lows, minlength=length + 1)
        counts = np.cumsum(steps)[:length] + np.bincount(numbers, minlength=length)[:length]
        return cls(counts=counts, sums=sums, shared=shared, ends=ends, seconds=seconds, numbers=numbers)

    @property
    def number(self) -> int:
        return int(self.counts.sum())

    def total(self, window: Window) -> tuple[float, Floats, int]:
        """The sum of the mean gaps of all numbers, what each block of the window adds to its error, and how many
        numbers have no gap of their own."""
        if not self.number:
            return 0.0, np.zeros(window.num_blocks), len(self.counts) - 1
        groups = _groups(self.counts[1:])
        widths, counts = np.bincount(groups), np.bincount(groups, self.counts[1:])
        means = np.bincount(groups, self.sums[1:]) / counts
        weights, centres = np.append(0.0, (widths / counts)[groups]), np.append(0.0, means[groups])
        influences = window.sums(self.ends, weights[self.numbers] * (self.seconds - centres[self.numbers]))
        for part in self.shared:
            influences += window.sums(part.ends, part.deviations(weights, weights * centres))
        return float(widths @ means), influences, int(np.count_nonzero(self.counts[1:] == 0))


def _groups(counts: Ints) -> Ints:
    """[numbers] Neighbours that share a mean: each group has at least `LEAST_GAPS` gaps, or there is one group."""
    until = np.cumsum(counts)
    groups = np.maximum(np.ceil(until / LEAST_GAPS).astype(np.int64) - 1, 0)
    _, groups = np.unique(np.minimum(groups, max(int(until[-1]) // LEAST_GAPS - 1, 0)), return_inverse=True)
    return groups


def _before_stretches(times: TokenTimes) -> tuple[Ints, Floats, Floats]:
    """[stretches] Tokens that the request had before, the time of the last of them (NaN where there is none), and the
    time of the stretch's first token."""
    order, owners = times.by_owner, times.owners[times.by_owner]
    lengths = (times.ends - times.begins)[order]
    leads = np.full(times.num_requests, np.nan) if times.leads is None else times.leads
    until = np.cumsum(lengths, dtype=np.int64) - lengths
    first = np.append(True, owners[1:] != owners[:-1])[: len(owners)]
    base = np.maximum.accumulate(np.where(first, until, 0))
    firsts, lasts = times.borders()
    previous = np.where(first, leads[owners], np.append(np.nan, lasts[order][:-1])[: len(owners)])
    before, found = np.empty_like(until), np.empty(len(owners))
    before[order] = until - base + ~np.isnan(leads[owners])
    found[order] = previous
    return before, found, firsts


def _shared(times: TokenTimes, number: int, before: Ints, window: Window, length: int) -> _Shared:
    """The gaps within stretches of one track that end in the window, below the length."""
    track, here = times.tracks[number], np.flatnonzero(times.numbers == number)
    begins, ends, before = times.begins[here].astype(np.int64), times.ends[here].astype(np.int64), before[here]
    early = np.append(0, np.cumsum(track <= window.opens))
    late = np.append(0, np.cumsum(track > window.closes))
    lows = np.maximum(begins + 1, begins + early[ends] - early[begins])
    highs = np.minimum(ends - (late[ends] - late[begins]), begins + length - before)
    some = lows < highs
    numbers = (before + lows - begins)[some]
    seconds = np.append(np.nan, np.diff(track))[: len(track)]
    return _Shared(ends=track, seconds=seconds, lows=lows[some], highs=highs[some], numbers=numbers)


def percentile(spans: Floats, ended: NDArray[np.bool_], share: float, *, starts: Floats, window: Window) -> Figure:
    """The smallest time that a share of the requests does not exceed, by product limit: `spans` are seconds until a
    request ended, or until it was last seen. Infinite where too few were seen to the end."""
    order = np.argsort(spans, kind="stable")
    at, over = spans[order], ended[order]
    left = len(at) - np.arange(len(at))
    hazard = np.cumsum(over / np.maximum(left, 1) ** 2)
    reached = 1 - np.cumprod(1 - over / left)
    value = _crossing(at, reached, share)
    until = np.clip(np.searchsorted(at, value, side="right") - 1, 0, len(at) - 1)
    below = np.arange(len(at)) <= until
    martingale = (over & below) / left - hazard[np.minimum(np.arange(len(at)), until)]
    spread = _half_width(window.sums(starts[order], (1 - share) * martingale))
    count = int(np.count_nonzero(ended))
    if spread is None:
        return Figure(value=value, low=None, high=None, num_observations=count, of="requests")
    low, high = (_crossing(at, reached, side) for side in (max(share - spread, 0.0), share + spread))
    return Figure(value=value, low=low, high=high, num_observations=count, of="requests")


def _crossing(at: Floats, reached: Floats, share: float) -> float:
    """The first time at which the curve reaches a share."""
    place = int(np.searchsorted(reached, share - 1e-9))
    return float(at[place]) if place < len(at) else math.inf


def _half_width(influences: Floats) -> float | None:
    """Half the interval of a figure, from the influence of each block."""
    number = len(influences)
    if number < LEAST_BLOCKS:
        return None
    deviation = math.sqrt(number / (number - 1) * float(np.sum((influences - influences.mean()) ** 2)))
    return float(stdtrit(number - 1, (1 + CONFIDENCE) / 2)) * deviation
