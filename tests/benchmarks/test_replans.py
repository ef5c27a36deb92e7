"""The gaps between tokens that a plan switch leaves, counted also where the next token has not come yet."""

from benchmarks.service.replans import Gaps


def test_a_gap_counts_where_it_ends_after_the_switch_or_has_not_ended() -> None:
    gaps = Gaps()
    for answer, now, last in ((1, 0.0, False), (1, 0.9, False), (2, 0.8, False), (1, 1.2, True)):
        gaps.token(answer, now, last=last)
    assert gaps.longest(1.0, 1.5) == 0.7, "the second answer still waits"
    gaps.token(2, 1.6, last=True)
    assert gaps.longest(1.0, 1.7) == 1.6 - 0.8
    assert gaps.longest(2.0, 2.5) == 0.0
