"""Samples: the value of every visit, and the measurements that they add up to.

Attention is reported as the whole layer minus `rest` at the same number of tokens, so that the two add up to the layer
as it ran, even where many keys and values evict a small model's weights from the cache. Timed apart they miss a step by
4 %, as whole layers by 1 %. Where the difference is below the noise, the time of the attention alone is used.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from exeplan.core.profile import COMPUTE_OPS, Measurement
from exeplan.core.runs.machine_speed import MachineSpeed

Key = tuple[str, str, int, int, int]
"""op, phase, num_seqs, num_tokens, context_tokens; op `layer` is attention and rest together."""
_KNOWN_ROUNDS = 3
_POINTS_AROUND = 2
"""Whose errors count as independent of the four that a layer lies between: those that are timed one after the other
have the speed of their moment in common, and by four the intervals of `benchmarks/fidelity/demos.py` were too
narrow."""


class Samples:
    """Seconds by measurement and round; every visit adds one sample to each measurement that it touches.

    A machine's speed drifts, and a point that was only visited in slow rounds would look like a bend. So each sample is
    divided by the slowness of its own moment, which reference passes tell, and then those of a round by how slow it was
    for their kind: the median of sample over median, taken over the measurements of which there are three samples.
    Round 0 is what a resumed run starts from.
    """

    def __init__(self) -> None:
        self._added: dict[Key, list[tuple[int, float, float | None]]] = defaultdict(list)
        """Round, seconds and time."""
        self._speed: MachineSpeed | None = None
        self._forget()

    def add(self, values: Mapping[Key, float], number: int = 0, *, time: float | None = None) -> None:
        """What a visit in round `number` found; `time` on the clock of the reference passes, None without any."""
        for key, seconds in values.items():
            self._added[key].append((number, seconds, time))
        self._forget()

    def pair_with(self, speed: MachineSpeed) -> None:
        """Divides every sample from now on by the slowness of its own moment."""
        self._speed = speed
        self._forget()

    def _forget(self) -> None:
        self._known: dict[Key, list[tuple[int, float]]] | None = None
        self._slowness: dict[tuple[str, str, int], float] | None = None

    @property
    def _raw(self) -> dict[Key, list[tuple[int, float]]]:
        """By round and second, at the speed of the reference passes."""
        if self._known is None:
            self._known = {key: self._paired(found) for key, found in self._added.items()}
        return self._known

    def _paired(self, found: Sequence[tuple[int, float, float | None]]) -> list[tuple[int, float]]:
        slow = np.ones(len(found))
        if self._speed is not None:
            known = np.array([time is not None for _, _, time in found])
            slow[known] = self._speed.slowness(np.array([time for _, _, time in found if time is not None]))
        return [(number, seconds / float(factor)) for (number, seconds, _), factor in zip(found, slow, strict=True)]

    @property
    def keys(self) -> list[Key]:
        return sorted(self._added)

    def seconds(self, key: Key) -> list[float]:
        """The samples of a measurement, drift taken out."""
        if self._slowness is None:
            self._slowness = _slowness(self._raw)
        return [value / self._slowness.get((*key[:2], number), 1.0) for number, value in self._raw[key]]

    @property
    def whole(self) -> bool:
        """Whether every op has a measurement in both phases, so that a profile can be written."""
        ops = {(op, phase) for op, phase, *_ in self._added}
        phases = {(op, phase) for op in ("attention", "overhead") for phase in ("prefill", "decode")}
        return ops >= phases and {op for op, _ in ops} >= set(COMPUTE_OPS)

    def median(self, key: Key) -> float:
        return statistics.median(self.seconds(key))

    def rest(self, num_tokens: int, phase: str) -> float:
        """Rest of a layer as the cost model reads it: linear between measured numbers of tokens.

        Those of the two phases are apart where encoder and decoder layers are.
        """
        return _at(self._rests(phase), num_tokens)

    def _rests(self, phase: str) -> dict[int, float]:
        return self.curve("rest", phase) or self.curve("rest", "")

    def curve(self, op: str, phase: str) -> dict[int, float]:
        """Median seconds over number of tokens, sorted."""
        return {key[3]: self.median(key) for key in self.keys if key[:2] == (op, phase)}

    def uncertainty(self, key: Key) -> float:
        """Standard error of the median over the median, from the samples' own spread; infinite for a single sample."""
        values = self.seconds(key)
        if len(values) < 2:
            return float("inf")
        return 1.25 * np.std(values, ddof=1).item() / len(values) ** 0.5 / statistics.median(values)

    def error(self, phase: str) -> float:
        """The relative standard error of a layer between its points, two numbers of sequences and two lengths, by what
        samples of one differ by in all of them: a few samples may agree by chance."""
        values = [self.seconds(key) for key in self.keys if key[:2] == ("layer", phase)]
        squares = [float(np.var(np.log(own)) * len(own)) for own in values]
        freedom = sum(len(own) - 1 for own in values)
        if not freedom:
            return 0.0
        visits = float(np.median([len(own) for own in values]))
        return math.sqrt(sum(squares) / freedom / visits / _POINTS_AROUND)

    def measurements(self) -> tuple[Measurement, ...]:
        """All rows, attention worked out from whole layers."""
        rows = []
        rests = {phase: self._rests(phase) for phase in ("prefill", "decode")}
        order = {op: number for number, op in enumerate(COMPUTE_OPS)}
        for key in sorted(self.keys, key=lambda key: (order.get(key[0], -1), key[1:])):
            op, phase, num_seqs, num_tokens, context_tokens = key
            if op == "layer":
                continue
            value = self.median(key)
            if op == "attention":
                whole = self.median(("layer", *key[1:]))
                beyond = whole - _at(rests[phase], num_tokens or num_seqs)
                value = beyond if beyond > value / 2 else value
            rows.append(
                Measurement(
                    op=op,
                    phase=phase,
                    num_seqs=num_seqs,
                    num_tokens=num_tokens,
                    context_tokens=context_tokens,
                    seconds=float(f"{value:.6g}"),
                    spread=float(f"{_spread(self.seconds(key)):.3g}"),
                    repeats=len(self._raw[key]),
                )
            )
        return tuple(rows)


def resumed(measurements: Iterable[Measurement]) -> Samples:
    """Samples that have the medians, spreads and repeats of these measurements."""
    samples = Samples()
    rows = list(measurements)
    for row in rows:
        for seconds in _samples_of(row):
            samples.add({_key(row): seconds})
    for row in rows:
        if row.op == "attention":
            rest = samples.rest(row.num_tokens or row.num_seqs, row.phase)
            for seconds in _samples_of(row):
                samples.add({("layer", *_key(row)[1:]): seconds + rest})
    return samples


def _at(curve: Mapping[int, float], num_tokens: int) -> float:
    return float(np.interp(num_tokens, list(curve), list(curve.values())))


def _key(row: Measurement) -> Key:
    return row.op, row.phase, row.num_seqs, row.num_tokens, row.context_tokens


def _samples_of(row: Measurement) -> list[float]:
    """Evenly spread values, whose half interquartile range is half of the largest deviation."""
    shifts = np.linspace(-2, 2, row.repeats) if row.repeats > 1 else np.zeros(1)
    return [row.seconds * (1 + row.spread * float(shift)) for shift in shifts]


def _slowness(raw: Mapping[Key, list[tuple[int, float]]]) -> dict[tuple[str, str, int], float]:
    """How slow each round was, by op, phase and round."""
    ratios: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for key, samples in raw.items():
        if len(samples) >= _KNOWN_ROUNDS:
            median = statistics.median(seconds for _, seconds in samples)
            for number, seconds in samples:
                ratios[*key[:2], number].append(seconds / median)
    return {group: statistics.median(found) for group, found in ratios.items() if len(found) >= _KNOWN_ROUNDS}


def _spread(values: list[float]) -> float:
    """Half the interquartile range over the median."""
    low, high = np.quantile(values, [0.25, 0.75])
    return float((high - low) / 2 / statistics.median(values))
