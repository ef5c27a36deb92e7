"""The cost model gives back what was measured, stays between measured neighbours elsewhere, says where it leaves the
measured range, and answers the same to a real batch and to an expected one."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exeplan.core.batch import Batch, SequenceState
from exeplan.core.profile import Measurement, Profile
from exeplan.core.schedule import Schedule, Sharding, Stage
from exeplan.policies import load_policy
from exeplan.policies.interface import Cycle
from exeplan.simulator.closed_form import steady_state
from exeplan.simulator.cost import CostModel
from exeplan.simulator.curves import Curve
from exeplan.simulator.replay import replay
from exeplan.workload.length_law import LengthLaw
from exeplan.workload.workload import Workload


def rows(*lengths: int, generated: int = 0) -> tuple[SequenceState, ...]:
    """Sequences of these prompt lengths with `generated` output tokens."""
    return tuple(
        SequenceState(request_id=str(i), num_prompt_tokens=n, max_output_tokens=100, num_output_tokens=generated)
        for i, n in enumerate(lengths)
    )


def one_pass(*, num_prefill: float = 0, prompt: int = 1, num_decode: float = 0, context: float = 0) -> Cycle:
    """A cycle of one certain pass with prompts of one length."""
    return Cycle(
        num_prefill=np.array([float(num_prefill)]),
        num_decode=np.array([float(num_decode)]),
        context_tokens=np.array([float(num_decode * context)]),
        prompt_law=LengthLaw(np.array([prompt]), np.ones(1)),
        kv_tokens=1.0,
        kv_tokens_std=0.0,
        num_seqs=float(num_prefill + num_decode),
    )


def test_measured_points_come_back(profile: Profile, cost: CostModel) -> None:
    surfaces = {
        "prefill": (cost.shards[Sharding()].prefill_attention, "num_tokens"),
        "decode": (cost.shards[Sharding()].decode_attention, "context_tokens"),
    }
    for m in profile.measurements:
        if m.op == "attention":
            surface, axis = surfaces[m.phase]
            assert surface(float(m.num_seqs), getattr(m, axis) / m.num_seqs) == pytest.approx(m.seconds)
        elif m.op == "overhead":
            curve = cost.prefill_overhead if m.phase == "prefill" else cost.overhead
            assert curve(float(m.num_seqs)) == pytest.approx(m.seconds)
        else:
            curve = cost.shards[Sharding()].rest["decode"] if m.op == "rest" else getattr(cost.shards[Sharding()], m.op)
            assert curve(float(m.num_tokens or m.num_seqs)) == pytest.approx(m.seconds)


def test_the_host_takes_what_it_took_at_the_placement_s_degree_or_the_next_smaller(profile: Profile) -> None:
    """Rows of every degree, of which the host's take as many times as long as there are devices at 1, 2 and 4."""
    rows = [
        replace(m, tensor_parallel_size=size, seconds=size * m.seconds if m.op == "overhead" else m.seconds)
        for m in profile.measurements
        for size in (1, 2, 3, 4, 8)
        if m.op != "overhead" or size in (1, 2, 4)
    ]
    sums = [
        Measurement(op="all_reduce", phase="intra", tensor_parallel_size=n, bytes=1, seconds=1e-6) for n in (2, 3, 4, 8)
    ]
    for size, factor in ((1, 1), (2, 2), (3, 2), (4, 4), (8, 4)):
        stage = Stage(devices=tuple(range(size)), layers=(0, profile.model.num_layers))
        cost = CostModel(replace(profile, measurements=(*rows, *sums)), (stage,))
        assert cost.overhead.at(16) == pytest.approx(factor * 180e-6)
        assert cost.prefill_overhead.at(16) == pytest.approx(factor * 248e-6)


def test_batches_that_keep_their_rows_decode_by_their_own_ratio_and_prefill_by_the_common_one(profile: Profile) -> None:
    measured = replace(profile, calibration=1.2, prefill_calibration=0.9, kept_rows_calibration=1.1)
    for policy, factor in (("static", 1.1), ("turbo", 1.1), ("concat", 1.1), ("orca", 1.2), ("rra", 1.2)):
        cost, bare = CostModel(measured).for_policy(load_policy(policy)), CostModel(profile)
        decode = Batch(decode=rows(64, 65))
        assert cost.batch_seconds(decode) == pytest.approx(factor * bare.batch_seconds(decode))
        attention = cost.shards[Sharding()].prefill_attention(1.0, 64.0)
        assert attention == pytest.approx(1.2 * 0.9 * bare.shards[Sharding()].prefill_attention(1.0, 64.0))


def test_closed_form_and_replay_take_the_ratio_of_their_policy(profile: Profile) -> None:
    """Twice as fast with kept rows, and no prefill to speak of: twice the throughput of static, the same of orca."""
    workload = Workload.of("short prompts", inputs=[1], outputs=[64], weights=[1])
    fast = CostModel(replace(profile, kept_rows_calibration=0.5))
    for schedule, gain in (
        (Schedule("static", {"batch_size": 4}), 2.0),
        (Schedule("orca", {"max_num_seqs": 4}), 1.0),
    ):
        planned = [steady_state(schedule, workload, cost).throughput for cost in (fast, CostModel(profile))]
        ends = [
            replay(schedule, cost, input_tokens=np.ones(8, int), output_tokens=np.full(8, 64), num_blocks=1000)
            .passes[-1]
            .end
            for cost in (fast, CostModel(profile))
        ]
        assert planned[0] / planned[1] == pytest.approx(gain, rel=0.1)
        assert ends[1] / ends[0] == pytest.approx(gain, rel=0.1)


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    """Any measured points, falling ones too."""
    x = sorted(draw(st.sets(st.integers(1, 500), min_size=1, max_size=6)))
    seconds = draw(st.lists(st.floats(1e-6, 1.0), min_size=len(x), max_size=len(x)))
    return Curve(np.array(x, dtype=float), np.array(seconds))


@given(curve=curves(), at=st.floats(0, 2000))
@settings(max_examples=60, deadline=None)
def test_between_two_points_a_curve_stays_between_their_values(curve: Curve, at: float) -> None:
    value = float(curve(at))
    right = int(np.searchsorted(curve.x, at).clip(max=len(curve.x) - 1))
    left = max(right - 1, 0) if at < curve.x[right] else right
    low, high = sorted((curve.seconds[left], curve.seconds[right]))
    if at <= curve.x[-1]:
        assert low - 1e-12 <= value <= high + 1e-12
    else:
        assert value >= curve.seconds[-1]  # Beyond the last point it goes on rising, or stays.


@given(curve=curves(), at=st.floats(0, 2000))
@settings(max_examples=60, deadline=None)
def test_one_number_at_a_time_gives_the_same(curve: Curve, at: float) -> None:
    assert curve.at(at) == pytest.approx(float(curve(at)), rel=1e-9, abs=1e-15)


def test_rising_measurements_make_rising_estimates(profile: Profile) -> None:
    rng = np.random.default_rng(0)
    jagged = CostModel(replace(profile, measurements=tuple(_bumped(m, rng) for m in profile.measurements)))
    context = np.linspace(1, 3000, 200)
    seqs = np.linspace(0.1, 150, 200)
    for n in (0.5, 1, 3, 40, 100):
        assert (np.diff(jagged.shards[Sharding()].decode_attention(n, context)) >= -1e-15).all()
    for tokens in (1, 100, 2000):
        assert (np.diff(jagged.shards[Sharding()].decode_attention(seqs, tokens)) >= -1e-15).all()
    assert (np.diff(jagged.shards[Sharding()].rest["decode"](np.linspace(0, 9000, 200))) >= 0).all()


def _bumped(m: Measurement, rng: np.random.Generator) -> Measurement:
    """Up to a fifth slower: little enough that the times of the made-up device still rise."""
    return replace(m, seconds=m.seconds * rng.uniform(1.0, 1.2)) if m.op == "attention" else m


@pytest.mark.parametrize("num_seqs", [1, 2, 4, 7, 64, 100])
@pytest.mark.parametrize("tokens", [1.0, 16.0, 100.0, 1024.0, 1500.0, 5000.0])
def test_a_cut_through_the_surface_is_the_surface(cost: CostModel, num_seqs: int, tokens: float) -> None:
    cut = cost.shards[Sharding()].decode_attention.at_num_seqs(num_seqs)
    assert cut.at(tokens) == pytest.approx(float(cost.shards[Sharding()].decode_attention(float(num_seqs), tokens)))


def test_a_decode_pass_by_hand(cost: CostModel) -> None:
    # Four rows with 100 tokens in the cache each, six layers.
    layer = (40e-6 + 4 * 20e-6) + 4 * (8e-6 + 100 * 2e-8)
    around = (5e-6 + 4 * 0.1e-6) + (50e-6 + 4 * 15e-6) + (100e-6 + 4 * 5e-6)
    batch = Batch(decode=rows(100, 100, 100, 100, generated=1))
    assert cost.batch_seconds(batch) == pytest.approx(6 * layer + around)


def test_a_prefill_pass_by_hand(cost: CostModel) -> None:
    # One prompt of 64 tokens.
    layer = (40e-6 + 64 * 20e-6) + (2e-5 + 64 * 64 * 2e-9)
    around = (5e-6 + 64 * 0.1e-6) + (50e-6 + 15e-6) + (120e-6 + 8e-6)
    assert cost.batch_seconds(Batch(prefill=rows(64))) == pytest.approx(6 * layer + around)


def test_of_a_prompt_the_last_layer_goes_on_with_its_last_token(profile: Profile) -> None:
    """Behind its attention, where 80 % of its products are: 63 of 64 tokens are spared them, at 20 us each."""
    cost, spared = CostModel(profile), CostModel(replace(profile, last_layer_saving=0.8))
    for batch, tokens in (
        (Batch(prefill=rows(64)), 63),
        (Batch(prefill=rows(64, 32)), 94),
        (Batch(prefill=rows(64), decode=rows(100, 100, generated=1)), 63),
        (Batch(decode=rows(100, 100, generated=1)), 0),
        (Batch(prefill=rows(1)), 0),
    ):
        saved = cost.batch_seconds(batch) - spared.batch_seconds(batch)
        assert saved == pytest.approx(0.8 * tokens * 20e-6, abs=1e-12)


def test_padding_costs_like_tokens(cost: CostModel) -> None:
    padded = Batch(prefill=rows(10, 64), pad_to=64)
    assert cost.batch_seconds(padded) == pytest.approx(cost.batch_seconds(Batch(prefill=rows(64, 64))))
    assert cost.batch_seconds(padded) > cost.batch_seconds(Batch(prefill=rows(10, 64)))


def test_ragged_rows_cost_by_their_total_context(cost: CostModel) -> None:
    ragged, even = Batch(decode=rows(20, 180, generated=1)), Batch(decode=rows(100, 100, generated=1))
    assert cost.batch_seconds(ragged) == pytest.approx(cost.batch_seconds(even))


@pytest.mark.parametrize(
    ("num_prefill", "prompt", "num_decode", "context"),
    [(1, 64, 0, 0), (3, 100, 0, 0), (0, 1, 1, 16), (0, 1, 5, 300), (2, 64, 5, 100), (0, 1, 80, 1500)],
)
def test_an_expected_pass_without_spread_costs_what_the_batch_costs(
    profile: Profile, num_prefill: int, prompt: int, num_decode: int, context: int
) -> None:
    batch = Batch(prefill=rows(*[prompt] * num_prefill), decode=rows(*[context] * num_decode, generated=1))
    cycle = one_pass(num_prefill=num_prefill, prompt=prompt, num_decode=num_decode, context=context)
    for saving in (0.0, 0.8):
        cost = CostModel(replace(profile, last_layer_saving=saving))
        assert cost.seconds(cycle)[0][0] == pytest.approx(cost.batch_seconds(batch))


def test_within_the_measured_range_nothing_is_beyond(cost: CostModel) -> None:
    assert cost.beyond(one_pass(num_prefill=4, prompt=512, num_decode=64, context=1024)) == ()


@pytest.mark.parametrize(
    ("cycle", "sentence"),
    [
        (one_pass(num_prefill=10, prompt=500), "tokens a pass reach 5000, measured up to 4096: extrapolated"),
        (one_pass(num_decode=65, context=10), "rows that decode reach 65, measured up to 64: extrapolated"),
        (one_pass(num_decode=2, context=2000), "context of a row reach 2000, measured up to 1024: extrapolated"),
        (one_pass(num_prefill=1, prompt=600), "prompt length reach 600, measured up to 512: extrapolated"),
    ],
)
def test_what_is_extrapolated_is_said(cost: CostModel, cycle: Cycle, sentence: str) -> None:
    assert cost.beyond(cycle) == (sentence,)


def test_one_measured_point_is_enough_for_a_curve() -> None:
    curve = Curve(np.array([4.0]), np.array([2.0]))
    assert [float(curve(x)) for x in (1.0, 4.0, 9.0)] == [curve.at(x) for x in (1.0, 4.0, 9.0)] == [2.0] * 3


def test_slots_that_no_request_takes_are_not_beyond(cost: CostModel) -> None:
    assert cost.beyond(replace(one_pass(num_decode=100, context=10), num_seqs=40.0)) == ()
