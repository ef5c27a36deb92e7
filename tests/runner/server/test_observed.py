"""Observed has the metrics of an Estimate, over the last minutes and in bounded memory."""

from dataclasses import replace

import numpy as np
import pytest

from exeplan.core.bounds import Bound
from exeplan.core.plan import Plan
from exeplan.core.runs.metrics import RequestRecord, summarize
from exeplan.core.schedule import Schedule, Stage
from exeplan.runner.ipc.messages import Stats
from exeplan.runner.server.observation.observed import MAX_REQUESTS, WINDOW_SECONDS, Observed, shares
from exeplan.runner.server.observation.predicted import predicted_and_observed


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def plan(**fields):
    fields = {"bound": Bound(seconds=2.0), **fields}
    return Plan(model="m", schedule=Schedule("orca", {"max_num_seqs": 4}), placement=(Stage(layers=(0, 1)),), **fields)


@pytest.fixture
def clock():
    return Clock()


def observed(clock, **fields):
    return Observed(plan(**fields), clock=clock)


def finish(target, *, start=0.0, first=0.5, last=1.5, output_tokens=11):
    target.finish(start=start, first=first, last=last, input_tokens=7, output_tokens=output_tokens)


def serve(target, *, start=0.0, first=0.5, last=1.5, output_tokens=11):
    """A whole request, of which this process hears at once."""
    target.begun("one", start=start, first=first, num_tokens=1)
    target.delivered("one", num_tokens=output_tokens - 1, seconds=last - first)
    target.left("one")
    finish(target, start=start, first=first, last=last, output_tokens=output_tokens)


def test_three_requests_by_hand(clock):
    seen = observed(clock)
    clock.now = 10.0
    for last in (1.5, 2.5, 3.5):
        serve(seen, start=0.25, last=last)
    found = seen.snapshot()
    assert (found.seconds, found.num_requests, found.throughput, found.token_throughput) == (10.0, 3, 0.3, 3.3)
    assert (found.ttft, found.tpot) == (0.25, pytest.approx(0.2))
    assert (found.latency_p50, found.latency_p99) == (2.25, 3.25)
    assert (found.evidence["latency_p50"].num_observations, found.evidence["latency_p50"].of) == (3, "requests")
    assert found.latency is None  # The planned length is unknown.
    assert found.within == {"p99-length": pytest.approx(1 / 3)}


@pytest.mark.parametrize("about", ["p99-length", "p90-requests"])
@pytest.mark.parametrize("waiting", [False, True])
def test_agrees_with_the_definitions_of_the_bench(clock, about, waiting):
    rng = np.random.default_rng(0)
    seen = observed(clock, bound=Bound(seconds=2.0, metric=about), arrival_rate=1.0 if waiting else None)
    seen.p99_output = 20
    records = []
    for begin in range(200):
        start, first, tokens = rng.uniform(0.01, 1.0), rng.uniform(1.1, 2.0), int(rng.integers(1, 40))
        times = begin + first + np.arange(tokens) * rng.uniform(0.01, 0.1)
        records.append(
            RequestRecord(input_tokens=3, arrival=begin, start=begin + start, token_times=tuple(times.tolist()))
        )
    for one in sorted(records, key=lambda one: one.token_times[-1]):
        clock.now = one.token_times[-1]
        times = {"start": one.start, "first": one.token_times[0], "last": clock.now}
        since = {name: time - one.arrival for name, time in times.items()}
        seen.finish(**since, input_tokens=3, output_tokens=one.output_tokens)
    found = seen.snapshot()
    counted = [replace(r, start=r.arrival) for r in records] if waiting else records
    wanted = summarize(counted, p99_output=20, bound_metric=about, backlog=False)
    for name in ("ttft", "tpot", "latency", "latency_p50", "latency_p99"):
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=1e-6), name


def test_shares_within_each_bound(clock):
    seen = observed(clock, more_bounds=(Bound(seconds=0.4, metric="ttft"), Bound(seconds=0.15, metric="tpot")))
    seen.p99_output = 6
    clock.now = 10.0
    finish(seen, first=0.3, last=1.3)
    finish(seen, first=0.5, last=3.5)  # Its sixth token came after 2 s, just in time.
    assert seen.snapshot().within == {"p99-length": 1.0, "ttft": 0.5, "tpot": 0.5}


def test_percentiles_attainment_and_goodput_are_those_of_the_bench(clock):
    further = (
        Bound(seconds=0.4, metric="p50-ttft"),
        Bound(seconds=0.15, metric="p95-tpot"),
        Bound(seconds=0.4, metric="p60-all", targets=(("ttft", 0.4), ("latency", 2.0))),
    )
    seen = observed(clock, more_bounds=further)
    seen.p99_output = 6
    clock.now = 10.0
    for first, last in ((0.3, 1.3), (0.5, 3.5), (0.4, 1.4)):
        serve(seen, first=first, last=last)
    found = seen.snapshot()
    assert found.percentiles == pytest.approx({"p50-ttft": 0.4, "p95-tpot": 0.3, "p60-all": 0.4})
    assert found.within == pytest.approx({"p99-length": 1.0, "p50-ttft": 2 / 3, "p95-tpot": 2 / 3, "p60-all": 2 / 3})
    assert found.attainment == pytest.approx(2 / 3)
    assert found.goodput == pytest.approx(2 / found.seconds)
    shown = predicted_and_observed(plan(more_bounds=further), found)
    assert shown["observed"]["p50-ttft"] == 0.4
    assert [bound["within"] for bound in shown["bounds"]] == list(found.within.values())


def run(target, clock, name, *, until, pace=0.5):
    """A request begins at the clock's time and has a token every `pace` seconds until then."""
    target.begun(name, start=0.0, first=0.0, num_tokens=1)
    while clock.now + pace <= until:
        clock.now += pace
        target.delivered(name, num_tokens=1, seconds=pace)


def stream(target, clock, names, *, until, pace=0.5):
    """As `run`, of requests that begin and go on together."""
    for name in names:
        target.begun(name, start=0.0, first=0.0, num_tokens=1)
    while clock.now + pace <= until:
        clock.now += pace
        for name in names:
            target.delivered(name, num_tokens=1, seconds=pace)


def test_tokens_of_requests_that_run_are_throughput(clock):
    """None of 64 has finished yet: their tokens had been none a second."""
    seen = observed(clock)
    assert (seen.snapshot().throughput, seen.snapshot().token_throughput) == (0.0, 0.0)
    stream(seen, clock, range(64), until=120.0)
    found = seen.snapshot()
    assert found.token_throughput == pytest.approx(64 * 241 / 120)
    assert found.throughput is None
    figure = found.evidence["token_throughput"]
    assert (figure.num_observations, figure.of) == (64 * 241, "tokens")
    assert figure.low < figure.value < figure.high < 1.1 * figure.value
    for _ in range(6):
        finish(seen, first=0.0, last=1.0, output_tokens=2)
    found = seen.snapshot()
    assert found.throughput == pytest.approx(6 / 120)  # Short ones: what runs is not as many of these.
    assert (found.evidence["throughput"].num_observations, found.evidence["throughput"].of) == (6, "requests")
    assert found.token_throughput == pytest.approx(64 * 241 / 120)


def test_rates_are_of_the_last_minutes(clock):
    seen = observed(clock)
    stream(seen, clock, "a", until=1000.25, pace=0.25)
    for later in (0.0, 10.0, 24.0):
        clock.now = 1000.25 + later
        assert seen.snapshot().token_throughput == pytest.approx(4 * (300 - later) / 300, rel=0.01)
    clock.now = 1200.25
    assert seen.snapshot().token_throughput == pytest.approx(4 * 100 / 300, rel=0.25)  # A block of 25 s more or less.
    clock.now = 1400.25
    assert seen.snapshot().token_throughput == 0.0


def test_requests_that_run_count_as_far_as_they_have_come(clock):
    seen = observed(clock, bound=Bound(seconds=2.0, metric="p50-requests"))
    run(seen, clock, "long", until=10.0)
    for last in (1.0, 2.0, 3.0):
        finish(seen, last=last)
    found = seen.snapshot()
    # The three that ended are a fourth of all each: the median is between the second and the third.
    assert found.latency_p50 == pytest.approx(2.5)
    assert found.latency_p99 is None  # Nothing is known of the longest fourth but that it takes ten seconds or more.
    assert found.within == {"p50-requests": pytest.approx(0.5)}
    seen.left("long")
    assert seen.snapshot().latency_p50 == pytest.approx(2.0)


def test_the_latency_at_a_length_comes_from_the_gaps_of_all(clock):
    seen = observed(clock)
    seen.p99_output = 21
    for number in range(16):  # One after the other; the last one is half as fast, and only half as long.
        run(seen, clock, str(number), until=clock.now + 10.0, pace=1.0 if number == 15 else 0.5)
    found = seen.snapshot()
    assert found.latency == pytest.approx((15 * 20 * 0.5 + 10 * 1.0) / 310 * 20, rel=0.02)
    figure = found.evidence["latency"]
    assert (figure.num_observations, figure.of) == (15 * 20 + 10, "gaps")
    assert figure.low < found.latency < figure.high
    shown = predicted_and_observed(plan(), found)["observed"]["evidence"]["latency"]
    assert (shown["num_observations"], shown["of"]) == (310, "gaps")


def test_where_batches_do_not_overlap_the_longest_requests_alone_tell_the_latency(clock):
    """A batch of short requests has faster passes than one with a long request."""
    seen = observed(clock)
    seen.adopt(replace(plan(), schedule=Schedule("static", {"batch_size": 4})))
    seen.p99_output = 21
    for number in range(12):
        seconds, pace = (20.0, 1.0) if number % 4 == 3 else (5.0, 0.5)
        run(seen, clock, str(number), until=clock.now + seconds, pace=pace)
        seen.left(str(number))
        finish(seen, first=0.0, last=seconds, output_tokens=1 + round(seconds / pace))
    figure = seen.snapshot().evidence["latency"]
    assert (figure.value, figure.num_observations, figure.of) == (pytest.approx(20.0), 3, "requests")


def test_long_requests_of_one_batch_are_one_batch(clock):
    seen = observed(clock)
    seen.adopt(replace(plan(), schedule=Schedule("static", {"batch_size": 4})))
    seen.p99_output = 21
    for batch in range(3):
        together = [f"{batch}.{number}" for number in range(3 if batch == 0 else 1)]
        for one in together:
            seen.begun(one, start=0.0, first=0.0, num_tokens=1)
        for _ in range(20):
            clock.now += 1.0
            for one in together:
                seen.delivered(one, num_tokens=1, seconds=1.0)
        for one in together:
            clock.now += 0.01  # Messages come one after the other.
            seen.left(one)
            finish(seen, first=0.0, last=20.0, output_tokens=21)
        assert seen.snapshot().evidence["latency"].of == ("gaps" if batch < 2 else "requests")
    assert seen.snapshot().evidence["latency"].num_observations == 5


def test_tokens_delivered_together_have_the_mean_gap(clock):
    one, many = observed(clock), observed(clock)
    one.p99_output = many.p99_output = 9
    run(one, clock, "a", until=4.0)
    clock.now = 0.0
    many.begun("a", start=0.0, first=0.0, num_tokens=1)
    clock.now = 4.0
    many.delivered("a", num_tokens=8, seconds=4.0)
    for seen in (one, many):
        finish(seen, first=0.0, last=4.0, output_tokens=9)
    assert one.snapshot().latency == many.snapshot().latency == pytest.approx(4.0)


def test_old_requests_are_forgotten_and_memory_is_bounded(clock):
    seen = observed(clock)
    finish(seen)
    clock.now = WINDOW_SECONDS + 1
    assert seen.snapshot().num_requests == 0
    seen.begin()
    for _ in range(MAX_REQUESTS + 100):
        serve(seen)
        seen.step(Stats(num_running=1, iteration_tokens=1, num_decode=1))
        clock.now += 0.01
    found = seen.snapshot()
    assert found.num_requests == MAX_REQUESTS
    assert found.throughput == pytest.approx(100, rel=0.01)
    assert len(seen.timeline) <= 240


def test_batches_are_means_over_the_iterations_that_have_them(clock):
    seen = observed(clock)
    for prefill, decode in ((4, 0), (0, 4), (0, 3), (2, 2)):
        seen.step(Stats(iteration_tokens=1, num_prefill=prefill, num_decode=decode, num_blocks=10, free_blocks=4))
    seen.step(Stats())
    found = seen.snapshot()
    assert (found.prefill_batch, found.decode_batch) == (3.0, 3.0)
    (tick,) = seen.timeline
    assert (tick.num_iterations, tick.num_prefilled, tick.num_decoded, tick.kv_share) == (4, 6, 9, 0.6)


def test_another_plan_judges_what_was_seen_by_its_own_bounds(clock):
    seen = observed(clock)
    finish(seen, last=3.0)
    seen.adopt(plan(bound=Bound(seconds=5.0, metric="p99-requests")))
    assert seen.snapshot().within == {"p99-requests": 1.0}


def test_lengths_fall_between_the_edges():
    assert shares([1, 4, 5, 8, 9, 100], (0, 4, 8, 16)) == pytest.approx([2 / 6, 2 / 6, 2 / 6])
    assert shares([], (0, 4)) == [0.0]
