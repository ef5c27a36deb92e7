"""Lengths drawn from histograms have their buckets and their sum, and the planned law wherever these leave it open."""

import math

import numpy as np
import pytest

from exeplan.drift.evidence import Known, evidence
from exeplan.drift.length_draws import Buckets, LengthDraws
from exeplan.drift.length_monitor import LengthMonitor
from exeplan.workload.workload import Trace, Workload

EDGES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, math.inf)


def buckets(values, edges=EDGES) -> Buckets:
    counts = np.bincount(np.searchsorted(edges, values, side="left"), minlength=len(edges))
    return Buckets(edges=edges, counts=tuple(counts.tolist()), total=float(np.sum(values)))


def requests(count: int, seed: int, *, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Longer inputs have longer outputs."""
    rng = np.random.default_rng(seed)
    inputs = rng.integers(8, 300, count)
    outputs = np.minimum((rng.gamma(2.0, 20.0, count) * scale + inputs / 4).astype(int) + 1, 600)
    return inputs, outputs


@pytest.fixture(scope="module")
def planned() -> Workload:
    return Workload.of_trace("planned", Trace(*requests(20_000, 0)))


def drawn(planned: Workload, inputs, outputs, seed: int = 0):
    draws = LengthDraws(planned, max_context=1024, seed=seed)
    rows = draws.requests(buckets(inputs), buckets(outputs), ended=(10.0, 15.0), prefill=0.5, gap=0.1)
    return rows, np.array([row.input_tokens for row in rows]), np.array([row.output_tokens for row in rows])


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("count", [1, 7, 400])
def test_buckets_are_those_of_the_server(planned, scale, count):
    true = requests(count, 3, scale=scale)
    _, inputs, outputs = drawn(planned, *true)
    for found, values in ((inputs, true[0]), (outputs, true[1])):
        assert buckets(found).counts == buckets(values).counts


@pytest.mark.parametrize("within", [(51, 60), (90, 100), (205, 260)])
def test_sums_are_those_of_the_server_where_the_law_within_a_bucket_is_another(planned, within):
    true = np.random.default_rng(1).integers(*within, 600)
    _, _, outputs = drawn(planned, true, true)
    assert outputs.mean() == pytest.approx(true.mean(), rel=0.02)


def test_within_buckets_and_between_the_sides_the_planned_law_holds(planned):
    true = requests(4000, 5)
    _, inputs, outputs = drawn(planned, *true)
    for side, found in enumerate((inputs, outputs)):
        for q in (0.1, 0.5, 0.9, 0.99):
            assert np.quantile(found, q) == pytest.approx(np.quantile(true[side], q), rel=0.05, abs=3)
    assert np.corrcoef(inputs, outputs)[0, 1] == pytest.approx(np.corrcoef(*true)[0, 1], abs=0.04)


def test_times_are_of_the_reading(planned):
    rows, _, outputs = drawn(planned, *requests(50, 1))
    assert rows[0].start > 10.0
    assert rows[-1].start == pytest.approx(15.0)
    assert all(row.complete for row in rows)
    assert [row.seconds for row in rows] == pytest.approx((0.5 + 0.1 * (outputs - 1)).tolist())


def test_a_bucket_that_the_plan_knows_nothing_of_is_filled_between_its_edges(planned):
    _, _, outputs = drawn(planned, np.full(100, 50), np.full(100, 900))
    assert outputs.mean() == pytest.approx(900, rel=0.02)
    assert outputs.min() > 500
    assert outputs.max() <= 1000


def test_nothing_is_drawn_of_nothing(planned):
    assert LengthDraws(planned, max_context=1024).requests(buckets([]), buckets([]), ended=(0.0, 1.0)) == []


@pytest.mark.parametrize("seed", range(6))
def test_unchanged_traffic_is_no_evidence_and_another_law_is(planned, seed):
    found = {}
    for scale in (1.0, 1.6):
        monitor, draws = LengthMonitor(), LengthDraws(planned, max_context=1024, seed=seed)
        trace = requests(1200, seed + 10, scale=scale)
        for at in range(0, 1200, 12):  # A reading has a dozen requests.
            part = [buckets(side[at : at + 12]) for side in trace]
            monitor.note(draws.requests(*part, ended=(at / 12, at / 12 + 1)), ())
        observed = monitor.observe()
        assert observed
        assert observed.size > 150
        found[scale] = evidence(observed.known, Known(planned, 20_000.0), false_alarm=1e-6)
    assert found[1.0] < 1 < found[1.6]


def test_lengths_that_are_all_as_planned_are_drawn_as_they_are() -> None:
    """Nothing is missing from their sum, and no bucket's lengths are known to differ."""
    fixed = Workload.of_trace("fixed", Trace(np.full(10, 128), np.full(10, 64)))
    _, inputs, outputs = drawn(fixed, np.full(10, 128), np.full(10, 64))
    assert (inputs.tolist(), outputs.tolist()) == ([128] * 10, [64] * 10)
