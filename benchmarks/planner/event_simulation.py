"""orca, chunked, rra and waa with arrivals, simulated from their definitions: what the replay is checked against.

Plain lists of requests and a heap of events; no scheduler, queue, KV cache or batch state of exeplan's. Only the times
of passes come from its cost model. Decoder-only models, memory for all, first come first served, no adjustment. Slow.

    orca     a group that is back runs: its free slots are filled from the queue, prompts ride with the decodes; those
             that wait are dealt out, each to the smallest group, among one group a stage, or more to hold them all;
             one in flight counts half as large again. Where none waits, groups that are back give rows to the
             smallest while they are larger by a half and one, groups that are not needed give all
    chunked  the same with at most so many tokens a pass: one for each decode, then prompts, the last of them cut
    rra      up to B_E requests prefill, in parts of alike many tokens; when all are through, N_D rounds of decodes
    waa      up to B_E requests prefill on stages of their own while no more than (stages + 1) B_E are in prefill, in
             transfer, or ready without a free slot; groups that are back take those that are ready, dealt out among all
             groups, those in flight as they are
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from exeplan.core.batch import Batch, Chunk, SequenceState
from exeplan.core.schedule import Schedule
from exeplan.simulator.cost import CostModel

SIMULATED = ("orca", "chunked", "rra", "waa-c", "waa-m")


@dataclass(eq=False)
class Request:
    prompt: int
    output: int
    arrival: float
    token_times: list[float] = field(default_factory=list)
    prefilled: int = 0

    @property
    def done(self) -> bool:
        return len(self.token_times) == self.output

    def row(self) -> SequenceState:
        """What the cost model asks of it."""
        return SequenceState(
            request_id="",
            num_prompt_tokens=self.prompt,
            max_output_tokens=self.output,
            num_output_tokens=len(self.token_times),
        )


class Line:
    """Stages in a row, each of which runs one pass at a time."""

    def __init__(self, cost: CostModel, phase: str) -> None:
        self.cost, self.phase = cost, phase
        self.free = [0.0] * sum(stage.phase == phase for stage in cost.placement)

    def enter(self, now: float, prefills: list[tuple[Request, int]], decodes: list[Request]) -> float:
        """A pass that begins now; when it has left. Prefills are (request, new tokens)."""
        chunks = tuple(Chunk(r.prefilled, r.prefilled + new, r.prefilled + new == r.prompt) for r, new in prefills)
        batch = Batch(
            prefill=tuple(r.row() for r, _ in prefills),
            decode=tuple(r.row() for r in decodes),
            chunks=chunks,
            phase=self.phase,
        )
        for stage, seconds in enumerate(self.cost.stage_seconds(batch)):
            now = self.free[stage] = max(now, self.free[stage]) + seconds
        return now


class Clockwork:
    """Events in the order of their times; `idle` is asked for work after those of each time."""

    def __init__(self, requests: list[Request], idle: Callable[[float], None]) -> None:
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.number, self.idle, self.waiting = count(), idle, list[Request]()
        for request in requests:
            self.at(request.arrival, lambda _, request=request: self.waiting.append(request))

    def at(self, when: float, what: Callable[[float], None]) -> None:
        heappush(self.events, (when, next(self.number), what))

    def run(self) -> None:
        while self.events:
            now = self.events[0][0]
            while self.events and self.events[0][0] <= now:
                heappop(self.events)[2](now)
            self.idle(now)

    def when_left(self, line: Line, left: float, what: Callable[[float], None]) -> None:
        """A pass has just entered: its first stage is free again some time before it has left."""
        self.at(line.free[0], lambda _: None)
        self.at(left, what)

    def take(self, most: int) -> list[Request]:
        taken, self.waiting[:] = self.waiting[:most], self.waiting[most:]
        return taken


def simulate(
    schedule: Schedule, cost: CostModel, inputs: list[int], outputs: list[int], arrivals: list[float]
) -> list[Request]:
    """The requests with the times of their tokens."""
    assert cost.first_token_from_prefill
    requests = [Request(*one) for one in zip(inputs, outputs, arrivals, strict=True)]
    if schedule.policy == "rra":
        _rra(schedule, cost, requests)
    elif schedule.policy.startswith("waa"):
        _waa(schedule, cost, requests)
    else:
        _slots(schedule, cost, requests)
    return requests


def _slots(schedule: Schedule, cost: CostModel, requests: list[Request]) -> None:
    """orca, and with a limit on the tokens of a pass chunked."""
    slots = _shares(schedule["max_num_seqs"], schedule.variables.get("micro_batches", 1))
    budget = schedule.variables.get("max_num_batched_tokens", 1 << 40)
    line, groups = Line(cost, ""), [list[Request]() for _ in slots]
    back = list(range(len(slots)))
    """Groups that are not in flight, the one that ran longest ago first."""

    def idle(now: float) -> None:
        if line.free[0] <= now:
            _even(groups, back, slots, len(clock.waiting), len(line.free))
        for g in list(back):
            if line.free[0] > now:
                return
            decodes = [r for r in groups[g] if r.prefilled == r.prompt]
            prefills, room = [], budget - len(decodes)
            for r in [r for r in groups[g] if r.prefilled < r.prompt]:
                prefills.append((r, min(room, r.prompt - r.prefilled)))
                room -= prefills[-1][1]
            places = _dealt(g, groups, back, slots, len(clock.waiting), len(line.free))
            while clock.waiting and places > 0 and room > 0:
                places -= 1
                groups[g] += clock.take(1)
                prefills.append((groups[g][-1], min(room, groups[g][-1].prompt)))
                room -= prefills[-1][1]
            if groups[g]:
                back.remove(g)
                left = line.enter(now, prefills, decodes)
                clock.when_left(line, left, lambda t, g=g, p=prefills, d=decodes: ended(t, g, p, d))

    def ended(now: float, g: int, prefills: list[tuple[Request, int]], decodes: list[Request]) -> None:
        _produced(now, prefills, decodes)
        groups[g] = [r for r in groups[g] if not r.done]
        back.append(g)

    clock = Clockwork(requests, idle)
    clock.run()


def _dealt(g: int, groups: list[list[Request]], back: list[int], slots: list[int], joining: int, stages: int) -> int:
    """How many of those that could join go to a group that is back, if equal groups let it go first."""
    total, own = sum(map(len, groups)) + joining, slots[g] - len(groups[g])
    if total >= sum(slots):
        return own
    used = _needed(total, slots, stages)
    sizes = [len(group) if h in back else len(group) * 3 // 2 for h, group in enumerate(groups[:used])]
    for left in range(joining, 0, -1):
        if g >= used or sizes[g] == slots[g] or sum(max(sizes[g] - size, 0) for size in sizes) >= left:
            break
        sizes[g] += 1
    return sizes[g] - len(groups[g]) if g < used else 0


def _needed(total: int, slots: list[int], stages: int) -> int:
    return next(n for n in range(min(stages, len(slots)), len(slots) + 1) if sum(slots[:n]) >= total)


def _even(groups: list[list[Request]], back: list[int], slots: list[int], joining: int, stages: int) -> None:
    """One row after the other, the groups in turn; rows that are given come first, and go first."""
    total = sum(map(len, groups)) + joining
    used = _needed(total, slots, stages) if total < sum(slots) else 0
    for g in [g for g in range(len(groups)) if used and g in back]:
        while groups[g] and groups[g][0].prefilled == groups[g][0].prompt:
            least = min(range(used), key=lambda h: len(groups[h]))
            if g < used and (joining or len(groups[g]) - 1 <= len(groups[least]) * 3 // 2):
                break
            groups[least].insert(0, groups[g].pop(0))


def _produced(now: float, prefills: list[tuple[Request, int]], decodes: list[Request]) -> None:
    for request, new in prefills:
        request.prefilled += new
        if request.prefilled == request.prompt:
            request.token_times.append(now)
    for request in decodes:
        request.token_times.append(now)


def _rra(schedule: Schedule, cost: CostModel, requests: list[Request]) -> None:
    """A prefill phase begins when every group that has requests has begun its rounds, or none has any.

    It takes the largest of as many parts as are left of what waits, until there are none or B_E requests are in; those
    that come meanwhile join it. Then all residents are dealt out, when those of the groups are back; the new ones fill
    up the groups in their order. A group waits for its own, and those behind it wait for it.
    """
    size, groups, line = schedule["prefill_batch"], schedule.variables.get("micro_batches", 1), Line(cost, "")
    residents: list[list[Request]] = [[] for _ in range(groups)]
    rounds, busy = [0] * groups, [False] * groups
    fresh: list[Request] = []
    """Those of the phase that have not been dealt out for good."""
    order: dict[int, int] = {}
    flying: set[int] = set()
    parts = admitted = 0

    def idle(now: float) -> None:
        nonlocal parts, admitted
        while line.free[0] <= now:
            here = [g for g in range(groups) if residents[g]]
            if not admitted and clock.waiting and all(rounds[g] >= schedule["decode_steps"] for g in here):
                parts = groups
            if parts and clock.waiting and admitted < size:
                part = _balanced(clock.waiting[: size - admitted], parts)[0]
                clock.waiting[:] = [r for r in clock.waiting if r not in part]
                order.update((id(r), len(order)) for r in part)
                parts, admitted = parts - 1, admitted + len(part)
                fresh.extend(part)
                flying.update(id(r) for r in part)
                whole = [(r, r.prompt) for r in part]
                clock.when_left(line, line.enter(now, whole, []), lambda t, p=whole: prefilled(t, p))
                continue
            if admitted:
                if any(busy):
                    return
                deal()
                here = [g for g in range(groups) if residents[g]]
                if not here:
                    parts = admitted = 0
                    if clock.waiting:
                        continue
            if not here or busy[g := min(here, key=lambda g: (rounds[g], g))]:
                return
            rows = list(residents[g])
            if any(id(r) in flying for r in rows):
                return
            parts = admitted = 0
            fresh.clear()
            rounds[g], busy[g] = rounds[g] + 1, True
            clock.when_left(line, line.enter(now, [], rows), lambda t, g=g, rows=rows: decoded(t, g, rows))

    def deal() -> None:
        """Those of the groups as one deals cards, the oldest first; then the new ones, hand after hand."""
        new = {id(r) for r in fresh}
        known = sorted([r for group in residents for r in group if id(r) not in new], key=lambda r: order[id(r)])
        sizes, left = _shares(len(known) + len(fresh), groups), list(fresh)
        for g in range(groups):
            residents[g] = known[g::groups]
            taken = sizes[g] - len(residents[g])
            residents[g] += left[:taken]
            del left[:taken]
        rounds[:] = [0] * groups

    def prefilled(now: float, part: list[tuple[Request, int]]) -> None:
        _produced(now, part, [])
        flying.difference_update(id(r) for r, _ in part)
        fresh[:] = [r for r in fresh if not r.done]
        residents[:] = [[r for r in group if not r.done] for group in residents]

    def decoded(now: float, g: int, rows: list[Request]) -> None:
        _produced(now, [], rows)
        residents[g] = [r for r in residents[g] if not r.done]
        busy[g] = False

    clock = Clockwork(requests, idle)
    clock.run()


def _waa(schedule: Schedule, cost: CostModel, requests: list[Request]) -> None:
    size, first, second = schedule["prefill_batch"], Line(cost, "prefill"), Line(cost, "decode")
    slots = _shares(schedule["decode_batch"], schedule.variables.get("micro_batches", 1))
    most = (len(first.free) + 1) * size
    groups, back = [list[Request]() for _ in slots], list(range(len(slots)))
    ready: list[Request] = []
    coming = 0
    """Requests in prefill and in transfer."""

    def idle(now: float) -> None:
        nonlocal coming
        decode(now)
        while first.free[0] <= now and clock.waiting and ahead() + min(size, len(clock.waiting)) <= most:
            batch = clock.take(size)
            coming += len(batch)
            left = first.enter(now, [(r, r.prompt) for r in batch], [])
            clock.when_left(first, left, lambda t, b=batch: prefilled(t, b))

    def ahead() -> int:
        return coming + max(len(ready) - (sum(slots) - sum(map(len, groups))), 0)

    def decode(now: float) -> None:
        if second.free[0] <= now:
            _even(groups, back, slots, len(ready), len(slots))
        for g in list(back):
            if second.free[0] > now:
                return
            ready.sort(key=lambda r: r.token_times[0])  # The oldest first, whichever transfer was faster.
            taken = ready[: _dealt(g, groups, list(range(len(slots))), slots, len(ready), len(slots))]
            del ready[: len(taken)]
            groups[g] += taken
            if groups[g]:
                back.remove(g)
                rows = list(groups[g])
                clock.when_left(second, second.enter(now, [], rows), lambda t, g=g, rows=rows: decoded(t, g, rows))

    def prefilled(now: float, batch: list[Request]) -> None:
        nonlocal coming
        _produced(now, [(r, r.prompt) for r in batch], [])
        going_on = [r for r in batch if not r.done]
        coming -= len(batch) - len(going_on)
        if going_on:
            tokens = sum(r.prompt for r in going_on)
            clock.at(now + cost.kv_transfer_seconds(tokens), lambda _, rows=going_on: arrived(rows))

    def arrived(rows: list[Request]) -> None:
        nonlocal coming
        coming -= len(rows)
        ready.extend(rows)

    def decoded(now: float, g: int, rows: list[Request]) -> None:
        _produced(now, [], rows)
        groups[g] = [r for r in groups[g] if not r.done]
        back.append(g)

    clock = Clockwork(requests, idle)
    clock.run()


def _shares(total: int, parts: int) -> list[int]:
    """Nearly equal, larger ones first."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def _balanced(requests: list[Request], parts: int) -> list[list[Request]]:
    """Shares of nearly equal tokens, the largest first: longest prompt first, each to the emptiest share."""
    shares = [list[Request]() for _ in range(min(parts, len(requests)))]
    for request in sorted(requests, key=lambda r: -r.prompt):
        min(shares, key=lambda share: sum(r.prompt for r in share)).append(request)
    shares.sort(key=lambda share: -sum(r.prompt for r in share))
    return [sorted(share, key=requests.index) for share in shares]
