"""The listening socket of the server, and how many connections it can hold.

Their number follows from the limit of open files, which is raised as far as this process may. Without a free file
asyncio would try to accept again and again, so that one is kept for that moment: with it a connection is accepted and
closed. Where there is no room for another connection, the one whose TLS handshake has taken longest leaves.
Not here: which connection with a place makes room for another (`places.py`).
"""

import contextlib
import errno
import logging
import os
import resource
import socket
import time
from typing import Any

from exeplan.errors import InputError
from exeplan.runner.server.network.places import NUM_PROBES

MAX_CONNECTIONS = 4096
SEND_BUFFER_BYTES = 128 * 1024
"""Of a connection, in the kernel: what a client that reads nothing can be sent. The kernel takes twice as much."""
_BACKLOG = 2048
_SPARE_FILES = 256
"""Open files kept free for everything but connections, where the limit is not low."""
_QUIET_SECONDS = 60.0
log = logging.getLogger(__name__)


class Listener(socket.socket):
    """A listening socket that holds at most `limit` connections, those included whose TLS handshake is not done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.limit = MAX_CONNECTIONS
        self._open: set[int] = set()
        """File numbers."""
        self._beginning: dict[int, _Accepted] = {}
        """Those of which no protocol knows yet, by file number, the oldest first."""
        self._spare: int | None = os.open(os.devnull, os.O_RDONLY)
        self._said = -_QUIET_SECONDS

    def accept(self) -> tuple[socket.socket, Any]:
        """As of any socket. BlockingIOError for a connection that there is no file or no room for, which is closed."""
        try:
            number, address = self._accept()  # type: ignore[attr-defined] # As in the standard library's.
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self._refuse_one()
            raise BlockingIOError from None
        connection = _Accepted(self.family, self.type, self.proto, fileno=number)
        if len(self._open) >= self.limit and not self._drop_oldest():
            connection.close()
            self._say(f"{self.limit} connections are open; another one is closed")
            raise BlockingIOError
        connection.listener = self
        self._open.add(number)
        self._beginning[number] = connection
        return connection, address

    def has_begun(self, number: int) -> None:
        """The connection with this file number has a protocol, its TLS handshake being done."""
        self._beginning.pop(number, None)

    def closed(self, connection: "_Accepted") -> None:
        """An accepted connection is about to be closed."""
        self._open.discard(connection.fileno())
        self._beginning.pop(connection.fileno(), None)

    def _drop_oldest(self) -> bool:
        """Ends the connection that has been beginning longest, which the event loop then closes; False without one."""
        if not self._beginning:
            return False
        oldest = next(iter(self._beginning.values()))
        self.closed(oldest)
        with contextlib.suppress(OSError):  # Its peer may have gone.
            oldest.shutdown(socket.SHUT_RDWR)
        self._say(f"{self.limit} connections are open or begin; those that have been beginning longest are closed")
        return True

    def close(self) -> None:
        super().close()
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def _refuse_one(self) -> None:
        assert self._spare is not None
        os.close(self._spare)
        with contextlib.suppress(OSError):
            os.close(self._accept()[0])  # type: ignore[attr-defined]
        self._spare = os.open(os.devnull, os.O_RDONLY)
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._say(f"no file is left for another connection (ulimit -n {files}), which is closed; a higher limit helps")

    def _say(self, message: str) -> None:
        if time.monotonic() - self._said >= _QUIET_SECONDS:
            self._said = time.monotonic()
            log.warning("%s", message)


class _Accepted(socket.socket):
    listener: Listener | None = None

    def close(self) -> None:
        if self.listener is not None:
            self.listener.closed(self)
            self.listener = None
        super().close()


def open_listener(host: str, port: int) -> Listener:
    """A listening socket. Raises InputError when the address is not available."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # A name such as localhost may have both families; clients try 127.0.0.1 more often than ::1.
        family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
        listener = Listener(family, socket.SOCK_STREAM)
    except (OSError, UnicodeError, OverflowError) as error:
        raise InputError(f"cannot serve on {host}:{port}: {error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)  # Another process may listen on a port that is only bound.
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"cannot serve on {host}:{port}: {reason}; another --port may be free") from None
    return listener


def connection_limit() -> int:
    """The most connections at one time, probes aside, after raising the limit of open files as far as this process may.

    The log tells where the limit is lower than `MAX_CONNECTIONS`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # Some systems allow no more than a limit of their own.
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            log.info("limit of open files raised from %s to %s", _shown(soft), _shown(hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    free = soft - len(os.listdir("/dev/fd"))
    limit = max(min(MAX_CONNECTIONS, free - min(_SPARE_FILES, free // 4) - min(NUM_PROBES, free // 8)), 8)
    if limit < MAX_CONNECTIONS:
        log.warning("at most %d connections at one time, as %d files may be open (ulimit -n)", limit, soft)
    return limit


def _shown(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


def set_options(connection: socket.socket, seconds: int) -> None:
    """Nothing waits to be sent; bounds what the kernel holds for a client that reads nothing, and lets it close a
    connection whose peer is gone, or reads nothing, for about `seconds`."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    # asyncio sets it only where the socket says its protocol, which one made by family and type does not: the second
    # part of an answer, and each event of a stream, would wait for the peer to acknowledge the one before, for 40 ms.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # These have other names, or do not exist, on systems other than Linux.
    for name, value in (("TCP_KEEPIDLE", seconds // 2), ("TCP_KEEPINTVL", seconds // 6), ("TCP_KEEPCNT", 3)):
        if option := getattr(socket, name, None):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
    if option := getattr(socket, "TCP_USER_TIMEOUT", None):
        connection.setsockopt(socket.IPPROTO_TCP, option, seconds * 1000)
