"""Machine speed: how fast a device was, moment by moment, by canonical passes of the model repeated while it worked.

A shared machine computes the same pass in different times from one minute to the next. A profile therefore stores how
long a few reference passes took while it was measured; a run repeats them, and its own passes, divided by how much
slower the reference passes near them were, are what they would have taken at the profile's speed.

Not here: running the passes (`runner/compute/reference_passes.py`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from exeplan.arrays import Floats
from exeplan.core.profile import ReferencePass

KINDS_OF = {"decode": ("decode",), "prefill": ("prefill",), "mixed": ("decode", "prefill")}
"""The reference passes whose slowness passes of each kind have."""
_NEAR = 5
"""Reference passes of one kind that a moment's slowness is the median of."""
MEDIAN_ERROR = 1.2533
"""The standard error of a median over that of a mean, of a normal law."""


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


@dataclass(frozen=True, kw_only=True)
class MachineSpeed:
    """The samples of a run, in order of time, against the reference passes of a profile."""

    passes: tuple[ReferencePass, ...]
    samples: tuple[SpeedSample, ...] = field(repr=False)

    def slowness(self, kind: str, times: Floats) -> Floats:
        """[times] Seconds over the profile's seconds of the reference passes near each time; 1 without any samples."""
        curves = [curve for kind_of in KINDS_OF[kind] if (curve := self._curves.get(kind_of))]
        if not curves:
            return np.ones(len(times))
        return np.exp(np.mean([np.interp(times, at, logs) for at, logs in curves], axis=0))

    @property
    def mean(self) -> float:
        """The mean slowness of all samples, each kind of pass alike; 1 without any."""
        return math.exp(float(np.mean([logs.mean() for _, logs in self._raw.values()]))) if self._raw else 1.0

    @property
    def error(self) -> float:
        """The standard error of the mean slowness, relative, that of the profile's reference passes included."""
        squares = [logs.var(ddof=1) / len(logs) for _, logs in self._raw.values() if len(logs) > 1]
        own = sum(squares) / max(len(squares), 1) ** 2
        profile = sum(one.error**2 for one in self.passes) / max(len(self.passes), 1) ** 2
        return math.sqrt(own + profile)

    @property
    def spread(self) -> float:
        """How far the speed moved: half the distance of its 5th to its 95th percentile, relative to the mean."""
        curves = [logs for _, logs in self._curves.values()]
        return max((float(np.ptp(np.quantile(np.exp(logs), (0.05, 0.95)))) / 2 for logs in curves), default=0.0)

    @property
    def cost(self) -> float:
        """Seconds that the samples took from the run."""
        return sum(sample.cost for sample in self.samples)

    @cached_property
    def _raw(self) -> dict[str, tuple[Floats, Floats]]:
        """Times and logarithms of the slowness by kind of pass."""
        found: dict[str, list[tuple[float, float]]] = {}
        for sample in self.samples:
            reference = self.passes[sample.number]
            found.setdefault(reference.kind, []).append((sample.time, math.log(sample.seconds / reference.seconds)))
        return {kind: (np.array(pairs)[:, 0], np.array(pairs)[:, 1]) for kind, pairs in found.items()}

    @cached_property
    def _curves(self) -> dict[str, tuple[Floats, Floats]]:
        """The same, each value the median of those near it."""
        return {kind: (times, _running_median(logs)) for kind, (times, logs) in self._raw.items()}


def _running_median(values: Floats) -> Floats:
    """[values] Each the median of `_NEAR` around it, of as many as there are at the ends."""
    half = _NEAR // 2
    return np.array([np.median(values[max(i - half, 0) : i + half + 1]) for i in range(len(values))])


def levelled(passes: Sequence[ReferencePass], samples: Sequence[SpeedSample]) -> tuple[ReferencePass, ...]:
    """The passes with the medians of these samples as their seconds; unchanged without any samples."""
    found = []
    for number, one in enumerate(passes):
        seconds = np.array([sample.seconds for sample in samples if sample.number == number])
        if len(seconds):
            median = float(np.median(seconds))
            error = MEDIAN_ERROR * float(seconds.std()) / median / math.sqrt(len(seconds))
            one = replace(one, seconds=float(f"{median:.6g}"), error=float(f"{error:.3g}"))
        found.append(one)
    return tuple(found)
