"""Router: to which replica a request goes. The server and the replay of several replicas share it.

    shortest-queue  the replica with the fewest sequences that have not finished, over what it serves a second where
                    replicas differ; of equally few each in turn
    round-robin     each in turn
    random          any, by a generator of its own

Not here: which replicas are up (`runner/engine_process/replicas.py`), and which waiting request of a replica is next
(`core/queue_order.py`).
"""

import random
from collections.abc import Iterable, Sequence

from exeplan.core.schedule import ROUTERS

_SHORTEST_QUEUE, _ROUND_ROBIN, _RANDOM = ROUTERS


class Queues:
    """How many sequences of each replica have not finished; finds the shortest of thousands of queues at once.

    A queue is as long as the time that its replica takes for it and one sequence more: they over its capacity.
    """

    def __init__(self, num_open: Iterable[int], capacities: Sequence[float | None] = ()) -> None:
        """Of replicas numbered from 0, at least one. All have the same capacity unless each has its own, in one
        unit."""
        self.num_open = list(num_open)
        known = [one for one in capacities if one is not None]
        kinds = known if known and len(known) == len(self.num_open) else [1.0] * len(self.num_open)
        self._kind_of = kinds
        self._kinds = {capacity: _Alike() for capacity in kinds}
        for number, count in enumerate(self.num_open):
            self._kinds[self._kind_of[number]].put(number, count)

    def __len__(self) -> int:
        return len(self.num_open)

    def add(self, number: int, change: int) -> None:
        """That many more sequences, or less, on a replica."""
        kind, before = self._kinds[self._kind_of[number]], self.num_open[number]
        self.num_open[number] = before + change
        kind.move(number, before, before + change)

    def shortest(self, first: int) -> int:
        """One of the shortest queues: the next from `first` on, and round to it."""
        if len(self._kinds) == 1:
            return next(iter(self._kinds.values())).next_of_fewest(first)
        lengths = {capacity: (kind.fewest + 1) / capacity for capacity, kind in self._kinds.items()}
        least = min(lengths.values())
        found = [self._kinds[capacity].next_of_fewest(first) for capacity, length in lengths.items() if length == least]
        return min(found, key=lambda number: (number - first) % len(self))


class _Alike:
    """Replicas of the same capacity by how many sequences they have: a bit each."""

    def __init__(self) -> None:
        self._with: dict[int, int] = {}
        self.fewest = 0
        """That any of them has, once it has one."""

    def put(self, number: int, count: int) -> None:
        if not self._with or count < self.fewest:
            self.fewest = count
        self._with[count] = self._with.get(count, 0) | 1 << number

    def move(self, number: int, before: int, count: int) -> None:
        having, bit = self._with, 1 << number
        left = having.pop(before) ^ bit
        if left:
            having[before] = left
        having[count] = having.get(count, 0) | bit
        if count < self.fewest:
            self.fewest = count
        elif not left and before == self.fewest:
            self.fewest = min(having)

    def next_of_fewest(self, first: int) -> int:
        """The next from `first` on, and round to it."""
        bits = self._with[self.fewest]
        behind = bits >> first
        return first + _lowest(behind) if behind else _lowest(bits)


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


class Router:
    """Decides one request after the other, in the order in which they come."""

    def __init__(self, law: str, *, seed: int = 0) -> None:
        """`law` is one of `ROUTERS`."""
        assert law in ROUTERS
        self._law, self._turn, self._random = law, 0, random.Random(seed)

    @property
    def looks_at_queues(self) -> bool:
        """Whether its choice depends on how long they are, and not only on how many there are."""
        return self._law == _SHORTEST_QUEUE

    def choose(self, queues: Queues) -> int:
        """The number of the replica."""
        turn = self._turn % len(queues)
        self._turn += 1
        if self._law == _ROUND_ROBIN:
            return turn
        if self._law == _RANDOM:
            return self._random.choice(range(len(queues)))
        # Of equally short queues each in turn, so that an idle set is used evenly.
        return queues.shortest(turn)
