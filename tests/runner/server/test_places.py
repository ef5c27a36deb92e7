"""Connections: as many as there are files, no address has all of them, and none is held by one that does nothing."""

import contextlib
import logging
import os
import resource
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exeplan.runner.server.network import listener as module
from exeplan.runner.server.network.listener import connection_limit, open_listener
from exeplan.runner.server.network.places import NUM_PROBES, SHARE_OF_ONE, Places

from ..processes import PATIENCE


@contextlib.contextmanager
def no_files():
    """Meanwhile this process can open no file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/dev/fd"))) + 1, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in fillers:
            os.close(number)


@pytest.fixture
def listener():
    with open_listener("127.0.0.1", 0) as listener:
        listener.setblocking(False)
        yield listener


def connected(listener):
    return socket.create_connection(listener.getsockname(), timeout=PATIENCE)


def closed(client):
    try:
        return client.recv(1) == b""
    except ConnectionError:
        return True


def test_without_a_file_a_connection_is_closed_and_the_log_says_so_once(listener, caplog):
    with connected(listener) as first, connected(listener) as second, no_files():
        for client in (first, second):
            with pytest.raises(BlockingIOError):
                listener.accept()
            assert closed(client)
    assert [record.message for record in caplog.records if "no file is left" in record.message] == caplog.messages
    assert len(caplog.messages) == 1
    with connected(listener) as third:
        accepted, address = listener.accept()
        with accepted:
            assert address == third.getsockname()


def test_where_there_is_no_room_the_oldest_handshake_ends(listener):
    listener.limit = 2
    with connected(listener) as working, connected(listener) as silent, connected(listener) as third:
        first, _ = listener.accept()
        listener.has_begun(first.fileno())
        second, _ = listener.accept()
        accepted, _ = listener.accept()
        assert closed(silent)
        listener.has_begun(accepted.fileno())
        for one, peer in ((first, working), (accepted, third)):
            one.sendall(b"x")
            assert peer.recv(1) == b"x"
        with connected(listener) as fourth:
            with pytest.raises(BlockingIOError):  # Both that there may be have a protocol.
                listener.accept()
            assert closed(fourth)
        for one in (first, second, accepted):
            one.close()
    with connected(listener):
        listener.accept()[0].close()


@pytest.mark.parametrize("files", [64, 256, 1024, 1 << 20])
def test_their_number_follows_from_the_limit_of_open_files(files, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    limits = [(50, files)]
    monkeypatch.setattr(module.resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(module.resource, "setrlimit", lambda _, both: limits.append(both))
    limit = connection_limit()
    assert limits[-1] == (files, files)
    assert limit + min(NUM_PROBES, 8) < files
    free = files - len(os.listdir("/dev/fd"))
    assert limit >= min(free // 2, module.MAX_CONNECTIONS)
    assert f"limit of open files raised from 50 to {files}" in caplog.text
    assert ("at most" in caplog.text) == (limit < module.MAX_CONNECTIONS)


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["enter", "enter", "rest", "work", "leave"]), st.integers(0, 3), st.integers(0, 50))
)


@given(ACTIONS, st.integers(1, 8))
def test_places_keep_their_limits(actions, limit):
    places, address_of, idle, probing = Places(limit), {}, {}, {}
    for number, (what, address, which) in enumerate(actions):
        if what == "enter":
            entry = places.enter(number, str(address))
            (probing if entry.probes else address_of)[number] = address
            if not entry.probes:
                idle[number] = None
            if entry.leaves is not None and not entry.probes:
                own = [one for one in idle if address_of[one] == address]
                assert entry.leaves in (next(iter(idle)), own[0] if own else None)
            if entry.leaves is not None:
                address_of.pop(entry.leaves, None)
                idle.pop(entry.leaves, None)
                probing.pop(entry.leaves, None)
        elif address_of:
            one = list(address_of)[which % len(address_of)]
            getattr(places, what)(one)
            idle.pop(one, None)
            if what == "rest":
                idle[one] = None
            elif what == "leave":
                del address_of[one]
        assert len(places) == len(address_of) + len(probing)
        assert len(address_of) <= limit
        held = list(address_of.values())
        assert all(held.count(one) <= max(1, int(SHARE_OF_ONE * limit)) for one in held)
        assert len(probing) <= NUM_PROBES
