"""A server's own metrics say how many requests and tokens a run had, whichever of three engines it is."""

import http.server
import math
import threading

import pytest

from exeplan.core.runs.metrics import RequestRecord, client_times
from exeplan.runner.server_counters import ServerRun, between, read_counters

PAGE = """# TYPE {p}:prompt_tokens_total counter
{p}:prompt_tokens_total{{engine="0",model_name="m"}} {prompt}
{p}:prompt_tokens_total{{engine="1",model_name="m"}} 0.0
# TYPE {p}:generation_tokens_total counter
{p}:generation_tokens_total{{model_name="m"}} {output}
# TYPE {p}:time_to_first_token_seconds histogram
{p}:time_to_first_token_seconds_bucket{{le="0.1",model_name="m"}} {count}
{p}:time_to_first_token_seconds_bucket{{le="+Inf",model_name="m"}} {count}
{p}:time_to_first_token_seconds_count{{model_name="m"}} {count}
{p}:time_to_first_token_seconds_sum{{model_name="m"}} {ttft}
# TYPE {p}:e2e_request_latency_seconds histogram
{p}:e2e_request_latency_seconds_bucket{{le="+Inf",model_name="m"}} {count}
{p}:e2e_request_latency_seconds_count{{model_name="m"}} {count}
{p}:e2e_request_latency_seconds_sum{{model_name="m"}} {latency}
# TYPE python_gc counter
python_gc_total 3.0
"""
RECORDS = [
    RequestRecord(input_tokens=10, arrival=1.0, start=1.0, token_times=(1.5, 1.6, 1.8)),
    RequestRecord(input_tokens=6, arrival=2.0, start=2.0, token_times=(2.1,)),
]


@pytest.fixture
def served():
    """Makes a server of one page; '' for one that answers 404."""
    servers = []

    def make(page: str) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                assert self.path == "/metrics"
                self.send_response(200 if page else 404)
                self.end_headers()
                self.wfile.write(page.encode())

            def log_message(self, *_: object) -> None:
                pass

        server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield make
    for server in servers:
        server.shutdown()
        server.server_close()


def page(prefix: str, **figures: float) -> str:
    return PAGE.format(p=prefix, **figures)


@pytest.mark.parametrize("prefix", ["vllm", "sglang", "exeplan"])
def test_a_run_between_two_readings(served, prefix: str) -> None:
    before = read_counters(served(page(prefix, prompt=100, output=50, count=5, ttft=1.0, latency=9.0)), {})
    after = read_counters(served(page(prefix, prompt=116, output=54, count=7, ttft=1.6, latency=9.9)), {})
    assert before
    assert after
    run = between(before, after)
    assert run
    assert (run.requests, run.prompt_tokens, run.output_tokens) == (2, 16, 4)
    assert (run.ttft, run.latency) == (pytest.approx(0.3), pytest.approx(0.45))
    assert run.disagreements(RECORDS) == []


def test_numbers_that_are_not_the_clients_are_said() -> None:
    run = ServerRun(requests=3, prompt_tokens=16, output_tokens=9, ttft=0.1, latency=0.2)
    assert run.disagreements(RECORDS) == [
        "the server counted 3 requests where 2 were asked for",
        "the server counted 9 output tokens where 4 were asked for",
    ]


def test_servers_without_such_metrics_have_none(served) -> None:
    assert read_counters(served(""), {}) is None
    assert read_counters(served("up 1.0\n"), {}) is None
    assert read_counters(served("not { metrics\n"), {}) is None
    assert read_counters("http://127.0.0.1:1", {}) is None


def test_a_server_that_began_anew_or_was_idle_has_no_run(served) -> None:
    reading = read_counters(served(page("vllm", prompt=100, output=50, count=5, ttft=1.0, latency=9.0)), {})
    anew = read_counters(served(page("vllm", prompt=10, output=60, count=6, ttft=1.0, latency=9.0)), {})
    assert reading
    assert anew
    assert between(reading, reading) is None
    assert between(reading, anew) is None


def test_times_as_clients_define_them() -> None:
    times = client_times(RECORDS)
    assert times["ttft"][:2] == (pytest.approx(0.3), pytest.approx(0.3))
    assert times["tpot"] == pytest.approx((0.15, 0.15, 0.15))  # Of the one request with several tokens.
    assert times["itl"][:2] == (pytest.approx(0.15), pytest.approx(0.15))
    assert times["latency"][0] == pytest.approx(0.45)
    assert math.isclose(times["latency"][2], 0.1 + 0.99 * 0.7)
    assert client_times([]) == {}


def test_a_watched_server_tells_its_speed_and_a_backlog_is_corrected_by_it(served) -> None:
    """Passes take twice as long, and reference passes 0.4 of the 2 s: what is left of a time is 0.8 / 2 of it."""
    figures = {"prompt": 0, "output": 0, "ttft": 0.0, "latency": 0.0, "count": 0}
    watched = "".join(
        f'exeplan:{name}{{{{model_name="m"}}}} {{{key}}}\n'
        for name, key in (
            ("machine_slowness_count", "passes"),
            ("machine_slowness_sum", "slow"),
            ("reference_pass_seconds_total", "spent"),
        )
    )
    before = read_counters(served(page("exeplan", **figures) + watched.format(passes=4, slow=4.4, spent=0.1)), {})
    later = figures | {"prompt": 16, "output": 4, "count": 2}
    after = read_counters(served(page("exeplan", **later) + watched.format(passes=12, slow=20.4, spent=0.5)), {})
    assert before
    assert after
    run = between(before, after)
    assert run
    assert (run.num_reference_passes, run.slowness) == (8, pytest.approx(2.0))
    assert "by 8 reference passes the server took 2.00 times as long" in run.speed
    records = [
        RequestRecord(input_tokens=1, arrival=1.0, start=1.5, token_times=(2.0, 3.0)),
        RequestRecord(input_tokens=1, arrival=1.0, start=1.0, token_times=(1.5,)),
    ]
    first, second = run.at_profile_speed(records, num_engines=1)
    assert (first.arrival, first.start) == (1.0, pytest.approx(1.2))
    assert first.token_times == pytest.approx((1.4, 1.8))
    assert second.token_times == pytest.approx((1.2,))


def test_a_server_that_is_not_watched_tells_no_speed(served) -> None:
    before = read_counters(served(page("exeplan", prompt=100, output=50, count=5, ttft=1.0, latency=9.0)), {})
    after = read_counters(served(page("exeplan", prompt=116, output=54, count=7, ttft=1.6, latency=9.9)), {})
    assert before
    assert after
    run = between(before, after)
    assert run
    assert run.num_reference_passes == 0
