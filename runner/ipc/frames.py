"""What the front end and the engine process say to each other: frames of JSON over a pair of connected sockets.

A frame is its length in four bytes, big-endian, then one JSON object in UTF-8. No object of Python ever crosses, so
whoever could write into the channel could at most send a request.

    front end -> engine   setup    what to load (first frame)
                          submit   {job, requests: [{request_id, prompt_token_ids, sampling, deadline, weight}]}, all or
                                   none; deadline is None or seconds from now
                          abort    {request_ids}
                          census   {}: asks for the lengths of requests
                          adopt    {number, setup}: go on with another plan, whose setup this is
    engine -> front end   loading  {stage, share}: how far it is, until it is ready, and where workers load again
                          ready    {num_blocks}
                          census   {now, left, running}: `Seen` each, those that left since the last census first
                          adopted  {number, num_blocks, seconds, num_recomputed, num_carried}: from here on the other
                                   plan
                          not-adopted {number, message}: nothing has changed
                          refused  {job | None, message}: bad input, in the setup or in a submit
                          step     {events, stats}: what one iteration brought
                          down     {message}: workers died, and new ones are being started
                          up       they are there
                          broken   {message}: a fault of ours, the process ends
"""

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

HEADER = struct.Struct(">I")


def frame(message: Mapping[str, Any]) -> bytes:
    """One message as it goes over the socket."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return HEADER.pack(len(body)) + body


def read_frame(connection: socket.socket) -> dict[str, Any] | None:
    """The next message, waiting for it; None when the other side is gone."""
    header = _read_exactly(connection, HEADER.size)
    body = _read_exactly(connection, HEADER.unpack(header)[0]) if header else None
    return json.loads(body) if body else None


def _read_exactly(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(min(size - len(data), 1 << 20))
        if not part:
            return None
        data += part
    return bytes(data)


class Logprob(NamedTuple):
    """A token and its log-probability; `top` holds the likeliest tokens with theirs, best first."""

    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]] = ()


class Event(NamedTuple):
    """New tokens of one sequence. Times are seconds on the engine's clock; `text` may lag behind the tokens."""

    request_id: str
    token_ids: Sequence[int]
    text: str
    finish_reason: str | None
    first: bool
    arrival: float
    """When the engine process received the request."""
    start: float
    """When its first prefill began, or when it expired."""
    time: float
    num_prompt_tokens: int
    logprobs: Sequence[Logprob] = ()

    @classmethod
    def of(cls, values: list[Any]) -> "Event":
        """From the list that JSON makes of it."""
        return cls(*values)._replace(logprobs=[Logprob(*entry) for entry in values[-1]])


class Loading(NamedTuple):
    """What an engine that is not ready does, and the share of it that is done."""

    stage: str
    share: float = 0.0

    def __str__(self) -> str:
        return f"{self.stage}, {100 * self.share:.0f} %" if self.share else self.stage


def as_values(loading: Loading | None) -> dict[str, Any]:
    """Its fields by name, nothing where there is nothing to load."""
    return loading._asdict() if loading else {}


class Stats(NamedTuple):
    """The engine after an iteration, and what it held: `iteration_tokens` and both numbers are 0 where nothing ran."""

    num_waiting: int = 0
    num_running: int = 0
    free_blocks: int = 0
    num_blocks: int = 0
    num_preemptions: int = 0
    iteration_tokens: int = 0
    num_prefill: int = 0
    num_decode: int = 0
