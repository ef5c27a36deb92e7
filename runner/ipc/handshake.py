"""Key challenge: before anything else is sent over a TCP connection, each end proves that it knows the shared key.

Challenge and response with HMAC-SHA-256. The accepting end sends a nonce; the dialling end answers with a nonce of its
own and a proof over both; the accepting end answers with its proof. The role is part of a proof, so that a proof cannot
be sent back to its maker. All challenge messages have a fixed size and are compared in constant time before anything
else is parsed, so that an unauthenticated peer can cause no more than a failed comparison.
Not here: encryption. What follows can be read and changed in transit, as the tensors can: hosts that run one plan need
a private network.
"""

import hmac
import secrets
import socket
import time

from exeplan.errors import InputError

SECONDS = 5.0
"""How long the other end may take for the challenge."""
_NONCE, _PROOF = 32, 32
_MAGIC = b"exeplan1"


class KeyChallengeError(ConnectionError):
    """The other end does not know the key, or does not speak this protocol."""


def dial(host: str, port: int, key: bytes) -> socket.socket:
    """A connection on which both ends have completed the key challenge.

    Raises ConnectionError where nothing answers in time, InputError where something with another key does.
    """
    try:
        return _proved(socket.create_connection((host, port), timeout=SECONDS), key)
    except KeyChallengeError:
        raise InputError(f"{host}:{port} does not know the token, or is no engine") from None
    except OSError as error:
        raise ConnectionError(
            f"no engine answers at {host}:{port} ({error.strerror or error}); can it be reached from here?"
        ) from None


def admit(connection: socket.socket, key: bytes) -> None:
    """The accepting end. Raises KeyChallengeError or another OSError when the peer does not complete the challenge."""
    deadline = time.monotonic() + SECONDS
    ours = secrets.token_bytes(_NONCE)
    connection.settimeout(SECONDS)
    connection.sendall(_MAGIC + ours)
    answer = _receive(connection, _NONCE + _PROOF, deadline)
    theirs, proof = answer[:_NONCE], answer[_NONCE:]
    if not hmac.compare_digest(proof, _proof(key, b"dials", ours, theirs)):
        raise KeyChallengeError("it does not know the key")
    connection.sendall(_proof(key, b"accepts", ours, theirs))
    _settle(connection)


def _proved(connection: socket.socket, key: bytes) -> socket.socket:
    """The dialling end. Closes the connection when the challenge fails."""
    try:
        deadline = time.monotonic() + SECONDS
        greeting = _receive(connection, len(_MAGIC) + _NONCE, deadline)
        if not greeting.startswith(_MAGIC):
            raise KeyChallengeError("it is no engine")
        ours, theirs = secrets.token_bytes(_NONCE), greeting[len(_MAGIC) :]
        connection.sendall(ours + _proof(key, b"dials", theirs, ours))
        try:
            proof = _receive(connection, _PROOF, deadline)
        except OSError:  # Closed after our proof, which the other end did not accept.
            raise KeyChallengeError("it did not accept our proof") from None
        if not hmac.compare_digest(proof, _proof(key, b"accepts", theirs, ours)):
            raise KeyChallengeError("it does not know the key")
        _settle(connection)
        return connection
    except BaseException:
        connection.close()
        raise


def _proof(key: bytes, side: bytes, of_acceptor: bytes, of_dialler: bytes) -> bytes:
    return hmac.digest(key, _MAGIC + side + of_acceptor + of_dialler, "sha256")


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionResetError("it closed the connection")
        data += part
    return data


def _settle(connection: socket.socket) -> None:
    """From now on reads block without limit, writes are sent at once, and a lost host is noticed within seconds."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 1),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, 4000),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
