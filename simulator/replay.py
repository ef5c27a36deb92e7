"""Replay: a schedule executed request by request on predicted times.

The engine runs the same Scheduler and policy; only the clock differs: here it is the cost model. Where one stage does
everything, repeated decode passes of one batch are timed and completed together, up to the next event.

Not here: the time of a pass (`cost.py`), and which batch is next (`exeplan/scheduling`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple, cast

import numpy as np

from exeplan.arrays import Floats
from exeplan.core.batch import BLOCK_SIZE, Batch, SequenceState
from exeplan.core.metrics import RequestRecord
from exeplan.core.schedule import Schedule
from exeplan.errors import InputError
from exeplan.scheduling.scheduler import Scheduler
from exeplan.simulator.cost import CostModel


class PassRecord(NamedTuple):
    """One pass over the stages: seconds on the run's clock, rows and tokens."""

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
    """What happened: one record a request, in order of arrival, expired ones too, and one a pass."""

    requests: tuple[RequestRecord, ...]
    passes: tuple[PassRecord, ...]
    peak_kv_tokens: int
    num_preemptions: int


@dataclass(eq=False, slots=True, kw_only=True)
class _Request(SequenceState):
    arrival: float
    patience: float | None = None
    """Seconds from arrival to deadline."""
    start: float | None = None
    token_times: list[float]

    def arrive(self, now: float) -> None:
        self.arrival = now
        self.deadline = None if self.patience is None else now + self.patience


def replay(
    schedule: Schedule,
    cost: CostModel,
    *,
    input_tokens: np.ndarray,
    output_tokens: np.ndarray,
    num_blocks: int,
    arrivals: Floats | None = None,
    concurrency: int | None = None,
    think_seconds: float = 0.0,
    deadlines: Floats | None = None,
    weights: Floats | None = None,
    seed: int = 0,
) -> Run:
    """Runs the requests in order; all are there at time 0 unless `arrivals` (seconds, rising) says otherwise.

    `concurrency` makes a closed loop: that many clients, each of which sends its next request when it has an answer, or
    after an exponential pause of mean `think_seconds` drawn by `seed`. `deadlines` are seconds from a request's arrival
    by which its prefill must start; `weights` enter the utility. Raises InputError when a request alone exceeds the KV
    cache.
    """
    if not len(input_tokens):
        raise InputError("a replay needs at least one request")
    requests = _requests(input_tokens, output_tokens, arrivals, deadlines, weights)
    scheduler = Scheduler(
        schedule,
        num_blocks,
        num_prefill_stages=len(cost.prefill_stages),
        whole_prompts=cost.spec.is_encoder_decoder,
    )
    # Decode stages come first: a request that they take frees a place for the next prefill.
    pipelines = [_Pipeline(cost, phase) for phase in sorted({stage.phase for stage in cost.placement})]
    pauses = _pauses(think_seconds, seed)
    clients = None if concurrency is None else sorted(next(pauses) for _ in range(concurrency))
    passes: list[PassRecord] = []
    events: list[_Event] = []
    now, arrived, peak_blocks = 0.0, 0, 0
    while True:
        while (coming := _next_arrival(requests, arrived, clients)) <= now:
            requests[arrived].arrive(requests[arrived].arrival if clients is None else coming)
            if clients is not None:
                heappop(clients)
            scheduler.add(requests[arrived])
            arrived += 1
        for expired in cast(list[_Request], scheduler.expire(now)):
            expired.start = now
            if clients is not None:
                heappush(clients, now + next(pauses))
        for pipeline in pipelines:
            while pipeline.free[0] <= now and (batch := scheduler.next_batch(pipeline.phase)):
                records = pipeline.run(batch, now, coming, scheduler)
                ends = [record.end for record in records]
                heappush(events, _Event(ends[-1], len(passes), "done", batch, ends))
                passes += records
        peak_blocks = max(peak_blocks, num_blocks - scheduler.free_blocks)
        upcoming = [coming, *(pipeline.free[0] for pipeline in pipelines if pipeline.free[0] > now)]
        if not events and arrived == len(requests) and not scheduler.has_work:
            break
        now = min([events[0].time, *upcoming] if events else upcoming)
        while events and events[0].time <= now:
            _, number, what, batch, ends = heappop(events)
            if what == "arrived":
                scheduler.kv_arrived(batch)
                continue
            num_finished = _produce(batch, passes[number].start, ends, prefills=cost.first_token_from_prefill)
            if clients is not None:
                for _ in range(num_finished):
                    heappush(clients, now + next(pauses))
            scheduler.complete(batch)
            if batch.phase == "prefill":
                heappush(events, _Event(now + _kv_transfer_seconds(batch, cost), number, "arrived", batch, ends))
    return Run(
        requests=tuple(_record(r) for r in requests),
        passes=tuple(passes),
        peak_kv_tokens=peak_blocks * BLOCK_SIZE,
        num_preemptions=scheduler.num_preemptions,
    )


class _Event(NamedTuple):
    """A batch has left its last stage, or its keys and values have arrived."""

    time: float
    number: int
    """Of its first pass."""
    what: str
    batch: Batch
    ends: list[float]
    """Of each of its passes."""


class _Pipeline:
    """Stages that a batch passes in order, each running one batch at a time."""

    def __init__(self, cost: CostModel, phase: str) -> None:
        self.cost, self.phase = cost, phase
        self.stages = [number for number, stage in enumerate(cost.placement) if stage.phase == phase]
        self.free = [0.0] * len(self.stages)
        """When each stage is free."""

    def run(self, batch: Batch, now: float, coming: float, scheduler: Scheduler) -> list[PassRecord]:
        """The batch's pass, or as many in a row as begin before the next request is `coming`, which may change it."""
        count = scheduler.num_repeats(batch) if self.cost.times_repeats else 1
        if count > 1:
            times = now + np.concatenate([[0.0], np.cumsum(self.cost.repeated_seconds(batch, count))])
            count = min(int(np.searchsorted(times[1:], coming)) + 1, count)
            scheduler.repeat(batch, count)
            spans = [((0, start, end),) for start, end in pairwise(times[: count + 1].tolist())]
            self.free[0] = spans[-1][0][2]
            return [_pass_record(batch, span) for span in spans]
        single, ready, free = [], now, self.free
        for number, seconds in enumerate(self.cost.stage_seconds(batch)):
            start = free[number] if free[number] > ready else ready
            ready = free[number] = start + seconds
            single.append((self.stages[number], start, ready))
        return [_pass_record(batch, tuple(single))]


def _next_arrival(requests: list[_Request], arrived: int, clients: list[float] | None) -> float:
    """Seconds; infinity where no request arrives before another finishes."""
    if arrived == len(requests) or clients == []:
        return math.inf
    return requests[arrived].arrival if clients is None else max(requests[arrived].arrival, clients[0])


def _pauses(think_seconds: float, seed: int) -> Iterator[float]:
    """Seconds between an answer and the client's next request."""
    rng = np.random.default_rng(seed)
    while True:
        yield float(rng.exponential(think_seconds))


def _requests(
    inputs: np.ndarray,
    outputs: np.ndarray,
    arrivals: Floats | None,
    deadlines: Floats | None,
    weights: Floats | None,
) -> list[_Request]:
    times = np.zeros(len(inputs)) if arrivals is None else arrivals
    patience = [None] * len(inputs) if deadlines is None else deadlines.tolist()
    worth = np.ones(len(inputs)) if weights is None else weights
    return [
        _Request(
            request_id=str(index),
            num_prompt_tokens=int(prompt),
            max_output_tokens=int(output),
            weight=float(weight),
            arrival=float(time),
            patience=patient,
            token_times=[],
        )
        for index, (prompt, output, time, patient, weight) in enumerate(
            zip(inputs, outputs, times, patience, worth, strict=True)
        )
    ]


def _produce(batch: Batch, start: float, ends: list[float], *, prefills: bool) -> int:
    """Every row but finished ones, which are only kept, yields a token at the end of each pass.

    A prefill yields one only if `prefills`, at its last chunk. Returns the number of requests that finished.
    """
    num_finished = 0
    for row in cast(tuple[_Request, ...], batch.prefill):
        if row.start is None:
            row.start = start
    producing = batch.whole_prefills + batch.decode if prefills else batch.decode
    for row in cast(tuple[_Request, ...], producing):
        if row.finished:
            continue
        row.num_output_tokens += len(ends)
        row.token_times += ends
        row.finished = row.num_output_tokens >= row.max_output_tokens
        num_finished += row.finished
    return num_finished


def _kv_transfer_seconds(batch: Batch, cost: CostModel) -> float:
    """Of the rows that continue to decode; the token that the prefill yielded is in no cache yet."""
    going_on = [row.num_tokens - cost.first_token_from_prefill for row in batch.prefill if not row.finished]
    return cost.kv_transfer_seconds(sum(going_on)) if going_on else 0.0


def _pass_record(batch: Batch, spans: tuple[tuple[int, float, float], ...]) -> PassRecord:
    return PassRecord(
        start=spans[0][1],
        end=spans[-1][2],
        spans=spans,
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
        deadline=request.deadline,
        weight=request.weight,
    )
