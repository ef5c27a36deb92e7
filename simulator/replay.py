"""Replay: a schedule executed request by request on predicted times.

The engine runs the same Scheduler and policy; only the clock differs: here it is the cost model. Rows that decode
together are counted together (`lockstep.py`). Where one stage does everything, repeated decode passes of one batch are
timed and completed together, up to the next event.

Not here: the time of a pass (`cost.py`), and which batch is next (`exeplan/scheduling`).
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from typing import cast

import numpy as np

from exeplan.arrays import Floats
from exeplan.core.batch import BLOCK_SIZE, Batch
from exeplan.core.schedule import Schedule
from exeplan.errors import InputError
from exeplan.simulator.cost import CostModel
from exeplan.simulator.lockstep import LockstepScheduler, Row
from exeplan.simulator.run import Run, RunLog
from exeplan.workload.length_law import Ints


def replay(
    schedule: Schedule,
    cost: CostModel,
    *,
    input_tokens: Ints,
    output_tokens: Ints,
    num_blocks: int,
    arrivals: Floats | None = None,
    concurrency: int | None = None,
    think_seconds: float = 0.0,
    deadlines: Floats | None = None,
    weights: Floats | None = None,
    seed: int = 0,
    record_passes: bool = True,
) -> Run:
    """Runs the requests in order; all are there at time 0 unless `arrivals` (seconds, rising) says otherwise.

    `concurrency` makes a closed loop: that many clients, each of which sends its next request when it has an answer, or
    after an exponential pause of mean `think_seconds` drawn by `seed`. `deadlines` are seconds from a request's arrival
    by which its prefill must start; `weights` enter the utility. Without `record_passes` the run is the same and has no
    `passes`, which take most of its memory. Raises InputError when a request alone exceeds the KV cache.
    """
    if not len(input_tokens):
        raise InputError("a replay needs at least one request")
    pipelines = [_Pipeline(cost, phase, number) for number, phase in enumerate(_phases(cost))]
    log = RunLog(
        len(input_tokens),
        tuple(p.stages for p in pipelines),
        has_leads=cost.first_token_from_prefill,
        record_passes=record_passes,
    )
    clients = None if concurrency is None else _Clients(concurrency, think_seconds, seed)
    requests = _Requests(input_tokens, output_tokens, arrivals, deadlines, weights, clients)
    scheduler = LockstepScheduler(
        schedule,
        num_blocks,
        make=requests.row,
        log=log,
        num_prefill_stages=len(cost.prefill_stages),
        whole_prompts=cost.spec.is_encoder_decoder,
    )
    requests.check(scheduler)
    peak_blocks = _run(scheduler, pipelines, requests, log)
    return Run(
        requests=log.requests(
            requests.inputs, requests.outputs, requests.arrivals, patience=deadlines, weights=weights
        ),
        passes=log.passes(),
        num_passes=log.num_passes,
        peak_kv_tokens=peak_blocks * BLOCK_SIZE,
        num_preemptions=scheduler.num_preemptions,
    )


def _run(scheduler: LockstepScheduler, pipelines: "list[_Pipeline]", requests: "_Requests", log: RunLog) -> int:
    """From the first arrival to the last token. Returns the most KV blocks in use at once."""
    cost, clients = pipelines[0].cost, requests.clients
    least_free = scheduler.free_blocks
    events: list[_Event] = []
    now = 0.0
    while True:
        if requests.coming <= now:
            scheduler.arrive(*requests.arrive(now))
        if requests.expire and scheduler.has_deadlines:
            for expired in cast(list[Row], scheduler.expire(now)):
                log.starts[expired.index] = now
                if clients is not None:
                    clients.answered(now, 1)
                    requests.wait()
        for pipeline in pipelines:
            while pipeline.free[0] <= now and (batch := scheduler.next_batch(pipeline.phase)):
                number = log.num_passes
                start, ends = pipeline.run(batch, now, requests.coming, scheduler, log)
                heappush(events, (ends[-1], number, batch, start, ends))
        if scheduler.free_blocks < least_free:
            least_free = scheduler.free_blocks
        upcoming = requests.coming
        for pipeline in pipelines:
            if now < pipeline.free[0] < upcoming:
                upcoming = pipeline.free[0]
        if events:
            now = min(events[0][0], upcoming)
        elif requests.all_arrived and not scheduler.has_work:
            return scheduler.num_blocks - least_free
        else:
            now = upcoming
        while events and events[0][0] <= now:
            _, number, batch, start, ends = heappop(events)
            if not ends:
                scheduler.kv_arrived(batch)
                continue
            num_finished = scheduler.advance(batch, start, ends, prefills=cost.first_token_from_prefill)
            if clients is not None and num_finished:
                clients.answered(now, num_finished)
                requests.wait()
            scheduler.complete(batch)
            if batch.phase == "prefill":
                heappush(events, (now + _kv_transfer_seconds(batch, cost), number, batch, start, []))


_Event = tuple[float, int, Batch, float, list[float]]
"""Its time, the number of the batch's first pass, the batch; the start of that pass, and the ends of all its passes, of
which there are none where the event is that the batch's keys and values have arrived."""


class _Pipeline:
    """Stages that a batch passes in order, each running one batch at a time."""

    def __init__(self, cost: CostModel, phase: str, number: int) -> None:
        self.cost, self.phase, self.number = cost, phase, number
        self.stages = tuple(number for number, stage in enumerate(cost.placement) if stage.phase == phase)
        self.free = [0.0] * len(self.stages)
        """When each stage is free."""

    def run(
        self, batch: Batch, now: float, coming: float, scheduler: LockstepScheduler, log: RunLog
    ) -> tuple[float, list[float]]:
        """The batch's pass, or as many in a row as begin before the next request is `coming`, which may change it.

        Returns when the first begins, and the ends of all.
        """
        context = scheduler.context_tokens(batch)
        sizes = (len(batch.prefill), len(batch.decode), batch.num_new_tokens) if log.record_passes else (0, 0, 0)
        count = scheduler.num_repeats(batch) if self.cost.times_repeats else 1
        if count > 1:
            growth = scheduler.lanes[batch.group].num_advancing
            seconds = self.cost.repeated_seconds(batch, context, growth, count)
            rising = list(accumulate(seconds, initial=now))
            del rising[max(bisect_left(rising, min(coming, scheduler.next_expiry), 1) + 1, 2) :]
            scheduler.repeat(batch, len(rising) - 1)
            for span in pairwise(rising):
                log.passed(self.number, span, sizes)
            self.free[0] = rising[-1]
            return now, rising[1:]
        ready, free = now, self.free
        spans: list[float] = []
        for number, taken in enumerate(self.cost.stage_seconds(batch, context)):
            start = free[number] if free[number] > ready else ready
            ready = free[number] = start + taken
            spans += start, ready
        log.passed(self.number, spans, sizes)
        return spans[0], [ready]


class _Clients:
    """Of a closed loop: when each that has its answer sends the next request."""

    def __init__(self, concurrency: int, think_seconds: float, seed: int) -> None:
        self._pauses = _pauses(think_seconds, seed)
        self.times = sorted(next(self._pauses) for _ in range(concurrency))

    def answered(self, now: float, count: int) -> None:
        """That many have an answer."""
        for _ in range(count):
            heappush(self.times, now + next(self._pauses))


class _Requests:
    """All requests, as arrays, and when the next one comes."""

    def __init__(
        self,
        inputs: Ints,
        outputs: Ints,
        arrivals: Floats | None,
        deadlines: Floats | None,
        weights: Floats | None,
        clients: _Clients | None,
    ) -> None:
        self.inputs, self.outputs = np.asarray(inputs), np.asarray(outputs)
        self.arrivals = np.zeros(len(inputs)) if arrivals is None else np.array(arrivals, dtype=float)
        # One out of order waits for those before it.
        self._rising = self.arrivals if arrivals is None else np.maximum.accumulate(self.arrivals)
        self._deadlines, self._weights, self.clients = deadlines, weights, clients
        self.expire = deadlines is not None
        self._num_arrived = 0
        self.coming = math.inf
        """Seconds; infinity where no request arrives before another finishes."""
        self.wait()

    @property
    def all_arrived(self) -> bool:
        return self._num_arrived == len(self.inputs)

    def wait(self) -> None:
        """Sets when the next one comes."""
        if self.all_arrived or (self.clients is not None and not self.clients.times):
            self.coming = math.inf
            return
        self.coming = float(self._rising[self._num_arrived])
        if self.clients is not None:
            self.coming = max(float(self.arrivals[self._num_arrived]), self.clients.times[0])

    def arrive(self, now: float) -> tuple[int, float]:
        """Takes those that have come by now. Returns how many have in all, and the first deadline of the new ones."""
        first = self._num_arrived
        if self.clients is None:
            self._num_arrived = int(np.searchsorted(self._rising, now, side="right"))
            self.wait()
        while self.clients is not None and self.coming <= now:
            self.arrivals[self._num_arrived] = self.coming
            heappop(self.clients.times)
            self._num_arrived += 1
            self.wait()
        if self._deadlines is None:
            return self._num_arrived, math.inf
        new = slice(first, self._num_arrived)
        return self._num_arrived, float(np.min(self.arrivals[new] + self._deadlines[new]))

    def row(self, number: int) -> Row:
        due = None if self._deadlines is None else float(self.arrivals[number] + self._deadlines[number])
        weight = 1.0 if self._weights is None else float(self._weights[number])
        return Row(number, int(self.inputs[number]), int(self.outputs[number]), due, weight)

    def check(self, scheduler: LockstepScheduler) -> None:
        """Raises InputError for the first that exceeds the KV cache alone."""
        too_long = np.flatnonzero(self.inputs + self.outputs > scheduler.num_blocks * BLOCK_SIZE)
        if len(too_long):
            scheduler.check(self.row(int(too_long[0])))


def _phases(cost: CostModel) -> list[str]:
    """Decode stages come first: a request that they take frees a place for the next prefill."""
    return sorted({stage.phase for stage in cost.placement})


def _pauses(think_seconds: float, seed: int) -> Iterator[float]:
    """Seconds between an answer and the client's next request."""
    rng = np.random.default_rng(seed)
    while True:
        yield float(rng.exponential(think_seconds))


def _kv_transfer_seconds(batch: Batch, cost: CostModel) -> float:
    """Of the rows that continue to decode; the token that the prefill yielded is in no cache yet."""
    going_on = [row.num_tokens - cost.first_token_from_prefill for row in batch.prefill if not row.finished]
    return cost.kv_transfer_seconds(sum(going_on)) if going_on else 0.0
