"""Tether: a connection between two hosts over which one of them learns within two seconds that the other is lost.

One end sends a byte every `BEAT_SECONDS`, the other answers each with its clock. A host that is cut off or has lost its
power acknowledges nothing: the system ends the connection when a byte has waited `LOST_SECONDS` for that, while it is
sent again several times. A process that ends closes it at once. A host that is busy answers late, and is not lost.
Not here: what follows from a loss.
"""

import contextlib
import errno
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable

BEAT_SECONDS = 0.3
LOST_SECONDS = 1.2
_READINGS = 32
_CLOCK = struct.Struct("!d")
_SILENCE = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN}


class Tether:
    """The end that wants to know; `on_end` is called once, in a thread, when the other one is gone."""

    def __init__(self, connection: socket.socket, on_end: Callable[[], None]) -> None:
        self._connection, self._on_end = connection, on_end
        self.silent = False
        """Whether the other host acknowledged nothing any more; otherwise the connection was closed, here or there."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * LOST_SECONDS))
        self._readings: deque[tuple[float, float]] = deque(maxlen=_READINGS)
        """How long an answer took, and how far the clock here was ahead."""
        self._answered = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def clock_offset(self, patience: float) -> float:
        """Seconds that `time.perf_counter` here is ahead of the other end's, by the fastest of the recent answers.

        Raises TimeoutError where the first answer takes longer than `patience`, or never comes.
        """
        if not self._answered.wait(patience) or not self._readings:
            raise TimeoutError(f"the other end did not answer within {patience:g} s")
        return min(list(self._readings))[1]

    def close(self) -> None:
        """Ends it for the other end, too, and for the thread here."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        try:
            self._beat()
        except OSError as error:
            self.silent = error.errno in _SILENCE
        self._connection.close()
        self._answered.set()
        self._on_end()

    def _beat(self) -> None:
        """Until the other end has gone."""
        sent, data, due = deque[float](), b"", 0.0
        while True:
            now = time.perf_counter()
            if now >= due:
                self._connection.sendall(b".")
                sent.append(now)
                due = now + BEAT_SECONDS
            self._connection.settimeout(max(due - now, 1e-3))
            try:
                part = self._connection.recv(4096)
            except TimeoutError as error:
                if error.errno is not None:  # The system's: nothing was acknowledged.
                    raise
                continue
            received = time.perf_counter()
            if not part:
                return
            data += part
            while len(data) >= _CLOCK.size:
                (theirs,), began = _CLOCK.unpack_from(data), sent.popleft()
                data = data[_CLOCK.size :]
                self._readings.append((received - began, (began + received) / 2 - theirs))
                self._answered.set()


def answer(connection: socket.socket) -> None:
    """The other end: answers until the connection ends."""
    with contextlib.suppress(OSError):
        while beats := connection.recv(4096):
            connection.sendall(_CLOCK.pack(time.perf_counter()) * len(beats))
    connection.close()
