"""The rows are the policies' frontiers with one winner; the picture has the format of its file name."""

import math
from dataclasses import replace

import pytest

from exeplan.errors import InputError
from exeplan.figures import new_figure
from exeplan.planner.reports.frontier_plot import FrontierRow, draw_frontier, frontier_rows, plot_frontier
from exeplan.policies.interface import Knob
from exeplan.search.search import Outcome, Trial, search

BATCH = Knob("batch_size", (1, 2, 4))


def results(bound):
    """Two policies of which the second has twice the throughput and twice the latency."""
    return {
        name: search(
            (BATCH,),
            lambda point, k=k: Outcome(k * point["batch_size"], k * point["batch_size"], 1),
            bound=bound,
            capacity=1,
        )
        for name, k in (("slow", 1.0), ("fast", 2.0))
    }


def test_rows_are_the_frontiers_with_one_winner():
    rows = frontier_rows(results(bound=5.0))
    assert [(row.policy, row.latency, row.wins) for row in rows] == [
        ("slow", 1.0, False),
        ("slow", 2.0, False),
        ("slow", 4.0, True),  # as good as fast's and named first
        ("fast", 2.0, False),
        ("fast", 4.0, False),
        ("fast", 8.0, False),
    ]
    assert rows[0] == FrontierRow(policy="slow", latency=1.0, throughput=1.0, label="batch_size=1", wins=False)


def test_the_policy_of_the_plan_wins_though_another_has_as_much_by_closed_form():
    rows = frontier_rows(results(bound=5.0), winning="fast")
    assert [(row.policy, row.latency) for row in rows if row.wins] == [("fast", 4.0)]


def test_a_plan_below_the_frontier_has_a_star_and_the_curve_passes_above_it():
    found = results(bound=5.0)
    found["slow"] = replace(found["slow"], best=Trial({"batch_size": 5}, Outcome(3.5, 4.5, 1)))
    rows = frontier_rows(found, winning="slow")
    of_slow = [(row.label, row.latency, row.wins) for row in rows if row.policy == "slow"]
    assert of_slow[-2:] == [("batch_size=4", 4.0, False), ("batch_size=5", 4.5, True)]
    axes = new_figure(8, 5).add_subplot()
    plot_frontier(rows, axes, bound=5.0)
    curve, *_, star = axes.lines
    assert curve.get_xdata().tolist() == [1.0, 2.0, 4.0]
    assert (list(star.get_xdata()), list(star.get_ydata())) == ([4.5], [3.5])


def test_no_row_wins_where_nothing_keeps_the_bound():
    assert not any(row.wins for row in frontier_rows(results(bound=0.5)))


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")])
def test_the_suffix_decides_the_kind(tmp_path, suffix, magic):
    path = tmp_path / f"frontier{suffix}"
    draw_frontier(results(bound=5.0), path, bound=5.0)
    assert path.read_bytes().startswith(magic)


@pytest.mark.parametrize("bound", [0.1, 0.5, math.inf])
def test_draws_without_a_winner_and_without_a_bound(tmp_path, bound):
    draw_frontier(results(bound), tmp_path / "frontier.png", bound=bound)


def test_names_the_kinds_there_are(tmp_path):
    with pytest.raises(InputError, match=r"frontier\.gif: the name must end in \.png, \.svg, \.pdf"):
        draw_frontier({}, tmp_path / "frontier.gif", bound=1.0)


def test_makes_the_folder_and_replaces_a_picture_in_one_step(tmp_path):
    path = tmp_path / "none" / "frontier.png"
    for _ in range(2):
        draw_frontier({}, path, bound=1.0)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [one.name for one in path.parent.iterdir()] == ["frontier.png"]
    with pytest.raises(InputError, match="cannot write"):
        draw_frontier({}, path / "frontier.png", bound=1.0)
