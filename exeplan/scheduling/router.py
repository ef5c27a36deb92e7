"""Router: to which replica a request goes. The server and the replay of several replicas share it.

    shortest-queue  the replica with the fewest sequences that have not finished; of equally few each in turn
    round-robin     each in turn
    random          any, by a generator of its own

Not here: which replicas are up (`runner/engine_process/replicas.py`), and which waiting request of a replica is next
(`core/queue_order.py`).
"""

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from exeplan.core.schedule import ROUTERS

_SHORTEST_QUEUE, _ROUND_ROBIN, _RANDOM = ROUTERS
_Replica = TypeVar("_Replica")


class Router:
    """Decides one request after the other, in the order in which they come."""

    def __init__(self, law: str, *, seed: int = 0) -> None:
        """`law` is one of `ROUTERS`."""
        assert law in ROUTERS
        self._law, self._turn, self._random = law, 0, random.Random(seed)

    def choose(self, replicas: Sequence[_Replica], num_open: Callable[[_Replica], int]) -> _Replica:
        """The replica, of at least one; `num_open` counts the sequences of one that have not finished."""
        turn = self._turn % len(replicas)
        self._turn += 1
        if self._law == _ROUND_ROBIN:
            return replicas[turn]
        if self._law == _RANDOM:
            return self._random.choice(replicas)
        # Of equally short queues each in turn, so that an idle set is used evenly.
        return min([*replicas[turn:], *replicas[:turn]], key=num_open)
