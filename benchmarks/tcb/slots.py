"""TCB's figures 13 and 14: how much faster a batch of slotted rows is than the same rows in one piece, really computed.

A full batch of rows of 400 tokens, from its prefill to its last answer. More slots a row hold a few requests less, so
that what is compared is requests a second of the batch.
"""

import time
from dataclasses import dataclass
from statistics import median

import numpy as np

from benchmarks.tcb.load import MEAN, Load, lengths
from benchmarks.tcb.serve import ROW_TOKENS, request
from exeplan.core.schedule import Schedule
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.engine.engine import Engine
from exeplan.runner.engine.executor import InProcessExecutor

SLOTS = (1, 2, 3, 4, 5, 6, 7, 8, 10)


@dataclass(frozen=True, slots=True)
class FullBatch:
    seconds: float
    answered: int


def full_batch(
    runner: ModelRunner, *, rows: int, row_tokens: int, slots: int = 1, variance: float = 20.0, seed: int = 0
) -> FullBatch:
    """The first batch of a backlog that fills it, with requests as they come."""
    cut = {"slot_tokens": row_tokens // slots} if slots > 1 else {}
    schedule = Schedule("concat", {"rows": rows, "row_tokens": row_tokens, **cut})
    engine = Engine(InProcessExecutor(runner), schedule, num_blocks=runner.cache.num_blocks)
    tokens = lengths(np.random.default_rng(seed), 2 * rows * row_tokens // MEAN, variance)
    # Whoever is longer than a slot would get a batch of its own.
    tokens = tokens[tokens <= row_tokens // slots]
    load = Load(np.zeros(len(tokens)), tokens, np.full(len(tokens), np.inf), np.ones(len(tokens)))
    for number in range(len(load)):
        engine.add(request(load, number))
    answered, begin = 0, time.perf_counter()
    while True:
        answered += sum(output.finish_reason is not None for output in engine.step())
        if not engine.num_running:
            break
    seconds = time.perf_counter() - begin
    for number in range(len(load)):
        engine.abort(str(number))
    return FullBatch(seconds, answered)


def speed_ups(runner: ModelRunner, *, rows: int, repeats: int) -> list[dict]:
    """One row a number of slots; medians of runs that take turns, so that a slow moment meets all of them."""
    runs: dict[int, list[FullBatch]] = {slots: [] for slots in SLOTS}
    for repeat in range(repeats):
        for slots in SLOTS:
            runs[slots].append(full_batch(runner, rows=rows, row_tokens=ROW_TOKENS, slots=slots, seed=repeat))
    rates = {slots: median(run.answered / run.seconds for run in found) for slots, found in runs.items()}
    return [
        {
            "rows": rows,
            "slots": slots,
            "batch_seconds": median(run.seconds for run in found),
            "requests": median(run.answered for run in found),
            "speed_up": rates[slots] / rates[1],
        }
        for slots, found in runs.items()
    ]
