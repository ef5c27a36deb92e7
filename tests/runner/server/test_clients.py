"""A client that sends too much takes from its own share: others still find a place in the queue, and the next pass."""

import asyncio
import contextlib
import http.client
import json
import threading
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exeplan.runner.engine_process.job import Job
from exeplan.runner.ipc.messages import Event
from exeplan.runner.server import lifecycle
from exeplan.runner.server.network.clients import MOST_PAUSE_SECONDS, REFUSALS_PER_SECOND, Client, Clients, network_of

from ..processes import PATIENCE, eventually


def job(number, count=1, waiting=True):
    names = tuple(f"{number}-{index}" for index in range(count))
    return Job(str(number), names, set(names), set(names) if waiting else set())


def event(request_id, num_tokens, first=False):
    times = {"arrival": 0.0, "start": 0.0, "time": 0.0}
    return Event(request_id=request_id, token_ids=[1] * num_tokens, text="", finish_reason=None, first=first,
                 num_prompt_tokens=10, **times)  # fmt: skip


A, B = Client(name="a"), Client(name="b", weight=2.0)


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::", "2001:db8:1:2::/64"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_an_ipv6_host_is_one_client_whatever_its_address(address, network):
    assert network_of(address) == network


def test_the_client_with_the_most_for_its_weight_makes_room():
    clients = Clients()
    for number in range(4):
        clients.begin(A, job(number))
    clients.begin(B, job(10, count=6))

    def leaving(client, count, num_missing):
        return [(one.job_id, owner.name) for one, owner in clients.making_room(client, count, num_missing)]

    assert leaving(Client(name="c"), 1, 1) == [("3", "a")]  # 4 over 1 against 6 over 2.
    assert leaving(Client(name="c"), 1, 3) == [("3", "a"), ("2", "a"), ("10", "b")]
    assert leaving(Client(name="c"), 1, 9) == [("3", "a"), ("2", "a"), ("10", "b"), ("1", "a")]
    assert leaving(A, 1, 1) == []
    assert leaving(B, 1, 1) == [("3", "a")]
    assert leaving(B, 2, 1) == []  # It would have as much.


def test_nothing_leaves_where_that_is_not_enough():
    clients = Clients()
    for number in range(10):
        clients.begin(A, job(number))
    assert len(clients.making_room(B, 4, 7)) == 7
    assert clients.making_room(B, 4, 9) == []


def test_what_has_begun_is_not_pushed_out():
    clients = Clients()
    clients.begin(A, job(1, count=3))
    clients.begin(A, job(2, count=3, waiting=False))
    assert [one.job_id for one, _ in clients.making_room(B, 1, 1)] == ["1"]
    assert clients.making_room(B, 1, 4) == []


@given(
    st.lists(st.tuples(st.sampled_from([A, B, Client(name="c", weight=0.5)]), st.integers(1, 4)), max_size=60),
    st.integers(4, 12),
)
def test_a_full_queue_is_divided_by_weights(requests, room):
    """Each client can have its share of the queue, less one request, whatever others have sent before."""
    clients, jobs = Clients(), {}

    def waiting():
        return sum(len(one.waiting) for one, _ in jobs.values())

    for number, (client, count) in enumerate(requests):
        for one, _ in clients.making_room(client, count, waiting() + count - room):
            clients.end(jobs.pop(one.job_id)[0])
        if waiting() + count <= room:
            jobs[str(number)] = job(number, count), client
            clients.begin(client, jobs[str(number)][0])
        else:
            weights = {one.identity: one.weight for _, one in jobs.values()} | {client.identity: client.weight}
            held = sum(len(one.waiting) for one, owner in jobs.values() if owner == client)
            assert held + count >= room * client.weight / sum(weights.values()) - count
        assert waiting() <= room


def test_rates_are_used_up_and_come_back():
    now = [0.0]
    clients = Clients(clock=lambda: now[0])
    limited = Client(name="limited", requests_per_minute=2, tokens_per_minute=60)
    for _ in range(2):
        assert clients.refusal(limited) is None
        with clients.reading(limited):
            pass
    refused = clients.refusal(limited)
    assert (refused.status, refused.code, refused.retry_after) == (429, "rate_limit_exceeded", 30)
    now[0] = 30.0
    assert clients.refusal(limited) is None
    clients.begin(limited, job(1))
    clients.count([event("1-0", 1, first=True), event("1-0", 99)])  # 10 of the prompt and 100.
    assert clients.refusal(limited).retry_after == 51  # Until one of 60 - 110 tokens is there again.
    assert clients.reading_of_all()["limited"].generation_tokens == 100


def test_a_client_is_told_that_it_waits_for_its_share_only():
    clients = Clients()
    for number in range(50):
        clients.begin(A, job(number))
    assert clients.num_ahead(Client(name="c"), 50, 1) == 2
    assert clients.num_ahead(A, 50, 1) == 50


def test_refusals_wait_where_others_are_here():
    now = 0.0
    clients = Clients(clock=lambda: now)
    flood, rate = Client().at("192.0.2.1"), REFUSALS_PER_SECOND
    clients.begin(flood, job(1))
    assert not any(clients.pause(flood) for _ in range(3 * rate))  # It is alone.
    clients.begin(A, job(2))
    waits = [clients.pause(flood) for _ in range(4 * rate)]
    assert waits[: rate + 1] == pytest.approx([0.0] * (rate + 1))
    assert waits[rate:] == pytest.approx([number / rate for number in range(3 * rate)])
    assert clients.pause(A) == 0.0
    now = 4.0  # Of which three seconds were for those that waited.
    assert [clients.pause(flood) for _ in range(rate + 2)] == pytest.approx([0.0] * (rate + 1) + [1 / rate])
    for number in range(100):
        clients.pause(Client().at(f"198.51.100.{number}"))
    assert len(clients._accounts) == 2


def test_no_refusal_waits_too_long_and_those_that_wait_longest_do_not_go_together():
    clients = Clients(clock=lambda: 0.0)
    flood = Client().at("192.0.2.1")
    clients.begin(flood, job(1))
    clients.begin(A, job(2))
    waits = [clients.pause(flood) for _ in range(1000)]
    assert max(waits) <= MOST_PAUSE_SECONDS
    late = waits[int(REFUSALS_PER_SECOND * (MOST_PAUSE_SECONDS + 1)) + 1 :]
    assert min(late) >= MOST_PAUSE_SECONDS / 2
    assert max(Counter(round(wait) for wait in late).values()) < len(late) / 3


def test_addresses_that_have_gone_leave_nothing():
    clients = Clients()
    for number in range(100):
        client = Client().at(f"192.0.2.{number}")
        with clients.reading(client):
            clients.begin(client, one := job(number))
        clients.end(one)
        clients.end(one)
    assert not clients._accounts
    assert set(clients.totals) == {"address"}


@contextlib.contextmanager
def asking(server, address, **fields):
    """The answer to a request from this address; the client disconnects at the end."""
    body = json.dumps({"prompt": "a", "ignore_eos": True, **fields})
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE, source_address=(address, 0))
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", body=body)
        with connection.getresponse() as response:
            yield response


def ask(server, address, answers, max_tokens=5):
    with asking(server, address, max_tokens=max_tokens) as response:
        answer = json.loads(response.read())
        answers.append((response.status, answer.get("error", {}).get("message", "")))


def test_a_client_alone_in_the_queue_makes_room_for_another(launch):
    def made_room():
        return [message for _, message in flood if "made room for a client with fewer waiting" in message]

    with launch("policy: orca, max_num_seqs: 1", max_queue=8, replan="off") as server:
        flood, polite = [], []
        waiting = [threading.Thread(target=ask, args=(server, "127.0.0.2", flood)) for _ in range(11)]
        one_more = threading.Thread(target=ask, args=(server, "127.0.0.3", polite))
        with asking(server, "127.0.0.2", stream=True, max_tokens=4000) as running:
            assert running.readline().startswith(b"data: {")
            for thread in waiting:
                thread.start()
            eventually(lambda: server.metric("client_sequences_waiting") == 8)
            one_more.start()
            eventually(made_room)
        for thread in (*waiting, one_more):
            thread.join()
    assert [status for status, _ in polite] == [200]
    assert len(made_room()) == 1
    assert sorted(status for status, _ in flood) == [200] * 7 + [429] * 4


def test_a_flood_from_one_address_leaves_places_for_another(launch):
    with launch("policy: orca, max_num_seqs: 1", max_queue=8, replan="off") as server:
        flood, polite = [], []
        stop = threading.Event()

        def flooding():
            while not stop.is_set():
                ask(server, "127.0.0.2", flood, 40)

        threads = [threading.Thread(target=flooding) for _ in range(20)]
        for thread in threads:
            thread.start()
        eventually(lambda: any(status == 429 for status, _ in flood))
        for _ in range(5):
            ask(server, "127.0.0.3", polite, 40)
        stop.set()
        for thread in threads:
            thread.join()
    assert [status for status, _ in polite] == [200] * 5
    assert {status for status, _ in flood} == {200, 429}


def test_answers_that_wait_for_their_turn_go_when_the_server_shuts_down(launch, tmp_path):
    count, log, flood = 12 * REFUSALS_PER_SECOND, tmp_path / "log", []
    with launch("policy: orca, max_num_seqs: 1", max_queue=2, replan="off", log=log) as server:
        threads = [threading.Thread(target=ask, args=(server, "127.0.0.2", flood)) for _ in range(count)]
        with asking(server, "127.0.0.3", stream=True, max_tokens=4000) as running:
            assert running.readline().startswith(b"data: {")
            for thread in threads:
                thread.start()
            eventually(lambda: server.metric("admission_rejections_total") == count - 2)
            eventually(lambda: server.metric("num_requests_waiting") == 2)  # Read too, not only given a place.
            server.process.terminate()
        for thread in threads:
            thread.join(PATIENCE)
        assert server.process.wait(PATIENCE) == 0
    assert Counter(status for status, _ in flood) == {200: 2, 429: count - 2}
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize(
    ("proxies", "known"),
    [
        ((), "127.0.0.1"),
        (("127.0.0.1",), "192.0.2.7"),
        (("127.0.0.0/8",), "192.0.2.7"),
        (("10.0.0.0/8",), "127.0.0.1"),
    ],
)
def test_only_trusted_proxies_name_the_client(proxies, known):
    seen = []

    async def app(scope, receive, send):
        seen.append(Client().at(scope["client"][0]).address)

    config = lifecycle._config(app, proxies)
    config.load()
    scope = {"type": "http", "client": ("127.0.0.1", 1), "headers": [(b"x-forwarded-for", b"192.0.2.7")]}
    asyncio.run(config.loaded_app(scope, None, None))
    assert seen == [known]
