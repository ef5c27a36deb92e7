"""TCB's figures 9 to 12: naive, turbo and concatenated batches on the engine, at rising request rates.

A system is a schedule of the engine; all of them run the same model code. Rows hold 400 tokens, the paper's longest
sentence; slots, where they are given, the longest request that comes. Rates are shares of what slotted rows serve from
a backlog on this machine.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.tcb.load import MEAN, Load, lengths, poisson
from exeplan.core.schedule import Schedule
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.tokens.sampling import SamplingParams
from exeplan.runner.engine.engine import Engine, Request
from exeplan.runner.engine.executor import InProcessExecutor

ROWS, ROW_TOKENS = 64, 400
SHARES = (0.3, 0.6, 0.9, 1.2)
SLOT_TOKENS = {20.0: 50, 100.0: 100}
"""By the variance: what holds the longest request that comes."""


def systems(order: str, *, variance: float, overhead_tokens: int) -> Mapping[str, Schedule]:
    """What the figures compare, by the names of the paper; concat is one slot a row. DAS cuts slots by the batch.

    `overhead_tokens` is the fixed cost of a batch, in tokens, by which turbo cuts batches.
    """
    rows = {"rows": ROWS, "row_tokens": ROW_TOKENS}
    slots = Schedule("concat", {**rows, "slot_tokens": SLOT_TOKENS[variance]}, order)
    return {
        "naive": Schedule("static", {"batch_size": ROWS}, order),
        "turbo": Schedule("turbo", {"batch_size": ROWS, "overhead_tokens": overhead_tokens}, order),
        "concat": Schedule("concat", rows, order),
        "slots": Schedule("concat", rows, "slotted-das") if order == "das" else slots,
    }


@dataclass(frozen=True, slots=True)
class Served:
    """The outcome of a load: seconds until the last answer, answered requests, their utility."""

    seconds: float
    answered: int
    utility: float
    num_requests: int

    @property
    def throughput(self) -> float:
        return self.answered / self.seconds


def serve(
    runner: ModelRunner, schedule: Schedule, load: Load, *, clock: Callable[[], float] = time.perf_counter
) -> Served:
    """Plays a load against the engine in real time, until every request is answered or has expired.

    A backlog may be timed by another clock, such as that of the CPU.
    """
    begin = clock()
    engine = Engine(
        InProcessExecutor(runner), schedule, num_blocks=runner.cache.num_blocks, clock=lambda: clock() - begin
    )
    requests, arrivals = [request(load, number) for number in range(len(load))], load.arrivals.tolist()
    ended: dict[int, bool] = {}
    last, added = 0.0, 0
    while len(ended) < len(requests):
        now = clock() - begin
        while added < len(requests) and arrivals[added] <= now:
            engine.add(requests[added])
            added += 1
        if not engine.has_work:
            time.sleep(max(0.0, arrivals[added] - now))
            continue
        for output in engine.step():
            if output.finish_reason is not None:
                ended[int(output.request_id)] = output.finish_reason == "length"
                last = output.time if output.finish_reason == "length" else last
    answered = [number for number, served in ended.items() if served]
    return Served(last, len(answered), float(load.utilities[answered].sum()), len(load))


def overhead_tokens(runner: ModelRunner) -> int:
    """The fixed cost of a batch on this machine, in tokens: from a small batch and a large one."""
    small, large = 8, ROWS
    seconds = {}
    for size in (large, small, large):  # The first one warms up.
        alike = np.full(size, MEAN)
        load = Load(np.zeros(size), alike, np.full(size, np.inf), np.ones(size))
        seconds[size] = serve(runner, Schedule("static", {"batch_size": size}), load).seconds
    each = (seconds[large] - seconds[small]) / (large - small)
    return max(1, round((seconds[small] - small * each) / each * MEAN))


def saturated(runner: ModelRunner, schedule: Schedule, *, variance: float, seconds: float) -> float:
    """Requests a CPU-second from a backlog of about `seconds`: other load on the machine has little effect."""
    rng, rate = np.random.default_rng(0), 0.0
    count = ROWS * ROW_TOKENS // MEAN
    while True:
        drawn = lengths(rng, count, variance)
        backlog = Load(np.zeros(count), drawn, np.full(count, np.inf), np.ones(count))
        served = serve(runner, schedule, backlog, clock=time.process_time)
        rate = served.throughput
        if served.seconds >= 0.7 * seconds:
            return rate
        count = max(2 * count, int(rate * seconds))


def rising_rates(
    runner: ModelRunner, order: str, *, variance: float, seconds: float, shares: Sequence[float] = SHARES
) -> list[dict]:
    """One row a system and rate: throughput, utility and the share of requests that were answered."""
    compared = systems(order, variance=variance, overhead_tokens=overhead_tokens(runner))
    slots = systems("fcfs", variance=variance, overhead_tokens=1)["slots"]
    capacity = saturated(runner, slots, variance=variance, seconds=min(seconds, 3.0))
    batch_seconds = ROWS * ROW_TOKENS / MEAN / capacity
    rows = []
    for share in shares:
        rate = share * capacity
        load = poisson(rate, seconds, variance=variance, batch_seconds=batch_seconds, seed=1)
        for name, schedule in compared.items():
            served = serve(runner, schedule, load)
            rows.append(
                {
                    "order": order,
                    "variance": variance,
                    "system": name,
                    "rate": rate,
                    "throughput": served.throughput,
                    "utility": served.utility / served.seconds,
                    "answered": served.answered / max(1, served.num_requests),
                }
            )
    return rows


def from_backlogs(runner: ModelRunner, order: str, *, variance: float, seconds: float) -> dict[str, float]:
    """What each system serves at saturation, without deadlines."""
    compared = systems(order, variance=variance, overhead_tokens=overhead_tokens(runner))
    return {
        name: saturated(runner, schedule, variance=variance, seconds=seconds) for name, schedule in compared.items()
    }


def best_of(rows: Sequence[dict], what: str) -> dict[str, float]:
    """The most that each system reaches at any rate."""
    return {
        name: max(row[what] for row in rows if row["system"] == name)
        for name in dict.fromkeys(r["system"] for r in rows)
    }


def request(load: Load, number: int) -> Request:
    """One of the load: as many output tokens as it has input tokens."""
    tokens, vocabulary = int(load.tokens[number]), 1000
    prompt = [1 + (7919 * number + 31 * at) % vocabulary for at in range(tokens)]
    deadline = float(load.deadlines[number])
    return Request(
        request_id=str(number),
        prompt_token_ids=prompt,
        sampling=SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True),
        arrival=float(load.arrivals[number]),
        deadline=None if deadline == float("inf") else deadline,
        weight=float(load.weights[number]),
    )
