"""Replay: a schedule executed request by request on predicted times.

The same Scheduler and policy that drive the engine drive this; only the clock is the cost model's.
"""

from dataclasses import dataclass

import numpy as np

from exeplan.errors import InputError
from exeplan.metrics import RequestRecord
from exeplan.plan import Schedule
from exeplan.policies import Floats
from exeplan.scheduling import BLOCK_SIZE, Batch, Scheduler, Sequence
from exeplan.simulator.cost import CostModel


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRecord:
    """One pass as it ran: seconds on the run's clock, rows and tokens."""

    start: float
    end: float
    num_prefill: int
    num_decode: int
    num_new_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What happened: one record a request, in order of arrival, and one a pass."""

    requests: tuple[RequestRecord, ...]
    passes: tuple[PassRecord, ...]
    peak_kv_tokens: int
    num_preemptions: int


@dataclass(eq=False, slots=True, kw_only=True)
class _Request(Sequence):
    arrival: float
    start: float | None = None
    token_times: list[float]


def replay(
    schedule: Schedule,
    cost: CostModel,
    *,
    input_tokens: np.ndarray,
    output_tokens: np.ndarray,
    num_blocks: int,
    arrivals: Floats | None = None,
    concurrency: int | None = None,
) -> Run:
    """Runs the requests in order; all are there at time 0 unless `arrivals` (seconds, rising) says otherwise.

    With `concurrency` only so many are under way at once: each that finishes is followed by the next (a closed loop).
    Raises InputError when a request cannot fit the KV cache even alone.
    """
    if not len(input_tokens):
        raise InputError("a replay needs at least one request")
    requests = _requests(input_tokens, output_tokens, arrivals)
    scheduler = Scheduler(schedule, num_blocks)
    passes: list[PassRecord] = []
    now, arrived, under_way, peak_blocks = 0.0, 0, 0, 0
    while arrived < len(requests) or scheduler.has_work:
        while arrived < len(requests) and requests[arrived].arrival <= now and under_way != concurrency:
            if concurrency is not None:
                requests[arrived].arrival = now
            scheduler.add(requests[arrived])
            arrived, under_way = arrived + 1, under_way + 1
        batch = scheduler.next_batch()
        if batch is None:
            now = requests[arrived].arrival
            continue
        end = now + cost.batch_seconds(batch)
        passes.append(_pass_record(batch, now, end))
        peak_blocks = max(peak_blocks, num_blocks - scheduler.free_blocks)
        under_way -= _produce(batch, now, end)
        scheduler.complete(batch)
        now = end
    return Run(
        requests=tuple(_record(r) for r in requests),
        passes=tuple(passes),
        peak_kv_tokens=peak_blocks * BLOCK_SIZE,
        num_preemptions=scheduler.num_preemptions,
    )


def _requests(inputs: np.ndarray, outputs: np.ndarray, arrivals: Floats | None) -> list[_Request]:
    times = np.zeros(len(inputs)) if arrivals is None else arrivals
    return [
        _Request(
            request_id=str(index),
            num_prompt_tokens=int(prompt),
            max_output_tokens=int(output),
            arrival=float(time),
            token_times=[],
        )
        for index, (prompt, output, time) in enumerate(zip(inputs, outputs, times, strict=True))
    ]


def _produce(batch: Batch, start: float, end: float) -> int:
    """Every row but finished ones, which are only kept, yields a token at the end of the pass. Returns who finished."""
    num_finished = 0
    for row in (*batch.prefill, *batch.decode):
        assert isinstance(row, _Request)
        if row.finished:
            continue
        if row.start is None:
            row.start = start
        row.num_output_tokens += 1
        row.token_times.append(end)
        row.finished = row.num_output_tokens >= row.max_output_tokens
        num_finished += row.finished
    return num_finished


def _pass_record(batch: Batch, start: float, end: float) -> PassRecord:
    return PassRecord(
        start=start,
        end=end,
        num_prefill=len(batch.prefill),
        num_decode=len(batch.decode),
        num_new_tokens=batch.num_new_tokens,
    )


def _record(request: _Request) -> RequestRecord:
    assert request.start is not None
    return RequestRecord(
        input_tokens=request.num_prompt_tokens,
        arrival=request.arrival,
        start=request.start,
        token_times=tuple(request.token_times),
    )
