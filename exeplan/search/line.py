"""Along one knob: how far a grid's limits reach, or that it cannot win, in a few trials.

Relies on throughput, latency and memory rising along the knob, as `search_boxes` does: a point that breaks a limit and
has less throughput than what is to beat ends the matter, as those above it break the limit too and those below it have
even less throughput.
"""

from exeplan.search.grid import Grid, Index


def reach(grid: Grid, start: Index, *, at_least: float, slack: float) -> float:
    """The most throughput within the limits along the first knob through `start`; 0 where that is under `at_least`.

    That may be missed by the slack, relative; a line that misses it is not searched to the end. The first trial is
    `start`, the next the top where that has too little, each other one halves what is left.
    """
    low, high, most, ceiling = -1, grid.shape[0], 0.0, float("inf")
    at = start[0]
    while high - low > 1:
        index = (at, *start[1:])
        throughput = grid(index).throughput
        if grid.fits(index):
            low, most = at, max(most, throughput)
        else:
            high, ceiling = at, throughput
        near = most * (1 + slack) >= at_least
        if ceiling < at_least and (near or ceiling * (1 + slack) < at_least):
            break
        untried = high == grid.shape[0] and not near
        at = grid.top[0] if untried else (low + high) // 2
    return most if most * (1 + slack) >= at_least else 0.0
