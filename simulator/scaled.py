"""Replay of a changing number of equal replicas behind a router: they start, drain and stop as a rule says, and a host
may die.

Every second the rule sees what has come and what waits, and says how many replicas are wanted
(`exeplan/scheduling/scaling.py`). One that is started serves after `start_seconds`; one too many gets no new requests,
and stops when it has answered those that it has, unless it is wanted again before. What a dead host's replicas had goes
on on others, as in the service: the tokens that were there are computed again, and none twice sent. Until the loss is
known, new requests go to them as well.

Not here: unequal replicas, closed loops and deadlines (`routed.py`), and hosts that come back.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from typing import Literal, NamedTuple

import numpy as np

from exeplan.arrays import Floats
from exeplan.core.runs.metrics import Requests
from exeplan.errors import InputError
from exeplan.scheduling.router import Queues, Router
from exeplan.scheduling.scaling import LOOK_SECONDS, to_drain
from exeplan.simulator.lockstep import Row
from exeplan.simulator.replay import EngineReplay, Stream
from exeplan.simulator.routed import Due, Inbox, Replica
from exeplan.simulator.run import RunLog
from exeplan.workload.length_law import Ints

NOTICED_SECONDS = 2.0
"""From the death of a host until it is known."""


class Seen(NamedTuple):
    """What the rule is told at a look."""

    time: float
    num_arrived: int
    num_waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A host dies at that time; its replicas are the numbers from `host * per_host` on."""

    time: float
    host: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A replica from its start to its end; seconds."""

    number: int
    begin: float
    up: float
    """When it serves; infinite where it never did."""
    end: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScaledRun:
    """What happened to all requests, in order of arrival, and to the replicas."""

    arrivals: Floats
    starts: Floats
    first_tokens: Floats
    last_tokens: Floats
    num_moved: int
    """Requests that went on on another replica."""
    spans: tuple[Span, ...]
    """In order of their begin; the last arrival ends all that last longer."""

    @property
    def replica_seconds(self) -> float:
        """For which devices were taken, up to the last arrival."""
        return sum(span.end - span.begin for span in self.spans)


def scaled_replay(
    replica: Replica,
    router: str,
    *,
    wanted: Callable[[Seen], int],
    first: int,
    most: int,
    start_seconds: float,
    input_tokens: Ints,
    output_tokens: Ints,
    arrivals: Floats,
    per_host: int = 1,
    losses: Sequence[Loss] = (),
) -> ScaledRun:
    """Runs the requests on `first` replicas that serve from the beginning, and on what is `wanted` later, at most
    `most`.

    Each host has `per_host` of the numbers. Raises InputError for a request that exceeds the KV cache, and for losses
    of encoder-decoder models, whose answers are not computed again from their tokens here.
    """
    if losses and not replica.cost.first_token_from_prefill:
        raise InputError("a lost host is replayed for decoder models only")
    stream = Stream(input_tokens, output_tokens, arrivals, None, None, None)
    fleet = _Fleet(replica, Router(router), stream, most=most, start_seconds=start_seconds)
    stream.check(replica.num_blocks)
    for number in range(first):
        fleet.start(number, 0.0, up=0.0)
    for loss in losses:
        numbers = range(loss.host * per_host, min((loss.host + 1) * per_host, most))
        fleet.happens(loss.time, "lost", numbers)
        fleet.happens(loss.time + NOTICED_SECONDS, "noticed", numbers)
    end = float(stream.arrivals.max())
    fleet.happens(LOOK_SECONDS, "look", ())
    _run(stream, fleet, wanted, end)
    return fleet.run(end)


def _run(stream: Stream, fleet: "_Fleet", wanted: Callable[[Seen], int], end: float) -> None:
    num_arrived = 0
    while True:
        now = min(stream.coming, fleet.coming)
        fleet.advance(now)
        if now == math.inf:
            return
        for kind, numbers in fleet.take(now):
            if kind == "look" and (now <= end or fleet.busy):
                seen = Seen(now, num_arrived, fleet.num_waiting)
                fleet.scale_to(wanted(seen), now)
                fleet.happens(now + LOOK_SECONDS, "look", ())
            if kind == "noticed":
                fleet.leave(numbers, now)
                continue
            for number in numbers:
                if kind == "up":
                    fleet.open(number, now)
                elif kind == "lost":
                    fleet.lose(number, now)
        while stream.coming <= now:
            fleet.put(stream.take(), now)
            num_arrived += 1
        fleet.begin(now)


class _Requests:
    """The requests of the stream, and what is left of those that a lost replica had, under further numbers."""

    expire = False

    def __init__(self, stream: Stream) -> None:
        self._stream, self._count = stream, len(stream.inputs)
        self._rests: list[tuple[int, int]] = []
        """The request, and how many of its tokens are there."""

    def request(self, number: int) -> int:
        return number if number < self._count else self._rests[number - self._count][0]

    def rest(self, number: int, tokens: int) -> int:
        """The number of what is left when that many more tokens are there."""
        before = 0 if number < self._count else self._rests[number - self._count][1]
        self._rests.append((self.request(number), before + tokens))
        return self._count + len(self._rests) - 1

    def row_of(self, number: int, index: int) -> Row:
        if number < self._count:
            return self._stream.row_of(number, index)
        request, tokens = self._rests[number - self._count]
        given, output = int(self._stream.inputs[request]), int(self._stream.outputs[request])
        return Row(index, given + tokens, output - tokens, None, 1.0)

    def first_deadline(self, some: list[int]) -> float:
        return math.inf

    def answered(self, now: float, count: int) -> None:
        """Nothing waits for answers."""

    def ended_of(self, some: Ints, log: RunLog) -> Requests:
        requests = [self.request(number) for number in some.tolist()]
        stream = self._stream
        return log.requests(
            stream.inputs[requests], stream.outputs[requests], stream.arrivals[requests], patience=None, weights=None
        )


class _Life:
    """One replica from its start to its end."""

    def __init__(self, number: int, place: int, engine: EngineReplay, inbox: Inbox, begin: float) -> None:
        self.number, self.place, self.engine, self.inbox, self.begin = number, place, engine, inbox, begin
        self.up = self.end = math.inf
        self.num_open = 0
        self.lost: dict[int, int] | None = None
        """The tokens of what it had when it was lost."""
        self.draining: float | None = None
        self.queue: int | None = None
        """Its place among the router's queues; None where it gets no requests."""


_Kind = Literal["look", "up", "lost", "noticed"]


class _Fleet:
    """All replicas: which serve, start and drain, and when something happens to them."""

    def __init__(self, replica: Replica, router: Router, stream: Stream, *, most: int, start_seconds: float) -> None:
        self._replica, self._router, self._start_seconds = replica, router, start_seconds
        self._requests = _Requests(stream)
        self._inputs: Stream = stream
        self._lives: list[_Life] = []
        self._engines: list[EngineReplay] = []
        self._due = Due(self._engines)
        self._awake: set[int] = set()
        self._by_number: dict[int, _Life] = {}
        """Those that have begun and not ended."""
        self._gone: set[int] = set()
        """Numbers whose host is lost."""
        self._most = most
        self._queues = Queues(())
        self._serving: list[int] = []
        """The numbers of those that get requests, in the order of `_queues`; also ones whose loss is not known."""
        self._pending: list[int] = []
        """Requests that came while none served."""
        self._events: list[tuple[float, int, _Kind, Sequence[int]]] = []
        self._num_events = self._num_moved = 0

    # --- time

    def happens(self, time: float, kind: _Kind, numbers: Sequence[int]) -> None:
        heappush(self._events, (time, self._num_events, kind, numbers))
        self._num_events += 1

    @property
    def coming(self) -> float:
        return self._events[0][0] if self._events else math.inf

    def take(self, now: float) -> Iterator[tuple[_Kind, Sequence[int]]]:
        while self._events and self._events[0][0] <= now:
            _, _, kind, numbers = heappop(self._events)
            yield kind, numbers

    def advance(self, now: float) -> None:
        """Everything on the engines up to now."""
        for place in self._due.until(now):
            life = self._lives[place]
            life.engine.advance(now)
            self._awake.add(place)
            if life.draining is not None and not life.num_open:
                self._end(life, max(life.draining, float(np.nanmax(life.engine.log.lasts, initial=0.0))))

    def begin(self, now: float) -> None:
        """What can begin on the engines that something has happened to."""
        for place in sorted(self._awake):
            life = self._lives[place]
            if life.lost is None:
                if life.engine.next <= now:
                    life.engine.begin(now)
                self._due.put(place)
        self._awake.clear()

    # --- replicas

    @property
    def num_waiting(self) -> int:
        """Requests whose prefill has not begun."""
        alive = [life for life in self._by_number.values() if life.lost is None]
        waiting = sum(len(life.engine.scheduler.waiting) + life.inbox.num_coming for life in alive)
        return len(self._pending) + waiting

    @property
    def busy(self) -> bool:
        """Whether anything goes on without further requests."""
        unsettled = any(life.lost is not None or life.up == math.inf for life in self._by_number.values())
        return bool(self._pending) or unsettled or self._due.first() < math.inf

    def start(self, number: int, now: float, *, up: float) -> None:
        place = len(self._lives)
        inbox = Inbox(self._requests, partial(self._opened, place))  # type: ignore[arg-type]
        one = self._replica
        engine = EngineReplay(one.schedule, one.cost, inbox, num_blocks=one.num_blocks, record_passes=False)
        life = _Life(number, place, engine, inbox, now)
        self._lives.append(life)
        self._engines.append(life.engine)
        self._by_number[number] = life
        self.happens(up, "up", (number,))

    def open(self, number: int, now: float) -> None:
        """It has loaded, if its host is still there, and serves."""
        life = self._by_number.get(number)
        if life is None or life.lost is not None:
            return
        life.up = now
        self._route()
        pending, self._pending = self._pending, []
        for one in pending:
            self.put(one, now)

    def scale_to(self, wanted: int, now: float) -> None:
        """Starts what lacks, those that drain first, or drains what is too much.

        Raises InputError where requests have come and no replica can be started any more.
        """
        lives = self._by_number
        staying = [number for number, life in lives.items() if life.draining is None]
        for number in [number for number in sorted(lives) if lives[number].draining is not None]:
            if len(staying) < wanted:
                lives[number].draining = None
                staying.append(number)
        free = [number for number in range(self._most) if number not in lives and number not in self._gone]
        for number in free[: max(wanted - len(staying), 0)]:
            self.start(number, now, up=now + self._start_seconds)
        if self._pending and not lives:
            raise InputError(f"{len(self._pending)} requests have no replica left to go to; allow more replicas")
        serving = {number: lives[number].num_open for number in staying if lives[number].up < math.inf}
        for _ in range(min(len(serving) - wanted, len(serving) - 1)):
            life = lives[number := to_drain(serving)]
            del serving[number]
            life.draining = now
            if not life.num_open:
                self._end(life, now)
        self._route()

    def lose(self, number: int, now: float) -> None:
        """Nothing happens on it any more."""
        self._gone.add(number)
        if life := self._by_number.get(number):
            life.lost = life.engine.lose(now)

    def leave(self, numbers: Sequence[int], now: float) -> None:
        """The loss of all of these is known: others go on with what they had."""
        lives = [self._by_number[number] for number in numbers if number in self._by_number]
        for life in lives:
            self._end(life, now)
        self._route()
        for life in lives:
            assert life.lost is not None
            for index, request in enumerate(life.inbox.numbers.tolist()):
                if math.isnan(life.engine.log.lasts[index]):
                    self._num_moved += 1
                    self.put(self._requests.rest(request, life.lost.get(index, 0)), now)

    def put(self, request: int, now: float) -> None:
        """A request goes where the router says."""
        if not self._serving:
            self._pending.append(request)
            return
        life = self._by_number[self._serving[self._router.choose(self._queues)]]
        life.inbox.put(request, now)
        life.engine.log.add(1)
        if life.lost is None:
            life.engine.interrupt(now)
            self._awake.add(life.place)

    def _end(self, life: _Life, now: float) -> None:
        life.end, life.queue = now, None
        del self._by_number[life.number]
        self._route()

    def _opened(self, place: int, change: int) -> None:
        life = self._lives[place]
        life.num_open += change
        if life.queue is not None:
            self._queues.add(life.queue, change)

    def _route(self) -> None:
        """The router chooses among those that serve and do not drain."""
        for number in self._serving:
            if life := self._by_number.get(number):
                life.queue = None
        lives = sorted(self._by_number.items())
        self._serving = [number for number, life in lives if life.up < math.inf and life.draining is None]
        for place, number in enumerate(self._serving):
            self._by_number[number].queue = place
        self._queues = Queues([self._by_number[number].num_open for number in self._serving])

    def run(self, end: float) -> ScaledRun:
        """What happened."""
        assert not self._pending
        count = len(self._inputs.inputs)
        starts, firsts, lasts = (np.full(count, np.nan) for _ in range(3))
        for life in self._lives:
            requests = np.array([self._requests.request(number) for number in life.inbox.numbers], dtype=np.int64)
            if life.lost is None:
                ended = life.engine.run().requests
                own = ended.starts, ended.first_tokens, ended.last_tokens
            else:
                log = life.engine.log
                own = np.array(log.starts), np.array(log.leads), np.array(log.lasts)
            for found, values in zip((starts, firsts), own[:2], strict=True):
                found[requests] = np.fmin(found[requests], values)
            lasts[requests] = np.fmax(lasts[requests], own[2])
        spans = [
            Span(number=life.number, begin=life.begin, up=life.up, end=min(life.end, end))
            for life in self._lives
            if life.begin < end
        ]
        return ScaledRun(
            arrivals=self._inputs.arrivals,
            starts=starts,
            first_tokens=firsts,
            last_tokens=lasts,
            num_moved=self._num_moved,
            spans=tuple(spans),
        )
