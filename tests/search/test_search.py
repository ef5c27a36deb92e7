"""search() finds the optimum of exhaustive search in few evaluations, and says why where there is none."""

import functools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exeplan.errors import InputError
from exeplan.policies.interface import Knob
from exeplan.search.grid import Grid, Limits
from exeplan.search.search import Outcome, Slack, search, search_grid


class Table:
    """A search problem with everything tabulated: `values[throughput, latency or memory, *index]`."""

    def __init__(self, values, falls=0.0):
        self.values = np.asarray(values, dtype=float)
        self.knobs = tuple(Knob(f"k{i}", tuple(range(n)), falls) for i, n in enumerate(self.values.shape[1:]))
        self.num_calls = 0

    def evaluate(self, point):
        self.num_calls += 1
        return Outcome(*(float(v) for v in self.values[(slice(None), *point.values())]))

    def search(self, *, bound=math.inf, capacity=math.inf, **options):
        return search(self.knobs, self.evaluate, bound=bound, capacity=capacity, **options)

    def referee(self, *, bound=math.inf, capacity=math.inf):
        """The winning index by trying everything, and its throughput; None when nothing fits."""
        throughput, latency, memory = self.values
        fits = (latency <= bound) & (memory <= capacity)
        if not fits.any():
            return None
        best = fits & (throughput == throughput[fits].max())
        return tuple(np.argwhere(best & (latency == latency[best].min()))[0])


def assert_agrees(table, **limits):
    result, best = table.search(**limits), table.referee(**limits)
    assert (None if result.best is None else tuple(result.best.point.values())) == best
    return result


@functools.cache
def rra(*, prefill_batch=500, decode_steps=200, normal=False, tile=0, spill=0.0):
    """Round-robin allocation on one device from its formulas: throughput = B_E / T_cycle, both knobs of DESIGN 4.2.

    A prefill takes a + b * tokens, a decode step c + d * rows with c much above d. `tile` rounds the rows up, `spill`
    is what 100 rows above 64 add to a step, in ms, growing with their number to the power 1.5.
    """
    lengths = np.arange(1, decode_steps + 1)
    law = np.exp(-0.5 * ((lengths - 80) / 32) ** 2) if normal else (1 - 1 / 60) ** lengths
    survival = 1 - np.concatenate([[0], np.cumsum(law / law.sum())[:-1]])
    longest = int(np.searchsorted(np.cumsum(law / law.sum()), 0.99)) + 1
    batch = np.arange(1, prefill_batch + 1.0)[:, None]
    values = np.empty((3, prefill_batch, decode_steps))
    for column, steps in enumerate(range(decode_steps, 0, -1)):
        comb = np.pad(survival, (0, -decode_steps % steps)).reshape(-1, steps).sum(axis=0)
        rows = batch * comb
        prefill = 0.004 + 0.0002 * 64 * batch[:, 0]
        over = (np.maximum(0, rows - 64) / 100) ** 1.5
        decode = 0.02 + 0.0006 * (np.ceil(rows / tile) * tile if tile else rows) + 0.001 * spill * over
        cycle = prefill + decode.sum(axis=1)
        full, rest = divmod(longest - 1, steps)
        latency = full * cycle + prefill + decode[:, : rest + 1].sum(axis=1)
        values[:, :, column] = batch[:, 0] / cycle, latency, rows[:, 0]
    return Table(values)


def at(table, fraction, axis=1):
    """The limit that far between the lowest and the highest latency."""
    low, high = table.values[axis].min(), table.values[axis].max()
    return float(low + fraction * (high - low))


LIMITS = [(0.002, 1), (0.02, 1), (0.1, 1), (0.1, 0.02), (0.3, 0.1), (0.7, 0.5), (1, 1)]


@pytest.mark.parametrize("normal", [False, True])
def test_the_papers_formulas_rise_with_both_knobs(normal):
    for values in rra(normal=normal).values:
        for axis in (0, 1):
            assert (np.diff(values, axis=axis) >= -1e-9 * values.max()).all()


@pytest.mark.parametrize(("latency", "memory"), LIMITS)
@pytest.mark.parametrize("normal", [False, True])
def test_finds_the_optimum_with_under_one_percent_of_the_evaluations(normal, latency, memory):
    table = rra(normal=normal)
    result = assert_agrees(table, bound=at(table, latency), capacity=at(table, memory, axis=2))
    assert result.num_points <= 0.01 * result.grid_size
    assert (result.gap, result.dips) == (0.0, Slack())


@pytest.mark.parametrize(("latency", "memory"), LIMITS)
@pytest.mark.parametrize("digits", [0, 1])
def test_ties_on_plateaus_go_to_the_least_latency(digits, latency, memory):
    exact = rra()
    table = Table([np.round(np.minimum(exact.values[0], 15), digits), *exact.values[1:]])
    result = assert_agrees(table, bound=at(table, latency), capacity=at(table, memory, axis=2))
    assert result.num_points <= 0.01 * result.grid_size


@pytest.mark.parametrize(("latency", "memory"), LIMITS)
@pytest.mark.parametrize("tile", [8, 16])
def test_tiles_of_a_kernel_do_not_mislead_it(tile, latency, memory):
    table = rra(tile=tile)
    result = assert_agrees(table, bound=at(table, latency), capacity=at(table, memory, axis=2))
    assert result.num_points <= 0.05 * result.grid_size


@pytest.mark.parametrize(("latency", "memory"), LIMITS)
@pytest.mark.parametrize("spill", [0.2, 2, 10])
def test_finds_a_peak_inside_where_large_batches_overflow_a_cache(spill, latency, memory):
    table = rra(spill=spill)
    limits = {"bound": at(table, latency), "capacity": at(table, memory, axis=2)}
    result = table.search(**limits)
    assert result.num_points <= 0.05 * result.grid_size
    assert result.best.outcome.throughput >= 0.999 * table.values[0][table.referee(**limits)]


@pytest.mark.parametrize(("latency", "memory"), LIMITS)
def test_finds_the_optimum_where_throughput_falls_at_the_edge(latency, memory):
    values = rra().values.copy()
    values[0, :, -2:] *= 0.8, 0.6  # a prefill in each iteration, or in every other
    table = Table(values)
    limits = {"bound": at(table, latency), "capacity": at(table, memory, axis=2)}
    result = table.search(**limits)
    assert result.num_points <= 0.05 * result.grid_size
    assert result.best.outcome.throughput >= 0.9995 * table.values[0][table.referee(**limits)]
    if result.best.point["k1"] == 197:
        assert result.dips.throughput > 0.2
        assert result.uncounted.throughput == result.dips.throughput


@pytest.mark.parametrize("noise", [0.001, 0.01, 0.03])
@pytest.mark.parametrize(("latency", "memory"), LIMITS)
def test_noise_costs_less_than_its_size(noise, latency, memory):
    values = rra().values * (1 + np.random.default_rng(0).uniform(-noise, noise, rra().values.shape))
    table = Table(values)
    limits = {"bound": at(table, latency), "capacity": at(table, memory, axis=2)}
    result = table.search(**limits)
    lost = 1 - result.best.outcome.throughput / table.values[0][table.referee(**limits)]
    assert lost <= noise / 4
    assert result.num_points <= 0.05 * result.grid_size
    if noise <= 0.01:
        assert lost <= result.gap + 1e-12
    # The gap counts up to 2 %, and of the load what a pass was left for.
    assert result.uncounted.throughput == (result.dips.throughput if result.dips.throughput > 0.02 else 0.0)
    assert result.uncounted.load in (0.0, result.dips.load)
    assert result.uncounted.load or result.dips.load <= 0.02


@pytest.mark.parametrize(("latency", "memory"), [(0.02, 1), (0.1, 0.02), (0.002, 1)])
def test_what_noise_leaves_open_is_looked_for_longer(latency, memory, monkeypatch):
    values = rra(prefill_batch=200, decode_steps=100).values
    table = Table(values * (1 + np.random.default_rng(0).uniform(-0.03, 0.03, values.shape)))
    limits = {"bound": at(table, latency), "capacity": at(table, memory, axis=2)}
    longer = table.search(**limits)
    monkeypatch.setattr("exeplan.search.branch_and_bound._OPEN", math.inf)
    once = table.search(**limits)
    assert once.gap > 0.07
    assert longer.gap <= 0.02 + 1e-9
    assert once.num_points < longer.num_points <= 0.06 * longer.grid_size
    assert 1 - longer.best.outcome.throughput / table.values[0][table.referee(**limits)] <= longer.gap + 1e-12


@pytest.mark.parametrize("noise", [0.001, 0.01])
def test_a_search_that_is_not_thorough_tries_less_and_its_gap_covers_what_the_thorough_one_finds(noise):
    table = Table(rra().values * (1 + np.random.default_rng(0).uniform(-noise, noise, rra().values.shape)))
    limits = {"bound": at(table, 0.3), "capacity": at(table, 0.1, axis=2)}
    grid = Grid(table.knobs, table.evaluate, Limits(**limits))
    quick, thorough = search_grid(grid, thorough=False), table.search(**limits)
    assert quick.num_points < thorough.num_points
    assert quick.gap > thorough.gap
    assert thorough.best.outcome.throughput <= quick.best.outcome.throughput * (1 + quick.gap)
    assert search_grid(grid).num_points > quick.num_points  # And goes on from what was tried.


@st.composite
def rising_tables(draw):
    """Up to four knobs with small whole numbers, so that ties abound; some knobs have a single value."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    most = draw(st.integers(1, 4))
    values = rng.integers(0, most, size=(3, *shape)).astype(float)
    for axis in range(1, len(shape) + 1):
        values = np.cumsum(values, axis=axis)
    return Table(values + 1)


@settings(max_examples=200, deadline=None)
@given(rising_tables(), st.floats(0, 1.1), st.floats(0, 1.1))
def test_agrees_with_trying_everything_on_whatever_rises(table, latency, memory):
    result = assert_agrees(table, bound=max(at(table, latency), 0.5), capacity=at(table, memory, axis=2))
    assert result.best is None or result.gap == 0


@settings(max_examples=100, deadline=None)
@given(rising_tables(), st.floats(0, 1.1), st.integers(0, 2**32 - 1))
def test_never_breaks_a_limit_and_never_tries_a_point_twice(table, latency, seed):
    values = table.values * np.random.default_rng(seed).uniform(0.5, 2, table.values.shape)
    bound, capacity = at(Table(values), latency), at(Table(values), 0.5, axis=2)
    uneven = Table(values)
    result = uneven.search(bound=bound, capacity=capacity)
    assert uneven.num_calls == result.num_points <= result.grid_size
    if result.best is not None:
        assert result.best.outcome.latency <= bound
        assert result.best.outcome.memory <= capacity


@settings(max_examples=200, deadline=None)
@given(rising_tables(), st.floats(0, 2), st.floats(0, 1.1), st.floats(0, 1.1), st.integers(0, 2**32 - 1))
def test_agrees_with_trying_everything_where_falls_are_declared(table, falls, latency, memory, seed):
    """However large: a few points show nothing of them."""
    factors = np.random.default_rng(seed).uniform(1, 1 + falls * (1 - 1e-9), table.values.shape)
    uneven = Table(table.values / factors, falls)
    assert_agrees(uneven, bound=max(at(uneven, latency), 0.5), capacity=at(uneven, memory, axis=2))


def test_declared_falls_cost_only_points_that_they_could_lift_to_the_best():
    rising = np.arange(1.0, 1001)
    result = assert_agrees(Table([rising, rising, rising], 0.25))
    assert result.uncounted == Slack()
    assert 200 <= result.num_points < 300
    limited = assert_agrees(Table([rising, rising, rising], 0.25), bound=100.0)
    assert limited.num_points < 80


def test_the_exhaustive_method_tries_all():
    table = rra(prefill_batch=20, decode_steps=20)
    limits = {"bound": at(table, 0.3), "capacity": at(table, 0.3, axis=2)}
    result = table.search(**limits, method="exhaustive")
    assert (result.num_points, result.gap, result.uncounted) == (400, 0.0, None)
    assert tuple(result.best.point.values()) == table.referee(**limits)


def test_the_bayesian_method_comes_near_and_repeats_itself():
    table = rra(prefill_batch=30, decode_steps=30)
    limits = {"bound": at(table, 0.2), "capacity": at(table, 0.5, axis=2)}
    first, second = (table.search(**limits, method="bayesian", budget=100, seed=1) for _ in range(2))
    assert (first.best, first.num_points) == (second.best, second.num_points)
    assert first.num_points <= 100
    assert first.gap is None
    assert first.best.outcome.throughput >= 0.95 * table.values[0][table.referee(**limits)]


HAND = Table([[[1, 2, 3], [2, 4, 5]], [[10, 20, 30], [20, 40, 60]], [[1, 2, 3], [2, 4, 6]]])
"""Two knobs of two and three values: throughput, latency, memory."""


@pytest.mark.parametrize(
    ("bound", "capacity", "best", "binds"),
    [
        (60, 6, {"k0": 1, "k1": 2}, ()),
        (59, 6, {"k0": 1, "k1": 1}, ("latency",)),
        (60, 5, {"k0": 1, "k1": 1}, ("memory",)),
        (35, 3, {"k0": 0, "k1": 2}, ("latency", "memory")),
        (9, 6, None, ("latency",)),
        (60, 0.5, None, ("memory",)),
        (9, 0, None, ("latency", "memory")),
    ],
)
def test_says_what_binds(bound, capacity, best, binds):
    result = HAND.search(bound=bound, capacity=capacity)
    assert (None if result.best is None else result.best.point) == best
    assert result.what_binds == binds


def test_an_impossible_bound_leaves_the_lowest_latency_point():
    result = HAND.search(bound=9, capacity=6)
    assert (result.best, result.gap) == (None, None)
    assert result.lowest_latency.point == {"k0": 0, "k1": 0}
    assert result.lowest_latency.outcome == Outcome(1, 10, 1)


def test_the_frontier_has_the_undominated_points_that_fit_the_memory():
    result = HAND.search(bound=60, capacity=4, method="exhaustive")
    assert [(t.outcome.latency, t.outcome.throughput) for t in result.frontier] == [(10, 1), (20, 2), (30, 3), (40, 4)]


def test_a_grid_of_one_point():
    result = Table([[7.0], [1.0], [1.0]]).search(bound=1, capacity=1)
    assert (result.best.outcome, result.num_points, result.what_binds) == (Outcome(7, 1, 1), 1, ())


def test_a_gap_is_no_bound_where_falls_exceed_what_it_counts():
    """Teeth of 30 % are far above what it counts, teeth of 1 % are within it."""
    rising = np.arange(1.0, 401)
    table = Table([np.where(np.arange(400) % 7 == 5, 1.3, 1.0) * rising, rising, rising])
    result = table.search(bound=396.5)
    assert result.dips.throughput > 0.02
    assert result.uncounted.throughput == result.dips.throughput
    assert result.uncounted.load == 0.0
    smooth = Table([np.where(np.arange(400) % 7 == 5, 1.01, 1.0) * rising, rising, rising]).search(bound=396.5)
    assert smooth.uncounted == Slack()


def test_a_spent_budget_shows_in_the_gap():
    table = rra()
    limits = {"bound": at(table, 0.02), "capacity": math.inf}
    result = table.search(**limits, budget=40)
    assert 0 < 1 - result.best.outcome.throughput / table.values[0][table.referee(**limits)] <= result.gap


def test_an_unknown_method_is_answered_with_those_there_are():
    with pytest.raises(InputError, match="no search method 'magic'; there are branch-and-bound, exhaustive, bayesian"):
        HAND.search(method="magic")
