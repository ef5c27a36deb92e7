"""Replay of several replicas behind a router: one stream of requests, each of which goes to a replica when it comes.

Every replica is an engine with a schedule, a placement and a KV cache of its own (`replay.py`). Up to the next request
of the stream each runs on its own; then the router, which is the server's (`exeplan/scheduling/router.py`), looks at
how many requests each has that are not over. What ends at that very time counts as over. Where the router does not
look, and no request waits for an answer, each replica's requests are known from the beginning: one replica is replayed
after the other, whose state then stays in the processor's cache.

Not here: replicas that start, stop and fail (`scaled.py`), and how a cluster is divided into replicas
(`exeplan/planner/problems/replicas.py`).
"""

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from typing import Any

import numpy as np

from exeplan.arrays import Floats
from exeplan.core.runs.metrics import Requests
from exeplan.core.runs.token_times import TokenTimes
from exeplan.core.schedule import Schedule
from exeplan.errors import InputError
from exeplan.garbage import collected_seldom
from exeplan.progress import SILENT, Told
from exeplan.scheduling.router import Queues, Router
from exeplan.simulator.cost import CostModel
from exeplan.simulator.lockstep import Row
from exeplan.simulator.replay import Clients, EngineReplay, Stream, run_engine
from exeplan.simulator.run import Run, RunLog
from exeplan.workload.length_law import Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """What one replica is replayed with."""

    schedule: Schedule
    cost: CostModel
    num_blocks: int
    """Of its KV cache."""
    capacity: float | None = None
    """As the plan says it (`ReplicaGroup`)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutedRun:
    """What happened: all requests in order of arrival, and the run of each replica with its own."""

    requests: Requests
    chosen: Ints
    """[requests] The number of the replica to which each went."""
    replicas: tuple[Run, ...]

    @property
    def num_passes(self) -> int:
        return sum(run.num_passes for run in self.replicas)

    @property
    def num_preemptions(self) -> int:
        return sum(run.num_preemptions for run in self.replicas)

    @property
    def peak_kv_tokens(self) -> int:
        """The sum of each replica's own peak."""
        return sum(run.peak_kv_tokens for run in self.replicas)


def routed_replay(
    replicas: Sequence[Replica],
    router: str,
    *,
    input_tokens: Ints,
    output_tokens: Ints,
    arrivals: Floats | None = None,
    concurrency: int | None = None,
    think_seconds: float = 0.0,
    deadlines: Floats | None = None,
    weights: Floats | None = None,
    seed: int = 0,
    record_passes: bool = True,
    told: Told = SILENT,
) -> RoutedRun:
    """Runs the requests on these replicas, by a router of `ROUTERS`; the other arguments are those of `replay`.

    Raises InputError when a request alone exceeds the smallest KV cache.
    """
    if not len(input_tokens):
        raise InputError("a replay needs at least one request")
    clients = None if concurrency is None else Clients(concurrency, think_seconds, seed)
    stream = Stream(input_tokens, output_tokens, arrivals, deadlines, weights, clients, told=told)
    stream.check(min(replica.num_blocks for replica in replicas))
    decides = Router(router)
    replayed = _together if clients is not None or decides.looks_at_queues else _apart
    with collected_seldom():
        chosen, runs = replayed(replicas, decides, stream, record_passes)
    places = _places(chosen, len(replicas))
    return RoutedRun(requests=_merged([run.requests for run in runs], places), chosen=chosen, replicas=runs)


def _apart(
    replicas: Sequence[Replica], router: Router, stream: Stream, record_passes: bool
) -> tuple[Ints, tuple[Run, ...]]:
    """To which replica each request goes, and what each replica did: all that it does before the next begins."""
    queues = Queues([0] * len(replicas))
    chosen = np.array([router.choose(queues) for _ in range(len(stream.inputs))])
    parts = [stream.part(places) for places in _places(chosen, len(replicas))]
    runs = (
        run_engine(one.schedule, one.cost, part, num_blocks=one.num_blocks, record_passes=record_passes)
        for one, part in zip(replicas, parts, strict=True)
    )
    return chosen, tuple(runs)


def _together(
    replicas: Sequence[Replica], router: Router, stream: Stream, record_passes: bool
) -> tuple[Ints, tuple[Run, ...]]:
    """The same, all replicas in the order of time."""
    queues = Queues([0] * len(replicas), [replica.capacity for replica in replicas])
    inboxes = [Inbox(stream, partial(queues.add, number)) for number in range(len(replicas))]
    engines = [
        EngineReplay(one.schedule, one.cost, inbox, num_blocks=one.num_blocks, record_passes=record_passes)
        for one, inbox in zip(replicas, inboxes, strict=True)
    ]
    chosen = _run(stream, inboxes, engines, partial(router.choose, queues))
    return chosen, tuple(engine.run() for engine in engines)


def _places(chosen: Ints, count: int) -> list[Ints]:
    """The requests of each replica, in order."""
    ends = np.cumsum(np.bincount(chosen, minlength=count))
    return np.split(np.argsort(chosen, kind="stable"), ends[:-1])


class Inbox:
    """The requests that went to one replica, which numbers them from 0."""

    def __init__(self, stream: Stream, opened: Callable[[int], None]) -> None:
        """Calls `opened` with how many more requests are not over, or less."""
        self._stream, self.expire, self._opened = stream, stream.expire, opened
        self.numbers = array("q")
        """In the stream."""
        self.coming = math.inf
        self._num_arrived = 0

    @property
    def all_arrived(self) -> bool:
        return self._num_arrived == len(self.numbers)

    @property
    def num_coming(self) -> int:
        """Requests that the engine has not taken into account: it looks for them when something may begin."""
        return len(self.numbers) - self._num_arrived

    def put(self, number: int, now: float) -> None:
        self.numbers.append(number)
        self._opened(1)
        self.coming = now

    def arrive(self, now: float) -> tuple[int, float]:
        new = self.numbers[self._num_arrived :].tolist() if self.expire else []
        self._num_arrived, self.coming = len(self.numbers), math.inf
        return self._num_arrived, self._stream.first_deadline(new)

    def row(self, number: int) -> Row:
        return self._stream.row_of(self.numbers[number], number)

    def answered(self, now: float, count: int) -> None:
        self._opened(-count)
        self._stream.answered(now, count)

    def ended(self, log: RunLog) -> Requests:
        return self._stream.ended_of(np.array(self.numbers, dtype=np.int64), log)


def _run(stream: Stream, inboxes: Sequence[Inbox], engines: Sequence[EngineReplay], choose: Callable[[], int]) -> Ints:
    """From the first arrival to the last token. Returns to which replica each request went."""
    due, chosen = Due(engines), array("q")
    while True:
        now = stream.coming
        if stream.clients is not None:  # An answer on any replica may make a request come.
            now = min(now, due.first())
        awake = due.until(now)
        for number in awake:
            engines[number].advance(now)
        if now == math.inf:
            return np.frombuffer(chosen, dtype=np.int64)
        while stream.coming <= now:
            number = choose()
            engine = engines[number]
            chosen.append(number)
            inboxes[number].put(stream.take(), now)
            engine.log.add(1)
            engine.interrupt(now)
            awake.append(number)
        for number in sorted(set(awake)):
            engine = engines[number]
            if engine.next <= now:
                engine.begin(now)
            due.put(number)


class Due:
    """When something happens next on which engine."""

    def __init__(self, engines: Sequence[EngineReplay]) -> None:
        self._engines = engines
        self._heap: list[tuple[float, int]] = []
        """Also of engines of which that has changed since."""

    def put(self, number: int) -> None:
        """An engine's next event is known."""
        if (time := self._engines[number].next) < math.inf:
            heappush(self._heap, (time, number))

    def first(self) -> float:
        """Infinity where nothing is to happen."""
        heap = self._heap
        while heap and heap[0][0] != self._engines[heap[0][1]].next:
            heappop(heap)
        return heap[0][0] if heap else math.inf

    def until(self, now: float) -> list[int]:
        """Takes the engines on which something happens by now."""
        heap, engines, found = self._heap, self._engines, set()
        while heap and heap[0][0] <= now:
            time, number = heappop(heap)
            if time == engines[number].next:
                found.add(number)
        return sorted(found)


def _merged(parts: Sequence[Requests], places: Sequence[Ints]) -> Requests:
    """The requests of all parts, each at its place."""
    count = sum(len(part) for part in parts)

    def together(name: str) -> Any:
        values = [getattr(part, name) for part in parts]
        if any(value is None for value in values):
            return None
        found = np.zeros(count, dtype=np.result_type(*values))
        for value, here in zip(values, places, strict=True):
            found[here] = value
        return found

    names = ("input_tokens", "output_tokens", "arrivals", "starts", "first_tokens", "last_tokens")
    return Requests(
        **{name: together(name) for name in (*names, "deadlines", "weights")},
        times=_merged_times([part.times for part in parts], places),
    )


def _merged_times(parts: Sequence[TokenTimes], places: Sequence[Ints]) -> TokenTimes:
    """A request has all its tokens on one replica, so that its stretches stay in order."""
    count = sum(part.num_requests for part in parts)
    leads = None
    if all(part.leads is not None for part in parts):
        leads = np.zeros(count)
        for part, here in zip(parts, places, strict=True):
            leads[here] = part.leads
    firsts = np.cumsum([0, *(len(part.tracks) for part in parts)])
    return TokenTimes(
        leads=leads,
        tracks=tuple(track for part in parts for track in part.tracks),
        owners=np.concatenate([here[part.owners] for part, here in zip(parts, places, strict=True)]),
        numbers=np.concatenate([part.numbers + first for part, first in zip(parts, firsts, strict=False)]),
        begins=np.concatenate([part.begins for part in parts]),
        ends=np.concatenate([part.ends for part in parts]),
        num_requests=count,
    )
