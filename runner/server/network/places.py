"""Places for connections: one address cannot have all of them, idle ones make room, and probes always get in.

A connection is idle while no complete header of a request has come. A newcomer to a full server takes the place of the
connection that has been idle longest; one from an address that has its share already, of one from there. Where none is
idle it may still probe: a few more places are for requests to the open paths only, and the oldest of those makes room.
Not here: the sockets (`listener.py`), and what is sent (`connection.py`).
"""

from collections import Counter
from dataclasses import dataclass
from typing import Generic, TypeVar

NUM_PROBES = 64
"""Places for probes, besides the others."""
SHARE_OF_ONE = 3 / 4
"""Of all places, for one address: a proxy in front may need most of them."""
_Connection = TypeVar("_Connection")


@dataclass(frozen=True, slots=True)
class Entry(Generic[_Connection]):
    """Whether a newcomer may only probe, and the connection that makes room for it."""

    probes: bool = False
    leaves: _Connection | None = None


class Places(Generic[_Connection]):
    """The connections of one server, at most `limit` and `NUM_PROBES` that may only probe."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._address: dict[_Connection, str] = {}
        self._count: Counter[str] = Counter()
        self._idle: dict[_Connection, None] = {}
        """The one that is idle longest first."""
        self._idle_of: dict[str, dict[_Connection, None]] = {}
        self._probes: dict[_Connection, None] = {}

    def __len__(self) -> int:
        return len(self._address) + len(self._probes)

    def enter(self, connection: _Connection, address: str) -> Entry[_Connection]:
        """A newcomer, idle at first; what leaves for it has no place any more."""
        leaves: _Connection | None = None
        if self._count[address] >= max(1, int(SHARE_OF_ONE * self.limit)):
            leaves = next(iter(self._idle_of.get(address, ())), None)
        elif len(self._address) >= self.limit:
            leaves = next(iter(self._idle), None)
        else:
            return self._enter(connection, address, None)
        if leaves is not None:
            self.leave(leaves)
            return self._enter(connection, address, leaves)
        if not self._count[address]:
            del self._count[address]
        self._probes[connection] = None
        oldest = next(iter(self._probes)) if len(self._probes) > NUM_PROBES else None
        if oldest is not None:
            del self._probes[oldest]
        return Entry(probes=True, leaves=oldest)

    def _enter(self, connection: _Connection, address: str, leaves: _Connection | None) -> Entry[_Connection]:
        self._address[connection] = address
        self._count[address] += 1
        self.rest(connection)
        return Entry(leaves=leaves)

    def rest(self, connection: _Connection) -> None:
        """It is idle from now on."""
        if (address := self._address.get(connection)) is not None:
            self.work(connection)
            self._idle[connection] = None
            self._idle_of.setdefault(address, {})[connection] = None

    def work(self, connection: _Connection) -> None:
        """It has a request."""
        if connection in self._idle:
            del self._idle[connection]
            idle = self._idle_of[address := self._address[connection]]
            del idle[connection]
            if not idle:
                del self._idle_of[address]

    def leave(self, connection: _Connection) -> None:
        """It has gone; one without a place is accepted."""
        self.work(connection)
        self._probes.pop(connection, None)
        if (address := self._address.pop(connection, None)) is not None:
            self._count[address] -= 1
            if not self._count[address]:
                del self._count[address]
