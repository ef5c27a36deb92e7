"""LengthMonitor: the joint law of input and output lengths of recent requests, running ones included.

A request counts from its start, with a weight that halves with every `half_life` requests that start after it: so the
weight does not depend on its length, and the estimate is unbiased. Counted from their ends, the short requests of new
traffic would come first. A request that still runs, or was dropped, has at least its present length: the product-limit
estimator of Kaplan and Meier (1958) gives its weight to the requests that became longer, here within bands of similar
inputs, so that the correlation of inputs and outputs stays. When recent requests differ from earlier ones, the earlier
ones are forgotten at once (as in ADWIN, Bifet and Gavalda 2007): a law of half old and half new traffic fits neither.

Not here: what follows from the law (`watch.py`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from exeplan.arrays import Floats
from exeplan.drift.evidence import Known, Sides, dependence, evidence
from exeplan.drift.state import RequestLengths
from exeplan.workload.length_law import Ints, LengthLaw
from exeplan.workload.workload import Workload

HALF_LIFE = 1000
"""Requests that start after a request until its weight is halved."""
MOST_KEPT = 4096
_FALSE_CUT = 1e-4
"""Probability, at one look, that unchanged traffic is partly forgotten, which costs part of the sample."""
_LEAST_RECENT = 32
"""Fewest complete requests that are compared with the earlier ones."""
_RENEWED, _MOST_BETWEEN = 100, 8
"""The law is renewed when one in so many of its requests, or this number, has ended since: fewer hardly change it."""
_BAND_REQUESTS, _MOST_BANDS = 100, 8
_DRAWS = 16
"""Lengths that represent what one running request may become."""
_TAIL = 0.99
_NEGLIGIBLE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The law of recent requests, and its sample."""

    known: Known
    size: float
    """Independent requests behind the tail of the outputs: 0 while all requests of that length still run."""
    since: float
    """Start of the oldest request in it."""
    num_censored: int

    @property
    def workload(self) -> Workload:
        return self.known.workload


class LengthMonitor:
    """Keeps the lengths of the last `most_kept` requests."""

    def __init__(self, *, half_life: float = HALF_LIFE, most_kept: int = MOST_KEPT) -> None:
        self._half_life = half_life
        self._ended = self._running = _table(())
        self._since = -np.inf
        self._most_kept = most_kept
        self._alike = 1.0
        """The factor on the sample size for dependence between successive requests, as last estimated."""
        self._last: Observed | None = None
        self._last_noted = 0
        """`num_noted` at the last law."""
        self.num_noted = 0
        """Requests that have ended in total."""

    def note(self, ended: Iterable[RequestLengths], running: Sequence[RequestLengths]) -> None:
        """Adds the requests that have ended since the last call, and replaces the running ones."""
        before = _table(tuple(ended))
        self._ended = np.concatenate([self._ended, before])[-self._most_kept :]
        self.num_noted += len(before)
        self._running = _table(running)

    @property
    def num_complete(self) -> int:
        """Complete requests in the sample; forgotten ones do not count."""
        return sum(seen.complete for seen in self.recent())

    def recent(self) -> tuple[RequestLengths, ...]:
        """Ended requests in the sample."""
        rows = self._ended[self._ended[:, 0] >= self._since].tolist()
        return tuple(RequestLengths(start, int(i), int(o), bool(done), took) for start, i, o, done, took in rows)

    def starts(self, since: float) -> Floats:
        """When the requests of the sample started from then on, rising, running and dropped ones too."""
        starts = np.concatenate([self._ended[:, 0], self._running[:, 0]])
        return np.sort(starts[starts >= max(since, self._since)])

    def observe(self, name: str = "observed") -> Observed | None:
        """The law now, the same object until enough requests have ended since; None while no request is complete.

        Forgets requests that differ from recent ones.
        """
        ended = self.num_noted - self._last_noted
        if self._last and ended < min(_MOST_BETWEEN, 1 + len(self._ended) // _RENEWED):
            return self._last
        rows = np.concatenate([self._ended, self._running])
        rows = rows[rows[:, 0] >= self._since]
        rows = rows[np.lexsort(rows.T[::-1])][-self._most_kept :]
        if not rows[:, 3].any():
            return None
        self._last_noted = self.num_noted
        sample = _Sample.of(rows)
        # Before the cut: a part that was selected because it differs would look dependent.
        self._alike = _dependence(sample) or self._alike
        if first := self._changed_at(sample):
            self._since, sample = sample.starts[first], sample.after(first)
        self._last = _observed(sample, self._half_life, self._alike, name)
        return self._last

    def _changed_at(self, sample: "_Sample") -> int:
        """The first request of the recent part, if it differs from the earlier part; else 0."""
        found, most = 0, 1.0
        behind = np.cumsum(sample.complete[::-1])[::-1]  # Complete requests from here on.
        recent = _LEAST_RECENT
        while 2 * recent <= behind[0]:
            first = int(np.searchsorted(-behind, -recent, side="left"))
            late, early = sample.after(first), sample.before(first)
            recent *= 2
            if not early.complete.any():
                continue
            one, other = (_sides(part, self._alike) for part in (late, early))
            if evidence(one, other, false_alarm=_FALSE_CUT) <= most:
                continue  # Evidence rises with the sizes, and those of all lengths are no larger.
            one, other = (_with_sizes(sides, part, self._alike) for sides, part in ((one, late), (other, early)))
            far = evidence(one, other, false_alarm=_FALSE_CUT)
            if far > most:
                found, most = first, far
        return found


def _table(rows: Sequence[RequestLengths]) -> Floats:
    """One row a request, its fields as columns."""
    return np.array(rows, float).reshape(-1, len(RequestLengths._fields))


@dataclass(frozen=True, eq=False, slots=True)
class _Sample:
    """Requests in the order of their start."""

    starts: Floats
    inputs: Ints
    outputs: Ints
    complete: np.ndarray
    by_input: Ints
    """Their numbers by rising input."""
    by_output: Ints
    """By rising output, complete ones first."""

    @classmethod
    def of(cls, rows: Floats) -> "_Sample":
        starts, inputs, outputs, complete, _ = rows.T
        lengths, complete = np.array([inputs, outputs], np.int64), complete.astype(bool)
        by_input, by_output = np.argsort(lengths[0], kind="stable"), np.lexsort((~complete, lengths[1]))
        return cls(starts, lengths[0], lengths[1], complete, by_input, by_output)

    def after(self, first: int) -> "_Sample":
        return self._part(first, len(self.starts))

    def before(self, last: int) -> "_Sample":
        return self._part(0, last)

    def _part(self, first: int, last: int) -> "_Sample":
        rows = slice(first, last)
        orders = [order[(order >= first) & (order < last)] - first for order in (self.by_input, self.by_output)]
        return _Sample(self.starts[rows], self.inputs[rows], self.outputs[rows], self.complete[rows], *orders)


def _dependence(sample: _Sample) -> float | None:
    """The larger of the dependences of inputs and of outputs."""
    found = [dependence(values[sample.complete]) for values in (sample.inputs, sample.outputs)]
    return max((one for one in found if one), default=None)


def _observed(sample: _Sample, half_life: float, alike: float, name: str) -> Observed:
    weights = 0.5 ** (np.arange(len(sample.starts))[::-1] / half_life)
    inputs, outputs, masses = _points(sample, weights)
    workload = Workload.of(name, inputs=inputs, outputs=outputs, weights=masses, source=f"{len(weights)} requests")
    size = float(weights.sum() ** 2 / np.square(weights).sum()) / alike
    curve = _Curve.of(sample.outputs, sample.complete, weights, sample.by_output)
    known = Known(workload, size, curve.lengths, np.minimum(curve.sizes / alike, size))
    tail = np.array([workload.output_quantile(_TAIL) - 1])
    return Observed(
        known=known,
        size=float(known.sides.output_sizes(tail)[0]),
        since=float(sample.starts[0]),
        num_censored=int(np.count_nonzero(~sample.complete)),
    )


def _sides(sample: _Sample, alike: float) -> Sides:
    """The laws of inputs and of outputs of requests of equal weight, every length known from all of them."""
    weights = np.ones(len(sample.starts))
    outputs, masses = sample.outputs[sample.by_output], weights
    if not sample.complete.all():
        _, outputs, masses = _points(sample, weights)
        order = np.argsort(outputs, kind="stable")
        outputs, masses = outputs[order], masses[order]
    inputs = LengthLaw(sample.inputs[sample.by_input], weights / len(weights))
    return Sides(inputs, LengthLaw(outputs, masses / len(weights)), len(weights) / alike)


def _with_sizes(sides: Sides, sample: _Sample, alike: float) -> Sides:
    """These laws with the number of requests behind each length of the outputs."""
    curve = _Curve.of(sample.outputs, sample.complete, np.ones(len(sample.starts)), sample.by_output)
    return replace(sides, lengths=curve.lengths, sizes=np.minimum(curve.sizes / alike, sides.size))


def _points(sample: _Sample, weights: Floats) -> tuple[Ints, Ints, Floats]:
    """The joint law. An incomplete request represents the requests of its band that became longer than it is now.

    Its input is known, so the law of the inputs uses all requests; that of the outputs is the product-limit estimator,
    which solves Efron's self-consistency equation (1967).
    """
    if sample.complete.all():
        return sample.inputs, sample.outputs, weights
    bands = int(np.clip(np.count_nonzero(sample.complete) // _BAND_REQUESTS, 1, _MOST_BANDS))
    places = np.linspace(0, 1, bands + 1)[1:-1] * (len(sample.inputs) - 1)
    edges = np.interp(places, np.arange(len(sample.inputs)), sample.inputs[sample.by_input])
    band = np.searchsorted(edges, sample.inputs, side="left")
    done = sample.complete
    inputs, outputs, masses = [sample.inputs[done]], [sample.outputs[done]], [weights[done]]
    for number in sorted(set(band[~done].tolist())):
        here = band == number
        order = np.lexsort((~done[here], sample.outputs[here]))
        curve = _Curve.of(sample.outputs[here], done[here], weights[here], order)
        censored = here & ~done
        inputs.append(np.repeat(sample.inputs[censored], _DRAWS))
        outputs.append(curve.beyond(sample.outputs[censored]))
        masses.append(np.repeat(weights[censored] / _DRAWS, _DRAWS))
    return np.concatenate(inputs), np.concatenate(outputs), np.concatenate(masses)


@dataclass(frozen=True, eq=False, slots=True)
class _Curve:
    """The share of requests that become longer than each of the lengths, rising, by the product-limit estimator."""

    lengths: Ints
    survival: Floats
    sizes: Floats
    """By Greenwood's variance: the number of complete requests that gives the same variance."""
    last: int
    """The length of requests beyond the longest known one: one token more."""

    @classmethod
    def of(cls, outputs: Ints, complete: np.ndarray, weights: Floats, order: Ints) -> "_Curve":
        """`order` is by rising output; an incomplete request was at risk at its length, so complete outputs of the
        same length come first."""
        weight, complete = weights[order], complete[order]
        at_risk, squares = (np.cumsum(values[::-1])[::-1] for values in (weight, weight**2))
        hazard = np.where(complete, weight / at_risk, 0.0)
        survival = np.cumprod(1.0 - np.minimum(hazard, 1.0))
        # No event among few requests may be chance: half an event more, and at most the known requests.
        half = 0.5 * squares / at_risk**2
        sizes = (1 - survival + half) / np.maximum(survival * (np.cumsum(hazard**2) + half**2), 1e-300)
        known = (np.cumsum(np.where(complete, weight, 0.0)) + at_risk - weight) ** 2
        sizes = np.minimum(
            sizes, known / (np.cumsum(np.where(complete, weight**2, 0.0)) + squares - weight**2 + 1e-300)
        )
        rising = outputs[order]
        ends = np.append(np.flatnonzero(np.diff(rising)), len(order) - 1)  # The last of each length.
        lengths = rising[ends]
        sizes, survival = sizes[ends], survival[ends]
        if survival[-1] > _NEGLIGIBLE:
            sizes[-1] = 0.0
        elif len(sizes) > 1:  # Beyond the longest length the share is as certain as at the one before.
            sizes[-1] = sizes[-2]
        return cls(lengths, survival, sizes, int(lengths[-1]) + 1)

    def beyond(self, outputs: Ints) -> Ints:
        """For each output, lengths that represent equal shares of the requests that became longer."""
        at = np.searchsorted(self.lengths, outputs, side="right") - 1
        left = self.survival[at][:, None] * (1 - (np.arange(_DRAWS) + 0.5) / _DRAWS)
        found = np.searchsorted(-self.survival, -left.ravel(), side="left")
        return np.concatenate([self.lengths, [self.last]])[found]
