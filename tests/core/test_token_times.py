"""Token times kept as passes and stretches of them are those of the requests, one by one and all together."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exeplan.core.runs.token_times import TokenTimes

TRACKS = (np.array([1.0, 2.0, 3.0, 5.0, 8.0]), np.array([1.5, 2.5, 4.0, 6.0]), np.zeros(0))
TIMES = TokenTimes(
    leads=np.array([0.5, 0.5, np.nan, 7.0]),
    tracks=TRACKS,
    owners=np.array([1, 0, 0, 2], dtype=np.int32),
    numbers=np.array([0, 1, 0, 1], dtype=np.uint16),
    begins=np.array([0, 0, 2, 1], dtype=np.int32),
    ends=np.array([2, 2, 5, 4], dtype=np.int32),
    num_requests=4,
)
LISTS = [[0.5, 1.5, 2.5, 3.0, 5.0, 8.0], [0.5, 1.0, 2.0], [2.5, 4.0, 6.0], [7.0]]


def check(times: TokenTimes, lists: list[list[float]]) -> None:
    everything = sorted(time for own in lists for time in own)
    assert [times.of(i).tolist() for i in range(len(lists))] == lists
    assert times.counts.tolist() == [len(own) for own in lists]
    for n in range(1, 8):
        expected = [own[n - 1] if len(own) >= n else np.nan for own in lists]
        np.testing.assert_array_equal(times.nth(n), expected)
    assert [times.in_order(i) for i in range(len(everything))] == everything
    gaps = [later - before for own in lists for before, later in pairwise(own)]
    assert times.longest_gap() == max(gaps, default=0.0)
    for opens, closes in ((0.0, 9.0), (0.5, 2.5), (2.5, 2.5), (3.0, 1.0), (2.2, 100.0)):
        assert times.num_within(opens, closes) == sum(opens < time <= closes for time in everything)


def test_stretches_of_passes_are_the_times_of_their_requests() -> None:
    check(TIMES, LISTS)


def test_each_request_may_be_asked_for_another_token() -> None:
    assert TIMES.nth(np.array([6, 1, 3, 1])).tolist() == [8.0, 0.5, 6.0, 7.0]


def test_only_some_requests_keep_their_tokens() -> None:
    check(TIMES.only(np.array([0, 3])), [LISTS[0], [], [], LISTS[3]])


@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, 2.5, 7.0]), max_size=6).map(sorted), min_size=1))
def test_lists_of_times_are_themselves(lists: list[list[float]]) -> None:
    check(TokenTimes.of_lists(lists), lists)


def test_nothing_lies_beyond_the_last_token() -> None:
    with pytest.raises(ValueError, match="empty"):
        TIMES.in_order(13)
