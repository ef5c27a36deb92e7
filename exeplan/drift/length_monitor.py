"""LengthMonitor: the joint law of input and output lengths of recent requests, those that still run included.

A request counts from its start, with a weight that halves with every so many that start after it: so the weight says
nothing about its length, and the estimate is unbiased. Counted from their ends, the short ones of a new kind of traffic
would come first. One that still runs, or was dropped, is known to be at least so long: the product-limit estimator of
Kaplan and Meier (1958) gives its weight to those that became longer, here within bands of like inputs, so that the
correlation of both sides stays. When what came lately differs from what came before, the older part is forgotten at
once (as in ADWIN, Bifet and Gavalda 2007): a law that is half the old traffic's would fit neither.

Not here: what follows from the law (`drift.py`).
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from exeplan.arrays import Floats
from exeplan.drift.evidence import Known, dependence, evidence
from exeplan.drift.state import RequestLengths
from exeplan.workload.length_law import Ints
from exeplan.workload.workload import Workload

HALF_LIFE = 1000
"""Requests that start after one until it counts half."""
MOST_KEPT = 4096
_FALSE_CUT = 1e-4
"""Probability, at one look, that traffic which has not changed is partly forgotten: it costs some of the sample."""
_LEAST_RECENT = 32
"""Complete requests that tell what came lately from what came before."""
_BAND_REQUESTS, _MOST_BANDS = 100, 8
_DRAWS = 16
"""Lengths that stand for what one request may become."""
_TAIL = 0.99
_NOBODY = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The law of recent requests, and what it rests on."""

    known: Known
    size: float
    """Independent requests from which the tail of the outputs is known: 0 while all that are so long still run."""
    since: float
    """Start of the oldest request in it."""
    num_censored: int

    @property
    def workload(self) -> Workload:
        return self.known.workload


class LengthMonitor:
    """Keeps what is known of the last `most_kept` requests."""

    def __init__(self, *, half_life: float = HALF_LIFE, most_kept: int = MOST_KEPT) -> None:
        self._half_life = half_life
        self._ended: deque[RequestLengths] = deque(maxlen=most_kept)
        self._running: tuple[RequestLengths, ...] = ()
        self._since = -np.inf
        self._most_kept = most_kept
        self._alike = 1.0
        """How much fewer requests it is worth that like ones follow each other, when there were enough to tell."""
        self.num_noted = 0
        """Requests that have ended, in all."""

    def note(self, ended: Iterable[RequestLengths], running: Sequence[RequestLengths]) -> None:
        """Takes those that have ended since the last call, and all that run now."""
        before = tuple(ended)
        self._ended.extend(before)
        self.num_noted += len(before)
        self._running = tuple(running)

    @property
    def num_complete(self) -> int:
        """Complete requests at hand; what was forgotten early does not count."""
        return sum(seen.complete and seen.start >= self._since for seen in self._ended)

    def recent(self) -> tuple[RequestLengths, ...]:
        """Those that have ended and count."""
        return tuple(seen for seen in self._ended if seen.start >= self._since)

    def observe(self, name: str = "observed") -> Observed | None:
        """The law now; None while no request is complete. Forgets what differs from what came lately."""
        rows = sorted(seen for seen in (*self._ended, *self._running) if seen.start >= self._since)[-self._most_kept :]
        if not any(row.complete for row in rows):
            return None
        sample = _Sample.of(rows)
        # A part that is chosen because it differs would not tell: it is like requests that it was chosen for.
        self._alike = _dependence(sample) or self._alike
        if first := self._changed_at(sample):
            self._since = sample.starts[first]
            sample = sample.after(first)
        return _observed(sample, self._half_life, self._alike, name)

    def _changed_at(self, sample: "_Sample") -> int:
        """Where what came lately begins, if it differs from what came before; 0 if it does not."""
        found, most = 0, 1.0
        behind = np.cumsum(sample.complete[::-1])[::-1]  # Complete ones from here on.
        recent = _LEAST_RECENT
        while 2 * recent <= behind[0]:
            first = int(np.searchsorted(-behind, -recent, side="left"))
            late, early = sample.after(first), sample.before(first)
            recent *= 2
            if not early.complete.any():
                continue
            one, other = (_observed(part, np.inf, self._alike, "part").known for part in (late, early))
            far = evidence(one, other, false_alarm=_FALSE_CUT)
            if far > most:
                found, most = first, far
        return found


@dataclass(frozen=True, eq=False, slots=True)
class _Sample:
    """Requests in the order of their start."""

    starts: Floats
    inputs: Ints
    outputs: Ints
    complete: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[RequestLengths]) -> "_Sample":
        starts, inputs, outputs, complete, _ = zip(*rows, strict=True)
        lengths = np.array([inputs, outputs], np.int64)
        return cls(np.array(starts, float), lengths[0], lengths[1], np.array(complete, bool))

    def after(self, first: int) -> "_Sample":
        return _Sample(self.starts[first:], self.inputs[first:], self.outputs[first:], self.complete[first:])

    def before(self, last: int) -> "_Sample":
        return _Sample(self.starts[:last], self.inputs[:last], self.outputs[:last], self.complete[:last])


def _dependence(sample: _Sample) -> float | None:
    """Of the side whose like values follow each other more."""
    found = [dependence(values[sample.complete]) for values in (sample.inputs, sample.outputs)]
    return max((one for one in found if one), default=None)


def _observed(sample: _Sample, half_life: float, alike: float, name: str) -> Observed:
    weights = 0.5 ** (np.arange(len(sample.starts))[::-1] / half_life)
    inputs, outputs, masses = _points(sample, weights)
    workload = Workload.of(name, inputs=inputs, outputs=outputs, weights=masses, source=f"{len(weights)} requests")
    size = float(weights.sum() ** 2 / np.square(weights).sum()) / alike
    curve = _Curve.of(sample.outputs, sample.complete, weights)
    known = Known(workload, size, curve.lengths, np.minimum(curve.sizes / alike, size))
    tail = np.array([workload.output_quantile(_TAIL) - 1])
    return Observed(
        known=known,
        size=float(known.output_sizes(tail)[0]),
        since=float(sample.starts[0]),
        num_censored=int(np.count_nonzero(~sample.complete)),
    )


def _points(sample: _Sample, weights: Floats) -> tuple[Ints, Ints, Floats]:
    """The joint law. A request that is not complete stands for those of its band that became longer than it is now.

    Its input is known, so the law of the inputs rests on all requests; that of the outputs is the product-limit
    estimator, as this is what solves Efron's self-consistency equation (1967).
    """
    if sample.complete.all():
        return sample.inputs, sample.outputs, weights
    bands = int(np.clip(np.count_nonzero(sample.complete) // _BAND_REQUESTS, 1, _MOST_BANDS))
    edges = np.quantile(sample.inputs, np.linspace(0, 1, bands + 1)[1:-1])
    band = np.searchsorted(edges, sample.inputs, side="left")
    done = sample.complete
    inputs, outputs, masses = [sample.inputs[done]], [sample.outputs[done]], [weights[done]]
    for number in np.unique(band[~done]):
        here = band == number
        curve = _Curve.of(sample.outputs[here], done[here], weights[here])
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
    """By Greenwood's variance: from how many complete requests one would know that share as well."""
    last: int
    """What those become who became longer than anybody is known to have: longer by one at least."""

    @classmethod
    def of(cls, outputs: Ints, complete: np.ndarray, weights: Floats) -> "_Curve":
        """Who is not complete at a length was at risk there, so an output of just that length comes before."""
        order = np.lexsort((~complete, outputs))
        weight, complete = weights[order], complete[order]
        at_risk, squares = (np.cumsum(values[::-1])[::-1] for values in (weight, weight**2))
        hazard = np.where(complete, weight / at_risk, 0.0)
        survival = np.cumprod(1.0 - np.minimum(hazard, 1.0))
        # Where nothing happens among few, it may be chance: half an event more, and no more than one knows it of.
        half = 0.5 * squares / at_risk**2
        sizes = (1 - survival + half) / np.maximum(survival * (np.cumsum(hazard**2) + half**2), 1e-300)
        known = (np.cumsum(np.where(complete, weight, 0.0)) + at_risk - weight) ** 2
        sizes = np.minimum(
            sizes, known / (np.cumsum(np.where(complete, weight**2, 0.0)) + squares - weight**2 + 1e-300)
        )
        lengths, first = np.unique(outputs[order], return_index=True)
        ends = np.concatenate([first[1:], [len(order)]]) - 1  # The last of each length.
        sizes, survival = sizes[ends], survival[ends]
        if survival[-1] > _NOBODY:
            sizes[-1] = 0.0
        elif len(sizes) > 1:  # Whether anybody becomes longer than the longest is known as well as of the one before.
            sizes[-1] = sizes[-2]
        return cls(lengths, survival, sizes, int(lengths[-1]) + 1)

    def beyond(self, outputs: Ints) -> Ints:
        """For each output, lengths that stand for equal shares of those who became longer."""
        at = np.searchsorted(self.lengths, outputs, side="right") - 1
        left = self.survival[at][:, None] * (1 - (np.arange(_DRAWS) + 0.5) / _DRAWS)
        found = np.searchsorted(-self.survival, -left.ravel(), side="left")
        return np.concatenate([self.lengths, [self.last]])[found]
