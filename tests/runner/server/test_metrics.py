"""`/metrics` counts what the engine reported, in a format that Prometheus reads."""

import re

import pytest

from exeplan.core.bounds import Bound
from exeplan.core.plan import Plan
from exeplan.core.schedule import Schedule, Stage
from exeplan.runner.ipc.frames import Event, Stats
from exeplan.runner.server.metrics import Histogram, ServeMetrics
from exeplan.runner.server.observed import Observed

SAMPLE = re.compile(r'^([a-z0-9_:]+)\{model_name="m\\"x"(?:,[a-z_]+="[^"]*")?\} (\S+)$')
IDLE = Stats(num_blocks=10, free_blocks=10)


def event(time, *, finish_reason=None):
    times = {"arrival": 1.0, "start": 1.5, "time": time}
    rest = {"finish_reason": finish_reason, "first": time == 2.0, "num_prompt_tokens": 7}
    return Event(request_id="1-0", token_ids=[5], text="a", **times, **rest)


@pytest.fixture
def metrics():
    plan = Plan(
        model="m",
        schedule=Schedule("orca", {"max_num_seqs": 1}),
        placement=(Stage(layers=(0, 1)),),
        bound=Bound(seconds=2.0),
    )
    return ServeMetrics(model_name='m"x', plan=plan, observed=Observed(plan, clock=lambda: 10.0))


def values(metrics, stats=IDLE):
    """Every sample of the page without buckets and labels; each line must be a comment or a sample."""
    lines = [
        line
        for line in metrics.render(stats, metrics.observed.snapshot(), num_waiting=3, replanning={}).splitlines()
        if not line.startswith("# TYPE ")
    ]
    found = [SAMPLE.match(line) for line in lines]
    assert all(found)
    return {match[1].removeprefix("exeplan:"): float(match[2]) for match in found if "_bucket" not in match[1]}


def test_one_request_by_hand(metrics):
    metrics.step([event(2.0)], Stats(iteration_tokens=7, num_blocks=10, free_blocks=5))
    metrics.step([event(2.25)], Stats(iteration_tokens=1))
    metrics.step([event(3.0, finish_reason="stop")], Stats(iteration_tokens=1))
    found = values(metrics)
    sums = {name: found[f"{name}_seconds_sum"] for name in ("time_to_first_token", "inter_token_latency")}
    assert sums == {"time_to_first_token": 1.0, "inter_token_latency": 1.0}
    assert found["inter_token_latency_seconds_count"] == 2
    assert found["request_queue_time_seconds_sum"] == 0.5
    assert found["request_prefill_time_seconds_sum"] == 0.5
    assert found["request_decode_time_seconds_sum"] == 1.0
    assert found["request_time_per_output_token_seconds_sum"] == 0.5
    assert found["e2e_request_latency_seconds_sum"] == 2.0
    assert (found["prompt_tokens_total"], found["generation_tokens_total"]) == (7, 3)
    assert found["iteration_tokens_total_sum"] == 9
    assert found["request_success_total"] == 1


def test_a_dropped_request_counts_once(metrics):
    metrics.step([event(2.0)], IDLE)
    metrics.dropped("1-0")
    metrics.dropped("1-0")
    metrics.dropped("never ran")
    assert metrics.finished == {"abort": 1}


def test_gauges_show_the_engine_and_the_bound(metrics):
    found = values(metrics, Stats(num_running=2, num_blocks=10, free_blocks=4, num_preemptions=1))
    assert found["kv_cache_usage_perc"] == pytest.approx(0.6)
    assert (found["num_requests_running"], found["num_requests_waiting"]) == (2, 3)
    assert (found["num_preemptions_total"], found["plan_latency_bound_seconds"]) == (1, 2.0)


def test_buckets_are_cumulative_and_closed_by_infinity():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.add(value)
    assert list(histogram.lines("h", 'a="b"')) == [
        'h_bucket{a="b",le="1.0"} 2',
        'h_bucket{a="b",le="2.0"} 3',
        'h_bucket{a="b",le="+Inf"} 4',
        'h_sum{a="b"} 12.0',
        'h_count{a="b"} 4',
    ]
