"""What a window of a perfect engine shows is what the engine does: a replay of the same schedule is the truth."""

import math
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from scipy.special import stdtrit

from exeplan.core.bounds import Bound
from exeplan.core.runs.estimators import Gaps, ProductLimit, Window, figure, mean_of, product, total_of_blocks
from exeplan.core.runs.metrics import RequestRecord, summarize
from exeplan.core.schedule import Estimate, Figure, Schedule
from exeplan.policies import load_policy
from exeplan.simulator.closed_form import steady_state
from exeplan.simulator.cost import CostModel
from exeplan.simulator.replay import replay
from exeplan.simulator.run import Run
from exeplan.workload.workload import Workload

POLICIES = {
    "orca": {"max_num_seqs": 24},
    "chunked": {"max_num_seqs": 24, "max_num_batched_tokens": 128},
    "rra": {"prefill_batch": 6, "decode_steps": 24},
    "static": {"batch_size": 24},
}
SEEDS = 40
LIVES = 2.6
"""The length of a run in those of a request of the 99th-percentile length: once the engine is full and before the queue
is empty, hardly one of them fits into the window."""
LEAST_BATCHES = 12


@cache
def long_tailed() -> Workload:
    """Outputs of up to 600 tokens, 94 in the mean."""
    rng = np.random.default_rng(7)
    sides = (rng.lognormal(np.log(median), sigma, 4000) for median, sigma in ((60, 1.0), (20, 0.6)))
    outputs, inputs = (
        np.maximum(np.rint(np.minimum(side, most)), 1).astype(int) for side, most in zip(sides, (600, 200), strict=True)
    )
    return Workload.of("long-tailed", inputs=inputs, outputs=outputs, weights=np.ones(4000))


LENGTH = long_tailed().output_quantile(0.99)


def schedule_of(name: str) -> Schedule:
    policy = load_policy(name)
    return policy.schedule({**policy.enumerated(1)[0], **POLICIES[name]}, long_tailed())


def played(schedule: Schedule, cost: CostModel, number: int, seed: int) -> Run:
    inputs, outputs = long_tailed().sample(number, seed=seed)
    return replay(schedule, cost, input_tokens=inputs, output_tokens=outputs, num_blocks=10**6, record_passes=False)


def mean_time_to(length: int, run: Run) -> float:
    """Of the requests that get there, in a run so long that its ends do not count."""
    requests = run.requests
    return float(np.nanmean(requests.times.nth(length) - requests.starts))


@pytest.mark.parametrize("name", POLICIES)
def test_short_windows_agree_with_a_long_run_and_know_how_far_they_may_be_off(name: str, cost: CostModel) -> None:
    schedule = schedule_of(name)
    long = played(schedule, cost, 12_000, seed=1000)
    latency, tokens = mean_time_to(LENGTH, long), summarize(long.requests, p99_output=LENGTH).token_throughput
    steady = steady_state(schedule, long_tailed(), cost)
    number = max(round(LIVES * latency * steady.throughput), LEAST_BATCHES * POLICIES[name].get("batch_size", 1))
    seen = [summarize(played(schedule, cost, number, seed).requests, p99_output=LENGTH) for seed in range(SEEDS)]
    check(seen, "latency", latency, bias=0.015)
    check(seen, "token_throughput", tokens, bias=0.015)


def check(seen: list[Estimate], name: str, truth: float, *, bias: float) -> None:
    """The mean is right, and of the intervals of 90 % no fewer hold the truth than chance explains in one test of a
    thousand: 29 of 40. None is so wide that it says nothing."""
    figures = [estimate.evidence[name] for estimate in seen if name in estimate.evidence]
    assert len(figures) >= 0.9 * SEEDS
    mean = float(np.mean([figure.value for figure in figures]))
    assert abs(mean / truth - 1) < bias, f"{name}: {mean:.4g} for {truth:.4g}"
    kept = [f.low <= truth <= f.high for f in figures if f.low is not None and f.high is not None]
    assert len(kept) >= 0.9 * SEEDS
    assert np.mean(kept) >= 0.72, f"{name}: {np.mean(kept):.0%} of the intervals hold {truth:.4g}"
    widths = [(f.high - f.low) / 2 / truth for f in figures if f.low is not None and f.high is not None]
    assert np.median(widths) < 0.15


def test_a_request_that_lives_as_long_as_the_window_is_said_to_be_missing(cost: CostModel) -> None:
    schedule = schedule_of("orca")
    latency = mean_time_to(LENGTH, played(schedule, cost, 4000, seed=1000))
    number = round(1.6 * latency * steady_state(schedule, long_tailed(), cost).throughput)
    seen = summarize(played(schedule, cost, number, seed=3).requests, p99_output=LENGTH)
    assert seen.latency == pytest.approx(latency, rel=0.03)
    assert any(
        note.startswith(f"no request of the 99th-percentile length, {LENGTH} tokens, began and ended")
        and f"latency from {seen.evidence['latency'].num_observations:,} gaps: " in note
        for note in seen.notes
    )


def request(start: float, *token_times: float) -> RequestRecord:
    return RequestRecord(input_tokens=1, arrival=0.0, start=start, token_times=token_times)


def test_gaps_by_hand() -> None:
    """Gaps 1 of 1 and 3 s, of which the mean is 2; gap 2 of 5 s; a ttft of 1 s each."""
    records = [request(0.0, 1.0, 2.0), request(0.0, 1.0, 4.0, 9.0)]
    found = summarize(records, p99_output=3, backlog=False).evidence["latency"]
    assert (found.num_observations, found.of) == (3, "gaps")
    # Few gaps share their mean: (1 + 3 + 5) / 3 for each of two gaps.
    assert found.value == pytest.approx(1.0 + 2 * 3.0)
    assert (found.low, found.high) == (None, None)


def test_tracks_and_lists_of_the_same_times_give_the_same_figures(cost: CostModel) -> None:
    requests = played(schedule_of("rra"), cost, 200, seed=0).requests
    shared, listed = (summarize(each, p99_output=LENGTH) for each in (requests, list(requests)))
    assert shared.evidence.keys() == listed.evidence.keys()
    for name, found in shared.evidence.items():
        other = listed.evidence[name]
        assert (found.value, found.low, found.high) == pytest.approx((other.value, other.low, other.high))
        assert found.num_observations == other.num_observations


def law_of(*spans: tuple[float, float], closes: float = math.inf, opens: float = -math.inf) -> ProductLimit:
    begins, lasts = np.array(spans).T
    return ProductLimit.of(begins, lasts, opens=opens, closes=closes)


TEN = Window(edges=np.array([0.0, 10.0]))


def percentiles(law: ProductLimit, *shares: float) -> list[float]:
    return [law.percentile(share, TEN).value for share in shares]


def test_the_product_limit_of_complete_requests_is_their_quantile() -> None:
    law = law_of((0.0, 1.0), (0.0, 2.0), (0.0, 4.0), (0.0, 3.0))
    shares = (0.0, 0.2, 0.5, 0.99, 1.0)
    assert percentiles(law, *shares) == pytest.approx(np.quantile([1.0, 2.0, 3.0, 4.0], shares, method="hazen"))
    assert law.weights == pytest.approx([0.25] * 4)


def test_the_product_limit_shares_out_what_was_cut_off() -> None:
    """One of four ends at 1; one is cut off at 2 of the three left; of the two left one ends at 3, then the other."""
    law = law_of((0.0, 1.0), (0.0, 3.0), (2.0, 9.0), (0.0, 4.0), closes=4.0)
    assert law.weights == pytest.approx([0.25, 0.375, 0.0, 0.375])
    assert percentiles(law, 0.25 + 0.375 / 2, 1.0) == pytest.approx([3.0, 4.0])


def test_a_share_that_no_request_was_seen_to_reach_is_infinite() -> None:
    assert percentiles(law_of((0.0, 1.0), (0.0, 9.0), closes=4.0), 0.5, 0.9) == [1.0, math.inf]


def test_requests_that_began_before_the_window_count_from_the_age_at_which_they_were_seen() -> None:
    """At 1 second one of the two seen ends; then the other and the one that began earlier."""
    law = law_of((0.0, 1.0), (0.0, 5.0), (-4.0, 1.5), opens=0.0)
    assert law.weights == pytest.approx([0.5, 0.25, 0.25])


def test_what_was_cut_off_after_the_last_end_counts_as_it_went_on() -> None:
    law = law_of((0.0, 1.0), (0.0, 9.0), (0.0, 2.0), (0.0, 8.0), closes=4.0)
    assert law.cut == pytest.approx(0.5)
    assert law.weights == pytest.approx([0.25] * 4)
    assert law.quantile(np.array([5.0, 7.0, 6.0, 8.0]), 0.75, TEN, together=False).value == 7.0


@pytest.mark.parametrize(("blocks", "most"), [*((n, math.inf) for n in range(4, 13)), (12, 1.0), (12, 2.3), (12, 6.7)])
def test_half_an_interval_is_by_students_law(blocks: int, most: float) -> None:
    """Blocks that alternate are not alike, and each deviates by one."""
    influences = (np.tile([1.0, -1.0], 6) + np.arange(12) % 2)[:blocks]
    found = figure(5.0, influences, num_observations=blocks, of="requests", most_freedom=most)
    deviation = float(np.std(influences, ddof=1)) * math.sqrt(blocks)
    assert found.high == pytest.approx(5 + stdtrit(max(min(blocks - 1, most), 2.0), 0.95) * deviation, rel=2e-5)


def test_a_share_has_an_interval_also_where_all_requests_are_in_it() -> None:
    """Twelve blocks of one request each: 0.05 ** (1 / 12) is 0.78."""
    law = law_of(*((begin, begin + 0.5) for begin in range(12)))
    window = Window(edges=np.arange(13.0))
    found = law.share(np.ones(12, dtype=bool), window, together=False)
    assert (found.value, found.low, found.high) == (1.0, pytest.approx(0.05 ** (1 / 12)), 1.0)
    found = law.quantile(np.arange(12.0), 0.99, window, together=False)
    assert (found.value, found.high) == (11.0, math.inf)


@pytest.mark.parametrize("number", range(4, 61))
def test_a_share_of_all_or_of_none_is_exactly_that(number: int) -> None:
    """A sum of n times 1/n falls short of 1 for many n, and the interval of such a share had no width."""
    law = law_of(*((begin, begin + 0.5) for begin in range(number)))
    window, wide = Window(edges=np.arange(number + 1.0)), 1 - 0.05 ** (1 / number)
    found = law.share(np.ones(number, dtype=bool), window, together=False)
    assert (found.value, found.low, found.high) == (1.0, pytest.approx(1 - wide), 1.0)
    found = law.share(np.zeros(number, dtype=bool), window, together=False)
    assert (found.value, found.low, found.high) == (0.0, 0.0, pytest.approx(wide))


def test_requests_that_begin_together_are_one_observation_of_what_they_share() -> None:
    apart = law_of(*((begin, begin + 0.5) for begin in range(12) for _ in range(50)))
    window, kept = Window(edges=np.arange(13.0)), np.tile([True] * 49 + [False], 12)
    for together, number in ((True, 12), (False, 600)):
        low = apart.share(kept, window, together=together).low
        assert low == pytest.approx(0.98 - 1.645 * math.sqrt(0.98 * 0.02 / number), abs=1e-4)


def test_the_error_of_a_mean_over_complete_requests_is_that_of_the_mean() -> None:
    rng = np.random.default_rng(3)
    begins, values = np.sort(rng.uniform(0, 12, 600)), rng.normal(5.0, 1.0, 600)
    law, window = ProductLimit.of(begins, begins + 1.0, opens=-math.inf, closes=math.inf), Window(edges=np.arange(13.0))
    found, plain = law.mean(values, window), mean_of(values, begins, window)
    assert (found.value, found.low, found.high) == pytest.approx((plain.value, plain.low, plain.high))


def test_goodput_is_as_uncertain_as_both_of_its_factors() -> None:
    share, rate = (Figure(value=v, low=v - 0.3, high=v + 0.4, num_observations=9, of="requests") for v in (0.5, 2.0))
    found = product(share, rate)
    assert (found.value, found.num_observations) == (1.0, 9)
    assert found.low == pytest.approx(1.0 - math.hypot(0.3 * 2.0, 0.3 * 0.5))
    assert found.high == pytest.approx(1.0 + math.hypot(0.4 * 2.0, 0.4 * 0.5))


def test_totals_of_blocks_are_those_of_the_gaps_in_them(cost: CostModel) -> None:
    times = played(schedule_of("rra"), cost, 60, seed=0).requests.times
    window, length = Window(edges=np.linspace(0.5, 3.0, 7)), 40
    counts, sums = np.zeros((6, length), dtype=np.int64), np.zeros((6, length))
    for block, (opens, closes) in enumerate(pairwise(window.edges)):
        gaps = Gaps.within(times, Window(edges=np.array([opens, closes])), length)
        counts[block], sums[block] = gaps.counts, gaps.sums
    (value, errors, pooled), wanted = total_of_blocks(counts, sums), Gaps.within(times, window, length).total(window)
    assert (value, pooled) == (pytest.approx(wanted[0]), wanted[2])
    assert errors == pytest.approx(wanted[1])


BOUNDS = (
    Bound(seconds=math.inf),
    Bound(seconds=0.1, metric="p90-ttft"),
    Bound(seconds=0.02, metric="p90-tpot"),
    Bound(seconds=0.1, metric="p80-all", targets=(("ttft", 0.1), ("latency", 0.6))),
)


@pytest.mark.parametrize("name", ["orca", "rra"])
def test_figures_of_bounds_in_short_windows_are_those_of_a_long_run(name: str, cost: CostModel) -> None:
    """Requests that the window cuts off are long, and slow ones take long: to leave them out would be wrong."""
    schedule = schedule_of(name)
    long = played(schedule, cost, 12_000, seed=1000).requests
    waits = np.quantile(long.first_tokens - long.starts, 0.9)
    bounds = (BOUNDS[0], *(replace(b, seconds=float(waits)) for b in BOUNDS[1:2]), *BOUNDS[2:])
    truth = summarize(long, p99_output=LENGTH, bounds=bounds)
    seen = [
        summarize(played(schedule, cost, 300, seed).requests, p99_output=LENGTH, bounds=bounds) for seed in range(SEEDS)
    ]
    for metric in ("p90-ttft", "p90-tpot", "p80-all", "attainment"):
        figures = [estimate.evidence[metric] for estimate in seen]
        true, mean = truth.evidence[metric].value, float(np.mean([figure.value for figure in figures]))
        assert mean == pytest.approx(true, rel=0.05), metric
        kept = [f.low <= true <= f.high for f in figures if f.low is not None and f.high is not None]
        assert np.mean(kept) >= 0.72, f"{metric}: {np.mean(kept):.0%}"
        assert all(figure.num_observations > 0 for figure in figures)
    assert any("take longer than the steady window shows" in note for estimate in seen for note in estimate.notes)


def test_blocks_begin_with_a_prefill() -> None:
    window = Window.of(0.0, 10.0, np.array([0.0, 2.4, 4.8, 7.2, 9.6]))
    assert window.edges.tolist() == [0.0, 2.4, 4.8, 7.2, 9.6, 10.0]
    assert window.sums(np.array([1.0, 2.4, 2.5, 10.0]), np.ones(4)).tolist() == [2.0, 1.0, 0.0, 0.0, 1.0]
