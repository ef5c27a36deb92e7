"""Contention: how much slower a device computes while the other devices of its host compute.

CPU devices share memory, caches and power: with all cores busy a thread may run at 0.8 of its speed alone. All else in
a profile is measured by one process, so whole passes are timed again: by one rank while the others wait (`alone`), and
by all ranks at once (`together`). The ratio slows down every plan for several devices. A rank of one thread is timed by
its CPU clock, which other programs do not stop: by the wall clock they doubled the ratio.
"""

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from exeplan.core.batch import Batch, SequenceState, num_blocks_for
from exeplan.core.profile import Measurement
from exeplan.profiler.measuring.device import synchronize
from exeplan.profiler.multi_device.rank_job import RankJob
from exeplan.profiler.multi_device.shards import Silent
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.shard import ALONE, Group, Shard

ROUNDS = 10
NUM_SEQS, CONTEXT = 32, 96
"""Size of the decode batch: it reads weights and cached keys in about equal parts."""


def pass_times(job: RankJob, rank: int, device: torch.device, _buffer: str | None) -> list[list[list[float]]]:
    """Seconds of passes by round: of this rank alone (rank 0 only), and of all ranks at once."""
    forward = _decode(_runner(job, rank, device), min(CONTEXT, job.spec.max_context - 1))
    each = job.seconds / ROUNDS / 2
    _timed(forward, device, each)
    alone, together = [], []
    for _ in range(ROUNDS):
        dist.barrier()
        alone.append(_timed(forward, device, each) if rank == 0 else [])
        dist.barrier()
        together.append(_timed(forward, device, each))
    return [alone, together]


def contention_rows(job: RankJob, answers: Sequence[list[list[list[float]]]]) -> tuple[Measurement, ...]:
    """The `alone` and `together` rows, from the answers of all ranks.

    Their ratio is the median of those within a round, which is short: the machine's speed drifts.
    """
    alone = [statistics.median(times) for times in answers[0][0]]
    together = [[statistics.median(times) for times in answer[1]] for answer in answers]
    slower = [own / before for times in together for own, before in zip(times, alone, strict=True)]
    seconds = statistics.median(alone)
    return tuple(
        Measurement(
            op="pass",
            phase=phase,
            num_seqs=NUM_SEQS,
            context_tokens=NUM_SEQS * min(CONTEXT, job.spec.max_context - 1),
            tensor_parallel_size=job.size if job.split else 1,
            seconds=float(f"{value:.4g}"),
            repeats=repeats,
        )
        for phase, value, repeats in (
            ("alone", seconds, len(alone)),
            ("together", seconds * statistics.median(slower), len(slower)),
        )
    )


def _runner(job: RankJob, rank: int, device: torch.device) -> ModelRunner:
    """The runner of a rank: a shard of all layers where the job is split, else a stage's layers."""
    spec, parts = job.spec, 1 if job.split else job.size
    group: Group = Silent(job.size) if job.split else ALONE
    layers, encoder_layers = ((0, -(-count // parts)) for count in (spec.num_layers, spec.num_encoder_layers))
    return ModelRunner(
        spec,
        shard=Shard(layers=layers, encoder_layers=encoder_layers, first=False, last=False, group=group),
        dtype=job.dtype,
        device=str(device),
        num_blocks=NUM_SEQS * num_blocks_for(CONTEXT + 1),
        dummy_weights=True,
        seed=rank,
    )


def _decode(runner: ModelRunner, context: int) -> Callable[[], Tensor]:
    """A pass over one decode batch."""
    blocks = num_blocks_for(context + 1)
    rows = tuple(
        SequenceState(request_id=str(n), num_prompt_tokens=context + 1, max_output_tokens=1, num_blocks=blocks)
        for n in range(NUM_SEQS)
    )
    tokens = {row.request_id: [0] * (context + 1) for row in rows}
    dtype = runner.activation
    hidden_NE = torch.ones(NUM_SEQS, runner.spec.hidden_size, dtype=dtype, device=runner.device)
    for row in rows if runner.spec.is_encoder_decoder else ():
        runner.take_encoded((row,), torch.ones(context, runner.spec.hidden_size, dtype=dtype, device=runner.device))
    batch = Batch(decode=rows)
    return lambda: runner.forward(batch, tokens, hidden_NE)


def _timed(forward: Callable[[], Tensor], device: torch.device, seconds: float) -> list[float]:
    clock = time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    times: list[float] = []
    start = time.perf_counter()
    while not times or time.perf_counter() - start < seconds:
        began = clock()
        forward()
        synchronize(device)
        times.append(clock() - began)
    return times
