"""Fair shares of one engine's work among its clients, by virtual token counters.

Each client has a counter of the tokens that it was served, over its weight. Whenever a sequence may start, it is the
oldest of the client with the lowest counter. A client that comes, or comes back after a pause, is lifted to the lowest
counter of those that are there, or of those that were there last, so that idleness earns nothing. With one client the
order is that of arrival.

    w_p   1   a prompt token, counted when the prompt is admitted
    w_q   2   an output token, counted when it is generated

Source: Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), algorithm 2 with weights (section 4.3).

Not here: limits of what a client may queue (`runner/server/network/clients.py`), and the scheduler that asks
(`fair_scheduler.py`).
"""

import heapq
import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import cast

from exeplan.core.batch import SequenceState
from exeplan.scheduling.sorted_queue import SortedQueue

PROMPT_TOKEN, OUTPUT_TOKEN = 1.0, 2.0
LINGER_SECONDS = 60.0
"""A client counts as present for this long after its last sequence."""
LOOK_SECONDS = 1.0
"""Between two looks for clients that are gone: there may be thousands."""


@dataclass(eq=False, slots=True, kw_only=True)
class ClientSequence(SequenceState):
    """A sequence with the client that it belongs to; "" for none."""

    client: str = ""
    client_weight: float = 1.0
    """The client's share of the engine, relative to others."""
    may_begin_late: bool = False
    """It is not dropped when its deadline passes: other sequences of the same answer have begun."""


class ClientLines(SortedQueue):
    """Follows one queue of `ClientSequence`s: the line of each client, in the order of the queue."""

    def __init__(self) -> None:
        super().__init__("")
        self._numbers: dict[str, int] = {}
        """Of the clients that were seen, which sort their lines."""
        self._sizes = Counter[str]()

    def sizes(self, queue: deque[SequenceState]) -> Counter[str]:
        """How many sequences of each client wait."""
        self._follow(queue)
        return self._sizes

    def lines(self, queue: deque[SequenceState]) -> dict[str, Iterator[tuple[int, ClientSequence]]]:
        """Places and sequences of each client with any. The queue may not change while they are read."""
        self._follow(queue)
        return {name: self._line(self._numbers[name], size) for name, size in self._sizes.items()}

    def _line(self, number: int, size: int) -> Iterator[tuple[int, ClientSequence]]:
        first = bisect_left(self._entries, number, key=itemgetter(1))
        for index in range(first, first + size):
            _, _, place, sequence = self._entries[index]
            yield place, cast(ClientSequence, sequence)

    def forget(self, sequence: SequenceState) -> None:
        if id(sequence) in self._known:
            client = cast(ClientSequence, sequence).client
            self._sizes[client] -= 1
            if not self._sizes[client]:
                del self._sizes[client]
        super().forget(sequence)

    def _start(self, queue: deque[SequenceState]) -> None:
        super()._start(queue)
        self._sizes.clear()
        self._numbers.clear()

    def _entry(self, sequence: SequenceState, place: int) -> tuple[bool, float, int, SequenceState]:
        client = cast(ClientSequence, sequence).client
        self._sizes[client] += 1
        return (True, self._numbers.setdefault(client, len(self._numbers)), place, sequence)


@dataclass(slots=True)
class _Client:
    weight: float
    served: float = 0.0
    seen: float | None = None
    """When it last had a sequence here, on the driver's clock; None for one that has just come."""


class VirtualTokenCounters:
    """The counters of all clients that were here in the last `LINGER_SECONDS`."""

    def __init__(self) -> None:
        self._clients: dict[str, _Client] = {}
        self._total_weight: float | None = None
        """Of all clients; None where it is to be summed again. It is asked for many times a pass."""
        self._looked = -math.inf
        """When the clients that are gone were last looked for."""
        self._lowest = 0.0
        """The lowest counter of the clients that are present, or were last; it never falls."""

    @property
    def is_shared(self) -> bool:
        """Whether there is more than one client."""
        return len(self._clients) > 1

    def knows_more_than(self, clients: Iterable[str]) -> bool:
        """Whether a client was here that is none of these."""
        return self.is_shared and len(set(clients)) < len(self._clients)

    def served(self, client: str) -> float:
        """Tokens over weight, 0 for an unknown client."""
        return self._clients[client].served if client in self._clients else 0.0

    def join(self, sequence: ClientSequence, present: Iterable[str]) -> None:
        """A new sequence; `present` are the clients of those that wait or run.

        One without a client, as of a warm-up, is of no further interest.
        """
        if not sequence.client:
            return
        known = self._clients.setdefault(sequence.client, _Client(sequence.client_weight))
        known.weight, known.seen = sequence.client_weight, None
        self._total_weight = None
        if self.is_shared:
            self._note_lowest(present)
        known.served = max(known.served, self._lowest)  # Of those that are present, none is below that.

    def charge(self, sequence: ClientSequence, tokens: float) -> None:
        """Counts tokens of this sequence, already weighed by their kind; of a single client nothing is counted."""
        if self.is_shared and (known := self._clients.get(sequence.client)):
            known.served += tokens / known.weight

    def look(self, present: Iterable[str], now: float) -> None:
        """Notes which clients are present, and forgets those that were not for `LINGER_SECONDS`."""
        names = set(present)
        self._note_lowest(names)
        for name in names:
            if client := self._clients.get(name):
                client.seen = now
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked, self._total_weight = now, None
        for name, client in list(self._clients.items()):
            if client.seen is None:
                client.seen = now
            elif now - client.seen >= LINGER_SECONDS:
                del self._clients[name]

    def _note_lowest(self, present: Iterable[str]) -> None:
        self._lowest = max(self._lowest, min((self.served(name) for name in present), default=0.0))

    def share(self, client: str) -> float:
        """The client's part of everything, 0 to 1, by the weights of all."""
        if self._total_weight is None:
            self._total_weight = sum(one.weight for one in self._clients.values())
        return self._weight(client) / self._total_weight

    def _weight(self, client: str) -> float:
        return self._clients[client].weight if client in self._clients else 1.0

    def order(
        self, waiting: Mapping[str, Iterator[tuple[int, ClientSequence]]], running: Iterable[ClientSequence]
    ) -> Iterator[ClientSequence]:
        """The waiting sequences as they may start, from the line of each client that has any.

        The prompts of those ahead count as if admitted. Of equal counters the client with fewer running sequences, over
        its weight, goes first, then the one whose sequence came first.
        """
        num_running = dict.fromkeys(waiting, 0.0)
        for sequence in running:
            if sequence.client in num_running:
                num_running[sequence.client] += 1 / self._weight(sequence.client)
        heads = [(self.served(name), num_running[name], *next(line), name) for name, line in waiting.items()]
        heapq.heapify(heads)
        while heads:
            served, ahead, _, sequence, name = heapq.heappop(heads)
            yield sequence
            if following := next(waiting[name], None):
                weight = self._weight(name)
                served += PROMPT_TOKEN * sequence.num_tokens / weight
                heapq.heappush(heads, (served, ahead + 1 / weight, *following, name))
