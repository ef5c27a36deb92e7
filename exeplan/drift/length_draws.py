"""Requests of a server that publishes histograms of lengths only: each length drawn within its bucket.

An engine's metrics say how many ended requests had a length in each bucket, and the sum of all lengths; not which input
had which output. Within a bucket lengths are drawn as the planned law has them there, or uniform in their logarithm
where it has none. Where the published sums of recent requests differ from those of such draws by more than chance, all
are moved towards the upper or the lower ends of their buckets, by a positive-part James-Stein estimate. Inputs and
outputs are paired by the ranks of a sample of the planned law (Iman and Conover 1982), so that their correlation stays
the planned one: these histograms cannot show another.

Not here: how they are read (`runner/engine_watch`), and the law of many such requests (`length_monitor.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from exeplan.arrays import Floats
from exeplan.drift.state import RequestLengths
from exeplan.workload.length_law import Ints, LengthLaw
from exeplan.workload.workload import Workload

_NEGLIGIBLE = 1e-6
"""A share of planned requests in a bucket below which the planned law says nothing of it."""
_POINTS = 64
"""Of such a bucket."""
_HALF_LIFE = 200.0
"""Requests after which a sum counts half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """Requests by length: `counts[i]` of them above `edges[i - 1]` and at most at `edges[i]` tokens; `edges` rise, the
    last one is infinite."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    total: float
    """Tokens of all requests."""

    @property
    def size(self) -> int:
        return sum(self.counts)


class LengthDraws:
    """Draws the requests of one server, whose planned law this is; equal seeds give equal requests."""

    def __init__(self, planned: Workload, *, max_context: int, seed: int = 0) -> None:
        self._planned = planned
        self._sides = (_Side(planned.input_law, max_context), _Side(planned.output_law, max_context))
        self._rng = np.random.default_rng(seed)

    def requests(
        self, inputs: Buckets, outputs: Buckets, *, ended: tuple[float, float], prefill: float = 0.0, gap: float = 0.0
    ) -> list[RequestLengths]:
        """Requests that ended evenly between two times; `start` is the end of each, as long ones began earlier and
        requests that still run are not known.

        `prefill` and `gap`, mean seconds up to the first token and between two of them, give their seconds.
        """
        size = min(inputs.size, outputs.size)
        if not size:
            return []
        ranks = self._planned.sample(size, seed=int(self._rng.integers(1 << 31)), stratified=False)
        sides = zip(self._sides, (inputs, outputs), strict=True)
        drawn = [self._rng.permutation(side.drawn(buckets, self._rng))[:size] for side, buckets in sides]
        paired = [self._in_order_of(values, like) for values, like in zip(drawn, ranks, strict=True)]
        times = np.linspace(*ended, size + 1)[1:]
        return [
            RequestLengths(time, i, o, complete=True, seconds=prefill + gap * (o - 1) if gap else 0.0)
            for time, i, o in zip(times.tolist(), paired[0].tolist(), paired[1].tolist(), strict=True)
        ]

    def _in_order_of(self, values: Ints, like: Ints) -> Ints:
        """The values in the order of ranks that `like` has; equal ones at random."""
        found = np.empty(len(values), np.int64)
        found[np.lexsort((self._rng.random(len(like)), like))] = np.sort(values)
        return found


class _Side:
    """Of inputs or of outputs: what is known of the lengths in each bucket."""

    def __init__(self, law: LengthLaw, max_context: int) -> None:
        self._law, self._max_context = law, max_context
        self._edges: tuple[float, ...] = ()
        self._buckets: list[_Bucket] = []
        self._missing = self._variance = self._size = 0.0
        """Tokens of recent requests beyond those of the buckets' means, how far chance would take that, and requests;
        all decaying."""

    def drawn(self, buckets: Buckets, rng: np.random.Generator) -> Ints:
        """A length for each request, bucket by bucket."""
        if buckets.edges != self._edges:
            self._edges, self._buckets = buckets.edges, list(self._known(buckets.edges))
        share = self._share(buckets)
        drawn = [
            _moved(rng.choice(bucket.lengths, count, p=bucket.weights), bucket, share)
            for bucket, count in zip(self._buckets, buckets.counts, strict=True)
        ]
        return np.asarray(np.rint(np.concatenate(drawn)), np.int64)

    def _known(self, edges: tuple[float, ...]) -> Iterator["_Bucket"]:
        below = 0.0
        for edge in edges:
            low, high = (min(length, self._max_context) for length in (below + 1, edge))
            here = (self._law.tokens >= low) & (self._law.tokens <= high)
            lengths, weights = self._law.tokens[here].astype(float), self._law.weights[here]
            if weights.sum() <= _NEGLIGIBLE:
                lengths = np.geomspace(low, high, _POINTS)
                weights = np.ones(_POINTS)
            yield _Bucket(low, high, lengths, weights / weights.sum())
            below = edge

    def _share(self, buckets: Buckets) -> float:
        """By which lengths are moved towards the upper ends of their buckets, below zero towards the lower ones."""
        counts = np.array(buckets.counts, float)
        means = np.array([bucket.mean for bucket in self._buckets])
        kept = 0.5 ** (buckets.size / _HALF_LIFE)
        self._missing = kept * self._missing + buckets.total - float(counts @ means)
        self._variance = kept**2 * self._variance + float(counts @ [bucket.variance for bucket in self._buckets])
        self._size = kept * self._size + buckets.size
        ends = [bucket.high if self._missing > 0 else bucket.low for bucket in self._buckets]
        room = abs(float(counts @ (ends - means))) * self._size / max(buckets.size, 1)
        if not room or not self._missing:
            return 0.0
        certain = max(1.0 - self._variance / self._missing**2, 0.0)
        return float(np.clip(certain * self._missing / room, -1.0, 1.0))


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Lengths from `low` to `high`, and their shares."""

    low: float
    high: float
    lengths: Floats
    weights: Floats

    @property
    def mean(self) -> float:
        return float(self.lengths @ self.weights)

    @property
    def variance(self) -> float:
        return float(np.square(self.lengths - self.mean) @ self.weights)


def _moved(lengths: Floats, bucket: _Bucket, share: float) -> Floats:
    """By this share of the room that each has in its bucket."""
    return np.asarray(lengths + abs(share) * ((bucket.high if share > 0 else bucket.low) - lengths))
