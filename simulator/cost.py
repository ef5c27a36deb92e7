"""Cost model: a Profile turned into seconds for one pass over the model.

    pass = overhead(rows) + embed(tokens) + head(rows)
         + layers * (rest(tokens) + attention(prefill) + attention(decode))

Ragged batches cost by total context, not by batch * max. Between measured points times are interpolated linearly, so an
estimate never leaves the values of its measured neighbours; beyond the last point the last slope goes on, and `beyond`
names every axis on which an estimate did that.

Not here: measuring (`profiler/`) and what happens when (`closed_form.py`, `replay.py`).
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np

from exeplan.policies import Cycle, Floats
from exeplan.profile import Measurement, Profile
from exeplan.scheduling import Batch

_QUADRATURE = 9
"""Points of the prompt-length law at which a pass with prefills is timed."""


@dataclass(frozen=True)
class Curve:
    """Seconds over one axis; linear between points, the last slope beyond them, never below zero."""

    x: Floats
    seconds: Floats

    def __call__(self, at: Floats | float) -> Floats:
        at = np.asarray(at, dtype=float)
        inside = np.interp(at, self.x, self.seconds)
        if len(self.x) == 1:
            return inside
        return inside + self.last_slope * np.maximum(at - self.x[-1], 0.0)

    def at(self, x: float) -> float:
        """The same as calling it, for one number."""
        xs, seconds = self._lists
        i = min(max(bisect_right(xs, x), 1), len(xs) - 1)
        if x <= xs[0] or len(xs) == 1:
            return seconds[0]
        value = seconds[i - 1] + (seconds[i] - seconds[i - 1]) * (x - xs[i - 1]) / (xs[i] - xs[i - 1])
        return value if x <= xs[-1] else seconds[-1] + self.last_slope * (x - xs[-1])

    @cached_property
    def _lists(self) -> tuple[list[float], list[float]]:
        return self.x.tolist(), self.seconds.tolist()

    @cached_property
    def last_slope(self) -> float:
        """Seconds per unit beyond the last point."""
        return max(0.0, float((self.seconds[-1] - self.seconds[-2]) / (self.x[-1] - self.x[-2])))


@dataclass(frozen=True, slots=True)
class Surface:
    """Seconds over (num_seqs, tokens a sequence): one curve over tokens for each measured num_seqs, linear between.

    Below one sequence and beyond the largest measured number the time is proportional to the number of sequences.
    """

    num_seqs: Floats
    curves: tuple[Curve, ...]

    def __call__(self, num_seqs: Floats | float, tokens: Floats | float) -> Floats:
        n, tokens = np.broadcast_arrays(np.asarray(num_seqs, dtype=float), np.asarray(tokens, dtype=float))
        heights = np.stack([curve(tokens) for curve in self.curves])
        return self.blend(n, heights)

    def at_num_seqs(self, num_seqs: int) -> "Curve":
        """The curve over tokens a sequence at one number of sequences; exact, as it has the points of all curves."""
        x = np.unique(np.concatenate([curve.x for curve in self.curves]))
        x = np.append(x, x[-1] * 2)  # Beyond the last point each curve has its own slope.
        return Curve(x, self(float(num_seqs), x))

    def blend(self, n: Floats, heights: Floats) -> Floats:
        """Interpolates over num_seqs the values that each curve gives; `heights` has the curves as its first axis."""
        clipped = np.clip(n, self.num_seqs[0], self.num_seqs[-1])
        right = np.searchsorted(self.num_seqs, clipped).clip(1 if len(self.curves) > 1 else 0, len(self.curves) - 1)
        left = np.maximum(right - 1, 0)
        width = np.maximum(self.num_seqs[right] - self.num_seqs[left], 1e-12)
        share = np.where(right > left, (clipped - self.num_seqs[left]) / width, 0.0)
        low = np.take_along_axis(heights, left[None], 0)[0]
        high = np.take_along_axis(heights, right[None], 0)[0]
        return (low + share * (high - low)) * n / np.maximum(clipped, 1e-12)


class CostModel:
    """Seconds of passes on the profiled device; a pure function of the profile."""

    def __init__(self, profile: Profile) -> None:
        rows = [replace(m, seconds=m.seconds * profile.calibration) for m in profile.measurements]
        self.num_layers = profile.model.num_layers
        self.rest = _curve(rows, "rest", "num_tokens")
        self.embed = _curve(rows, "embed", "num_tokens")
        self.head = _curve(rows, "head", "num_seqs")
        self.overhead = _curve(rows, "overhead", "num_seqs", phase="decode")
        self.prefill_overhead = _curve(rows, "overhead", "num_seqs", phase="prefill")
        self.decode_attention = _surface(rows, "decode", "context_tokens")
        self.prefill_attention = _surface(rows, "prefill", "num_tokens")
        # A replay asks for one scalar at a time, thousands of times: the same interpolation without numpy's overhead.
        self._attention_curve = cache(self.decode_attention.at_num_seqs)
        self._fixed_decode = cache(lambda n: float(self._iteration(n, n, 0)))

    def batch_seconds(self, batch: Batch) -> float:
        """One real batch (the replay's and the runner's)."""
        rows, prefills = len(batch.decode), len(batch.prefill)
        if not prefills:
            fixed = self._fixed_decode(rows)
            context = sum(s.num_prompt_tokens + s.num_output_tokens for s in batch.decode) - rows
            return fixed + self.num_layers * self._attention_curve(rows).at(context / rows)
        prompts = np.array([batch.pad_to or s.num_tokens for s in batch.prefill], dtype=float)
        seconds = float(self._iteration(rows + prompts.sum(), rows, prefills))
        share = self.prefill_attention(float(prefills), prompts) / prefills
        seconds += self.num_layers * float(share.sum())
        if rows:
            context = sum(s.num_tokens for s in batch.decode) - rows
            seconds += self.num_layers * self._attention_curve(rows).at(context / rows)
        return seconds

    def pass_seconds(self, cycle: Cycle) -> Floats:
        """Each expected pass of a steady cycle, given that it occurs."""
        rows, prefills = cycle.num_decode, cycle.num_prefill
        points, weights = _quadrature(cycle)
        mean = float(weights @ points)
        # The sum of k independent prompts spreads like one prompt times sqrt(k); padded ones are all alike.
        spread = prefills if cycle.padded else np.sqrt(prefills)
        prompts = prefills[:, None] * mean + spread[:, None] * (points - mean)
        seconds = (
            self._iteration(rows[:, None] + np.maximum(prompts, prefills[:, None]), rows[:, None], prefills[:, None])
            @ weights
        )
        context = cycle.context_tokens / np.maximum(rows, 1e-12)
        attention = np.where(rows > 0, self.decode_attention(rows, context), 0.0)
        shares = np.stack([curve(points) @ weights for curve in self.prefill_attention.curves])
        heights = np.repeat(shares[:, None], len(prefills), axis=1)
        attention = attention + np.where(prefills > 0, self.prefill_attention.blend(prefills, heights), 0.0)
        return seconds + self.num_layers * attention

    def beyond(self, cycle: Cycle) -> tuple[str, ...]:
        """Axes on which the estimate of this cycle leaves what was measured, as sentences."""
        points, _ = _quadrature(cycle)
        tokens = float(np.max(cycle.num_decode + cycle.num_prefill * points.mean()))
        context = float(np.max(cycle.context_tokens / np.maximum(cycle.num_decode, 1e-12)))
        reached = [
            ("tokens a pass", tokens, self.rest.x[-1]),
            ("rows that decode", float(cycle.num_decode.max()), self.decode_attention.num_seqs[-1]),
            ("context of a row", context, max(curve.x[-1] for curve in self.decode_attention.curves)),
            ("prompt length", float(points.max()), max(curve.x[-1] for curve in self.prefill_attention.curves)),
        ]
        return tuple(
            f"{what} reach {value:.0f}, measured up to {limit:.0f}: extrapolated"
            for what, value, limit in reached
            if value > limit * 1.001
        )

    def _iteration(self, tokens: Floats | float, rows: Floats | float, prefills: Floats | float) -> Floats:
        """Everything but attention. A pass with prefills pays their own overhead over that of as many decode rows."""
        everyone = np.asarray(rows) + np.asarray(prefills)
        extra = np.maximum(self.prefill_overhead(prefills) - self.overhead(prefills), 0.0)
        fixed = self.overhead(everyone) + np.where(np.asarray(prefills) > 0, extra, 0.0)
        return fixed + self.embed(tokens) + self.num_layers * self.rest(tokens) + self.head(everyone)


def _quadrature(cycle: Cycle) -> tuple[Floats, Floats]:
    """A few points of the prompt law with equal weights, exact in the mean."""
    law = cycle.prompt_law
    mass = np.concatenate([[0.0], np.cumsum(law.weights * law.tokens)])
    edges = np.linspace(0.0, 1.0, _QUADRATURE + 1)
    means = np.diff(np.interp(edges, np.concatenate([[0.0], law.cdf]), mass)) * _QUADRATURE
    return means, np.full(_QUADRATURE, 1 / _QUADRATURE)


def _curve(rows: Iterable[Measurement], op: str, axis: str, *, phase: str | None = None) -> Curve:
    points: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        if row.op == op and phase in (None, row.phase):
            points[getattr(row, axis)].append(row.seconds)
    x = sorted(points)
    return Curve(np.array(x, dtype=float), np.array([np.median(points[at]) for at in x]))


def _surface(rows: Iterable[Measurement], phase: str, axis: str) -> Surface:
    by_seqs: dict[int, dict[float, float]] = defaultdict(dict)
    for row in rows:
        if row.op == "attention" and row.phase == phase:
            by_seqs[row.num_seqs][getattr(row, axis) / row.num_seqs] = row.seconds
    curves = []
    for num_seqs in sorted(by_seqs):
        points = sorted(by_seqs[num_seqs].items())
        curves.append(Curve(np.array([p[0] for p in points]), np.array([p[1] for p in points])))
    return Surface(np.array(sorted(by_seqs), dtype=float), tuple(curves))
