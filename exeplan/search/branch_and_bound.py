"""Branch and bound over boxes of a grid, for throughput, latency and memory that rise with every knob.

Source: ExeGPT (ASPLOS 2024) section 5.1, Algorithm 1: a box's top-right corner bounds its throughput, its lower-left
corner its latency. Relies on all three not falling as any knob rises: then it finds the optimum, ties included (least
latency, then first in the order of the grid). Where the algorithm is loose in print, this differs:

- It only halves boxes. Here a box is first cut to what still matters, as in branch-reduce-and-bound (Tuy, Al-Khayyal,
  Thach 2005): each knob comes down to the last value that the lower-left corner can afford, and up to the first one
  with which the top-right corner can still win. That takes half to a tenth of the evaluations.
- Its boxes share their edges, and it queues what is affordable as a whole. Here they are disjoint and shrink to points.
- Fixed tolerances would list every point of a plateau. Here they are ceilings. The first pass has none, but for falls
  that a knob declares (`Knob.falls`): a few points show nothing of teeth that are narrower than what lies between them.
  If the points tried show dips (one above another has less throughput, or less load), another pass has the largest dip
  as its slack, up to the tolerance, and tries a limited number of points more. The gap says what it left open.
- A dip above the tolerance (caches overflow, a prefill in every pass) breaks the bound itself: the corner may be worse
  than what lies below it. Then a pass before that one bounds a box by an estimate of the monotone envelope: the best of
  the corner and of the points 1, 2, 4, ... below it along each knob. That is a heuristic, as is the polish after each
  pass (the same distances around the winner, and its diagonal neighbours, until nothing gains).

So the gap is a bound as long as nothing dips more than the points tried show. Dips that they show and that it does not
count, above the tolerance or found when no more points were allowed, are reported: with them it is an estimate.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from exeplan.search.crossing import last_within
from exeplan.search.grid import Grid, Index, Rank, Slack

_NEAR = 0.02
"""How far below what is of interest a point is still a reason to look around it."""
_OPEN = 0.01
"""A gap from which on it is looked for longer."""
_LEAST_ALLOWED = 200
"""Points that dips may always cost."""

Box = tuple[Index, Index]
"""Lower-left and top-right corner, both inside."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """How far a box's corners are not believed."""

    slack: Slack = Slack()  # noqa: RUF009 (frozen)
    envelope: bool = False
    """Throughput may fall towards the top-right corner by more than the slack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search knows of its best point."""

    gap: float = 0.0
    """(largest throughput that a box left over could hold - best) / best, 0 when none is left over."""
    dips: Slack = Slack()  # noqa: RUF009 (frozen)
    """The largest that were seen."""
    uncounted: Slack = Slack()  # noqa: RUF009 (frozen)
    """Of these the ones that the gap does not count, 0 where it does."""


def branch_and_bound(grid: Grid, tolerance: Slack, budget: int, *, thorough: bool = True) -> Found:
    """Tries what it takes to know the best point.

    Dips may cost up to 2 % of the grid's points, and as many again where these leave a gap that is worth it; 200 points
    where it need not be `thorough`.
    """
    used = declared = Slack(grid.falls, grid.falls)
    gap = _pass(grid, Doubt(declared), budget)
    if grid.at_least and not _near(grid):
        return Found()
    dips = grid.dips()
    steep = dips.throughput > max(tolerance.throughput, grid.falls)
    more = _allowance(grid) if thorough else _LEAST_ALLOWED
    limit = min(budget, len(grid.tried) + more)

    def again(doubt: Doubt) -> float:
        """A pass within the limit, and once it is reached as many points more where that left much open."""
        found = _pass(grid, doubt, limit)
        if thorough and found > _OPEN and len(grid.tried) >= limit:
            return _pass(grid, doubt, min(budget, limit + more))
        return found

    if steep:
        gap = again(Doubt(Slack(load=_doubted(dips, declared, tolerance).load), envelope=True))
    while (slack := _doubted(dips, declared, tolerance)) != used and len(grid.tried) < limit:
        gap = again(Doubt(slack, envelope=steep))
        dips, used = grid.dips(), slack
    # Slack in throughput that no pass had scales the gap; of load it would have kept more of the boxes.
    return Found(
        gap=max((1 + gap) * (1 + slack.throughput) / (1 + used.throughput) - 1, 0.0),
        dips=dips,
        uncounted=dips.above(Slack(slack.throughput, used.load)),
    )


def _near(grid: Grid) -> bool:
    """Whether a point tried fits its limits and is of interest, or nearly so in both."""
    return any(
        outcome.throughput * (1 + _NEAR) >= grid.at_least and not grid.limits.broken(outcome, _NEAR)
        for outcome in grid.tried.values()
    )


def _doubted(dips: Slack, declared: Slack, tolerance: Slack) -> Slack:
    """The dips up to the tolerance, but no less than was declared."""
    return Slack(
        max(min(dips.throughput, tolerance.throughput), declared.throughput),
        max(min(dips.load, tolerance.load), declared.load),
    )


def _allowance(grid: Grid) -> int:
    """Points that dips may cost: 2 % of the grid, at least 200 and at most 2000."""
    return min(max(_LEAST_ALLOWED, math.prod(grid.shape) // 50), 2000)


def _pass(grid: Grid, doubt: Doubt, budget: int) -> float:
    gap = _explore(grid, doubt, budget)
    if not grid.at_least or _near(grid):
        _polish(grid)
    return gap


def _explore(grid: Grid, doubt: Doubt, budget: int) -> float:
    """Splits the box of the largest bound until none can hold a better point or the budget is spent; gives the gap."""
    queue: list[tuple[Rank, Box]] = []
    _push(grid, queue, (grid.bottom, grid.top), doubt)
    while queue and len(grid.tried) < budget:
        bound, (low, high) = heapq.heappop(queue)
        if grid.best is not None and bound >= grid.best:
            return 0.0
        if low != high:
            for half in _halves(low, high):
                _push(grid, queue, half, doubt)
    if not queue or grid.best is None or grid.best[0] == 0:
        return 0.0
    return max(0.0, queue[0][0][0] / grid.best[0] - 1)


def _push(grid: Grid, queue: list[tuple[Rank, Box]], box: Box, doubt: Doubt) -> None:
    """Queues what can matter of the box under a rank that none of its points precedes."""
    if (cut := _cut(grid, box, doubt)) is None:
        return
    low, _ = cut
    bound = (-_ceiling(grid, cut, doubt), grid(low).latency * (1 - doubt.slack.load), low)
    if -bound[0] >= grid.at_least and (grid.best is None or bound < grid.best):
        heapq.heappush(queue, (bound, cut))


def _halves(low: Index, high: Index) -> tuple[Box, Box]:
    """The box split in the middle of its widest knob."""
    knob = max(range(len(low)), key=lambda k: high[k] - low[k])
    middle = (low[knob] + high[knob]) // 2
    return (_turn(low, knob, middle + 1), high), (low, _turn(high, knob, middle))


def _cut(grid: Grid, box: Box, doubt: Doubt) -> Box | None:
    """The part of the box that can hold a point within the limits and no worse than the best; None for nothing."""
    low, high = box
    excess = partial(grid.excess, slack=doubt.slack.load)
    if excess(low) > 0:
        return None
    for knob in range(len(low)):
        high = _turn(high, knob, _last(excess, low, knob, high[knob]))
    if _lack(grid, doubt, low, high) > 0:
        return None
    for knob in range(len(low)):
        low = _turn(low, knob, _last(partial(_lack, grid, doubt, low), high, knob, low[knob]))
    return (low, high) if excess(low) <= 0 else None


def _last(excess: Callable[[Index], float], start: Index, knob: int, end: int) -> int:
    """The value of the knob farthest from `start` towards `end` with which the excess is not above 0."""
    return last_within(lambda value: excess(_turn(start, knob, value)), start[knob], end)


def _lack(grid: Grid, doubt: Doubt, low: Index, high: Index) -> float:
    """The throughput that the box misses the one to beat by; not above 0 where it can win."""
    most = grid.at_least if grid.best is None else max(grid.at_least, -grid.best[0])
    return most - _ceiling(grid, (low, high), doubt)


def _ceiling(grid: Grid, box: Box, doubt: Doubt) -> float:
    """The throughput that no point of the box exceeds."""
    low, high = box
    most = grid(high).throughput
    if doubt.envelope:
        below = (index for k in range(len(low)) for index in _along(grid, high, k) if low[k] <= index[k] < high[k])
        most = max([most, *(grid(index).throughput for index in below)])
    return most * (1 + doubt.slack.throughput)


def _turn(index: Index, knob: int, value: int) -> Index:
    return (*index[:knob], value, *index[knob + 1 :])


def _polish(grid: Grid) -> None:
    """Moves from the best point, or the lowest-latency one if none fits, to better ones around it until there is
    none."""
    start = None
    while (here := grid.best[2] if grid.best else grid.lowest_latency()) != start:
        start = here
        for knob in range(len(grid.shape)):
            for index in _along(grid, grid.best[2] if grid.best else here, knob):
                grid(index)
        for index in _around(grid, grid.best[2] if grid.best else here):
            grid(index)


def _along(grid: Grid, index: Index, knob: int) -> Iterator[Index]:
    distance = 1
    while distance < grid.shape[knob]:
        for value in (index[knob] - distance, index[knob] + distance):
            if 0 <= value < grid.shape[knob]:
                yield _turn(index, knob, value)
        distance *= 2


def _around(grid: Grid, index: Index) -> Iterator[Index]:
    for steps in itertools.product((-1, 0, 1), repeat=len(index)):
        neighbour = tuple(i + step for i, step in zip(index, steps, strict=True))
        if neighbour in grid:
            yield neighbour
