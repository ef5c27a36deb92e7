"""When the tokens of many requests were there, without a number for each: passes have times, requests have passes.

All requests of a batch have a token at the end of its pass, so that a run keeps the ends of its passes, by the group
that decoded (a track), and of each request the stretches of passes in which it took part. A request that decodes from
beginning to end in one group has one stretch, however long its answer.

Not here: what is computed from these times (`metrics.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from exeplan.arrays import Floats
from exeplan.workload.length_law import Ints


@dataclass(frozen=True, kw_only=True)
class TokenTimes:
    """Requests are numbered from 0; a stretch is `track[begin:end]` of one request, in order of time for each."""

    leads: Floats | None
    """[requests] A token before all stretches, the first one where the prefill yields it; NaN where there is none."""
    tracks: tuple[Floats, ...]
    """Rising times, in seconds."""
    owners: Ints
    """[stretches] The request."""
    numbers: Ints
    """[stretches] The track."""
    begins: Ints
    ends: Ints
    num_requests: int

    @classmethod
    def of_lists(cls, times: Sequence[Sequence[float]]) -> "TokenTimes":
        """Of requests that each have times of their own."""
        lengths = np.array([len(own) for own in times], dtype=np.int64)
        ends = np.cumsum(lengths)
        return cls(
            leads=None,
            tracks=(np.array([time for own in times for time in own], dtype=float),),
            owners=np.arange(len(times)),
            numbers=np.zeros(len(times), dtype=np.int64),
            begins=ends - lengths,
            ends=ends,
            num_requests=len(times),
        )

    @cached_property
    def counts(self) -> Ints:
        """[requests] Tokens."""
        found = np.bincount(self.owners, self.ends - self.begins, self.num_requests).astype(np.int64)
        return found if self.leads is None else found + ~np.isnan(self.leads)

    def of(self, request: int) -> Floats:
        """All token times of one request."""
        first, last = np.searchsorted(self._sorted_owners, (request, request + 1))
        own = self._by_owner[first:last]
        parts = [self.tracks[self.numbers[i]][self.begins[i] : self.ends[i]] for i in own]
        lead = [] if self.leads is None or np.isnan(self.leads[request]) else [self.leads[request : request + 1]]
        return np.concatenate([*lead, *parts, np.zeros(0)])

    def nth(self, n: Ints | int) -> Floats:
        """[requests] When each had its n-th token, n from 1 and one for all or one each; NaN where it has fewer."""
        wanted = np.broadcast_to(np.asarray(n, dtype=np.int64), self.num_requests)
        found = np.full(self.num_requests, np.nan)
        enough = (wanted >= 1) & (wanted <= self.counts)
        if self.leads is not None:
            has_lead = ~np.isnan(self.leads)
            found = np.where(enough & has_lead & (wanted == 1), self.leads, found)
            wanted = wanted - has_lead
            enough &= wanted >= 1
        some = np.flatnonzero(enough)
        before = self._tokens_before[np.searchsorted(self._sorted_owners, some)]
        at = np.searchsorted(self._tokens_before, before + wanted[some] - 1, side="right") - 1
        stretch = self._by_owner[at]
        places = self.begins[stretch] + before + wanted[some] - 1 - self._tokens_before[at]
        numbers = self.numbers[stretch]
        for number, track in enumerate(self.tracks):
            here = numbers == number
            found[some[here]] = track[places[here]]
        return found

    def in_order(self, position: int) -> float:
        """The time at this position among all tokens of all requests."""
        return float(self._times[np.searchsorted(self._tokens_until, position, side="right")])

    def num_within(self, opens: float, closes: float) -> int:
        """Tokens of all requests after `opens` and not after `closes`."""
        low, high = np.searchsorted(self._times, (opens, closes), side="right")
        until = np.append(0, self._tokens_until)
        return int(max(until[high] - until[low], 0))

    @cached_property
    def _by_owner(self) -> Ints:
        return np.argsort(self.owners, kind="stable")

    @cached_property
    def _sorted_owners(self) -> Ints:
        return self.owners[self._by_owner]

    @cached_property
    def _tokens_before(self) -> Ints:
        """Tokens of the stretches before each, in order of their owners."""
        lengths = (self.ends - self.begins)[self._by_owner]
        return np.cumsum(lengths, dtype=np.int64) - lengths

    @cached_property
    def _merged(self) -> tuple[Floats, Ints]:
        """The times of all tracks and leads, sorted, and how many tokens there are until each, itself included."""
        times, counts = [], []
        for number, track in enumerate(self.tracks):
            here = self.numbers == number
            steps = np.bincount(self.begins[here], minlength=len(track) + 1)
            steps = steps - np.bincount(self.ends[here], minlength=len(track) + 1)
            times.append(track)
            counts.append(np.cumsum(steps)[:-1])
        if self.leads is not None:
            times.append(self.leads[~np.isnan(self.leads)])
            counts.append(np.ones(len(times[-1]), dtype=np.int64))
        all_times = np.concatenate(times)
        order = np.argsort(all_times, kind="stable")
        return all_times[order], np.cumsum(np.concatenate(counts)[order])

    @property
    def _times(self) -> Floats:
        return self._merged[0]

    @property
    def _tokens_until(self) -> Ints:
        return self._merged[1]
