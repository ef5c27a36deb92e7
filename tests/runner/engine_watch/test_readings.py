"""What an engine shows of its requests is read under its own names, of all its ranks and replicas together."""

import pytest

from exeplan.errors import InputError
from exeplan.runner.engine_watch.readings import read
from tests.runner.engine_watch.served import TOKENS, Engine, shown

REQUESTS = [(30, 4), (30, 8), (300, 60)]


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_lengths_times_and_queue(name):
    engine = Engine(name)
    engine.end(REQUESTS)
    with shown(engine) as url:
        begin = read(name, [url])
        engine.end([(7, 2)])
        later = read(name, [f"{url}/metrics"]).since(begin)
    first = begin.together
    assert first.inputs.edges[:-1] == TOKENS
    assert {edge: n for edge, n in zip(first.inputs.edges, first.inputs.counts, strict=True) if n} == {50: 2, 500: 1}
    assert first.outputs.total == 72
    assert first.ttft.mean == pytest.approx(0.3)
    assert first.gaps.mean == pytest.approx(0.01)
    assert first.gaps.number == 3 + 7 + 59
    assert first.prefill.mean == pytest.approx(0.1)
    assert (first.num_running, first.num_waiting) == (3, 2)
    assert later is not None
    assert (later.inputs.size, later.inputs.total, later.outputs.total, later.gaps.number) == (1, 7, 2, 1)


def test_replicas_are_added_up():
    engines = Engine(), Engine()
    for engine in engines:
        engine.end(REQUESTS)
    with shown(engines[0]) as one, shown(engines[1]) as other:
        both = read("vllm", [one, other]).together
    assert (both.inputs.size, both.outputs.total, both.num_running) == (6, 144, 6)


def test_a_server_that_began_anew_has_no_difference():
    before, after = Engine(), Engine()
    before.end(REQUESTS)
    after.end(REQUESTS[:1])
    with shown(before) as one, shown(after) as other:
        assert read("vllm", [other]).since(read("vllm", [one])) is None


def test_one_of_several_servers_that_began_anew_is_seen_where_the_others_have_more():
    before, after, other = Engine(), Engine(), Engine()
    before.end(REQUESTS)
    after.end(REQUESTS[:1])
    with shown(before) as old, shown(after) as new, shown(other) as busy:
        first = read("vllm", [old, busy])
        other.end(10 * REQUESTS)
        assert read("vllm", [new, busy]).since(first) is None
        between = read("vllm", [old, busy]).since(first)
    assert between is not None
    assert (between.inputs.size, between.outputs.total) == (30, 720)


def test_servers_whose_buckets_differ_are_refused():
    engines = Engine(), Engine(tokens=(1, 10, 100, 1000))
    with shown(engines[0]) as one, shown(engines[1]) as other:
        assert read("vllm", [one, other]).together.inputs.size == 0  # Buckets show with the first request.
        for engine in engines:
            engine.end(REQUESTS)
        with pytest.raises(InputError, match=r"^the servers count lengths in unlike buckets"):
            read("vllm", [one, other])


def test_another_engine_is_said():
    with shown(Engine("sglang")) as url, pytest.raises(InputError, match=r"vllm:request_prompt_tokens.*--engine"):
        read("vllm", [url])


def test_what_sglang_shows_by_an_option_only_is_said():
    engine = Engine("sglang", without="generation_tokens_histogram")
    with shown(engine) as url, pytest.raises(InputError, match=r"generation_tokens_histogram.*--enable-metrics"):
        read("sglang", [url])


def test_nobody_there_is_an_error_of_the_system():
    with shown(Engine()) as url:
        pass
    with pytest.raises(OSError, match="refused"):
        read("vllm", [url])
