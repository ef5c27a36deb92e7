"""The benchmarks of overload, leavers and fuzzing, for a few seconds each: all that they promise but the figures."""

import asyncio
import importlib
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from exeplan.bench import Load
from exeplan.inputs import read_plan

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
KEY = "the key"


@pytest.fixture(scope="module")
def benchmark():
    """`benchmark(name)` is one of them as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module


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
        figures = overload.judged(read_plan(server.plan_file), found, p99_output=40)
    assert set(found["statuses"]) == {"200", "429"}
    assert sum(found["statuses"].values()) == number
    assert found["statuses"]["200"] > 10
    assert figures["share of accepted within the bound"] > 0.5  # A figure for a quiet machine, not for a test.


def test_broken_http_is_answered_with_4xx_or_not_at_all(benchmark, server, target):
    malformed, draw, answers = benchmark("malformed"), random.Random(0), Counter()
    for _ in range(300):
        _, data = malformed.malformed(draw, KEY)
        try:
            answers[malformed.talk(server.port, data, seconds=0.05)] += 1
        except ConnectionError:
            answers["closed"] += 1
    assert [status for status in answers if status.startswith("5")] == []
    assert answers["400"] > 50
    assert server.complete({"prompt": "a", "max_tokens": 1}).status == 200


def test_the_fuzzer_finds_nothing(benchmark, launch):
    with launch(api_key=KEY, max_queue=2000, replan="off") as server:
        target = benchmark("serving").Server(server.process, server.url, KEY)
        found = benchmark("fuzz").storm(target, seconds=4, rate=60, clients=1, begin=0)
    assert (found["5xx"], found["not as described"]) == (0, {})
    assert "0 failed" in found["normal load"]
    assert found["all free again"]
