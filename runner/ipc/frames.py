"""Frames: typed messages over sockets and pipes, each checked against the messages that its channel carries.

A frame is the length of its body in four bytes, big-endian, then one message in MessagePack (msgpack.org). JSON takes
as much time and more bytes, and has no infinity, which is the log-probability of a banned token. No pickle ever
crosses: a process that can write into a channel can at most send a message of that channel.
"""

import asyncio
import struct
from collections.abc import Callable
from typing import Any, Generic, TypeVar, get_args

import msgspec

from exeplan.errors import InputError

HEADER = struct.Struct(">I")
MAX_BYTES = 1 << 30
"""Of one message; a frame that announces more is refused before it is read."""
_PIECE_BYTES = 1 << 20
M = TypeVar("M")


class MessageError(ConnectionError):
    """The other process sent something that its channel does not carry; the connection is of no further use."""


class Channel(Generic[M]):
    """One direction of a connection: the messages that it carries, and the most bytes that one may have."""

    def __init__(self, name: str, messages: Any, *, max_bytes: int = MAX_BYTES) -> None:
        """`messages` is one tagged Struct or a union of them."""
        self.name, self.max_bytes = name, max_bytes
        self.messages: tuple[type[Any], ...] = get_args(messages) or (messages,)
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(messages)

    def read(self, receive: Callable[[int], bytes]) -> M | None:
        """The next message, waiting for it; None when the other process has closed the connection.

        `receive` returns at most as many bytes as it is asked for: `socket.recv`, or `read` of a pipe. Raises
        MessageError for what does not fit, OSError for a connection that broke.
        """
        header = _exactly(receive, HEADER.size)
        body = None if header is None else _exactly(receive, self._size(header))
        return None if body is None else self.decode(body)

    async def read_from(self, stream: asyncio.StreamReader) -> M:
        """As `read`. Raises asyncio.IncompleteReadError when the other process has closed the connection."""
        header = await stream.readexactly(HEADER.size)
        return self.decode(await stream.readexactly(self._size(header)))

    def decode(self, body: bytes) -> M:
        """The message of a frame's body. Raises MessageError where it does not fit."""
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise MessageError(f"a message of {len(body)} bytes does not fit {self.name}: {error}") from None

    def _size(self, header: bytes) -> int:
        size: int = HEADER.unpack(header)[0]
        if size > self.max_bytes:
            raise MessageError(
                f"a message of {size} bytes does not fit {self.name}: the limit is {self.max_bytes} bytes"
            )
        return size


def frame(message: msgspec.Struct) -> bytes:
    """One message as it goes over a connection. Raises InputError for an integer of more than 64 bits."""
    try:
        body = _ENCODER.encode(message)
    except OverflowError:
        raise InputError(f"{type(message).__name__} holds an integer of more than 64 bits; use a smaller one") from None
    return HEADER.pack(len(body)) + body


def _plain(value: Any) -> float:
    """A float of numpy, which is a float to everything but an encoder."""
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"{type(value).__name__} is no part of a message")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)


def _exactly(receive: Callable[[int], bytes], size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        piece = receive(min(size - len(data), _PIECE_BYTES))
        if not piece:
            return None
        data += piece
    return bytes(data)
