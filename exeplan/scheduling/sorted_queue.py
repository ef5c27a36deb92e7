"""The waiting sequences sorted by what does not change while they wait: their tokens or their deadlines.

The order is that of `exeplan/core/queue_order.py`, behind those that have begun already. The scheduler's queue itself
stays in order of arrival; what came to either of its ends since the last look is sorted in, so that an admission takes
the same time however many wait.

Not here: `das`, whose order depends on all that wait.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import takewhile
from operator import itemgetter

from exeplan.core.batch import SequenceState

SORTED_ORDERS = ("sjf", "edf")
_FEW = 16
"""Up to so many new sequences are sorted in one by one."""

_Entry = tuple[bool, float, int, SequenceState]
"""Whether it has not begun, its tokens or the seconds of its deadline, its place in order of arrival, and itself. No
two places are equal, so that sequences are never compared."""


class SortedQueue:
    """Follows one queue, in one of `SORTED_ORDERS`."""

    def __init__(self, order: str) -> None:
        self._by_deadline = order == "edf"
        self._queue: deque[SequenceState] | None = None
        self._entries: list[_Entry] = []
        """Sorted."""
        self._known: dict[int, _Entry] = {}
        """Of every sequence, by identity."""
        self._first, self._end = 0, 0
        """The places of all are from `_first` to below `_end`, rising along the queue."""

    def of(self, queue: deque[SequenceState]) -> Iterator[SequenceState]:
        """The sequences of the queue, first things first. It may not change while this is read."""
        self._follow(queue)
        return map(itemgetter(3), self._entries)

    def due(self, queue: deque[SequenceState], before: float) -> tuple[list[SequenceState], float]:
        """Of a queue followed by deadline: the sequences that have not begun and had to before that time, as they came,
        and the seconds of the next deadline; infinity without one."""
        self._follow(queue)
        first, end = (bisect_left(self._entries, (True, at), key=itemgetter(0, 1)) for at in (-math.inf, before))
        found = sorted(self._entries[first:end], key=itemgetter(2))
        return [entry[3] for entry in found], self._entries[end][1] if end < len(self._entries) else math.inf

    def forget(self, sequence: SequenceState) -> None:
        """The sequence has left the queue."""
        if entry := self._known.pop(id(sequence), None):
            del self._entries[bisect_left(self._entries, entry)]

    def take_out(self, queue: deque[SequenceState], sequences: Iterable[SequenceState]) -> None:
        """Takes sequences out of the queue, which has all of them."""
        self._follow(queue)
        for sequence in sequences:
            if sequence is queue[0]:
                queue.popleft()
            else:
                place = self._known[id(sequence)][2]
                del queue[bisect_left(queue, place, hi=len(self._known), key=self._place)]
            self.forget(sequence)

    def _place(self, sequence: SequenceState) -> int:
        return self._known[id(sequence)][2]

    def _follow(self, queue: deque[SequenceState]) -> None:
        """Sorts in what came to either end; the whole queue where it is another one, or has changed otherwise."""
        if queue is not self._queue:
            self._start(queue)
        if not queue:
            self._start(queue)
            return
        queue[len(queue) - 1]  # A queue may make its sequences when they are looked at.
        front = list(takewhile(self._is_new, deque.__iter__(queue)))
        back = list(takewhile(self._is_new, deque.__reversed__(queue))) if len(front) < len(queue) else []
        if len(self._known) + len(front) + len(back) != len(queue):
            self._start(queue)
            front, back = list(deque.__iter__(queue)), []
        self._first -= len(front)
        fresh = [self._entry(one, place) for place, one in enumerate(front, self._first)]
        fresh += [self._entry(one, place) for place, one in enumerate(reversed(back), self._end)]
        self._end += len(back)
        if len(fresh) > _FEW:
            self._entries += fresh
            self._entries.sort()
        else:
            for entry in fresh:
                insort(self._entries, entry)
        self._known.update((id(entry[3]), entry) for entry in fresh)

    def _start(self, queue: deque[SequenceState]) -> None:
        """Of this queue nothing is known."""
        self._queue, self._first, self._end = queue, 0, 0
        self._entries.clear()
        self._known.clear()

    def _is_new(self, sequence: SequenceState) -> bool:
        return id(sequence) not in self._known

    def _entry(self, sequence: SequenceState, place: int) -> _Entry:
        if sequence.begun:
            return (False, 0.0, place, sequence)
        if not self._by_deadline:
            return (True, sequence.num_packed_tokens, place, sequence)
        return (True, math.inf if sequence.deadline is None else sequence.deadline, place, sequence)


def take_out_of_all(
    followers: Sequence[SortedQueue], queue: deque[SequenceState], sequences: Collection[SequenceState]
) -> None:
    """Takes sequences out of a queue that all of these follow."""
    followers[0].take_out(queue, sequences)
    for other in followers[1:]:
        for sequence in sequences:
            other.forget(sequence)
