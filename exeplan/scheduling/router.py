"""Router: to which replica a request goes. The server and the replay of several replicas share it.

    shortest-queue  the replica with the fewest sequences that have not finished; of equally few each in turn
    round-robin     each in turn
    random          any, by a generator of its own

Not here: which replicas are up (`runner/engine_process/replicas.py`), and which waiting request of a replica is next
(`core/queue_order.py`).
"""

import random
from collections.abc import Iterable

from exeplan.core.schedule import ROUTERS

_SHORTEST_QUEUE, _ROUND_ROBIN, _RANDOM = ROUTERS


class Queues:
    """How many sequences of each replica have not finished; finds the fewest among thousands of replicas at once."""

    def __init__(self, num_open: Iterable[int]) -> None:
        """Of replicas numbered from 0, at least one."""
        self._num_open = list(num_open)
        self._alike: dict[int, int] = {}
        """By number of sequences: the replicas that have so many, a bit each."""
        for number, count in enumerate(self._num_open):
            self._alike[count] = self._alike.get(count, 0) | 1 << number
        self._fewest = min(self._alike)

    def __len__(self) -> int:
        return len(self._num_open)

    def add(self, number: int, change: int) -> None:
        """That many more sequences, or less, on a replica."""
        before, bit = self._num_open[number], 1 << number
        self._num_open[number] = after = before + change
        self._alike[before] ^= bit
        if not self._alike[before]:
            del self._alike[before]
        self._alike[after] = self._alike.get(after, 0) | bit
        if after < self._fewest:
            self._fewest = after
        elif self._fewest not in self._alike:
            self._fewest = min(self._alike)

    def shortest(self, first: int) -> int:
        """One of those with the fewest: the next from `first` on, and round to it."""
        alike = self._alike[self._fewest]
        behind = alike >> first
        return first + _lowest(behind) if behind else _lowest(alike)


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


class Router:
    """Decides one request after the other, in the order in which they come."""

    def __init__(self, law: str, *, seed: int = 0) -> None:
        """`law` is one of `ROUTERS`."""
        assert law in ROUTERS
        self._law, self._turn, self._random = law, 0, random.Random(seed)

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
