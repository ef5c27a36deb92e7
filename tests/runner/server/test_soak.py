"""The benchmarks of overload, disconnects and fuzzing, for a few seconds each: all their claims except the figures."""

import asyncio
import importlib
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from exeplan.planner.load_problem import read_plan
from exeplan.runner.load import Load

from .conftest import KEY


@pytest.fixture(scope="module")
def benchmark():
    """`benchmark(name)` is one of them as a module."""
    return lambda name: importlib.import_module(f"benchmarks.service.{name}")


@pytest.fixture
def target(benchmark, server):
    """The shared server as the benchmarks see one."""
    return benchmark("serving").Server(server.process, server.url)


def test_clients_that_leave_take_nothing_with_them(benchmark, target):
    found = asyncio.run(benchmark("leavers").come_and_go(target, clients=80, at_once=20, seed=1))
    assert found["all free again"]
    assert found["the same answer afterwards"]
    assert set(found["patient client"]) <= {"as undisturbed", "refused"}
    before, after = found["held before"], found["held after"]
    assert after["open files"] <= before["open files"] + 2
    assert {name: after[name] for name in ("processes", "ports")} == {
        name: before[name] for name in ("processes", "ports")
    }


def test_far_too_many_requests_are_refused_and_the_others_served(benchmark, launch):
    number = 300
    load = Load(
        input_tokens=np.full(number, 20),
        output_tokens=np.full(number, 40),
        arrivals=np.linspace(0, 0.3, number),
        seed=0,
    )
    overload = benchmark("overload")
    with launch(max_queue=8, replan="off") as server:
        found = asyncio.run(overload.overload(benchmark("serving").Server(server.process, server.url), load, 300))
    assert set(found["statuses"]) == {"200", "429"}
    assert sum(found["statuses"].values()) == number
    assert found["statuses"]["200"] == len(found["accepted"]) >= 8  # A request that is admitted is served.
    assert found["statuses"]["429"] == len(found["refused"])
    assert all(0 <= queued <= first <= whole and tokens == 40 for queued, first, whole, tokens in found["accepted"])


def test_the_accepted_are_judged_by_the_bound_and_the_refused_by_their_wait(benchmark, server):
    found = {
        "statuses": Counter({"200": 4, "429": 2}),
        # Seconds of waiting, to the first token and to the last; tokens. The bound is 2 s, from the start of a prefill.
        "accepted": [(9.0, 9.1, 10.9, 40), (0.0, 0.1, 2.1, 40), (0.0, 0.2, 1.0, 20), (1.0, 1.1, 8.9, 400)],
        "refused": [0.01, 0.5],
        "memory": [1, 2, 50, 50, 60],
        "seconds": 2.0,
    }
    figures = benchmark("overload").judged(read_plan(server.plan_file), found, p99_output=40)
    assert figures["share of accepted within the bound"] == 0.75  # The long one is judged at its 40th token.
    assert figures["latency of outputs of p99 length, mean s"] == pytest.approx(
        (1.9 + 2.1 + 0.1 + 39 * 7.8 / 399) / 3, abs=1e-3
    )
    assert figures["wait of accepted, p99 s"] == pytest.approx(8.76)
    assert figures["share of 429 within 100 ms"] == 0.5
    assert (figures["accepted requests/s"], figures["promised requests/s"]) == (2.0, 0.5)
    assert (figures["memory MiB, first third"], figures["memory MiB, last third"]) == (50, 60)


def test_broken_http_is_answered_with_4xx_or_not_at_all(benchmark, server, target):
    malformed, draw = benchmark("malformed"), random.Random(0)
    pieces = [malformed.malformed(draw, KEY)[1] for _ in range(300)]

    def answer(data):
        try:
            return malformed.talk(server.port, data, seconds=4)
        except ConnectionError:
            return "closed"

    with ThreadPoolExecutor(60) as clients:
        answers = Counter(clients.map(answer, pieces))
    assert [status for status in answers if status.startswith("5")] == []
    assert answers["400"] > 50
    assert server.complete({"prompt": "a", "max_tokens": 1}).status == 200


def test_the_fuzzer_finds_nothing(benchmark, keyed):
    target = benchmark("serving").Server(keyed.process, keyed.url, KEY)
    found = benchmark("fuzz").storm(target, seconds=4, rate=60, clients=1, begin=0)
    assert (found["5xx"], found["not as described"]) == (0, {})
    assert "0 failed" in found["normal load"]
    assert found["all free again"]
