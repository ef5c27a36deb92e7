"""Machine speed: how fast a device was, moment by moment, by canonical passes of the model repeated while it worked.

A shared machine computes the same pass in different times from one minute to the next. A profile therefore stores how
long a few reference passes took while it was measured; a run repeats them, and its own passes, divided by how much
slower the reference passes near them were, are what they would have taken at the profile's speed.

Not here: running the passes (`runner/compute/reference_passes.py`).
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from exeplan.arrays import Floats
from exeplan.core.profile import ReferencePass

_NEAR = 5
"""Reference passes, of any kind, that a moment's slowness is the mean of."""
_MOST_OFF = 2.0
"""A reference pass counts as at most so many times slower, or faster, than those near it."""
_SENSITIVITY = 0.9
"""log(slowness of the engine's passes) over that of reference passes: less than 1 where these are rare, as what happens
between them is not seen (LOG.md has the data)."""
_DEVIATIONS = 1.4826
"""The standard deviation of a normal law over the median of its distances from the middle."""
_LEAST_REMEMBERED, _REMEMBERED = 6, 12
"""Repetitions by which the machine is called restless, at least and at most."""
_STEADY, _LEAST_SHARE = 0.05, 0.3
"""The standard deviation of a pass from which on more of them are needed, and the least share of the time between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedSample:
    """One repetition of a reference pass."""

    number: int
    """Which of the profile's reference passes it was."""
    time: float
    """When it began, seconds."""
    seconds: float
    cost: float
    """Seconds that it took from the run, warming up included."""
    others: float = 1.0
    """Its seconds by the wall clock over `seconds`, where these are of the CPU clock."""


@dataclass(frozen=True, kw_only=True)
class MachineSpeed:
    """The samples of a run, in order of time, against the reference passes of a profile."""

    passes: tuple[ReferencePass, ...]
    samples: tuple[SpeedSample, ...] = field(repr=False)

    def slowness(self, times: Floats) -> Floats:
        """[times] Of the engine's passes against the profile, by the reference passes near each time; 1 without any."""
        if not self.samples:
            return np.ones(len(times))
        return np.exp(np.interp(times, self._times, self._near))

    @property
    def mean(self) -> float:
        """The geometric mean of the slowness over all samples; 1 without any."""
        return float(np.exp(self._logs.mean())) if self.samples else 1.0

    @property
    def error(self) -> float:
        """The standard error of the mean slowness, relative, that of the profile's reference passes included."""
        own = self._logs.std(ddof=1) / math.sqrt(len(self.samples)) if len(self.samples) > 1 else 0.0
        profile = math.sqrt(sum(one.error**2 for one in self.passes)) / max(len(self.passes), 1)
        return math.hypot(own, _SENSITIVITY * profile)

    def error_between(self, began: float, ended: float) -> float:
        """The relative standard error of the mean slowness of that time, by what samples differ by from their
        neighbours; of one sample where none is in it."""
        if len(self.samples) < 2:
            return 0.0
        number = int(np.count_nonzero((self._times >= began) & (self._times <= ended)))
        return _DEVIATIONS * float(np.median(np.abs(np.diff(self._logs)))) / math.sqrt(2 * max(number, 1))

    @property
    def others_error(self) -> float:
        """The standard error of `others`, relative."""
        logs = np.log([sample.others for sample in self.samples])
        return float(logs.std(ddof=1)) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0

    @property
    def spread(self) -> float:
        """How far the speed moved: half the distance of its 5th to its 95th percentile, relative to the mean."""
        return float(np.ptp(np.quantile(np.exp(self._near), (0.05, 0.95)))) / 2 if self.samples else 0.0

    @property
    def others(self) -> float:
        """How much longer the samples took because other processes had the core; 1 where nothing tells."""
        own = sum(sample.seconds for sample in self.samples)
        return sum(sample.seconds * sample.others for sample in self.samples) / own if own else 1.0

    @property
    def cost(self) -> float:
        """Seconds that the samples took from the run."""
        return sum(sample.cost for sample in self.samples)

    @property
    def _times(self) -> Floats:
        return np.array([sample.time for sample in self.samples])

    @property
    def _logs(self) -> Floats:
        """[samples] Logarithms of the slowness that each means for the engine's passes."""
        logs = [math.log(one.seconds / self.passes[one.number].seconds) for one in self.samples]
        return _SENSITIVITY * np.array(logs)

    @cached_property
    def _near(self) -> Floats:
        """[samples] The same, each the mean of those near it."""
        return _running_mean(self._logs)


class Restlessness:
    """How far the machine's speed moves from one repetition of a reference pass to its next: the share of the usual
    time between two passes after which the next one is due. What happens between them is seen by none."""

    def __init__(self) -> None:
        self._before: dict[int, float] = {}
        self._moves: deque[float] = deque(maxlen=_REMEMBERED)
        """Squared differences of logarithms."""

    def add(self, number: int, seconds: float) -> None:
        """That the pass of this number took these seconds."""
        log = math.log(seconds)
        if number in self._before:
            self._moves.append(min(abs(log - self._before[number]), math.log(_MOST_OFF)) ** 2)
        self._before[number] = log

    @property
    def share(self) -> float:
        """1 where the speed is steady, or not known yet."""
        if len(self._moves) < _LEAST_REMEMBERED:
            return 1.0
        deviation = math.sqrt(sum(self._moves) / len(self._moves) / 2)
        return max(min(_STEADY / max(deviation, 1e-9), 1.0), _LEAST_SHARE)


def why_none(device: str) -> str:
    """Why a run has no reference passes; '' where it may have them."""
    return "" if device == "cpu" else f"reference passes are not run on {device}: they would wait for queued passes"


def slowness_between(passes: Sequence[ReferencePass], others: Sequence[ReferencePass]) -> float:
    """How much slower the engine's passes were while the other reference passes were timed; 1 without any."""
    logs = [math.log(b.seconds / a.seconds) for a, b in zip(passes, others, strict=True)]
    return math.exp(_SENSITIVITY * sum(logs) / len(logs)) if logs else 1.0


def _running_mean(logs: Floats) -> Floats:
    """[samples] Each the mean of `_NEAR` around it, of as many as there are at the ends.

    Over 18 runs of three policies with one profile the error of whole runs had a standard deviation of 3.2 % with this,
    of 3.9 % with medians, of 5.0 % with medians of decodes and prefills apart, and of 8.9 % as measured.
    """
    half, most = _NEAR // 2, math.log(_MOST_OFF)
    near = [logs[max(i - half, 0) : i + half + 1] for i in range(len(logs))]
    return np.array([values.clip(np.median(values) - most, np.median(values) + most).mean() for values in near])


def levelled(passes: Sequence[ReferencePass], samples: Sequence[SpeedSample]) -> tuple[ReferencePass, ...]:
    """The passes with the geometric means of these samples as their seconds; unchanged without any samples.

    A mean, as a moment's slowness is: of a skewed law the median is another speed.
    """
    found = []
    for number, one in enumerate(passes):
        logs = np.log([sample.seconds for sample in samples if sample.number == number])
        if len(logs):
            logs = logs.clip(np.median(logs) - math.log(_MOST_OFF), np.median(logs) + math.log(_MOST_OFF))
            error = float(logs.std()) / math.sqrt(len(logs))
            one = replace(one, seconds=float(f"{math.exp(logs.mean()):.6g}"), error=float(f"{error:.3g}"))
        found.append(one)
    return tuple(found)
