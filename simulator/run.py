"""What a replay did: its requests and passes, in arrays; single ones are made when asked for.

A request takes some 50 bytes here, and a pass 8 for its end and, where passes are recorded, some 13 and 16 a stage;
nothing is kept for each token (`exeplan/core/runs/token_times.py`).
"""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from exeplan.arrays import Floats
from exeplan.core.runs.metrics import Requests
from exeplan.core.runs.token_times import TokenTimes
from exeplan.workload.length_law import Ints

_UNKNOWN = array("d", [math.nan])


class PassRecord(NamedTuple):
    """One pass over the stages: seconds on the run's clock, rows and tokens."""

    start: float
    end: float
    """When it has left its last stage."""
    spans: tuple[tuple[int, float, float], ...]
    """(stage, start, end), in the order of the stages."""
    num_prefill: int
    num_decode: int
    num_new_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Passes(Sequence[PassRecord]):
    """Passes in the order in which they were scheduled, as arrays of one entry each unless said otherwise."""

    stages: tuple[tuple[int, ...], ...]
    """Of each pipeline, in order."""
    pipelines: Ints
    """On which of them it ran."""
    spans: Floats
    """Start and end on each of its stages, [passes x stages x 2] one after the other."""
    first_spans: Ints
    """Where its own begin in `spans`."""
    num_prefill: Ints
    num_decode: Ints
    num_new_tokens: Ints

    def __len__(self) -> int:
        return len(self.pipelines)

    @overload
    def __getitem__(self, number: int) -> PassRecord: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[PassRecord]: ...
    def __getitem__(self, number: int | slice) -> PassRecord | Sequence[PassRecord]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        i = range(len(self))[number]
        stages, first = self.stages[self.pipelines[i]], int(self.first_spans[i])
        times = self.spans[first : first + 2 * len(stages)].tolist()
        return PassRecord(
            start=times[0],
            end=times[-1],
            spans=tuple(zip(stages, times[::2], times[1::2], strict=True)),
            num_prefill=int(self.num_prefill[i]),
            num_decode=int(self.num_decode[i]),
            num_new_tokens=int(self.num_new_tokens[i]),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Passes) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Passes({len(self)})"

    @property
    def starts(self) -> Floats:
        return self.spans[self.first_spans]

    @property
    def ends(self) -> Floats:
        """When each has left its last stage."""
        return self.spans[self.first_spans + 2 * self._num_stages - 1]

    @property
    def _num_stages(self) -> Ints:
        return np.array([len(stages) for stages in self.stages])[self.pipelines]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What happened: the requests in order of arrival, expired ones too, and the passes."""

    requests: Requests
    passes: Passes
    """None of them where the replay was not asked to record them."""
    num_passes: int
    peak_kv_tokens: int
    num_preemptions: int


class RunLog:
    """Collects what becomes a Run; arrays of plain numbers."""

    def __init__(self, stages: tuple[tuple[int, ...], ...], *, has_leads: bool, record_passes: bool) -> None:
        """`has_leads`: the prefill yields the first token."""
        self.starts, self.lasts, self.leads = array("d"), array("d"), array("d")
        self.has_leads = has_leads
        self.tracks: list[array[float]] = []
        self._owners, self._numbers, self._begins, self._ends = array("i"), array("H"), array("i"), array("i")
        self._stages = stages
        self._pipelines, self._spans, self._sizes = array("H"), array("d"), array("i")
        self.record_passes = record_passes
        self.num_passes = 0

    def add(self, count: int) -> None:
        """Makes room for that many more requests."""
        unknown = _UNKNOWN * count
        self.starts.extend(unknown)
        self.lasts.extend(unknown)
        if self.has_leads:
            self.leads.extend(unknown)

    def new_track(self) -> "tuple[int, array[float]]":
        """Its number, and where its times are appended."""
        self.tracks.append(array("d"))
        return len(self.tracks) - 1, self.tracks[-1]

    def stretch(self, owner: int, track: int, begin: int, end: int) -> None:
        """The request had a token at each of these times of a track."""
        self._owners.append(owner)
        self._numbers.append(track)
        self._begins.append(begin)
        self._ends.append(end)

    def passed(self, pipeline: int, spans: Sequence[float], sizes: tuple[int, int, int]) -> None:
        """One pass: starts and ends on the pipeline's stages; prefilled rows, rows that decoded, new tokens."""
        self.num_passes += 1
        if self.record_passes:
            self._pipelines.append(pipeline)
            self._spans.extend(spans)
            self._sizes.extend(sizes)

    def requests(
        self,
        input_tokens: Ints,
        output_tokens: Ints,
        arrivals: Floats,
        *,
        patience: Floats | None,
        weights: Floats | None,
    ) -> Requests:
        """As they ended. `patience` is in seconds from arrival to deadline."""
        times = TokenTimes(
            leads=_numbers(self.leads) if self.has_leads else None,
            tracks=tuple(_numbers(track) for track in self.tracks),
            owners=_numbers(self._owners),
            numbers=_numbers(self._numbers),
            begins=_numbers(self._begins),
            ends=_numbers(self._ends),
            num_requests=len(self.starts),
        )
        lasts, expired = _numbers(self.lasts), np.isnan(_numbers(self.lasts))
        return Requests(
            input_tokens=input_tokens,
            output_tokens=np.where(expired, 0, output_tokens) if expired.any() else output_tokens,
            arrivals=arrivals,
            starts=_numbers(self.starts),
            first_tokens=times.nth(1) if times.leads is None else times.leads,
            last_tokens=lasts,
            deadlines=None if patience is None else arrivals + patience,
            weights=weights,
            times=times,
        )

    def passes(self) -> Passes:
        pipelines = _numbers(self._pipelines)
        lengths = 2 * np.array([len(stages) for stages in self._stages])[pipelines]
        sizes = _numbers(self._sizes).reshape(-1, 3)
        return Passes(
            stages=self._stages,
            pipelines=pipelines,
            spans=_numbers(self._spans),
            first_spans=np.cumsum(lengths) - lengths,
            num_prefill=sizes[:, 0],
            num_decode=sizes[:, 1],
            num_new_tokens=sizes[:, 2],
        )


def _numbers(values: "array[Any]") -> NDArray[Any]:
    """The same memory as a NumPy array."""
    return np.frombuffer(values, dtype=values.typecode) if values else np.zeros(0, dtype=values.typecode)
