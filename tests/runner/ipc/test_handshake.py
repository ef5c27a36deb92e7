"""Both ends of a connection prove that they know the key; nothing else that a peer without it sends is read."""

import contextlib
import hmac
import socket
import threading

import pytest

from exeplan.errors import InputError
from exeplan.runner.ipc import handshake
from exeplan.runner.ipc.handshake import KeyChallengeError, admit, dial

from ..processes import PATIENCE

KEY, OTHER = b"one key that several hosts share", b"a key of other hosts............."


@pytest.fixture
def port():
    """Where a listener admits one connection with KEY; `outcome` is the result."""

    class Listener(threading.Thread):
        outcome: object = None

        def run(self):
            with listener, listener.accept()[0] as connection:
                try:
                    admit(connection, KEY)
                    self.outcome = connection.recv(100)
                    connection.sendall(b"welcome")
                except OSError as error:
                    self.outcome = error

    listener = socket.create_server(("127.0.0.1", 0))
    thread = Listener()
    thread.port = listener.getsockname()[1]
    thread.start()
    yield thread
    thread.join(PATIENCE)
    assert not thread.is_alive()


def outcome(port):
    port.join(PATIENCE)
    return port.outcome


def test_a_peer_with_the_key_is_admitted(port):
    with dial("127.0.0.1", port.port, KEY) as connection:
        connection.sendall(b"hello")
        assert connection.recv(100) == b"welcome"
        assert connection.gettimeout() is None
    assert outcome(port) == b"hello"


def test_a_peer_with_another_key_gets_an_error_that_says_so(port):
    with pytest.raises(InputError, match=r"127.0.0.1:\d+ does not know the token"):
        dial("127.0.0.1", port.port, OTHER)
    assert isinstance(outcome(port), KeyChallengeError)


@pytest.mark.parametrize("sent", [b"", b"\0" * 64, b"GET / HTTP/1.1\r\n\r\n" * 10])
def test_a_peer_without_the_key_gets_a_nonce_and_no_more(port, sent):
    with socket.create_connection(("127.0.0.1", port.port), timeout=PATIENCE) as peer:
        assert len(peer.recv(100)) == 40
        with contextlib.suppress(OSError):  # The connection may be closed before all is sent.
            peer.sendall(sent)
            peer.shutdown(socket.SHUT_WR)
            assert peer.recv(100) == b""
    assert isinstance(outcome(port), OSError)


def test_a_silent_peer_is_disconnected(port, monkeypatch):
    monkeypatch.setattr(handshake, "SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", port.port), timeout=PATIENCE) as peer:
        assert isinstance(outcome(port), OSError)
        peer.close()


def test_a_proof_cannot_be_sent_back_to_its_maker():
    """An impostor that listens, and answers the proof of the dialling end with that very proof."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def echo():
            with listener.accept()[0] as connection:
                connection.sendall(b"exeplan1" + bytes(32))
                connection.sendall(connection.recv(64)[32:])

        thread = threading.Thread(target=echo)
        thread.start()
        with pytest.raises(InputError, match="does not know the token"):
            dial("127.0.0.1", listener.getsockname()[1], KEY)
        thread.join(PATIENCE)


def test_an_old_proof_is_refused(port):
    with socket.create_connection(("127.0.0.1", port.port), timeout=PATIENCE) as peer:
        peer.recv(100)
        peer.sendall(bytes(32) + hmac.digest(KEY, b"exeplan1" + b"dials" + bytes(32) + bytes(32), "sha256"))
        assert peer.recv(100) == b""
    assert isinstance(outcome(port), KeyChallengeError)


def test_an_address_that_does_not_accept_is_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConnectionError, match=f"no engine answers at 127.0.0.1:{port} "):
        dial("127.0.0.1", port, KEY)
