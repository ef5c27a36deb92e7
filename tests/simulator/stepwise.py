"""A replay on the engine's own Scheduler, pass by pass and row by row: what the replay's counting must equal."""

import math
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any, cast

import numpy as np

from exeplan.core.batch import BLOCK_SIZE, Batch, SequenceState
from exeplan.core.schedule import Schedule
from exeplan.scheduling.scheduler import Scheduler
from exeplan.simulator.cost import CostModel


@dataclass(eq=False, slots=True, kw_only=True)
class Request(SequenceState):
    arrival: float
    patience: float | None
    start: float | None = None
    token_times: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Stepwise:
    requests: list[Request]
    passes: list[tuple[list[float], int, int, int]]
    """Starts and ends on the stages; prefilled rows, rows that decode, new tokens."""
    peak_kv_tokens: int
    num_preemptions: int


def stepwise(
    schedule: Schedule,
    cost: CostModel,
    *,
    input_tokens: list[int],
    output_tokens: list[int],
    num_blocks: int,
    arrivals: list[float] | None = None,
    concurrency: int | None = None,
    deadlines: list[float] | None = None,
) -> Stepwise:
    """Clients of a closed loop do not think."""
    scheduler = Scheduler(
        schedule,
        num_blocks,
        num_prefill_stages=len(cost.prefill_stages),
        num_decode_stages=len(cost.decode_stages),
        whole_prompts=cost.spec.is_encoder_decoder,
    )
    requests = [
        Request(
            request_id=str(i),
            num_prompt_tokens=prompt,
            max_output_tokens=output,
            arrival=arrivals[i] if arrivals else 0.0,
            patience=deadlines[i] if deadlines else None,
        )
        for i, (prompt, output) in enumerate(zip(input_tokens, output_tokens, strict=True))
    ]
    phases = sorted({stage.phase for stage in cost.placement})
    free = {phase: [0.0] * sum(stage.phase == phase for stage in cost.placement) for phase in phases}
    clients = [0.0] * concurrency if concurrency else None
    passes: list[tuple[list[float], int, int, int]] = []
    events: list[tuple[float, int, str, Batch, float]] = []
    order, now, arrived, peak = count(), 0.0, 0, 0

    def coming() -> float:
        if arrived == len(requests) or clients == []:
            return math.inf
        return max(requests[arrived].arrival, clients[0]) if clients else requests[arrived].arrival

    while True:
        while coming() <= now:
            request = requests[arrived]
            request.arrival = coming()
            request.deadline = None if request.patience is None else request.arrival + request.patience
            if clients:
                heappop(clients)
            scheduler.add(request)
            arrived += 1
        for expired in cast(list[Request], scheduler.expire(now)):
            expired.start = now
        for phase in phases:
            while free[phase][0] <= now and (batch := scheduler.next_batch(phase)):
                times, ready = [], now
                for stage, seconds in enumerate(cost.stage_seconds(batch)):
                    begin = max(ready, free[phase][stage])
                    ready = free[phase][stage] = begin + seconds
                    times += [begin, ready]
                passes.append((times, len(batch.prefill), len(batch.decode), batch.num_new_tokens))
                heappush(events, (ready, next(order), "done", batch, times[0]))
        peak = max(peak, num_blocks - scheduler.free_blocks)
        if not events and arrived == len(requests) and not scheduler.has_work:
            return Stepwise(requests, passes, peak * BLOCK_SIZE, scheduler.num_preemptions)
        now = min([coming(), *(first for first, *_ in free.values() if first > now), *(e[0] for e in events[:1])])
        while events and events[0][0] <= now:
            _, number, what, batch, start = heappop(events)
            if what == "arrived":
                scheduler.kv_arrived(batch)
                continue
            for finished in _produce(batch, start, now, prefills=cost.first_token_from_prefill):
                if clients is not None:
                    heappush(clients, finished)
            scheduler.complete(batch)
            if batch.phase == "prefill":
                heappush(events, (now + _transfer(batch, cost), number, "arrived", batch, start))


def _produce(batch: Batch, start: float, now: float, *, prefills: bool) -> list[float]:
    """Gives every row its token. Returns the time once for each request that finished."""
    for row in cast(tuple[Request, ...], batch.prefill):
        row.start = start if row.start is None else row.start
    finished = []
    for row in cast(tuple[Request, ...], batch.whole_prefills * prefills + batch.decode):
        if not row.finished:
            row.num_output_tokens += 1
            row.token_times.append(now)
            row.finished = row.num_output_tokens == row.max_output_tokens
            finished += [now] * row.finished
    return finished


def _transfer(batch: Batch, cost: CostModel) -> float:
    tokens: list[Any] = [row.num_tokens - cost.first_token_from_prefill for row in batch.prefill if not row.finished]
    return cost.kv_transfer_seconds(float(np.sum(tokens))) if tokens else 0.0
