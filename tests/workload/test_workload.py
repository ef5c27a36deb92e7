"""A workload's steady state equals that of simulated requests, for any law and any correlation."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exeplan.errors import InputError
from exeplan.workload.files import load_workload
from exeplan.workload.length_law import DecodeLaw, LengthLaw
from exeplan.workload.workload import Trace, Workload

TASKS = ("S", "T", "G", "C1", "C2")
CORRELATED = "normal:in=128,60,256;out=60,30,160;rank_correlation=0.8"


def simulated(workload: Workload, steps: int, cohorts: int) -> dict[str, np.ndarray]:
    """What one request a cycle does, drawn from `cohorts` random requests: an entry for each iteration of the cycle."""
    rng = np.random.default_rng(7)
    drawn = rng.choice(len(workload.weights), cohorts, p=workload.weights)
    inputs, decode = workload.inputs[drawn], workload.outputs[drawn] - 1
    active, context, squares = (np.zeros(steps) for _ in range(3))
    for k in range(1, decode.max() + 1):
        held = inputs[decode >= k] + k
        active[(k - 1) % steps] += len(held) / cohorts
        context[(k - 1) % steps] += (held.sum() - len(held)) / cohorts
        squares[(k - 1) % steps] += np.square(held).sum() / cohorts - (held.sum() / cohorts) ** 2
    return {"active": active, "context": context, "kv_var": squares}


@pytest.mark.parametrize("steps", [1, 16])
@pytest.mark.parametrize("text", [*TASKS, CORRELATED])
def test_comb_equals_monte_carlo(text: str, steps: int) -> None:
    workload = load_workload(text)
    comb = workload.decode_law().comb(steps)
    seen = simulated(workload, steps, cohorts=400_000)
    assert comb.active == pytest.approx(seen["active"], rel=3e-3)
    assert comb.context == pytest.approx(seen["context"], rel=5e-3)
    assert comb.kv_var == pytest.approx(seen["kv_var"], rel=1e-2)


def test_comb_equals_a_batch_that_runs() -> None:
    """Cohorts of 3 requests every 4 iterations, followed one by one."""
    workload, steps, batch, cycles = load_workload(CORRELATED), 4, 3, 60_000
    rng = np.random.default_rng(3)
    drawn = rng.choice(len(workload.weights), (cycles, batch), p=workload.weights)
    inputs, decode = workload.inputs[drawn], workload.outputs[drawn] - 1
    warm_up = -(-int(decode.max()) // steps)
    active, context = np.zeros((2, cycles, steps))
    for age in range(warm_up):
        k = age * steps + np.arange(1, steps + 1)
        runs = decode[: cycles - age, :, None] >= k
        active[age:] += runs.sum(axis=1)
        context[age:] += (runs * (inputs[: cycles - age, :, None] + k - 1)).sum(axis=1)
    comb = workload.decode_law().comb(steps)
    assert batch * comb.active == pytest.approx(active[warm_up:].mean(axis=0), rel=2e-3)
    assert batch * comb.active_var == pytest.approx(active[warm_up:].var(axis=0), rel=3e-2)
    assert batch * comb.context == pytest.approx(context[warm_up:].mean(axis=0), rel=2e-3)


def test_paper_overstates_completions() -> None:
    """A normal law of mean 128 and std 68 cut at zero, 16 iterations a cycle: section 6 of ExeGPT overstates 1.4x."""
    lengths = np.arange(1, 600)
    weights = np.exp(-0.5 * np.square((lengths - 128) / 68))
    workload = Workload.of("cut", inputs=np.ones_like(lengths), outputs=lengths, weights=weights)
    paper = replace(workload, as_paper=True)
    combs = [w.decode_law(first_token_from_prefill=False).comb(16) for w in (paper, workload)]
    assert workload.weights @ (1 / np.ceil(workload.outputs / 16)) == pytest.approx(0.161, abs=5e-4)
    assert [1 / comb.active[0] for comb in combs] == pytest.approx([0.161, 0.114], abs=5e-4)


def test_the_papers_formula_is_exact_where_every_request_ends_in_its_first_cycle() -> None:
    laws = [HAND.decode_law(), replace(HAND, as_paper=True).decode_law()]
    exact, paper = (law.comb(4) for law in laws)
    assert paper.active[:3] == pytest.approx(exact.active[:3])
    assert paper.context[:3] == pytest.approx(exact.context[:3])


HAND = Workload.of("hand", inputs=[10, 10, 20], outputs=[1, 3, 4], weights=[2, 1, 1])


def test_decode_law_by_hand() -> None:
    law = HAND.decode_law()
    assert law.survival == pytest.approx([0.5, 0.5, 0.25])
    assert law.input_sum == pytest.approx([7.5, 7.5, 5.0])
    assert law.input_square == pytest.approx([125.0, 125.0, 100.0])
    assert law.max_survival(2) == pytest.approx([0.75, 0.75, 0.4375])
    assert HAND.decode_law(first_token_from_prefill=False).survival == pytest.approx([1.0, 0.5, 0.5, 0.25])


def test_comb_by_hand() -> None:
    comb = HAND.decode_law().comb(2)
    assert comb.active == pytest.approx([0.75, 0.5])
    assert comb.context == pytest.approx([7.5 + 5.0 + 2 * 0.25, 7.5 + 0.5])
    assert np.exp(comb.log_empty) == pytest.approx([0.5 * 0.75, 0.5])
    assert comb.active_var == pytest.approx([0.25 + 0.1875, 0.25])
    # After iteration 2 a quarter of the requests hold 12 tokens and a quarter 22.
    assert comb.kv_var[1] == pytest.approx((144 + 484) / 4 - 8.5**2)


def test_a_batch_is_never_empty_while_all_decode() -> None:
    comb = Workload.of("fixed", inputs=[8], outputs=[4], weights=[1]).decode_law().comb(4)
    assert comb.log_empty.tolist() == [-np.inf, -np.inf, -np.inf, 0.0]
    assert comb.kv_var.tolist() == [0, 0, 0, 0]


def test_outputs_of_one_token_need_no_decoding() -> None:
    law = Workload.of("one", inputs=[8], outputs=[1], weights=[1]).decode_law()
    assert law.mean_steps == 0
    assert law.comb(3).active.tolist() == [0, 0, 0]


def test_the_longest_of_some_draws() -> None:
    law = LengthLaw(np.array([1, 2]), np.array([0.5, 0.5]))
    assert law.longest_of(1).mean == pytest.approx(1.5)
    assert law.longest_of(3).mean == pytest.approx(2 - 1 / 8)


points = st.lists(
    st.tuples(st.integers(1, 400), st.integers(1, 300), st.floats(0.01, 1)),
    min_size=1,
    max_size=40,
)
workloads = points.map(
    lambda rows: Workload.of(
        "any", inputs=[r[0] for r in rows], outputs=[r[1] for r in rows], weights=[r[2] for r in rows]
    )
)


@settings(deadline=None)
@given(workloads, st.integers(1, 64), st.booleans())
def test_littles_law(workload: Workload, steps: int, first_token_from_prefill: bool) -> None:
    law: DecodeLaw = workload.decode_law(first_token_from_prefill=first_token_from_prefill)
    wanted = workload.mean_output - first_token_from_prefill
    assert law.comb(steps).active.sum() == pytest.approx(wanted, abs=1e-9)
    assert law.mean_steps == pytest.approx(wanted, abs=1e-9)


@settings(deadline=None)
@given(workloads)
def test_survival_falls_and_weights_sum_to_one(workload: Workload) -> None:
    survival = workload.decode_law().survival
    assert workload.weights.sum() == pytest.approx(1)
    assert (np.diff(survival) <= 1e-12).all()
    assert (survival >= 0).all()
    assert (survival <= 1).all()


@settings(deadline=None)
@given(workloads, st.floats(1.0, 3.0))
def test_scale_keeps_the_mean_right(workload: Workload, factor: float) -> None:
    scaled = workload.scale(factor)
    assert scaled.mean_output == pytest.approx(factor * workload.mean_output, rel=1e-9)
    assert scaled.mean_input == pytest.approx(workload.mean_input, rel=1e-9)


def test_scale_down_keeps_outputs_above_zero() -> None:
    scaled = load_workload("T").scale(0.5)
    assert scaled.outputs.min() == 1
    assert scaled.mean_output == pytest.approx(64, rel=5e-3)
    assert scaled.source.endswith("outputs x0.5")


@settings(max_examples=50, deadline=None)
@given(workloads, st.integers(0, 5), st.integers(200, 600))
def test_stratified_sample_follows_both_marginals(workload: Workload, seed: int, n: int) -> None:
    inputs, outputs = workload.sample(n, seed)
    for law, drawn in ((workload.input_law, inputs), (workload.output_law, outputs)):
        drawn_cdf = np.searchsorted(np.sort(drawn), law.tokens, side="right") / n
        assert np.abs(drawn_cdf - law.cdf).max() < 2.5 / np.sqrt(n)


def test_stratified_sample_beats_a_random_one() -> None:
    workload, errors = load_workload("alpaca"), {}
    for stratified in (True, False):
        means = [workload.sample(400, seed, stratified=stratified)[1].mean() for seed in range(30)]
        errors[stratified] = np.std(np.array(means) / workload.mean_output)
    assert errors[True] < 0.2 * errors[False]


@settings(max_examples=50, deadline=None)
@given(workloads, st.integers(0, 5), st.integers(1, 600))
def test_stratified_sample_has_its_share_of_the_99th_percentile_length(workload: Workload, seed: int, n: int) -> None:
    p99 = workload.output_quantile(0.99)
    expected = n * float(workload.weights[workload.outputs >= p99].sum())
    assert abs(np.count_nonzero(workload.sample(n, seed)[1] >= p99) - expected) < 1 + 1e-6


def test_samples_repeat_with_their_seed() -> None:
    workload = load_workload("T")
    first, again, other = (workload.sample(100, seed) for seed in (1, 1, 2))
    assert first[0].tolist() == again[0].tolist()
    assert first[0].tolist() != other[0].tolist()


@settings(deadline=None)
@given(workloads, st.integers(2, 800), st.booleans())
def test_fitted_requests_fit(workload: Workload, context: int, scale: bool) -> None:
    fitted = workload.fit_context(context, scale=scale)
    assert (fitted.inputs + fitted.outputs).max() <= context
    assert min(fitted.inputs.min(), fitted.outputs.min()) >= 1
    assert (fitted is workload) == ((workload.inputs + workload.outputs).max() <= context)


def test_scaling_to_a_context_is_said_and_keeps_the_trace() -> None:
    trace = Trace(np.array([900, 100, 2000]), np.array([100, 50, 200]), np.array([0.0, 1.0, 1.5]))
    fitted = Workload.of_trace("t", trace, source="t.csv").fit_context(1100)
    assert fitted.source == "t.csv; inputs x0.45, outputs x1, 0.00% cut, to fit 1100 tokens"
    assert fitted.trace is not None
    assert fitted.trace.inputs.tolist() == [405, 45, 900]
    assert fitted.trace.outputs.tolist() == [100, 50, 200]
    assert fitted.trace.arrival_s is trace.arrival_s


def test_cutting_to_a_context_takes_the_longer_side_first() -> None:
    workload = Workload.of("w", inputs=[900, 10, 90], outputs=[10, 900, 90], weights=[1, 1, 2])
    cut = workload.fit_context(100, scale=False)
    assert list(zip(cut.inputs, cut.outputs, strict=True)) == [(90, 10), (50, 50), (10, 90)]


def test_a_context_must_hold_two_tokens() -> None:
    with pytest.raises(InputError, match="a context of 1 tokens cannot hold a prompt and an output; the least is 2"):
        HAND.fit_context(1)


def test_fingerprint_is_of_the_law_alone() -> None:
    same = Workload.of("other", inputs=[20, 10, 10, 10], outputs=[4, 3, 1, 1], weights=[1, 1, 1, 1])
    assert same.fingerprint == HAND.fingerprint
    assert len(same.fingerprint) == 16
    assert HAND.scale(1.5).fingerprint != HAND.fingerprint


def test_large_lengths_merge_like_small_ones() -> None:
    workload = Workload.of("far", inputs=[9_000_000, 3, 3], outputs=[9_000_000, 2, 2], weights=[1, 1, 2])
    assert (workload.inputs.tolist(), workload.outputs.tolist()) == ([3, 9_000_000], [2, 9_000_000])
    assert workload.weights.tolist() == [0.75, 0.25]
