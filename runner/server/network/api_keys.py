"""API keys: one from the command line, or a file of them with names, weights and limits.

    keys:
      - name: chat                # In metrics and logs, where keys never are.
        key: 3kY...               # Or sha256: its digest in hexadecimal.
        weight: 4                 # Its share of the engine relative to other clients; 1 where absent.
        max_requests: 200         # At one time, waiting, running and being read.
        max_waiting: 100          # Sequences in the queue.
        requests_per_minute: 600
        tokens_per_minute: 100000 # Prompts, once for each of their n, and outputs together.
        admin: true               # It may change the plan.

The file may be readable by its owner alone. Keys are kept as digests, which have one length, so that the time of a
comparison reveals nothing about them.
Not here: keys in databases, and their issue: a proxy or a gateway does that.
"""

import hashlib
import hmac
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from exeplan.errors import InputError
from exeplan.files import read_yaml
from exeplan.runner.server.network.clients import Client

MAX_KEYS = 1000
_LEAST, _MOST = 1e-3, 1e9
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY = re.compile(r"[!-~]{1,512}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")


class ApiKeys:
    """The keys of a server; `reload` reads the file again. Raises InputError for a file that is not right."""

    def __init__(self, *, key: str | None = None, file: Path | None = None) -> None:
        self._own = [] if key is None else [(_digest(key.encode()), Client(admin=True))]
        self._file = file
        self._named = [] if file is None else read_keys(file)

    @property
    def required(self) -> bool:
        return bool(self._own or self._file)

    @property
    def clients(self) -> list[Client]:
        """All that a request may be from; without keys, one for every address."""
        return [client for _, client in (*self._own, *self._named)] or [Client()]

    def with_identity(self, identity: str) -> Client | None:
        """The client that another front end names by its identity, with its limits as they are here."""
        address = identity.removeprefix("address ")
        found = (client.at(address) for client in self.clients)
        return next((client for client in found if client.identity == identity), None)

    def reload(self) -> int:
        """Reads the file again, if there is one; returns the number of its keys. A wrong one changes nothing."""
        if self._file:
            self._named = read_keys(self._file)
        return len(self._named)

    def find(self, key: bytes) -> Client | None:
        """The client with this key; one without a name where it is the key of the command line."""
        given, found = _digest(key), None
        for digest, client in (*self._own, *self._named):
            if hmac.compare_digest(digest, given):
                found = client
        return found


def read_keys(path: Path) -> list[tuple[bytes, Client]]:
    """Digests and clients of a file. Raises InputError for one that others may read, or that is wrong."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    if mode & 0o077:
        raise InputError(f"{path} holds API keys, but others may use it (mode {mode:04o}); run `chmod 600 {path}`")
    entries = read_yaml(path).get("keys")
    if not isinstance(entries, list) or not 0 < len(entries) <= MAX_KEYS:
        raise InputError(f"{path} must hold `keys`, a list of 1 to {MAX_KEYS} entries with name and key")
    found = [_entry(entry, f"{path}, key {number}") for number, entry in enumerate(entries, 1)]
    for what, values in (("name", [client.name for _, client in found]), ("key", [digest for digest, _ in found])):
        if len(set(values)) < len(values):
            raise InputError(f"{path} has the same {what} twice")
    return found


def _entry(entry: Any, where: str) -> tuple[bytes, Client]:
    if not isinstance(entry, Mapping):
        raise InputError(f"{where} must be a mapping with name and key")
    if unknown := set(entry) - {"name", "key", "sha256", "admin", *_LIMITS}:
        raise InputError(f"{where} has an unknown field '{min(map(str, unknown))}'; known: {', '.join(_LIMITS)}, admin")
    name, admin = entry.get("name"), entry.get("admin", False)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InputError(f"{where} needs a name of 1 to 64 letters, digits, '.', '_' and '-'")
    if not isinstance(admin, bool):
        raise InputError(f"{where}: admin must be true or false")
    limits: dict[str, Any] = {
        field: read(entry[field], f"{where}: {field}") for field, read in _LIMITS.items() if field in entry
    }
    return _key_digest(entry, where), Client(name=name, admin=admin, **limits)


def _key_digest(entry: Mapping[str, Any], where: str) -> bytes:
    key, digest = entry.get("key"), entry.get("sha256")
    if isinstance(key, str) and digest is None and _KEY.fullmatch(key):
        return _digest(key.encode())
    if isinstance(digest, str) and key is None and _DIGEST.fullmatch(digest):
        return bytes.fromhex(digest)
    raise InputError(f"{where} needs a key (1 to 512 visible ASCII characters, in quotes) or its sha256 (64 digits)")


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not _LEAST <= value <= _MOST:
        raise InputError(f"{where} must be a number from {_LEAST:g} to {_MOST:g}")
    return float(value)


def _count(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
        raise InputError(f"{where} must be a whole number from 1 to {_MOST:g}")
    return value


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


_LIMITS: dict[str, Callable[[Any, str], float]] = {
    "weight": _number,
    "max_requests": _count,
    "max_waiting": _count,
    "requests_per_minute": _number,
    "tokens_per_minute": _number,
}
