"""Every figure of a run follows from its requests' timestamps by the module's definitions."""

import numpy as np
import pytest

from exeplan.core.runs.metrics import RequestRecord, summarize, window


def request(start: float, *token_times: float, arrival: float = 0.0) -> RequestRecord:
    return RequestRecord(input_tokens=10, arrival=arrival, start=start, token_times=token_times)


def test_one_request_by_hand() -> None:
    estimate = summarize([request(1.0, 2.0, 2.5, 3.0)], p99_output=3, backlog=False)
    assert estimate.ttft == pytest.approx(1.0)
    assert estimate.tpot == pytest.approx(0.5)
    assert estimate.latency == pytest.approx(2.0)
    assert estimate.latency_p50 == estimate.latency_p99 == pytest.approx(2.0)
    assert estimate.token_throughput == pytest.approx(3 / 3)
    assert estimate.throughput == pytest.approx(1 / 3)


def test_times_count_from_the_start_of_the_prefill_not_from_the_arrival() -> None:
    early, late = request(5.0, 6.0, arrival=0.0), request(5.0, 6.0, arrival=4.9)
    assert summarize([early], p99_output=1, backlog=False).ttft == 1.0
    assert summarize([late], p99_output=1, backlog=False).ttft == 1.0


def test_tpot_leaves_out_outputs_of_one_token() -> None:
    records = [request(0.0, 1.0), request(0.0, 1.0, 3.0), request(0.0, 1.0, 2.0)]
    assert summarize(records, p99_output=1, backlog=False).tpot == pytest.approx((2.0 + 1.0) / 2)
    assert summarize(records[:1], p99_output=1, backlog=False).tpot == 0.0


def test_the_p99_length_latency_is_the_mean_time_to_that_token_of_those_that_get_there() -> None:
    records = [request(0.0, 1.0, 2.0), request(0.0, 1.0, 4.0, 9.0), request(0.0, 1.0)]
    assert summarize(records, p99_output=2, backlog=False).latency == pytest.approx((2.0 + 4.0) / 2)


def test_a_length_that_no_request_reached_has_no_latency() -> None:
    assert summarize([request(0.0, 1.0)], p99_output=2, backlog=False).latency is None


def test_the_p99_requests_latency_is_the_99th_percentile_of_all() -> None:
    records = [request(0.0, float(i)) for i in range(1, 101)]
    estimate = summarize(records, p99_output=1, bound_metric="p99-requests", backlog=False)
    assert estimate.latency == estimate.latency_p99 == pytest.approx(99.5)
    assert estimate.latency_p50 == pytest.approx(50.5)


STEADY = [request(float(i), i + 1.0, i + 2.0) for i in range(10)]
"""One request starts every second and yields a token after one and after two seconds."""


def test_the_window_opens_after_the_first_batch_and_closes_with_the_last_start() -> None:
    assert window(STEADY, backlog=True) == (2.0, 9.0)
    assert window(STEADY, backlog=False) == (0.0, 11.0)


def test_the_window_opens_at_once_where_batches_do_not_overlap() -> None:
    batches = [request(2.0 * i, 2.0 * i + 1.0, 2.0 * i + 2.0) for i in range(4)]
    assert window(batches, backlog=True) == (0.0, 6.0)


def test_rates_count_only_what_falls_inside_the_window() -> None:
    # Inside (2, 9] every second brings two tokens; over the whole run 20 tokens take 11 seconds.
    assert summarize(STEADY, p99_output=2).token_throughput == pytest.approx(2.0)
    assert summarize(STEADY, p99_output=2).throughput == pytest.approx(1.0)
    assert summarize(STEADY, p99_output=2, backlog=False).token_throughput == pytest.approx(20 / 11)


def test_times_count_only_requests_that_start_inside_the_window() -> None:
    slow_start = [request(0.0, 50.0, 51.0), *(request(50.0 + i, 51.0 + i, 52.0 + i) for i in range(1, 10))]
    estimate = summarize(slow_start, p99_output=2)
    assert estimate.ttft == pytest.approx(1.0)
    assert estimate.latency == pytest.approx(2.0)


def test_the_window_opens_by_the_middle_of_a_long_first_generation() -> None:
    # The first request outlives all others; a quarter of the tokens is out long before it ends.
    records = [request(0.0, *(float(t) for t in range(1, 41))), *(request(float(t), t + 1.0) for t in range(1, 40))]
    opens, closes = window(records, backlog=True)
    assert opens == 20.0
    assert closes == 39.0


def test_the_window_waits_until_requests_are_as_old_as_later() -> None:
    # Ten at a time, of ten tokens each, one after the other, but those of the start: they have one to three, all ends
    # after three seconds, and from then on more and more of the ten are older.
    first = [request(0.0, *(float(t) for t in range(1, n + 1))) for n in (1, 1, 1, 1, 2, 2, 2, 3, 3, 3)]
    begins = [1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0]
    later = [
        request(begin + 10.0 * round_ + 0.1 * slot, *(begin + 10.0 * round_ + 0.1 * slot + t for t in range(1, 11)))
        for round_ in range(6)
        for slot, begin in enumerate(begins)
    ]
    opens, _ = window(first + later, backlog=True)
    assert opens == pytest.approx(11.0)


def batches_apart(number: int) -> list[RequestRecord]:
    """Quick ones of eight requests of 10 tokens, one a second; every other one slow, of 20 tokens in two seconds each,
    the first after four."""
    records, begins = [], 0.0
    for index in range(number):
        first, pace, tokens = (4.0, 2.0, 20) if index % 2 else (1.0, 1.0, 10)
        times = [begins + first + pace * k for k in range(tokens)]
        records += [request(begins, *times) for _ in range(8)]
        begins = times[-1]
    return records


def test_where_batches_do_not_overlap_a_long_request_has_the_times_of_its_own_kind() -> None:
    estimate = summarize(batches_apart(13), p99_output=20)
    assert estimate.latency == pytest.approx(4.0 + 19 * 2.0)
    assert not estimate.notes


def test_longest_requests_in_few_batches_have_no_interval() -> None:
    estimate = summarize(batches_apart(7), p99_output=20)
    found = estimate.evidence["latency"]
    assert found.value == pytest.approx(4.0 + 19 * 2.0)
    assert found.low is None
    assert estimate.notes == ("latency: the longest requests ran in 3 batches, too few for an interval",)


def full_slots(seed: int) -> list[RequestRecord]:
    """Thirty requests of 8 to 59 tokens on 16 slots, the next of which begins when a slot is free."""
    rng, free = np.random.default_rng(seed), np.zeros(16)
    records = []
    for outputs in rng.integers(8, 60, 30):
        slot = int(np.argmin(free))
        times = free[slot] + 0.07 + 0.006 * rng.uniform(0.9, 1.1) * np.arange(outputs)
        records.append(request(float(free[slot]), *times.tolist()))
        free[slot] = times[-1]
    return records


def test_percentiles_rise_with_their_share_also_where_the_window_does_not_show_all_of_them() -> None:
    cut_off = 0
    for seed in range(200):
        estimate = summarize(full_slots(seed), p99_output=59, bound_metric="p90-requests")
        assert estimate.latency is not None
        assert estimate.latency_p50 <= estimate.latency <= estimate.latency_p99, seed
        found = estimate.evidence["latency_p99"]
        assert found.low is None or found.low <= found.value
        cut_off += any(
            note.startswith("latency p99: ") and note.endswith("they count as they went on after it")
            for note in estimate.notes
        )
    assert cut_off > 50


def test_memory_is_passed_through() -> None:
    estimate = summarize(STEADY, p99_output=2, kv_tokens=5.0, memory_bytes=7.0)
    assert (estimate.kv_tokens, estimate.memory_bytes_per_gpu) == (5.0, 7.0)
