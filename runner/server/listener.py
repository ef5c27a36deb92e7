"""The listening socket of the server, and how many connections it can hold."""

import resource
import socket

from exeplan.errors import InputError

MAX_CONNECTIONS = 4096
_BACKLOG = 2048
_SPARE_FILES = 256
"""Open files kept free for everything but connections."""


def open_listener(host: str, port: int) -> socket.socket:
    """A listening socket. Raises InputError when the address is not available."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # A name such as localhost may have both families; clients try 127.0.0.1 more often than ::1.
        family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
        listener = socket.socket(family, socket.SOCK_STREAM)
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
    """The most connections at one time, after raising the limit of open files as far as this process may.

    A process that runs out of files can no longer accept a connection, and retries in a loop.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else max(min(MAX_CONNECTIONS, soft - _SPARE_FILES), 16)


def set_keepalive(connection: socket.socket, seconds: int) -> None:
    """Lets the kernel close a connection whose peer is gone, or reads nothing, for about `seconds`."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # These have other names, or do not exist, on systems other than Linux.
    for name, value in (("TCP_KEEPIDLE", seconds // 2), ("TCP_KEEPINTVL", seconds // 6), ("TCP_KEEPCNT", 3)):
        if option := getattr(socket, name, None):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
    if option := getattr(socket, "TCP_USER_TIMEOUT", None):
        connection.setsockopt(socket.IPPROTO_TCP, option, seconds * 1000)
