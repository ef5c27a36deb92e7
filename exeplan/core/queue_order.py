"""Orders: which waiting request goes first. Pure functions of arrays; a policy says how many may start.

    fcfs          first come, first served
    sjf, edf      shortest prompt first, earliest deadline first
    das           TCB (ICPP 2022) Algorithm 1, row by row: of the s requests of the highest utility that fill a row the
                  first eta * s; then those of at least q times their mean utility, by deadline; then the others
    slotted-das   TCB Algorithm 2: the same choice, in slots of the longest request of a row's first part

    symbol  name       meaning
    N_t     queue      requests that have arrived, not started and not expired
    B, L    rows, row_tokens
    z       slot_tokens
    v_n     utility    weight / tokens; 1 / l_n in the paper
    eta, q             the paper lets eta + q = 1

Rounded up, eta * s is at least one request. What `das` takes of a queue earns at least eta q / (eta q + 1) of what the
best schedule in hindsight does (Theorem 5.1, for utilities 1 / l_n). fcfs, sjf and edf stop at the first request that
fits nowhere; das continues with smaller ones. Not here: expiry and memory (`exeplan.scheduling.scheduler`).
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapreplace
from typing import NamedTuple

import numpy as np

from exeplan.arrays import Floats
from exeplan.core.batch import PackedPrompt, Packing, SequenceState
from exeplan.core.schedule import Schedule
from exeplan.workload.length_law import Ints

ORDERS = ("fcfs", "sjf", "edf", "das")
SLOTTED_DAS = "slotted-das"
ORDER_VARIABLES = ("eta_percent", "q_percent", "lead_ms")
"""Variables of the order that any schedule may have: the parameters of DAS, and `lead_ms`, how long before its
deadline a request must have started."""
ETA = 0.5
_WIDER = (1.0, 1.02, 1.05)
"""How much longer slots may become, so that requests of like lengths share one."""


@dataclass(frozen=True, slots=True)
class QueueArrays:
    """The waiting requests in order of arrival, one array entry each."""

    tokens: Ints
    deadlines: Floats
    """Infinity where there is none."""
    utilities: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Das:
    """The parameters of DAS."""

    eta: float = ETA
    q: float = 1 - ETA


class Pick(NamedTuple):
    """A request of the queue in a bin, which is a row or a slot."""

    request: int
    """Its index in the queue."""
    bin: int
    offset: int


@dataclass(frozen=True, slots=True)
class Packed:
    """Requests assigned to bins, `bins_a_row` of them in each row."""

    picks: list[Pick]
    bins_a_row: int = 1

    def packing(self, queue: QueueArrays, count: int | None = None) -> Packing:
        """The first `count` picks, rebalanced where that makes their rows shorter; no more rows than now."""
        picks = self.picks[:count]
        lengths = queue.tokens.tolist()
        tokens = [lengths[pick.request] for pick in picks]
        rows = 1 + max(pick.bin for pick in picks) // self.bins_a_row
        bins = rows * self.bins_a_row if rows > 1 else 1 + max(pick.bin for pick in picks)
        size, lying = _laid([(pick.bin, pick.offset) for pick in picks], tokens, bins, alike=self.bins_a_row > 1)
        per_row = bins // rows
        places = (PackedPrompt(bin_ // per_row, bin_ % per_row * size + offset) for bin_, offset in lying)
        return Packing(per_row * size, size, tuple(places))


Lying = list[tuple[int, int]]
"""Bin and offset of each."""


def _laid(lying: Lying, tokens: list[int], bins: int, *, alike: bool) -> tuple[int, Lying]:
    """The length that the bins need, and where each request lies then.

    Requests of like lengths share a bin where that needs hardly more: a slot leaves when all its requests are done.
    """
    even = evenly_spread(tokens, bins)
    size, best = min((_longest(where, tokens), where) for where in (lying, even))
    if alike:
        lengths = np.array(tokens)
        rank = np.argsort(-lengths, kind="stable")
        for more in _WIDER:
            wider = min(int(size * more), _longest(lying, tokens))
            picks = _best_fit(rank, lengths, bins=bins, size=wider, strict=True)
            if len(picks) == len(tokens):
                together = {pick.request: (pick.bin, pick.offset) for pick in picks}
                return wider, [together[number] for number in range(len(tokens))]
    return size, best


def evenly_spread(tokens: list[int], bins: int) -> Lying:
    """Bin and offset of each, longest first, each into the emptiest bin."""
    fill = [(0, number) for number in range(bins)]
    where = [(0, 0)] * len(tokens)
    for index in sorted(range(len(tokens)), key=lambda index: -tokens[index]):
        used, number = fill[0]
        where[index] = (number, used)
        heapreplace(fill, (used + tokens[index], number))
    return where


def _longest(where: Lying, tokens: list[int]) -> int:
    return max(offset + length for (_, offset), length in zip(where, tokens, strict=True))


def queue_of(sequences: Iterable[SequenceState]) -> QueueArrays:
    """The queue of these sequences."""
    rows = [(s.num_packed_tokens, math.inf if s.deadline is None else s.deadline, s.weight) for s in sequences]
    tokens, deadlines, weights = np.array(rows, dtype=float).reshape(-1, 3).T
    return QueueArrays(tokens.astype(np.int64), deadlines, weights / np.maximum(tokens, 1))


def ranking(order: str, queue: QueueArrays, *, room: int, limit: int, das: Das, before: int = 0) -> Ints:
    """All of the queue, first things first, where `limit` requests or `room` tokens can start.

    DAS then has one row. Where requests start one at a time its first part would be all there is: what eta times their
    number leaves over is carried on from those `before` this one.
    """
    if order != "das" or not len(queue.tokens):
        return _sorted(order, queue)
    by_utility = np.argsort(-queue.utilities, kind="stable")
    count = int(np.searchsorted(np.cumsum(queue.tokens[by_utility]), room, side="right"))
    count = max(min(count, limit), 1)
    first = math.floor(das.eta * (before + count) + 1e-9) - math.floor(das.eta * before + 1e-9)
    mean = queue.utilities[by_utility[: max(first, 1)]].mean()
    end = max(int(np.searchsorted(-queue.utilities[by_utility], -das.q * mean * (1 - 1e-12), side="right")), first)
    urgent = by_utility[first:end]
    urgent = urgent[np.lexsort((urgent, queue.deadlines[urgent]))]
    return np.concatenate([by_utility[:first], urgent, by_utility[end:]])


def in_rows(order: str, queue: QueueArrays, *, rows: int, row_tokens: int, das: Das) -> Packed:
    """The row of each request. No request of the queue may be longer than a row."""
    if order != "das":
        return Packed(_best_fit(_sorted(order, queue), queue.tokens, bins=rows, size=row_tokens, strict=True))
    picks = []
    for row, (chosen, _) in enumerate(das_rows(queue, rows=rows, row_tokens=row_tokens, das=das)):
        starts = np.cumsum(queue.tokens[chosen]) - queue.tokens[chosen]
        picks += [Pick(request, row, start) for request, start in zip(chosen.tolist(), starts.tolist(), strict=True)]
    return Packed(picks)


def in_slots(order: str, queue: QueueArrays, *, rows: int, row_tokens: int, slot_tokens: int, das: Das) -> Packed:
    """The slot of each request. No request of the queue may be longer than a slot.

    DAS fills rows, whose requests are then spread over all slots, followed by those that it did not choose.
    """
    slots = row_tokens // slot_tokens
    if order == "das":
        chosen = [row for row, _ in das_rows(queue, rows=rows, row_tokens=row_tokens, das=das)]
        others = np.setdiff1d(np.arange(len(queue.tokens)), np.concatenate(chosen))
        rank = np.concatenate([*chosen, others[np.argsort(-queue.utilities[others], kind="stable")]])
    else:
        rank = _sorted(order, queue)
    picks = _best_fit(rank, queue.tokens, bins=rows * slots, size=slot_tokens, strict=order != "das")
    return Packed(picks, slots)


def in_slots_of_their_own(queue: QueueArrays, *, rows: int, row_tokens: int, das: Das) -> Packed:
    """Algorithm 2. A request longer than its slot waits for another batch."""
    chosen = das_rows(queue, rows=rows, row_tokens=row_tokens, das=das)
    size = max(int(queue.tokens[row[:first]].max()) for row, first in chosen)
    slots = row_tokens // size
    rank = np.concatenate([row for row, _ in chosen])
    # As long as this many slots can be.
    return Packed(
        _best_fit(rank, queue.tokens, bins=rows * slots, size=row_tokens // slots, strict=False), bins_a_row=slots
    )


def das_rows(queue: QueueArrays, *, rows: int, row_tokens: int, das: Das) -> list[tuple[Ints, int]]:
    """Algorithm 1: the requests of each row, and how many of them for their utility. None may be longer than a row."""
    place = np.empty(len(queue.tokens), dtype=np.int64)
    left = np.argsort(-queue.utilities, kind="stable")
    place[left] = np.arange(len(left))
    by_deadline = np.argsort(queue.deadlines, kind="stable")
    waiting = np.ones(len(left), dtype=bool)
    chosen = []
    for _ in range(rows):
        if not len(left):
            break
        row, first = _das_row(queue, left, by_deadline, place, room=row_tokens, das=das)
        chosen.append((row, first))
        waiting[row] = False
        left, by_deadline = left[waiting[left]], by_deadline[waiting[by_deadline]]
    return chosen


def _das_row(
    queue: QueueArrays, left: Ints, by_deadline: Ints, place: Ints, *, room: int, das: Das
) -> tuple[Ints, int]:
    """One row from those `left`, by utility; `place` is the rank of each among all."""
    total = np.cumsum(queue.tokens[left])
    if total[-1] <= room:
        return left, len(left)
    count = int(np.searchsorted(total, room, side="right"))
    first = max(math.ceil(das.eta * count - 1e-9), 1)
    least = das.q * float(queue.utilities[left[:first]].mean()) * (1 - 1e-12)
    end = max(int(np.searchsorted(-queue.utilities[left], -least, side="right")), first)
    chosen, room = [left[:first]], room - int(total[first - 1])
    among = place[by_deadline]
    urgent = by_deadline[(among >= place[left[first]]) & (among <= place[left[end - 1]])]
    for candidates in (urgent, left[end:]):
        taken = candidates[_greedy(queue.tokens[candidates], room)]
        chosen.append(taken)
        room -= int(queue.tokens[taken].sum())
    return np.concatenate(chosen), first


def _greedy(tokens: Ints, room: int) -> Ints:
    """Positions of those taken one after the other, each if it still fits."""
    taken, here = [], np.arange(len(tokens))
    while len(here := here[tokens[here] <= room]):
        total = np.cumsum(tokens[here])
        count = int(np.searchsorted(total, room, side="right"))
        taken.append(here[:count])
        room -= int(total[count - 1])
        here = here[count:]
    return np.concatenate(taken) if taken else here


def _sorted(order: str, queue: QueueArrays) -> Ints:
    keys = {"sjf": queue.tokens, "edf": queue.deadlines}
    return np.argsort(keys[order], kind="stable") if order in keys else np.arange(len(queue.tokens))


def _best_fit(rank: Ints, tokens: Ints, *, bins: int, size: int, strict: bool) -> list[Pick]:
    """Best fit: each into the bin with the least room that holds it; `strict` stops at the first that fits nowhere."""
    rooms = [(size, number) for number in range(bins)]
    least = int(tokens[rank].min(initial=size))
    picks = []
    for request, length in zip(rank.tolist(), tokens[rank].tolist(), strict=True):
        found = bisect_left(rooms, (length, 0))
        if found < bins:
            room, number = rooms.pop(found)
            picks.append(Pick(request, number, size - room))
            insort(rooms, (room - length, number))
        elif strict or rooms[-1][0] < least:
            break
    return picks


def das_of(schedule: Schedule) -> Das:
    """The parameters of DAS; q is 1 - eta unless it is given."""
    eta = schedule.variables.get("eta_percent", round(100 * ETA))
    return Das(eta=eta / 100, q=schedule.variables.get("q_percent", 100 - eta) / 100)
