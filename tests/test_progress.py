"""Work that takes longer than two seconds says how much of it is left; shorter work says nothing."""

import pytest

from exeplan.progress import Shown, Told, followed, show_left


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


def test_planning_says_what_it_does_and_how_much_is_left(capsys):
    times = iter([0.0, 1.0, 2.0, 4.0, 11.0, 12.0])
    with Shown("optimize", clock=lambda: next(times)) as shown:
        search = shown.part(0.0, 0.5, "48 GPUs")
        for share in (0.1, 0.2, 0.4, 0.8, 1.0):
            search("orca", share)
    lines = ["optimize: 10 %, about 18 s left; 48 GPUs: orca", "optimize: 50 %, about 12 s left; 48 GPUs: orca"]
    assert capsys.readouterr().err.splitlines() == lines


def test_parts_of_parts_keep_their_share_of_the_whole():
    heard = []

    class Listener(Told):
        def __call__(self, title, share):
            heard.append((title, share))

    inner = Listener().part(0.5, 1.0, "explanation").part(0.0, 0.5)
    inner("search", 0.5)
    inner("search", 2.0)
    assert heard == [("explanation: search", 0.625), ("explanation: search", 0.75)]


@pytest.mark.parametrize(("seconds", "text"), [(7.4, "7 s"), (119.0, "119 s"), (600.0, "10 min"), (7300.0, "2 h")])
def test_an_estimate_has_few_digits(seconds, text):
    assert show_left(seconds) == text
