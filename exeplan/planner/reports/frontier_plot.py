"""The throughput/latency frontier of each policy: `frontier_rows` has the numbers, `plot_frontier` draws them.

Only points that the search tried are drawn, so that curves are dense around the bound and sparse far from it.
"""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from exeplan.figures import check_picture, new_figure, save_figure
from exeplan.search.search import Result, Trial
from exeplan.units import show_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LABEL_WIDTH = 40
"""Characters in a line of the winner's schedule: about half the picture."""
WIDEST = 4.0
"""Latency is drawn up to this many bounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierRow:
    """A schedule on its policy's frontier, or the plan's, which may lie below it. Seconds, requests/s."""

    policy: str
    latency: float
    throughput: float
    label: str
    """Its control variables."""
    wins: bool
    """The plan's, or the best of its policy; of all, where there is no plan."""


def frontier_rows(results: Mapping[str, Result], *, winning: str | None = None) -> list[FrontierRow]:
    """Every policy's frontier, policies as given, latency rising; one row at most wins: the `best` of its result.

    `winning` is the policy of the plan, which a replay may prefer to the one with the most throughput by closed form.
    """
    winners = {policy: result.best for policy, result in results.items() if result.best is not None}
    if winning is None:
        winning = max(winners, key=lambda policy: winners[policy].outcome.throughput, default=None)
    rows = []
    for policy, result in results.items():
        best = winners.get(policy) if policy == winning else None
        rows += [_row(policy, trial) for trial in result.frontier if best is None or not _same(trial, best)]
        rows += [_row(policy, best, wins=True)] if best else []
    places = {policy: number for number, policy in enumerate(results)}
    return sorted(rows, key=lambda row: (places[row.policy], row.latency))


def _row(policy: str, trial: Trial, *, wins: bool = False) -> FrontierRow:
    return FrontierRow(
        policy=policy,
        latency=trial.outcome.latency,
        throughput=trial.outcome.throughput,
        label=", ".join(f"{name}={value}" for name, value in trial.point.items()),
        wins=wins,
    )


def _same(one: Trial, other: Trial) -> bool:
    """Whether they are one schedule; a point of a search may have variables that its schedule leaves out."""
    return one.point == other.point or one.outcome == other.outcome


def draw_frontier(results: Mapping[str, Result], path: Path, *, bound: float, winning: str | None = None) -> None:
    """Writes the picture as PNG, SVG or PDF by the path's suffix. Raises InputError for another or an unusable path."""
    check_picture(path)
    figure = new_figure(8, 5)
    plot_frontier(frontier_rows(results, winning=winning), figure.add_subplot(), bound=bound)
    save_figure(figure, path)


def plot_frontier(rows: Sequence[FrontierRow], axes: "Axes", *, bound: float) -> None:
    """Draws the rows within `WIDEST` bounds, the bound and the winner."""
    rows = [row for row in rows if row.latency <= WIDEST * bound]
    for policy in dict.fromkeys(row.policy for row in rows):
        own = _rising([row for row in rows if row.policy == policy])
        axes.step([r.latency for r in own], [r.throughput for r in own], where="post", marker=".", label=policy)
    if math.isfinite(bound):
        axes.axvline(bound, color="0.3", linestyle="--", linewidth=1, label=f"bound {show_seconds(bound)}")
    else:
        axes.set_xscale("log")
    axes.set(xlabel="latency that the bound is on (s)", ylabel="throughput (requests/s)")
    axes.set_title("Most throughput within a latency, by policy")
    axes.set_ylim(0, 1.4 * max((row.throughput for row in rows), default=1.0) or 1.0)
    axes.grid(alpha=0.3)
    for winner in (row for row in rows if row.wins):
        _mark(axes, winner)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right")


def _rising(rows: Sequence[FrontierRow]) -> list[FrontierRow]:
    """The rows with more throughput than all with less latency; these rise."""
    return [row for n, row in enumerate(rows) if all(row.throughput > other.throughput for other in rows[:n])]


def _mark(axes: "Axes", winner: FrontierRow) -> None:
    """A star, and its schedule above all curves, inside the axes."""
    at = (winner.latency, winner.throughput)
    axes.plot(*at, marker="*", markersize=16, color="black", linestyle="none", zorder=5)
    schedule = textwrap.fill(f"{winner.policy}: {winner.label}", _LABEL_WIDTH)
    axes.annotate(
        f"{schedule}\n{winner.throughput:.3g} requests/s, {show_seconds(winner.latency)}",
        at,
        xytext=(0.02, 0.97),
        textcoords="axes fraction",
        ha="left",
        va="top",
        arrowprops={"arrowstyle": "-", "color": "0.5"},
        bbox={"boxstyle": "round", "facecolor": "white", "edgecolor": "0.7", "alpha": 0.9},
    )
