"""TLS by certificate files: version 1.2 or newer, and the files can be read again.

Not here: client certificates, and their issue or renewal; a proxy such as Caddy renews them.
"""

import ssl
from pathlib import Path

from exeplan.errors import InputError


class Tls:
    """The context of a server with this certificate (with the chain to its root) and key, in PEM files.

    Raises InputError for files that cannot be used.
    """

    def __init__(self, cert: Path, key: Path) -> None:
        self._cert, self._key = cert, key
        self._current = self._read()
        self.context = _context()
        # A certificate loaded into a context replaces only one of its own kind (RSA, elliptic curve): each connection
        # takes a context that has one certificate.
        self.context.sni_callback = self._take_current

    def reload(self) -> None:
        """Reads the files again; new connections get what is in them. Wrong files change nothing."""
        self._current = self._read()

    def _read(self) -> ssl.SSLContext:
        context = _context()
        _load(context, self._cert, self._key)
        return context

    def _take_current(
        self, connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext
    ) -> None:
        """Called in every handshake, whether or not the client names a server."""
        connection.context = self._current


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    return context


def _load(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    for option, path in (("--tls-cert", cert), ("--tls-key", key)):
        try:
            path.read_bytes()
        except OSError as error:
            raise InputError(f"{option}: cannot read {path}: {error.strerror}") from None

    def encrypted() -> str:
        raise InputError(f"--tls-key: {key} is encrypted; `openssl pkey -in {key}` writes it without a passphrase")

    try:
        context.load_cert_chain(cert, key, password=encrypted)
    except InputError:
        raise
    except (ssl.SSLError, OSError, ValueError) as error:
        reason = "they do not belong together" if "MISMATCH" in str(error) else "one of them is not such a PEM file"
        raise InputError(f"{cert} and {key} cannot be used as certificate and key: {reason}") from None
