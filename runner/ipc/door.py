"""Door: where a process listens for one peer on another host, which has been given a token for it by a safe way.

Each door has a port and a token of its own, and admits one connection: the first whose peer proves that it knows the
token, by the key challenge (`handshake.py`). It reads nothing else of any other peer.
Not here: how the token gets to the other host (`exeplan.runner.distributed.ray_launcher`: by a call of Ray).
"""

import contextlib
import logging
import queue
import secrets
import socket
import threading
from collections import deque

from exeplan.runner.ipc.handshake import admit

log = logging.getLogger(__name__)
_TOKEN_BYTES = 32
_MAX_UNPROVEN = 32
"""Connections that may be in the key challenge at a time; a further one takes the place of the oldest. A peer that has
the token proves that in milliseconds, strangers that say nothing cannot keep it out."""


class Door:
    """Listens from now on; a context manager that closes."""

    def __init__(self, address: str) -> None:
        """On a free port of an address of this host. Raises OSError where it has no such address."""
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        self._listener = socket.create_server((address, 0), backlog=_MAX_UNPROVEN)
        self.port: int = self._listener.getsockname()[1]
        self._entered: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._unproven: deque[socket.socket] = deque()
        """The oldest first; guarded by `_lock`, as `_open` is."""
        self._open, self._lock = True, threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> "Door":
        return self

    def __exit__(self, *of_error: object) -> None:
        self.close()

    def admit(self, patience: float) -> socket.socket:
        """The connection of the peer that knows the token. Raises TimeoutError where none came in that many seconds."""
        try:
            return self._entered.get(timeout=patience)
        except queue.Empty:
            raise TimeoutError(f"no peer with the token came within {patience:g} s") from None

    def close(self) -> None:
        """Nothing is admitted from now on."""
        with self._lock:
            self._open = False
            for connection in self._unproven:
                _shut(connection)
        _shut(self._listener)

    def _accept(self) -> None:
        while True:
            try:
                connection, (host, *_) = self._listener.accept()
            except OSError:  # It was closed.
                return
            with self._lock:
                if len(self._unproven) >= _MAX_UNPROVEN:
                    _shut(self._unproven.popleft())
                self._unproven.append(connection)
            threading.Thread(target=self._challenge, args=(connection, host), daemon=True).start()

    def _challenge(self, connection: socket.socket, host: str) -> None:
        try:
            admit(connection, self.token)
        except OSError as error:
            log.warning("refused a connection from %s: %s", host, error)
            with self._lock, contextlib.suppress(ValueError):  # It was the oldest, and has lost its place.
                self._unproven.remove(connection)
            connection.close()
            return
        with self._lock:
            with contextlib.suppress(ValueError):
                self._unproven.remove(connection)
            first, self._open = self._open, False
        if first:
            self._entered.put(connection)
        else:
            connection.close()


def _shut(connection: socket.socket) -> None:
    """Also for a thread that waits for it, which closing alone does not."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
