"""A door admits one peer that knows its token; a tether tells that the other end is gone, and how its clock runs."""

import socket
import threading
import time

import pytest

from exeplan.errors import InputError
from exeplan.runner.ipc.door import Door
from exeplan.runner.ipc.handshake import dial
from exeplan.runner.ipc.tether import Tether, answer

from ..processes import PATIENCE

HERE = "127.0.0.1"


def test_a_peer_with_the_token_is_admitted_once() -> None:
    with Door(HERE) as door, dial(HERE, door.port, door.token) as theirs, door.admit(PATIENCE) as ours:
        ours.sendall(b"welcome")
        assert theirs.recv(100) == b"welcome"
        with dial(HERE, door.port, door.token) as second:
            assert second.recv(1) == b""


def test_a_peer_with_another_token_is_not_admitted() -> None:
    with Door(HERE) as door, Door(HERE) as other:
        assert door.token != other.token
        with pytest.raises(InputError):
            dial(HERE, door.port, other.token)
        with pytest.raises(TimeoutError, match="no peer with the token came"):
            door.admit(0.1)


def test_strangers_that_say_nothing_keep_no_peer_out() -> None:
    with Door(HERE) as door:
        strangers = [socket.create_connection((HERE, door.port)) for _ in range(40)]
        with dial(HERE, door.port, door.token), door.admit(PATIENCE):
            pass
        for stranger in strangers:
            stranger.close()


def test_nothing_enters_a_closed_door() -> None:
    door = Door(HERE)
    door.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((HERE, door.port))


@pytest.fixture
def tether():
    """A tether with the other end's connection; `ended` is set when it has ended."""
    with Door(HERE) as door:
        theirs = dial(HERE, door.port, door.token)
        ended = threading.Event()
        yield Tether(door.admit(PATIENCE), ended.set), theirs, ended
        theirs.close()
        assert ended.wait(PATIENCE)


def test_a_tether_reads_the_clock_of_the_other_end(tether) -> None:
    rope, theirs, _ = tether
    threading.Thread(target=answer, args=(theirs,), daemon=True).start()
    assert rope.clock_offset(PATIENCE) == pytest.approx(0.0, abs=0.05)
    rope.close()


def test_an_end_that_does_not_answer_has_no_clock(tether) -> None:
    with pytest.raises(TimeoutError, match="did not answer"):
        tether[0].clock_offset(0.1)


def test_a_tether_tells_at_once_that_the_other_process_has_ended(tether) -> None:
    rope, theirs, ended = tether
    began = time.monotonic()
    theirs.close()
    assert ended.wait(PATIENCE)
    assert time.monotonic() - began < 2.0
    assert not rope.silent
