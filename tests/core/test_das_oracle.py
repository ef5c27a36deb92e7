"""DAS and Algorithm 2 choose what their description says: a second copy, written from the paper alone, row by row.

Source: TCB (ICPP 2022) sections 5.2 and 5.3. Where the paper is silent, README and docstrings decide: the first part is
eta * s rounded up and at least one request, equal ones go in order of arrival, and what comes greedily skips what does
not fit. Utilities are exact fractions, so that a request on the border of q times the mean is on the right side of it.
The oracle shares no line with `exeplan.core.queue_order`: plain lists, no numpy, no early end.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from exeplan.core.batch import SequenceState as Waiting
from exeplan.core.queue_order import Das, QueueArrays, das_rows, in_rows, in_slots_of_their_own, ranking
from exeplan.core.schedule import Schedule
from exeplan.scheduling.scheduler import Scheduler


class Request(NamedTuple):
    tokens: int
    deadline: int
    weight: int = 1

    @property
    def utility(self) -> Fraction:
        return Fraction(self.weight, self.tokens)


class Row(NamedTuple):
    chosen: list[int]
    """Numbers of requests, as they are put in."""
    num_dominant: int
    """How many of them were chosen for their utility alone."""


# The oracle


def first_of(requests: Sequence[Request], waiting: Sequence[int], budget: int) -> list[int]:
    """The sequence by utility, as far as it fits together."""
    taken: list[int] = []
    for number in by_utility(requests, waiting):
        if sum(requests[other].tokens for other in taken) + requests[number].tokens > budget:
            break
        taken.append(number)
    return taken


def by_utility(requests: Sequence[Request], waiting: Sequence[int]) -> list[int]:
    return sorted(waiting, key=lambda number: (-requests[number].utility, number))


def three_parts(
    requests: Sequence[Request], waiting: Sequence[int], num_dominant: int, q: Fraction
) -> tuple[list[int], list[int], list[int]]:
    """The utility-dominant set, the deadline-aware set by deadline, and the rest by utility."""
    ranked = by_utility(requests, waiting)
    dominant = ranked[:num_dominant]
    mean = sum(requests[number].utility for number in dominant) / len(dominant)
    aware = [number for number in ranked[num_dominant:] if requests[number].utility >= q * mean]
    rest = [number for number in ranked[num_dominant:] if requests[number].utility < q * mean]
    return dominant, sorted(aware, key=lambda number: (requests[number].deadline, number)), rest


def das(requests: Sequence[Request], *, rows: int, row_tokens: int, eta: Fraction, q: Fraction) -> list[Row]:
    """Algorithm 1."""
    waiting, found = list(range(len(requests))), []
    for _ in range(rows):
        if not waiting:
            break
        if sum(requests[number].tokens for number in waiting) <= row_tokens:
            found.append(Row(by_utility(requests, waiting), len(waiting)))
            waiting = []
            continue
        num_dominant = max(math.ceil(eta * len(first_of(requests, waiting, row_tokens))), 1)
        dominant, aware, rest = three_parts(requests, waiting, num_dominant, q)
        row = list(dominant)
        for number in aware + rest:
            if sum(requests[other].tokens for other in row) + requests[number].tokens <= row_tokens:
                row.append(number)
        found.append(Row(row, num_dominant))
        waiting = [number for number in waiting if number not in row]
    return found


def slotted(
    requests: Sequence[Request], *, rows: int, row_tokens: int, eta: Fraction, q: Fraction
) -> tuple[int, list[list[int]]]:
    """Algorithm 2: slots a row, and what is in each slot. A slot is as long as that number of them allows."""
    chosen = das(requests, rows=rows, row_tokens=row_tokens, eta=eta, q=q)
    longest = max(requests[number].tokens for row in chosen for number in row.chosen[: row.num_dominant])
    slots = row_tokens // longest
    left = [row_tokens // slots] * (rows * slots)
    held: list[list[int]] = [[] for _ in left]
    for number in [number for row in chosen for number in row.chosen]:
        fitting = [slot for slot, room in enumerate(left) if room >= requests[number].tokens]
        if fitting:
            slot = min(fitting, key=lambda slot: (left[slot], slot))
            left[slot] -= requests[number].tokens
            held[slot].append(number)
    return slots, held


# What is compared


def queue_of(requests: Sequence[Request]) -> QueueArrays:
    tokens = np.array([request.tokens for request in requests])
    weights = np.array([request.weight for request in requests], dtype=float)
    return QueueArrays(tokens, np.array([request.deadline for request in requests], dtype=float), weights / tokens)


def parameters(eta_percent: int, q_percent: int) -> tuple[Das, dict[str, Fraction]]:
    ours = Das(eta=eta_percent / 100, q=q_percent / 100)
    return ours, {"eta": Fraction(eta_percent, 100), "q": Fraction(q_percent, 100)}


ROW = 24
REQUESTS = st.lists(
    st.builds(Request, st.integers(1, ROW // 2), st.integers(0, 6), st.sampled_from([1, 1, 1, 2, 3])),
    min_size=1,
    max_size=24,
)
PERCENT = st.sampled_from([1, 10, 25, 30, 50, 70, 75, 90, 99])
LIKELY_AT_THE_BORDER = [Request(2, 3), Request(2, 2), Request(4, 1), Request(4, 0), Request(8, 0), Request(8, 0)]
"""Requests of 4 tokens are worth just half of what those of 2 are."""


@given(requests=REQUESTS, rows=st.integers(1, 4), eta=PERCENT, q=PERCENT)
@example(requests=LIKELY_AT_THE_BORDER, rows=1, eta=50, q=50)
@settings(max_examples=300, deadline=None)
def test_each_row_holds_what_algorithm_1_says(requests: list[Request], rows: int, eta: int, q: int) -> None:
    ours, theirs = parameters(eta, q)
    expected = das(requests, rows=rows, row_tokens=ROW, **theirs)
    found = das_rows(queue_of(requests), rows=rows, row_tokens=ROW, das=ours)
    assert [(row.tolist(), first) for row, first in found] == [tuple(row) for row in expected]
    packed = in_rows("das", queue_of(requests), rows=rows, row_tokens=ROW, das=ours)
    assert [(pick.bin, pick.request) for pick in packed.picks] == [
        (number, request) for number, row in enumerate(expected) for request in row.chosen
    ]


@given(requests=REQUESTS, rows=st.integers(1, 3), eta=PERCENT, q=PERCENT)
@settings(max_examples=200, deadline=None)
def test_each_slot_holds_what_algorithm_2_says(requests: list[Request], rows: int, eta: int, q: int) -> None:
    ours, theirs = parameters(eta, q)
    slots, held = slotted(requests, rows=rows, row_tokens=ROW, **theirs)
    packed = in_slots_of_their_own(queue_of(requests), rows=rows, row_tokens=ROW, das=ours)
    assert packed.bins_a_row == slots
    found = [[pick.request for pick in packed.picks if pick.bin == number] for number in range(len(held))]
    assert found == held


@given(
    requests=REQUESTS,
    room=st.integers(ROW // 2, 3 * ROW),
    limit=st.integers(1, 24),
    eta=PERCENT,
    q=PERCENT,
    before=st.integers(0, 30),
)
@settings(max_examples=300, deadline=None)
def test_a_policy_without_rows_takes_the_three_parts_in_turn(
    requests: list[Request], room: int, limit: int, eta: int, q: int, before: int
) -> None:
    """One row of the free memory, at most `limit` requests; of eta times their number the fractions add up."""
    ours, theirs = parameters(eta, q)
    everyone = list(range(len(requests)))
    starting = max(min(len(first_of(requests, everyone, room)), limit), 1)
    num_dominant = math.floor(theirs["eta"] * (before + starting)) - math.floor(theirs["eta"] * before)
    # Where it is no request's turn for utility, "like utility" is that of the best.
    dominant, aware, rest = three_parts(requests, everyone, max(num_dominant, 1), theirs["q"])
    if not num_dominant:
        aware = sorted(dominant + aware, key=lambda number: (requests[number].deadline, number))
        dominant = []
    found = ranking("das", queue_of(requests), room=room, limit=limit, das=ours, before=before)
    assert found.tolist() == dominant + aware + rest


@pytest.mark.parametrize(
    ("variables", "eta", "q"),
    [
        ({}, Fraction(1, 2), Fraction(1, 2)),
        ({"eta_percent": 30}, Fraction(3, 10), Fraction(7, 10)),
        ({"q_percent": 95}, Fraction(1, 2), Fraction(19, 20)),
        ({"eta_percent": 20, "q_percent": 10}, Fraction(1, 5), Fraction(1, 10)),
    ],
    ids=str,
)
def test_a_schedule_says_eta_and_q_and_the_paper_what_it_leaves_out(
    variables: dict[str, int], eta: Fraction, q: Fraction
) -> None:
    rng = np.random.default_rng(3)
    requests = [Request(int(n), int(d)) for n, d in zip(rng.integers(2, 13, 40), rng.integers(0, 50, 40), strict=True)]
    scheduler = Scheduler(Schedule("concat", {"rows": 3, "row_tokens": ROW, **variables}, "das"), num_blocks=1000)
    for number, request in enumerate(requests):
        scheduler.add(
            Waiting(
                request_id=str(number),
                num_prompt_tokens=request.tokens,
                max_output_tokens=2,
                deadline=float(request.deadline),
            )
        )
    batch = scheduler.next_batch()
    assert batch is not None
    expected = [number for row in das(requests, rows=3, row_tokens=ROW, eta=eta, q=q) for number in row.chosen]
    assert [int(row.request_id) for row in batch.prefill] == expected
