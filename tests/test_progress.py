"""Work that takes longer than two seconds says how much of it is left; shorter work says nothing."""

import pytest

from exeplan.progress import followed


@pytest.mark.parametrize(
    ("step", "lines"),
    [(0.1, []), (1.0, ["work: 2 of 12, about 10 s left", "work: 12 of 12, about 0 s left"])],
)
def test_the_rest_is_estimated_by_what_is_done(capsys, step, lines):
    times = iter(step * n for n in range(100))
    assert list(followed(range(12), "work", count=12, clock=lambda: next(times))) == list(range(12))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == lines
