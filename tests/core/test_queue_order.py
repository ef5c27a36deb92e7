"""Orders: what TCB's algorithms choose, what they are worth against hindsight, and where the plain orders fail."""

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from exeplan.core.queue_order import Das, QueueArrays, das_rows, in_rows, in_slots, in_slots_of_their_own, ranking

HALF = Das()


def queue(*tokens: int, deadlines: list[float] | None = None, weights: list[float] | None = None) -> QueueArrays:
    lengths = np.array(tokens)
    due = np.full(len(lengths), math.inf) if deadlines is None else np.array(deadlines, dtype=float)
    return QueueArrays(lengths, due, np.array(weights or [1.0] * len(lengths)) / lengths)


def chosen(packed) -> list[list[int]]:
    """The requests in each bin."""
    bins = 1 + max((pick.bin for pick in packed.picks), default=-1)
    return [[pick.request for pick in packed.picks if pick.bin == number] for number in range(bins)]


def test_das_takes_half_for_utility_and_the_rest_by_deadline():
    """Row of 12: lengths 1, 2, 3, 4 fill it (s = 4), so 1 and 2 go in for their utility (mean 3/4). The others of at
    least 3/8 would be of length 2 at most: none. So the shortest of the rest follow."""
    waiting = queue(3, 1, 4, 2, 6, deadlines=[9, 9, 1, 9, 0.5])
    assert das_rows(waiting, rows=1, row_tokens=12, das=HALF)[0][0].tolist() == [1, 3, 0, 2]


def test_das_prefers_the_urgent_among_those_of_like_utility():
    waiting = queue(4, 4, 4, 4, 4, 4, deadlines=[6, 5, 4, 3, 2, 1])
    ((row, first),) = das_rows(waiting, rows=1, row_tokens=16, das=HALF)
    assert (row.tolist(), first) == ([0, 1, 5, 4], 2)


def test_a_queue_that_fits_goes_in_whole():
    assert chosen(in_rows("das", queue(5, 4, 3), rows=3, row_tokens=12, das=HALF)) == [[2, 1, 0]]


def test_rows_can_be_exactly_full():
    for order in ("fcfs", "sjf", "edf", "das"):
        packed = in_rows(order, queue(*[5] * 8), rows=2, row_tokens=20, das=HALF)
        assert [len(row) for row in chosen(packed)] == [4, 4]
        packing = packed.packing(queue(*[5] * 8))
        assert (packing.num_rows, packing.row_tokens, packing.num_tokens) == (2, 20, 40)


def test_slots_can_be_exactly_full():
    waiting = queue(*[5] * 8)
    for order in ("fcfs", "sjf", "edf", "das"):
        packed = in_slots(order, waiting, rows=2, row_tokens=20, slot_tokens=10, das=HALF)
        assert [len(slot) for slot in chosen(packed)] == [2, 2, 2, 2]
        assert packed.packing(waiting).num_tokens == 40


def test_batches_are_no_longer_than_their_requests_need():
    waiting = queue(3, 4)
    assert in_rows("fcfs", waiting, rows=4, row_tokens=100, das=HALF).packing(waiting).num_tokens == 7
    slotted = in_slots("fcfs", waiting, rows=4, row_tokens=100, slot_tokens=5, das=HALF).packing(waiting)
    assert (slotted.row_tokens, slotted.slot_tokens, [place.start for place in slotted.places]) == (8, 4, [4, 0])


def test_algorithm_2_cuts_rows_by_the_longest_request_that_was_taken_for_its_utility():
    """Of 2, 2, 2, 3, 3, 9 the first five fill 12 tokens; the first three of them set slots of 2, and 3s must wait."""
    waiting = queue(2, 2, 2, 3, 3, 9)
    packed = in_slots_of_their_own(waiting, rows=1, row_tokens=12, das=HALF)
    assert packed.bins_a_row == 6
    assert sorted(pick.request for pick in packed.picks) == [0, 1, 2]


def test_algorithm_2_takes_every_request_where_all_fit():
    waiting = queue(2, 2, 9)
    assert len(in_slots_of_their_own(waiting, rows=2, row_tokens=13, das=HALF).picks) == 3


def test_a_heavier_request_counts_as_so_many():
    assert ranking("das", queue(4, 4, weights=[1, 2]), room=100, limit=1, das=HALF, before=1)[0] == 1


def test_one_at_a_time_das_alternates_between_utility_and_deadline():
    waiting = queue(4, 3, deadlines=[1, 2])
    first = [int(ranking("das", waiting, room=100, limit=1, das=HALF, before=n)[0]) for n in range(4)]
    assert first == [0, 1, 0, 1]


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=40),
    order=st.sampled_from(["fcfs", "sjf", "edf", "das", "slots", "slotted-das"]),
    rows=st.integers(1, 4),
    seed=st.integers(0, 99),
)
@settings(max_examples=150, deadline=None)
def test_no_prompt_overlaps_another_or_leaves_its_slot(lengths, order, rows, seed):
    waiting = queue(*lengths, deadlines=np.random.default_rng(seed).uniform(0, 9, len(lengths)).tolist())
    if order == "slots":
        packed = in_slots("das", waiting, rows=rows, row_tokens=61, slot_tokens=20, das=HALF)
    elif order == "slotted-das":
        packed = in_slots_of_their_own(waiting, rows=rows, row_tokens=61, das=HALF)
    else:
        packed = in_rows(order, waiting, rows=rows, row_tokens=61, das=HALF)
    packing = packed.packing(waiting)
    requests = [pick.request for pick in packed.picks]
    assert len(set(requests)) == len(requests) > 0
    assert packing.num_rows <= rows
    assert packing.row_tokens <= 61
    assert packing.row_tokens % packing.slot_tokens == 0
    used = np.zeros((packing.num_rows, packing.row_tokens), dtype=int)
    for request, (row, start) in zip(requests, packing.places, strict=True):
        length = int(waiting.tokens[request])
        assert start // packing.slot_tokens == (start + length - 1) // packing.slot_tokens
        used[row, start : start + length] += 1
    assert used.max() == 1


ONLINE = st.lists(st.tuples(st.integers(1, 8), st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=9)
"""(length, batch it arrives before, batches it can wait) of each request."""


@given(requests=ONLINE, rows=st.integers(1, 2), eta=st.sampled_from([0.25, 0.5, 0.75]))
@example(requests=[(1, 0, 2)] * 4 + [(2, 0, 0)] * 4, rows=1, eta=0.5)
@settings(max_examples=60, deadline=None)
def test_das_keeps_its_competitive_ratio(requests, rows, eta):
    """Theorem 5.1, against the offline optimum of the paper's equations 9 to 13."""
    lengths, arrivals, patience = np.array(requests).T
    best = _offline_optimum(lengths, arrivals, arrivals + patience, rows=rows, row_tokens=8)
    q = 1 - eta
    earned = _earned("das", lengths, arrivals, arrivals + patience, rows=rows, row_tokens=8, das=Das(eta=eta, q=q))
    assert earned >= eta * q / (eta * q + 1) * best - 1e-9


def test_the_optimum_is_one():
    """One row of 8, two batches: of 8, 4, 4, 4 the long one is left out, for the third short one is worth more."""
    lengths, arrivals, deadlines = np.array([8, 4, 4, 4]), np.zeros(4, dtype=int), np.array([0, 1, 1, 1])
    assert _offline_optimum(lengths, arrivals, deadlines, rows=1, row_tokens=8) == pytest.approx(3 / 4)


def test_earliest_deadline_first_spends_its_rows_on_long_urgent_requests():
    """A long one is always about to expire; three short ones fit in its place, and wait until it is too late."""
    lengths = np.array([12] * 4 + [4] * 12)
    arrivals = np.array([0, 1, 2, 3] + [0] * 12)
    deadlines = np.array([0, 1, 2, 3] + [3] * 12)
    case = {"rows": 1, "row_tokens": 12, "das": HALF}
    assert _earned("edf", lengths, arrivals, deadlines, **case) == pytest.approx(4 / 12)
    assert _earned("das", lengths, arrivals, deadlines, **case) == pytest.approx(12 / 4)


def test_shortest_job_first_lets_all_others_expire_for_short_requests_that_could_wait():
    """Lengths 3 could wait for ever; those of 4 cannot. All fit, in time, if the latter go first now and then."""
    lengths = np.array([3] * 12 + [4] * 6)
    arrivals = np.zeros(18, dtype=int)
    deadlines = np.array([9] * 12 + [1] * 6)
    case = {"rows": 1, "row_tokens": 12, "das": HALF}
    short = _earned("sjf", lengths, arrivals, deadlines, **case)
    assert short == pytest.approx(12 / 3)
    assert _earned("das", lengths, arrivals, deadlines, **case) > short


def _earned(order, lengths, arrivals, deadlines, *, rows, row_tokens, das) -> float:
    """Utility of all that start in time, one batch after the other."""
    left = list(range(len(lengths)))
    earned = 0.0
    for now in range(int(deadlines.max()) + 1):
        left = [n for n in left if deadlines[n] >= now]
        here = [n for n in left if arrivals[n] <= now]
        if not here:
            continue
        waiting = QueueArrays(lengths[here], deadlines[here].astype(float), 1 / lengths[here])
        taken = [
            here[pick.request] for pick in in_rows(order, waiting, rows=rows, row_tokens=row_tokens, das=das).picks
        ]
        earned += float((1 / lengths[taken]).sum())
        left = [n for n in left if n not in taken]
    return earned


def _offline_optimum(lengths, arrivals, deadlines, *, rows, row_tokens) -> float:
    """Equations 9 to 13 as a mixed-integer program, one variable a request, batch and row."""
    batches = int(deadlines.max()) + 1
    shape = (len(lengths), batches, rows)
    utility = np.broadcast_to(1 / lengths[:, None, None], shape)
    when = np.arange(batches)[None, :]
    may = (when >= arrivals[:, None]) & (when <= deadlines[:, None])
    once = np.kron(np.eye(len(lengths)), np.ones(batches * rows))
    full = np.concatenate([np.eye(batches * rows) * length for length in lengths], axis=1)
    found = milp(
        -utility.ravel(),
        integrality=np.ones(utility.size),
        bounds=Bounds(0, np.broadcast_to(may[:, :, None], shape).ravel().astype(float)),
        constraints=[LinearConstraint(once, ub=1), LinearConstraint(full, ub=row_tokens)],
    )
    assert found.success
    return -float(found.fun)
