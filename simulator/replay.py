"""Replay: a schedule executed request by request on predicted times.

The engine runs the same Scheduler and policy; only the clock differs: here it is the cost model. Rows that decode
together are counted together (`lockstep.py`). Where one stage does everything, repeated decode passes of one batch are
timed and completed together, up to the next event.

Not here: the time of a pass (`cost.py`), and which batch is next (`exeplan/scheduling`).
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol, cast

import numpy as np

from exeplan.arrays import Floats
from exeplan.core.batch import BLOCK_SIZE, Batch
from exeplan.core.runs.metrics import Requests
from exeplan.core.schedule import Schedule
from exeplan.errors import InputError
from exeplan.policies import load_policy
from exeplan.progress import SILENT, Told
from exeplan.scheduling.scheduler import check_fits
from exeplan.simulator.cost import CostModel
from exeplan.simulator.lockstep import LockstepScheduler, Row
from exeplan.simulator.run import Run, RunLog
from exeplan.workload.length_law import Ints

_STEPS = 1000
"""How often a replay says how far it is."""


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
    told: Told = SILENT,
) -> Run:
    """Runs the requests in order; all are there at time 0 unless `arrivals` (seconds, rising) says otherwise.

    `concurrency` makes a closed loop: that many clients, each of which sends its next request when it has an answer, or
    after an exponential pause of mean `think_seconds` drawn by `seed`. `deadlines` are seconds from a request's arrival
    by which its prefill must start; `weights` enter the utility. Without `record_passes` the run is the same and has no
    `passes`, which take most of its memory. `told` hears which share of the requests is over. Raises InputError when a
    request alone exceeds the KV cache.
    """
    if not len(input_tokens):
        raise InputError("a replay needs at least one request")
    clients = None if concurrency is None else Clients(concurrency, think_seconds, seed)
    stream = Stream(input_tokens, output_tokens, arrivals, deadlines, weights, clients, told=told)
    stream.check(num_blocks)
    return run_engine(schedule, cost, stream, num_blocks=num_blocks, record_passes=record_passes)


def run_engine(schedule: Schedule, cost: CostModel, stream: "Stream", *, num_blocks: int, record_passes: bool) -> Run:
    """One engine with the whole stream, none of whose requests exceeds the KV cache alone."""
    engine = EngineReplay(schedule, cost, stream, num_blocks=num_blocks, record_passes=record_passes)
    engine.log.add(len(stream.inputs))
    engine.begin(0.0)
    engine.advance(math.inf)
    return engine.run()


class Incoming(Protocol):
    """The requests of one engine, which it numbers from 0 in their order."""

    coming: float
    """When the next one comes, as far as that is known; infinity otherwise."""

    @property
    def expire(self) -> bool:
        """Whether requests have deadlines."""

    @property
    def all_arrived(self) -> bool:
        """Whether none is to come, as far as that is known."""

    def arrive(self, now: float) -> tuple[int, float]:
        """Takes those that have come by now. Returns how many have in all, and the first deadline of the new ones."""

    def row(self, number: int) -> Row:
        """One that has come."""

    def answered(self, now: float, count: int) -> None:
        """That many are over."""

    def ended(self, log: RunLog) -> Requests:
        """All of them, as they ended."""


class EngineReplay:
    """One engine on predicted times: its scheduler, its pipelines, and the batches in flight.

    `begin` and `end` take turns: at `next`, batches end first; then requests may come; then batches begin.
    """

    def __init__(
        self, schedule: Schedule, cost: CostModel, incoming: Incoming, *, num_blocks: int, record_passes: bool
    ) -> None:
        self.cost, self.incoming = cost.for_policy(load_policy(schedule.policy)), incoming
        self.pipelines = [_Pipeline(self.cost, *one, number) for number, one in enumerate(_pipelines(cost))]
        self.log = RunLog(
            tuple(p.stages for p in self.pipelines),
            has_leads=cost.first_token_from_prefill,
            record_passes=record_passes,
        )
        self.scheduler = LockstepScheduler(
            schedule,
            num_blocks,
            make=incoming.row,
            log=self.log,
            num_prefill_stages=len(cost.prefill_stages),
            num_decode_stages=len(cost.decode_stages),
            whole_prompts=cost.spec.is_encoder_decoder,
            num_ranks=cost.num_ranks,
        )
        self.next = math.inf
        """When something happens next, if no request comes before that was not known of."""
        self._events: list[_Event] = []
        self._repeating: _Repeating | None = None
        self._least_free = num_blocks

    def advance(self, until: float) -> None:
        """Does all that happens before `until`, and ends what ends then."""
        while (now := self.next) < until:
            self.end(now)
            self.begin(now)
        if now == until:
            self.end(until)

    def begin(self, now: float) -> None:
        """Takes the requests that have come, drops those whose deadline has passed, and starts what can start."""
        scheduler, incoming, events, log = self.scheduler, self.incoming, self._events, self.log
        if incoming.coming <= now:
            scheduler.arrive(*incoming.arrive(now))
        if incoming.expire and scheduler.has_deadlines:
            for expired in cast(list[Row], scheduler.expire(now)):
                log.starts[expired.index] = now
                incoming.answered(now, 1)
        for pipeline in self.pipelines:
            while pipeline.free[0] <= now and (batch := scheduler.next_batch(pipeline.phase)):
                number = log.num_passes
                if self.cost.times_repeats and (count := scheduler.num_repeats(batch)) > 1:
                    start, ends = now, self._repeat(pipeline, batch, now, count)
                else:
                    start, ends = pipeline.run(batch, now, scheduler, log)
                heappush(events, (ends[-1], number, batch, start, ends))
        if scheduler.free_blocks < self._least_free:
            self._least_free = scheduler.free_blocks
        self._look_ahead(now)

    def end(self, now: float) -> None:
        """Completes the batches whose last pass has ended by now."""
        scheduler, events, prefills = self.scheduler, self._events, self.cost.first_token_from_prefill
        while events and events[0][0] <= now:
            _, number, batch, start, ends = heappop(events)
            if not ends:
                scheduler.kv_arrived(batch)
                continue
            if self._repeating is not None:
                self._repeated(batch, start, ends)
            if num_finished := scheduler.advance(batch, start, ends, prefills=prefills):
                self.incoming.answered(now, num_finished)
            scheduler.complete(batch)
            if batch.phase == "prefill":
                heappush(events, (now + _kv_transfer_seconds(batch, self.cost), number, batch, start, []))

    def interrupt(self, now: float) -> None:
        """A request has come that was not known of: a batch that is repeated is not, after the pass that runs."""
        if self._repeating is not None:
            _, number, batch, start, ends = self._events[0]
            ends = _begun([start, *ends], now)[1:]
            self._events[0] = ends[-1], number, batch, start, ends
            self._repeating.pipeline.free[0] = ends[-1]
        self._look_ahead(now)

    def _look_ahead(self, now: float) -> None:
        """Sets when something happens next. A request that comes while nothing can begin is looked at when a pass
        ends."""
        upcoming, looks = self._events[0][0] if self._events else math.inf, self.incoming.expire
        for pipeline in self.pipelines:
            free = pipeline.free[0]
            if free <= now:
                looks = True
            elif free < upcoming:
                upcoming = free
        if looks and self.incoming.coming < upcoming:
            upcoming = self.incoming.coming
        self.next = upcoming

    def lose(self, now: float) -> dict[int, int]:
        """Its devices are gone, and nothing more happens. Returns the tokens of each request that has come and is not
        over, by number; it was advanced up to now."""
        rows = cast(list[Row], [*self.scheduler.running, *self.scheduler.waiting])
        tokens = {row.index: row.num_output_tokens for row in rows if not row.finished}
        if self._repeating is not None:
            _, _, batch, _, ends = self._events[0]
            for row in cast(tuple[Row, ...], batch.decode):
                if not row.finished:
                    tokens[row.index] += bisect_right(ends, now)
        self._events.clear()
        self._repeating, self.next = None, math.inf
        return tokens

    def run(self) -> Run:
        """What happened. Raises InputError where the policy left requests waiting with nothing in flight."""
        if left := len(self.scheduler.waiting) + len(self.scheduler.running):
            raise InputError(
                f"{self.scheduler.schedule} starts nothing more, and {left} requests are not finished; its policy must "
                "name a batch when nothing is in flight"
            )
        assert self.incoming.all_arrived
        return Run(
            requests=self.incoming.ended(self.log),
            passes=self.log.passes(),
            num_passes=self.log.num_passes,
            peak_kv_tokens=(self.scheduler.num_blocks - self._least_free) * BLOCK_SIZE,
            num_preemptions=self.scheduler.num_preemptions,
        )

    def _repeat(self, pipeline: "_Pipeline", batch: Batch, now: float, count: int) -> list[float]:
        """The ends of the batch's passes: as many of `count` as begin before the next request comes, which may change
        it."""
        scheduler = self.scheduler
        context, growth = scheduler.context_tokens(batch), scheduler.lanes[batch.group].num_advancing
        seconds = self.cost.repeated_seconds(batch, context, growth, count)
        rising = _begun(list(accumulate(seconds, initial=now)), min(self.incoming.coming, scheduler.next_expiry))
        self._repeating = _Repeating(pipeline, _sizes(batch, self.log))
        pipeline.free[0] = rising[-1]
        return rising[1:]

    def _repeated(self, batch: Batch, start: float, ends: list[float]) -> None:
        """A batch in flight has been repeated: takes the blocks of its passes, and writes them down."""
        assert self._repeating is not None
        pipeline, sizes = self._repeating
        self.scheduler.repeat(batch, len(ends))
        self._least_free = min(self._least_free, self.scheduler.free_blocks)
        for span in pairwise([start, *ends]):
            self.log.passed(pipeline.number, span, sizes)
        self._repeating = None


_Event = tuple[float, int, Batch, float, list[float]]
"""Its time, the number of the batch's first pass, the batch; the start of that pass, and the ends of all its passes, of
which there are none where the event is that the batch's keys and values have arrived."""


class _Repeating(NamedTuple):
    """A batch in flight is repeated: on which pipeline, and what is written down of each pass."""

    pipeline: "_Pipeline"
    sizes: tuple[int, int, int]


def _sizes(batch: Batch, log: RunLog) -> tuple[int, int, int]:
    """What a log that records passes writes down of each."""
    return (len(batch.prefill), len(batch.decode), batch.num_new_tokens) if log.record_passes else (0, 0, 0)


def _begun(rising: list[float], until: float) -> list[float]:
    """The start of the first pass and the ends of those that begin before `until`; of the first one in any case."""
    del rising[max(bisect_left(rising, until, 1) + 1, 2) :]
    return rising


class _Pipeline:
    """Stages that a batch passes in order, each running one batch at a time."""

    def __init__(self, cost: CostModel, phase: str, stages: tuple[int, ...], number: int) -> None:
        self.cost, self.phase, self.stages, self.number = cost, phase, stages, number
        self.free = [0.0] * len(self.stages)
        """When each stage is free."""

    def run(self, batch: Batch, now: float, scheduler: LockstepScheduler, log: RunLog) -> tuple[float, list[float]]:
        """One pass of the batch. Returns when it begins, and, alone in a list, when it ends."""
        ready, free = now, self.free
        spans: list[float] = []
        taken_by = self.cost.stage_seconds(batch, scheduler.context_tokens(batch), scheduler.decoding(batch))
        for number, taken in enumerate(taken_by):
            start = free[number] if free[number] > ready else ready
            ready = free[number] = start + taken
            spans += start, ready
        log.passed(self.number, spans, _sizes(batch, log))
        return spans[0], [ready]


class Clients:
    """Of a closed loop: when each that has its answer sends the next request."""

    def __init__(self, concurrency: int, think_seconds: float, seed: int) -> None:
        self._pauses = _pauses(think_seconds, seed)
        self.times = sorted(next(self._pauses) for _ in range(concurrency))

    def answered(self, now: float, count: int) -> None:
        """That many have an answer."""
        for _ in range(count):
            heappush(self.times, now + next(self._pauses))


class Over:
    """How many requests of a replay are over, told in steps."""

    def __init__(self, count: int, told: Told) -> None:
        self._count, self._told = count, told
        self._over, self._next = 0, 0.0

    def add(self, count: int) -> None:
        """That many more."""
        self._over += count
        if self._over >= self._next:
            self._next = self._over + self._count / _STEPS
            self._told("replay", self._over / self._count)


class Stream:
    """All requests, as arrays, and when the next one comes."""

    def __init__(
        self,
        inputs: Ints,
        outputs: Ints,
        arrivals: Floats | None,
        deadlines: Floats | None,
        weights: Floats | None,
        clients: Clients | None,
        *,
        told: Told = SILENT,
    ) -> None:
        self.inputs, self.outputs = np.asarray(inputs), np.asarray(outputs)
        self.arrivals = np.zeros(len(inputs)) if arrivals is None else np.array(arrivals, dtype=float)
        # Of a memoryview, single entries are plain numbers, which NumPy takes several times as long to give.
        self._inputs, self._outputs = self.inputs.data, self.outputs.data
        # One out of order waits for those before it.
        self._rising = self.arrivals if arrivals is None else np.maximum.accumulate(self.arrivals)
        self._times = self._rising.data
        self._deadlines, self._weights, self.clients = deadlines, weights, clients
        self.expire = deadlines is not None
        self._over = Over(len(inputs), told)
        self._num_arrived = 0
        self.coming = math.inf
        """Seconds; infinity where no request arrives before another finishes."""
        self._wait()

    @property
    def all_arrived(self) -> bool:
        return self._num_arrived == len(self.inputs)

    def _wait(self) -> None:
        """Sets when the next one comes."""
        number, clients = self._num_arrived, self.clients
        if number == len(self._times) or (clients is not None and not clients.times):
            self.coming = math.inf
        elif clients is None:
            self.coming = self._times[number]
        else:
            self.coming = max(float(self.arrivals[number]), clients.times[0])

    def arrive(self, now: float) -> tuple[int, float]:
        first = self._num_arrived
        if self.clients is None:
            self._num_arrived = bisect_right(self._times, now, first)
            self._wait()
        while self.coming <= now:
            self.take()
        return self._num_arrived, self.first_deadline(slice(first, self._num_arrived))

    def take(self) -> int:
        """The number of the next one, which comes when it was said to."""
        number = self._num_arrived
        if self.clients is not None:
            self.arrivals[number] = self.coming
            heappop(self.clients.times)
        self._num_arrived += 1
        self._wait()
        return number

    def first_deadline(self, some: slice | list[int]) -> float:
        """Of some that have come; infinity where there are no deadlines."""
        if self._deadlines is None:
            return math.inf
        return float(np.min(self.arrivals[some] + self._deadlines[some]))

    def answered(self, now: float, count: int) -> None:
        self._over.add(count)
        if self.clients is not None:
            self.clients.answered(now, count)
            self._wait()

    def row(self, number: int) -> Row:
        return self.row_of(number, number)

    def row_of(self, number: int, index: int) -> Row:
        """The row of a request for an engine that numbers it `index`."""
        due = None if self._deadlines is None else float(self.arrivals[number] + self._deadlines[number])
        weight = 1.0 if self._weights is None else float(self._weights[number])
        return Row(index, self._inputs[number], self._outputs[number], due, weight)

    def ended(self, log: RunLog) -> Requests:
        return self.ended_of(slice(None), log)

    def ended_of(self, some: slice | Ints, log: RunLog) -> Requests:
        """These, as they ended on the engine of the log."""
        return log.requests(
            self.inputs[some],
            self.outputs[some],
            self.arrivals[some],
            patience=None if self._deadlines is None else self._deadlines[some],
            weights=None if self._weights is None else self._weights[some],
        )

    def check(self, num_blocks: int) -> None:
        """Raises InputError for the first that exceeds a KV cache of `num_blocks` blocks alone."""
        too_long = np.flatnonzero(self.inputs + self.outputs > num_blocks * BLOCK_SIZE)
        if len(too_long):
            check_fits(self.row(int(too_long[0])), num_blocks)

    def part(self, some: Ints) -> "Stream":
        """These of its requests, where there are no clients; each comes when it does here."""
        deadlines, weights = (None if of is None else of[some] for of in (self._deadlines, self._weights))
        part = Stream(self.inputs[some], self.outputs[some], self.arrivals[some], deadlines, weights, None)
        part._rising, part._over = self._rising[some], self._over
        part._times = part._rising.data
        part._wait()
        return part


def _pipelines(cost: CostModel) -> list[tuple[str, tuple[int, ...]]]:
    """The phase and the stages of each; those that decode come first: a request that they take frees a place for the
    next prefill."""
    return [(phase, stages) for phase in sorted(cost.servers) for stages in cost.servers[phase]]


def _pauses(think_seconds: float, seed: int) -> Iterator[float]:
    """Seconds between an answer and the client's next request."""
    rng = np.random.default_rng(seed)
    while True:
        yield float(rng.exponential(think_seconds))


def _kv_transfer_seconds(batch: Batch, cost: CostModel) -> float:
    """Of the rows that continue to decode; the token that the prefill yielded is in no cache yet."""
    going_on = [row.num_tokens - cost.first_token_from_prefill for row in batch.prefill if not row.finished]
    return cost.kv_transfer_seconds(sum(going_on)) if going_on else 0.0
