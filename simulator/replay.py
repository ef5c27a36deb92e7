"""Replay: a schedule executed request by request on predicted times.

The same Scheduler and policy that drive the engine drive this; only the clock is the cost model's.
"""

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple, cast

import numpy as np

from exeplan.errors import InputError
from exeplan.metrics import RequestRecord
from exeplan.plan import Schedule
from exeplan.policies import Floats
from exeplan.scheduling import BLOCK_SIZE, Batch, Scheduler, Sequence
from exeplan.simulator.cost import CostModel


class PassRecord(NamedTuple):
    """One pass as it ran: seconds on the run's clock, rows and tokens."""

    start: float
    end: float
    """When it has left its last stage."""
    spans: tuple[tuple[int, float, float], ...]
    """(stage, start, end), in the order of the stages."""
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
    scheduler = Scheduler(schedule, num_blocks, num_prefill_stages=len(cost.prefill_stages))
    # Those that decode come first: whom they take makes room for the next to be prefilled.
    pipelines = [_Pipeline(cost, phase) for phase in sorted({stage.phase for stage in cost.placement})]
    passes: list[PassRecord] = []
    events: list[tuple[float, int, str, Batch]] = []
    now, arrived, under_way, peak_blocks = 0.0, 0, 0, 0
    while True:
        while arrived < len(requests) and requests[arrived].arrival <= now and under_way != concurrency:
            if concurrency is not None:
                requests[arrived].arrival = now
            scheduler.add(requests[arrived])
            arrived, under_way = arrived + 1, under_way + 1
        for pipeline in pipelines:
            while pipeline.free[0] <= now and (batch := scheduler.next_batch(pipeline.phase)):
                spans = pipeline.run(batch, now)
                heappush(events, (spans[-1][2], len(passes), "done", batch))
                passes.append(_pass_record(batch, spans))
        peak_blocks = max(peak_blocks, num_blocks - scheduler.free_blocks)
        upcoming = [pipeline.free[0] for pipeline in pipelines if pipeline.free[0] > now]
        if arrived < len(requests) and under_way != concurrency:
            upcoming.append(requests[arrived].arrival)
        if not events and arrived == len(requests) and not scheduler.has_work:
            break
        now = min([events[0][0], *upcoming] if events else upcoming)
        while events and events[0][0] <= now:
            _, number, what, batch = heappop(events)
            if what == "arrived":
                scheduler.hand_over(batch)
                continue
            under_way -= _produce(batch, passes[number].start, now, prefills=cost.first_token_from_prefill)
            scheduler.complete(batch)
            if batch.phase == "prefill":
                heappush(events, (now + _handover_seconds(batch, cost), number, "arrived", batch))
    return Run(
        requests=tuple(_record(r) for r in requests),
        passes=tuple(passes),
        peak_kv_tokens=peak_blocks * BLOCK_SIZE,
        num_preemptions=scheduler.num_preemptions,
    )


class _Pipeline:
    """Stages that a batch passes in order, each running one batch at a time."""

    def __init__(self, cost: CostModel, phase: str) -> None:
        self.cost, self.phase = cost, phase
        self.stages = [number for number, stage in enumerate(cost.placement) if stage.phase == phase]
        self.free = [0.0] * len(self.stages)
        """When each stage is free."""

    def run(self, batch: Batch, now: float) -> list[tuple[int, float, float]]:
        """(stage, start, end) on each stage, in order."""
        spans, ready, free = [], now, self.free
        for number, seconds in enumerate(self.cost.stage_seconds(batch)):
            start = free[number] if free[number] > ready else ready
            ready = free[number] = start + seconds
            spans.append((self.stages[number], start, ready))
        return spans


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


def _produce(batch: Batch, start: float, end: float, *, prefills: bool) -> int:
    """Every row but finished ones, which are only kept, yields a token at the end of the pass. Returns who finished.

    A prefill yields one if `prefills` says so, and when its last chunk is done.
    """
    num_finished = 0
    for row in cast(tuple[_Request, ...], batch.prefill):
        if row.start is None:
            row.start = start
    producing = batch.whole_prefills + batch.decode if prefills else batch.decode
    for row in cast(tuple[_Request, ...], producing):
        if row.finished:
            continue
        row.num_output_tokens += 1
        row.token_times.append(end)
        row.finished = row.num_output_tokens >= row.max_output_tokens
        num_finished += row.finished
    return num_finished


def _handover_seconds(batch: Batch, cost: CostModel) -> float:
    """Of those whom the prefill has not finished; the token that it yielded is in no cache yet."""
    going_on = [row.num_tokens - cost.first_token_from_prefill for row in batch.prefill if not row.finished]
    return cost.handover_seconds(sum(going_on)) if going_on else 0.0


def _pass_record(batch: Batch, spans: list[tuple[int, float, float]]) -> PassRecord:
    return PassRecord(
        start=spans[0][1],
        end=spans[-1][2],
        spans=tuple(spans),
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
