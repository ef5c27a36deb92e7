"""Broken HTTP: valid requests cut, flipped or repeated, with false headers and invalid bodies."""

import json
import random
import socket

_BODIES = (
    b'{"prompt": "a", "max_tokens": 2}',
    b'{"prompt": [1, 2, 3], "max_tokens": 2, "stream": true}',
    b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}',
)
_PIECES = (b"NaN", b"1e999", b"\xff", b"\\ud800", b"9" * 5000, b"[" * 20_000, b"{}", b'"', b"\x00", b"null", b"-1")
_HEADERS = (
    b"content-length: -1",
    b"content-length: 99999999999999999999",
    b"content-length: 5\r\ncontent-length: 6",
    b"transfer-encoding: chunked",
    b"transfer-encoding: gzip",
    b"transfer-encoding: chunked\r\ncontent-length: 3",
    b"expect: 100-continue",
    b"connection: upgrade\r\nupgrade: websocket",
    b"host: a\r\nhost: b",
    b"host: elsewhere.example",
    b"x: " + b"y" * 20_000,
    b"x\x00y: z",
    b" folded: line",
    b"authorization: Bearer",
    b"authorization: Bearer a\r\nauthorization: Bearer b",
    b"origin: https://elsewhere.example",
    b"x-request-id: \x1b[31m",
)
_PATHS = (
    b"/v1/completions",
    b"/v1/chat/completions",
    b"/health",
    b"/",
    b"/plan",
    b"/dashboard",
    b"/%00",
    b"/..%2f",
    b"*",
    b"/\xff",
)
_METHODS = (b"POST", b"POST", b"GET", b"BREW", b"HEAD", b"OPTIONS", b"")


def malformed(draw: random.Random, key: str) -> tuple[str, bytes]:
    """The kind of damage, and the bytes to send; most requests have the right key, so that they pass authentication."""
    trust = b"authorization: Bearer " + key.encode()
    body = draw.choice(_BODIES)
    at = draw.randrange(len(body))
    kind = draw.choice(("piece in body", "headers", "cut", "flipped", "repeated", "noise", "chunks", "values"))
    if kind == "piece in body":
        body = body[:at] + draw.choice(_PIECES) + body[at + draw.randint(0, 3) :]
    if kind == "values":
        values = (-1, 0, 2**31, 2**63, 10**99, 1e308, True, None, "5", [], {}, "\ud800")
        names = (
            "n",
            "max_tokens",
            "temperature",
            "top_k",
            "seed",
            "logprobs",
            "stop",
            "prompt",
            "stream",
            "model",
            "\x00",
        )
        body = json.dumps({"prompt": "a", "max_tokens": 2, draw.choice(names): draw.choice(values)}).encode()
    data = request(body, b"POST", draw.choice(_PATHS[:2]), [trust])
    if kind == "headers":
        extra = draw.sample(_HEADERS, draw.randint(1, 3))
        data = request(body, draw.choice(_METHODS), draw.choice(_PATHS), [trust, *extra])
    if kind == "chunks":
        sizes = draw.choice((b"ffffffffffffffff", b"-5", b"0x5", b"5;a=b", b"", b"zz", b"10000"))
        data = (
            request(b"", b"POST", _PATHS[0], [trust, b"transfer-encoding: chunked"], length=False)
            + sizes
            + b"\r\n"
            + body
        )
    if kind == "cut":
        data = data[: draw.randrange(len(data))]
    if kind == "flipped":
        flipped = bytearray(data)
        for _ in range(draw.randint(1, 8)):
            flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
        data = bytes(flipped)
    if kind == "repeated":
        data *= draw.randint(2, 30)
    if kind == "noise":
        data = draw.randbytes(draw.randint(1, 4000)) + b"\r\n\r\n"
    return kind, data


def request(body: bytes, method: bytes, path: bytes, extra: list[bytes], *, length: bool = True) -> bytes:
    """A request of these parts, valid or not."""
    lines = [method + b" " + path + b" HTTP/1.1", b"host: localhost", *extra]
    if length and not any(b"content-length" in line for line in extra):
        lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def talk(port: int, data: bytes, *, seconds: float) -> str:
    """Sends, listens for `seconds`, closes; the status of the first answer, or that there was none."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.settimeout(seconds)
        try:
            connection.sendall(data)
            answer = connection.recv(65536)
        except TimeoutError:
            return "raw: left without an answer"
    if not answer:
        return "raw: closed without an answer"
    words = answer.split(None, 2)
    return words[1].decode("ascii", "replace") if answer.startswith(b"HTTP/1.1 ") and len(words) > 1 else "raw: no HTTP"
