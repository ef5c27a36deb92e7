"""What two cores can win over one at most: CPU times of passes over all layers, over half of them, and over half of the
heads, alone and while the other core computes the same.

    python -m benchmarks.engine.two_cores [--rounds 15]

The demo model with random weights and decode passes alone, of 2, 8 and 32 requests with 40 to 80 tokens each. A
pipeline of two stages is busy if two micro-batches of half of the requests are in it; then each stage runs two passes
while one core runs a single one of all requests. A tensor-parallel group of two runs one pass, each core with half of
the heads and of the feed-forward width. At best, nothing else takes time: no sampling, no message, no sum, no engine.
A worker a core runs all of these by turns, in every round once alone and once with the other; medians over the rounds,
CPU seconds of the thread. Writes records/two-cores.json.
"""

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from benchmarks.lib.record import write_record
from exeplan.core.batch import Batch, SequenceState
from exeplan.core.models.model import load_model_spec
from exeplan.planner.reports.tables import table
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.weights.shard import Shard

REQUESTS = (2, 8, 32)
PROMPT, PASSES = 40, 40
PARTS = ("all layers", "first half", "last half", "half of the heads")
Round = dict[tuple[str, int], float]
"""Milliseconds of CPU a pass by part and rows."""
Times = dict[tuple[str, int], list[float]]
"""The same of all rounds."""


class Half:
    """The group of two ranks as one of them sees it, where the other one's part takes no time."""

    size, rank = 2, 0

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat([x, x], -1)

    def muted(self) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass(frozen=True, slots=True)
class Row:
    """Of so many requests, milliseconds of CPU; one core's pass, each stage's, a rank's."""

    requests: int
    whole: float
    first: float
    last: float
    rank: float

    @property
    def pipeline(self) -> float:
        """Times one core, at best."""
        return self.whole / (2 * max(self.first, self.last))

    @property
    def tensor_parallel(self) -> float:
        """Times one core, at best."""
        return self.whole / self.rank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    context = get_context("spawn")
    cores = sorted(os.sched_getaffinity(0))[:2]
    ends, workers = [], []
    for core in cores:
        ours, theirs = context.Pipe()
        worker = context.Process(target=work, args=(theirs, core), daemon=True)
        worker.start()
        ends.append(ours)
        workers.append(worker)
    alone: Times = defaultdict(list)
    together: Times = defaultdict(list)
    for _ in range(args.rounds):
        for times, asked in ((alone, ends[:1]), (together, ends)):
            for key, taken in ask(asked).items():
                times[key].append(taken)
    for end in ends:
        end.send(False)
    for worker in workers:
        worker.join()
    rows = {"alone": rows_of(alone, alone), "the other core busy": rows_of(alone, together)}
    header = ("requests", "the other core", "one core ms", *(f"{part} ms" for part in PARTS[1:]), "pipeline", "tensor")
    print(table(header, [cells(name, row) for name, found in rows.items() for row in found]))
    shared = statistics.median(median(together, *key) / median(alone, *key) for key in alone)
    print(f"a pass takes {shared:.2f} times the CPU time while the other core computes")
    body = {
        name: [
            {"requests": r.requests, "whole": r.whole, "first": r.first, "last": r.last, "rank": r.rank}
            | {"pipeline": r.pipeline, "tensor_parallel": r.tensor_parallel}
            for r in found
        ]
        for name, found in (("alone", rows["alone"]), ("together", rows["the other core busy"]))
    }
    print(f"record: {write_record('two-cores', {**body, 'slower_together': shared})}")


def ask(ends: "list[Connection[bool, Round]]") -> Round:
    """A round on all of these workers at once; the times of the first."""
    for end in ends:
        end.send(True)
    first, *_ = [end.recv() for end in ends]
    return first


def rows_of(one: Times, two: Times) -> list[Row]:
    """One core is alone, whatever the halves are."""
    return [
        Row(
            n,
            whole=median(one, PARTS[0], n),
            first=median(two, PARTS[1], n // 2),
            last=median(two, PARTS[2], n // 2),
            rank=median(two, PARTS[3], n),
        )
        for n in REQUESTS
    ]


def median(times: Times, part: str, rows: int) -> float:
    return statistics.median(times[part, rows])


def cells(name: str, row: Row) -> list[str]:
    figures = (row.whole, row.first, row.last, row.rank)
    bounds = (row.pipeline, row.tensor_parallel)
    return [str(row.requests), name, *(f"{x:.2f}" for x in figures), *(f"{x:.2f} times" for x in bounds)]


def work(end: "Connection[Round, bool]", core: int) -> None:
    """A worker on its core: a round for each message, until one says that it was the last."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    passes = all_passes()
    while end.recv():
        end.send({key: run() for key, run in passes.items()})


def all_passes() -> dict[tuple[str, int], Callable[[], float]]:
    spec = load_model_spec("demo")
    layers, half = spec.num_layers, spec.num_layers // 2
    shards = {
        PARTS[0]: Shard(layers=(0, layers)),
        PARTS[1]: Shard(layers=(0, half), last=False),
        PARTS[2]: Shard(layers=(half, layers), first=False),
        PARTS[3]: Shard(layers=(0, layers), group=Half()),
    }
    found: dict[tuple[str, int], Callable[[], float]] = {}
    for part, shard in shards.items():
        runner = ModelRunner(spec, shard=shard, num_blocks=8 * max(REQUESTS), dummy_weights=True)
        for rows in REQUESTS if shard.num_layers == layers else [n // 2 for n in REQUESTS]:
            found[part, rows] = partial(milliseconds, runner, rows)
    return found


@torch.inference_mode()
def milliseconds(runner: ModelRunner, num_rows: int) -> float:
    """Of CPU, the median of the decode passes of so many requests, after their prefill."""
    tokens = {str(n): [(7 * i + n) % 2000 + 5 for i in range(PROMPT + PASSES + 1)] for n in range(num_rows)}
    rows = tuple(
        SequenceState(request_id=name, num_prompt_tokens=PROMPT, max_output_tokens=PASSES + 1, num_blocks=8)
        for name in tokens
    )
    hidden = None if runner.shard.first else torch.randn(PROMPT * num_rows, runner.spec.hidden_size)
    runner.forward(Batch(prefill=rows), tokens, hidden)
    hidden = None if hidden is None else hidden[:num_rows]
    taken = []
    for number in range(PASSES):
        for row in rows:
            row.num_output_tokens = number + 1
        began = time.thread_time()
        runner.forward(Batch(decode=rows), tokens, hidden)
        taken.append(time.thread_time() - began)
    for name in tokens:
        runner.free(name)
    return 1e3 * statistics.median(taken)


if __name__ == "__main__":
    main()
