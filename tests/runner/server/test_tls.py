"""With a certificate and its key the server speaks https; what is wrong with the files is one sentence."""

import contextlib
import http.client
import shutil
import signal
import socket
import ssl
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from exeplan.errors import InputError
from exeplan.runner.load import served_model
from exeplan.runner.server.network.tls import Tls

from ..processes import PATIENCE, eventually

CURVE = ("ec", "-pkeyopt", "ec_paramgen_curve:P-256")


def certificate(folder: Path, name: str, *options: str, kind: tuple[str, ...] = CURVE) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1, signed by itself, and its key."""
    if not (openssl := shutil.which("openssl")):
        pytest.skip("makes certificates with the openssl command")
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    made = [openssl, "req", "-x509", "-newkey", *kind, "-days", "2"]
    of = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*made, *of, *(options or ("-nodes",))], check=True, capture_output=True)
    return cert, key


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def files(folder):
    return certificate(folder, "first")


@pytest.fixture(scope="module")
def secure(launch, files, folder):
    cert, key = files
    with launch(tls_cert=str(cert), tls_key=str(key), log=folder / "log") as running:
        yield running


def trusting(cert):
    return ssl.create_default_context(cafile=cert)


def status(server, context):
    with contextlib.closing(
        http.client.HTTPSConnection("127.0.0.1", server.port, timeout=PATIENCE, context=context)
    ) as client:
        client.request("GET", "/v1/models")
        with client.getresponse() as response:
            return response.status


def test_clients_that_trust_the_certificate_are_answered(secure, files):
    assert secure.url.startswith("https://127.0.0.1:")
    assert status(secure, trusting(files[0])) == 200
    assert served_model(secure.url, tls_ca=files[0]).name == "tiny"
    with pytest.raises(InputError, match="CERTIFICATE_VERIFY_FAILED"):
        served_model(secure.url)


def test_old_versions_and_plain_http_get_nothing(secure, files):
    old = trusting(files[0])
    old.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        status(secure, old)
    with socket.create_connection(("127.0.0.1", secure.port), timeout=PATIENCE) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert b"HTTP" not in plain.recv(1000)


def test_silent_strangers_hold_no_place(secure, files):
    silent = [socket.create_connection(("127.0.0.1", secure.port), timeout=PATIENCE) for _ in range(20)]
    assert status(secure, trusting(files[0])) == 200
    for stranger in silent:
        with stranger, contextlib.suppress(ConnectionError):
            assert stranger.recv(1) == b""  # After the time for a handshake.


def test_a_renewed_certificate_is_read_at_sighup(secure, files, folder):
    cert, key = files
    before = trusting(cert.read_text() and cert)
    for old, new in zip(files, certificate(folder, "second"), strict=True):
        old.write_bytes(new.read_bytes())
    secure.process.send_signal(signal.SIGHUP)

    def renewed():
        try:
            return status(secure, trusting(cert)) == 200
        except ssl.SSLError:
            return False

    eventually(renewed)
    with pytest.raises(ssl.SSLError):
        status(secure, before)
    key.write_text("nonsense")
    secure.process.send_signal(signal.SIGHUP)
    eventually(lambda: "certificates stay as they were" in (folder / "log").read_text())
    assert status(secure, trusting(cert)) == 200


def shown(tls):
    """The name in the certificate that a client gets that takes any."""
    ours, theirs = socket.socketpair()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

    def answer():
        with tls.context.wrap_socket(ours, server_side=True) as server:
            server.recv(1)

    with ThreadPoolExecutor() as pool:
        answering = pool.submit(answer)
        with context.wrap_socket(theirs) as client:
            found = client.getpeercert(binary_form=True)
        answering.result(PATIENCE)
    return next(name for name in ("curve", "rsa") if f"is {name}".encode() in found)


@pytest.mark.parametrize("names", [("curve", "rsa"), ("rsa", "curve")])
def test_a_renewed_certificate_may_be_of_another_kind(names, tmp_path):
    kinds = {"curve": CURVE, "rsa": ("rsa:2048",)}
    made = {name: certificate(tmp_path, f"is {name}", kind=kinds[name]) for name in names}
    files, found = (tmp_path / "cert", tmp_path / "key"), []
    for old, new in zip(files, made[names[0]], strict=True):
        old.write_bytes(new.read_bytes())
    tls = Tls(*files)
    found.append(shown(tls))
    for old, new in zip(files, made[names[1]], strict=True):
        old.write_bytes(new.read_bytes())
    tls.reload()
    found.append(shown(tls))
    assert found == list(names)


def test_wrong_files_are_named(folder, tmp_path):
    cert, key = certificate(folder, "third")
    other, _ = certificate(folder, "other")
    _, locked = certificate(folder, "locked", "-passout", "pass:secret")
    for pair, message in (
        ((tmp_path / "no.crt", key), "--tls-cert: cannot read"),
        ((cert, tmp_path), "--tls-key: cannot read"),
        ((other, key), "do not belong together"),
        ((cert, locked), "is encrypted"),
        ((key, key), "not such a PEM file"),
        ((cert, cert), "not such a PEM file"),
    ):
        with pytest.raises(InputError, match=message):
            Tls(*pair)
