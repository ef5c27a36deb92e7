"""Which names the server answers to: the check of the `Host` header, before anything else of a request is looked at.

The owner of a name can point it at this machine after a browser has loaded a page from it (DNS rebinding). The browser
then takes the server for a part of that page's site, and its `Origin` fits its `Host`. Such a name is refused, as it is
none of this server's. Addresses cannot be pointed elsewhere: a server on all interfaces answers to every one.
"""

import ipaddress
import re
import socket
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from exeplan.errors import InputError
from exeplan.runner.server.network.connection import error_response
from exeplan.runner.server.openai.errors import RequestError

ANY = "*"
_NAME = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?)*")


def check_host_name(name: str) -> str:
    """The name or address as `Hosts` compares it. Raises InputError for one with a scheme, port or path."""
    plain = _plain(name)
    if plain != ANY and not _NAME.fullmatch(plain) and _address(plain) is None:
        raise InputError(f"--allowed-host must be a name or an address such as llm.example.org, or *, found '{name}'")
    return plain


class Hosts:
    """The names and addresses of a server that listens on `bound`: loopback, its own, and the `allowed` ones."""

    def __init__(self, bound: str, allowed: Iterable[str] = ()) -> None:
        names = {check_host_name(name) for name in allowed}
        self._any = ANY in names
        address = _address(bound := _plain(bound))
        self._any_address = bound == "" or (address is not None and address.is_unspecified)
        own = socket.gethostname() if self._any_address else bound
        self._names = names | {"localhost", _plain(own)}
        self._addresses = {found for name in self._names if (found := _address(name))}

    def has(self, header: str) -> bool:
        """Whether a `Host` header names this server; the port does not matter."""
        name = _plain(_without_port(header))
        if self._any or name in self._names or name.endswith(".localhost"):
            return True
        address = _address(name)
        return address is not None and (self._any_address or address.is_loopback or address in self._addresses)


class HostGate:
    """ASGI middleware: 403 for a request to a name that is not this server's.

    A request without `Host`, which HTTP/1.0 permits, comes from no browser and passes.
    """

    def __init__(self, app: ASGIApp, hosts: Hosts) -> None:
        self.app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            for name, value in scope["headers"]:
                if name == b"host" and not self._hosts.has(host := value.decode("latin-1")):
                    return await error_response(_foreign(host))(scope, receive, send)
        await self.app(scope, receive, send)


def _foreign(host: str) -> RequestError:
    shown = f"{host!a:.80}"[1:].rstrip("'")
    message = f"this server does not answer to the host '{shown}'; exeplan serve --allowed-host allows a name"
    return RequestError(message, status=403, code="host_not_allowed")


def _without_port(header: str) -> str:
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0] if header.count(":") == 1 else header


def _plain(name: str) -> str:
    return name.strip().lower().removeprefix("[").removesuffix("]").removesuffix(".")


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
