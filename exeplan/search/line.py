"""Along one knob: how far a grid's limits reach, or that it cannot win, in a few trials.

Relies on throughput, latency and memory rising along the knob, as `branch_and_bound` does: a point that breaks a limit
and has less throughput than what is to beat ends the matter, as those above it break the limit too and those below
it have even less throughput.
"""

import math

from exeplan.search.crossing import Interval
from exeplan.search.grid import Grid, Index


def reach(grid: Grid, start: Index, *, at_least: float, slack: float) -> float:
    """The most throughput within the limits along the first knob through `start`; 0 where that is under `at_least`.

    That may be missed by the slack, relative; a line that misses it is not searched to the end. The first trial is
    `start`, the next the top where that has too little, each other one is where the limits are expected to break.
    """
    if start[0] < grid.bottom[0]:  # Limits so tight that the best is below the first values.
        grid.lower()
    here, most, ceiling, below = max(start[0], grid.bottom[0]), 0.0, math.inf, grid.bottom[0] - 1
    interval = Interval(below, -1.0, grid.shape[0], math.inf)  # Outside the line: nothing is in use, all limits break.
    while True:
        outcome, excess = grid((here, *start[1:])), grid.excess((here, *start[1:]))
        interval.tell(here, excess)
        if excess <= 0:
            most = max(most, outcome.throughput)
        else:
            ceiling = outcome.throughput
        near = most * (1 + slack) >= at_least
        hopeless = ceiling < at_least and (near or ceiling * (1 + slack) < at_least)
        if hopeless or interval.closed:
            return most if near else 0.0
        here = grid.top[0] if interval.bad == grid.shape[0] and not near else interval.middle()
