"""TCB's figures 15 and 16: the utility of the orders, and the cost of DAS.

Figure 15 runs in simulated time with measured batch times: time is cut into batches, as in the paper's section 5.1; at
the start of each the order chooses the requests for the rows, and a request that has not begun by its deadline expires.
An upper bound is given with them: a linear programme that knows all requests beforehand and may split them.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean, median

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from benchmarks.tcb.load import MEAN, Load, poisson
from benchmarks.tcb.slots import full_batch
from exeplan.core.batch import SequenceState
from exeplan.core.queue_order import Das, QueueArrays, in_rows
from exeplan.core.schedule import Schedule
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.scheduling.scheduler import Scheduler

OTHERS = ("fcfs", "sjf", "edf")
BATCHES, SLACK = 20, 4
"""Batches of arrivals, and those after them in which the last deadlines come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A point of figure 15; `load` is what arrives over what rows of this size can take."""

    name: str
    rows: int
    row_tokens: int
    variance: float
    load: float = 2.0
    seconds: float = 0.0
    """Of a batch, measured."""
    heavy: bool = False
    """A fifth of the requests weigh ten times as much; only DAS uses weights."""

    def requests(self, seed: int) -> Load:
        rate = self.load * self.rows * self.row_tokens / MEAN / self.seconds
        span = BATCHES * self.seconds
        load = poisson(rate, span, variance=self.variance, batch_seconds=self.seconds, seed=seed)
        if not self.heavy:
            return load
        return replace(load, weights=np.where(np.random.default_rng([seed, 1]).random(len(load)) < 0.2, 10.0, 1.0))


def settings() -> list[Setting]:
    """The paper's: batch sizes, variances at batch size 16, and row lengths; then loads, and weights by the request."""
    found = [Setting(name=f"batch size {rows}", rows=rows, row_tokens=100, variance=20.0) for rows in (10, 16, 32, 64)]
    base = Setting(name="", rows=16, row_tokens=100, variance=20.0)
    found += [replace(base, name=f"variance {variance}", variance=variance) for variance in (20.0, 60.0, 100.0)]
    found += [replace(base, name=f"row length {tokens}", row_tokens=tokens) for tokens in (100, 200, 400)]
    found += [replace(base, name=f"load {load}", load=load) for load in (1.1, 1.5, 3.0)]
    return [*found, replace(base, name="weights, load 2.5", load=2.5, heavy=True)]


def with_batch_times(runner: ModelRunner, wanted: Sequence[Setting]) -> list[Setting]:
    """Each with the median time of three full batches of its rows on this machine."""
    times: dict[tuple[int, int, float], float] = {}
    for s in wanted:
        key = (s.rows, s.row_tokens, s.variance)
        if key not in times:
            runs = [
                full_batch(runner, rows=s.rows, row_tokens=s.row_tokens, variance=s.variance, seed=n) for n in range(3)
            ]
            times[key] = median(run.seconds for run in runs)
    return [replace(s, seconds=times[s.rows, s.row_tokens, s.variance]) for s in wanted]


def compare(setting: Setting, *, seeds: int) -> dict:
    """Mean utilities of the orders and of the bound, and DAS over the best of the others."""
    loads = [setting.requests(seed) for seed in range(seeds)]
    utility = {order: mean(earned(order, setting, load) for load in loads) for order in (*OTHERS, "das")}
    utility["bound"] = mean(bound(setting, load) for load in loads)
    best = max(utility[order] for order in OTHERS)
    return {
        "setting": setting.name,
        "batch_seconds": setting.seconds,
        **utility,
        "das_over_best": utility["das"] / best,
        "bound_over_best": utility["bound"] / best,
    }


def earned(order: str, setting: Setting, load: Load) -> float:
    """The utility of the requests that are in a batch by their deadline."""
    waiting, arrived, utility = np.zeros(0, dtype=np.int64), 0, 0.0
    for batch in range(BATCHES + SLACK):
        now = batch * setting.seconds
        until = int(np.searchsorted(load.arrivals, now, side="right"))
        waiting = np.concatenate([waiting, np.arange(arrived, until)])
        arrived = until
        waiting = waiting[load.deadlines[waiting] >= now]
        if not len(waiting):
            continue
        queue = QueueArrays(load.tokens[waiting], load.deadlines[waiting], load.utilities[waiting])
        packed = in_rows(order, queue, rows=setting.rows, row_tokens=setting.row_tokens, das=Das())
        chosen = [pick.request for pick in packed.picks]
        utility += float(load.utilities[waiting[chosen]].sum())
        waiting = np.delete(waiting, chosen)
    return utility


def bound(setting: Setting, load: Load) -> float:
    """The most that any schedule can earn: requests known beforehand and split freely, rows full to the last token."""
    first = np.ceil(load.arrivals / setting.seconds).astype(int)
    last = np.minimum(np.floor(load.deadlines / setting.seconds).astype(int), BATCHES + SLACK - 1)
    count = np.maximum(last - first + 1, 0)
    request_X = np.repeat(np.arange(len(load)), count)
    batch_X = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count - first, count)
    at = np.concatenate([request_X, len(load) + batch_X])
    weight = np.concatenate([np.ones(len(request_X)), load.tokens[request_X]])
    size = (len(load) + BATCHES + SLACK, len(request_X))
    limits = coo_matrix((weight, (at, np.tile(np.arange(len(request_X)), 2))), shape=size).tocsr()
    room = np.concatenate([np.ones(len(load)), np.full(BATCHES + SLACK, setting.rows * setting.row_tokens)])
    found = linprog(-load.utilities[request_X], A_ub=limits, b_ub=room, bounds=(0, 1), method="highs")
    assert found.success, found.message
    return float(-found.fun)


def overhead(setting: Setting, loads: Sequence[float]) -> list[dict]:
    """DAS's own time over that of the batch that it chooses, as requests come faster."""
    rows = []
    for share in loads:
        load = replace(setting, load=share).requests(0)
        # The requests of one batch time, and those left over from the one before.
        waiting = np.flatnonzero(load.arrivals < min(2.0, 1 + max(0.0, share - 1)) * setting.seconds)
        schedule = Schedule("concat", {"rows": setting.rows, "row_tokens": setting.row_tokens}, "das")
        seconds = median(_choosing(schedule, load, waiting) for _ in range(5))
        rows.append(
            {
                "load": share,
                "requests_per_second": len(load) / (BATCHES * setting.seconds),
                "waiting": len(waiting),
                "das_seconds": seconds,
                "share": seconds / setting.seconds,
            }
        )
    return rows


def _choosing(schedule: Schedule, load: Load, waiting: np.ndarray) -> float:
    """Seconds in which a scheduler makes a batch of these."""
    scheduler = Scheduler(schedule, num_blocks=100_000)
    for number in waiting:
        scheduler.add(_waiting(load, int(number)))
    begin = time.perf_counter()
    assert scheduler.next_batch() is not None
    return time.perf_counter() - begin


def _waiting(load: Load, number: int) -> SequenceState:
    tokens = int(load.tokens[number])
    return SequenceState(
        request_id=str(number),
        num_prompt_tokens=tokens + 1,
        num_begin_tokens=1,
        max_output_tokens=tokens,
        deadline=float(load.deadlines[number]),
    )
