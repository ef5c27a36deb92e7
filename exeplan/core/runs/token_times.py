"""When the tokens of many requests were there, without a number for each: passes have times, requests have passes.

All requests of a batch have a token at the end of its pass, so that a run keeps the ends of its passes, by the group
that decoded (a track), and of each request the stretches of passes in which it took part. A request that decodes from
beginning to end in one group has one stretch, however long its answer.

Not here: what is computed from these times (`metrics.py`).
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import cast

import numpy as np

from exeplan.arrays import Floats
from exeplan.workload.length_law import Ints


def small(values: Ints) -> Ints:
    """The same whole numbers in four bytes each, where they fit: runs may have many millions of requests."""
    fit = not len(values) or max(abs(int(values.min())), abs(int(values.max()))) <= np.iinfo(np.int32).max
    return cast(Ints, values.astype(np.int32, copy=False)) if fit else values


@dataclass(frozen=True, kw_only=True)
class TokenTimes:
    """Requests are numbered from 0; a stretch is `track[begin:end]` of one request, in order of time for each."""

    leads: Floats | None
    """[requests] A token before all stretches, the first one where the prefill yields it; NaN where there is none."""
    tracks: tuple[Floats, ...]
    """Times in seconds, rising in each stretch."""
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

    def parts(self, stretches: int) -> Iterator["TokenTimes"]:
        """The same of some of the requests at a time, in order, that have about so many stretches."""
        number = max(-(-len(self.owners) // stretches), 1)
        edges = np.linspace(0, self.num_requests, number + 1).astype(np.int64).tolist()
        for first, end in pairwise(edges):
            here = np.flatnonzero((self.owners >= first) & (self.owners < end)) if number > 1 else slice(None)
            yield TokenTimes(
                leads=None if self.leads is None else self.leads[first:end],
                tracks=self.tracks,
                owners=self.owners[here] - first,
                numbers=self.numbers[here],
                begins=self.begins[here],
                ends=self.ends[here],
                num_requests=end - first,
            )

    def only(self, requests: Ints) -> "TokenTimes":
        """The same without any token of other requests."""
        wanted = np.zeros(self.num_requests, dtype=bool)
        wanted[requests] = True
        here = wanted[self.owners]
        return replace(
            self,
            leads=None if self.leads is None else np.where(wanted, self.leads, np.nan),
            owners=self.owners[here],
            numbers=self.numbers[here],
            begins=self.begins[here],
            ends=self.ends[here],
        )

    @cached_property
    def counts(self) -> Ints:
        """[requests] Tokens."""
        found = small(np.bincount(self.owners, self.ends - self.begins, self.num_requests).astype(np.int64))
        return found if self.leads is None else found + ~np.isnan(self.leads)

    def of(self, request: int) -> Floats:
        """All token times of one request."""
        first, last = np.searchsorted(self._sorted_owners, (request, request + 1))
        own = self.by_owner[first:last]
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
        # Of these requests alone, often few.
        stretches = np.flatnonzero(enough[self.owners])
        stretches = stretches[np.argsort(self.owners[stretches], kind="stable")]
        lengths = self.ends[stretches] - self.begins[stretches]
        until = np.cumsum(lengths, dtype=np.int64)
        some = np.flatnonzero(enough)
        first = np.searchsorted(self.owners[stretches], some)
        before = until[first] - lengths[first]
        at = np.searchsorted(until, before + wanted[some], side="left")
        places = self.ends[stretches[at]] - 1 - (until[at] - before - wanted[some])
        numbers = self.numbers[stretches[at]]
        for number, track in enumerate(self.tracks):
            here = numbers == number
            found[some[here]] = track[places[here]]
        return found

    def longest_gap(self) -> float:
        """Seconds of the longest time between two tokens of one request; 0 where none has two."""
        used = np.flatnonzero(self.ends > self.begins)
        found = [self._longest_in(number, used) for number in range(len(self.tracks))]
        order = used[np.argsort(self.owners[used], kind="stable")]
        owners, firsts, lasts = self.owners[order], self.firsts(order), self.lasts(order)
        same = owners[1:] == owners[:-1]
        found.append(float((firsts[1:] - lasts[:-1])[same].max(initial=0.0)))
        if self.leads is not None and len(order):
            first = np.append(True, ~same)
            leads = self.leads[owners[first]]
            found.append(float((firsts[first] - leads)[~np.isnan(leads)].max(initial=0.0)))
        return max(found, default=0.0)

    def _longest_in(self, number: int, stretches: Ints) -> float:
        """Within the stretches of one track."""
        track, here = self.tracks[number], stretches[self.numbers[stretches] == number]
        steps = np.bincount(self.begins[here], minlength=len(track) + 1)
        steps -= np.bincount(self.ends[here] - 1, minlength=len(track) + 1)
        inside = np.cumsum(steps)[: max(len(track) - 1, 0)] > 0
        return float(np.diff(track)[inside].max(initial=0.0))

    def in_order(self, position: int) -> float:
        """The time at this position, from 0, among all tokens of all requests."""
        tracks = list(self._until())

        def num_until(time: float) -> int:
            return sum(int(until[np.searchsorted(times, time, side="right")]) for times, until in tracks)

        # The first time of each track with more tokens until then: no merged list is made, which would be large.
        found = (bisect_right(times, position, key=num_until) for times, _ in tracks)
        return min(float(times[at]) for (times, _), at in zip(tracks, found, strict=True) if at < len(times))

    def num_within(self, opens: float, closes: float) -> int:
        """Tokens of all requests after `opens` and not after `closes`."""
        return max(int(self.num_between(np.array([opens, closes]))[0]), 0)

    def num_between(self, edges: Floats) -> Ints:
        """[edges - 1] Tokens of all requests after each edge and not after the next."""
        found = np.zeros(len(edges), dtype=np.int64)
        for times, until in self._until():
            found += until[np.searchsorted(times, edges, side="right")]
        return np.diff(found)

    def borders(self) -> tuple[Floats, Floats]:
        """[stretches] The times of the first and the last token of each; NaN of an empty one."""
        every = np.arange(len(self.owners))
        return self.firsts(every), self.lasts(every)

    def firsts(self, stretches: Ints) -> Floats:
        """[of them] The time of the first token; NaN of an empty one."""
        return self._at(stretches, self.begins[stretches])

    def lasts(self, stretches: Ints) -> Floats:
        """[of them] The time of the last token; NaN of an empty one."""
        return self._at(stretches, self.ends[stretches] - 1)

    def _at(self, stretches: Ints, places: Ints) -> Floats:
        found, numbers = np.full(len(stretches), np.nan), self.numbers[stretches]
        some = self.ends[stretches] > self.begins[stretches]
        for number, track in enumerate(self.tracks):
            here = (numbers == number) & some
            found[here] = track[places[here]]
        return found

    def _until(self) -> Iterator[tuple[Floats, Ints]]:
        """The rising times of each track, and of all leads, and the number of tokens before the first and until each of
        them."""
        yield from map(self._until_of, range(len(self.tracks)))
        if self.leads is not None:
            leads = self.leads[~np.isnan(self.leads)]
            leads.sort()
            yield leads, np.arange(len(leads) + 1)

    def _until_of(self, number: int) -> tuple[Floats, Ints]:
        """Of a track."""
        track, here = self.tracks[number], self.numbers == number
        steps = np.bincount(self.begins[here], minlength=len(track) + 1)
        steps -= np.bincount(self.ends[here], minlength=len(track) + 1)
        counts = np.cumsum(steps, out=steps)[:-1]
        if np.any(track[1:] < track[:-1]):
            order = np.argsort(track, kind="stable")
            track, counts = track[order], counts[order]
        return track, np.append(0, np.cumsum(counts))

    @cached_property
    def by_owner(self) -> Ints:
        """[stretches] Their numbers, in order of requests."""
        return np.argsort(self.owners, kind="stable").astype(self.owners.dtype)

    @cached_property
    def _sorted_owners(self) -> Ints:
        return self.owners[self.by_owner]
