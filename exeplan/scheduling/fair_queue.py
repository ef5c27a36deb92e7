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
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from exeplan.core.batch import SequenceState

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

    def join(self, sequence: ClientSequence, present: Iterable[ClientSequence]) -> None:
        """A new sequence; `present` are those that wait or run, of all clients.

        One without a client, as of a warm-up, is of no further interest.
        """
        if not sequence.client:
            return
        known = self._clients.setdefault(sequence.client, _Client(sequence.client_weight))
        known.weight, known.seen = sequence.client_weight, None
        self._total_weight = None
        if self.is_shared:
            self._note_lowest({one.client for one in present})
        known.served = max(known.served, self._lowest)  # Of those that are present, none is below that.

    def charge(self, sequence: ClientSequence, tokens: float) -> None:
        """Counts tokens of this sequence, already weighed by their kind; of a single client nothing is counted."""
        if self.is_shared and (known := self._clients.get(sequence.client)):
            known.served += tokens / known.weight

    def look(self, present: Iterable[ClientSequence], now: float) -> None:
        """Notes which clients are present, and forgets those that were not for `LINGER_SECONDS`."""
        names = {one.client for one in present}
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

    def order(self, waiting: Iterable[ClientSequence], running: Iterable[ClientSequence]) -> Iterator[ClientSequence]:
        """The waiting sequences as they may start, each client's in the order given.

        The prompts of those ahead count as if admitted. Of equal counters the client with fewer running sequences, over
        its weight, goes first, then the one whose sequence was given first.
        """
        lines: dict[str, deque[tuple[int, ClientSequence]]] = {}
        for place, sequence in enumerate(waiting):
            lines.setdefault(sequence.client, deque()).append((place, sequence))
        num_running = dict.fromkeys(lines, 0.0)
        for sequence in running:
            if sequence.client in num_running:
                num_running[sequence.client] += 1 / self._weight(sequence.client)
        heads = [(self.served(name), num_running[name], line[0][0], name) for name, line in lines.items()]
        heapq.heapify(heads)
        while heads:
            served, ahead, _, name = heapq.heappop(heads)
            sequence = lines[name].popleft()[1]
            yield sequence
            if lines[name]:
                weight = self._weight(name)
                served += PROMPT_TOKEN * sequence.num_tokens / weight
                heapq.heappush(heads, (served, ahead + 1 / weight, lines[name][0][0], name))
