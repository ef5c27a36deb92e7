"""A scheduler for several clients: who waits is offered to the policy in fair order, and the last places are kept free.

With one client it is `Scheduler`, decision by decision: what was planned is what runs. With several,

- the policy sees the first of the waiting sequences in the order of virtual token counters (`fair_queue.py`);
- while a client of the last minute has nothing waiting, the last eighth of the places, and of the KV blocks, is left to
  clients that hold less than their share, so that it does not wait for an output of another to end when it comes back;
- where a pass takes much longer than one of the light clients' sequences alone would, such express passes come between
  the policy's, so that those run at `1 / STRETCH` of their own speed at least; the policy's passes keep a third of the
  time. On devices whose passes take as long with few sequences as with many there are none;
- where blocks run out, the client that holds the most for its weight gives up its youngest sequence; the oldest of all
  is never preempted.

Orders other than `fcfs`, and policies that pack by length, choose among the sequences offered.

Not here: which client a request is from (`runner/server/network/clients.py`).
"""

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice, takewhile
from typing import cast

from exeplan.core.batch import Batch, SequenceState, num_blocks_for, within
from exeplan.core.schedule import Schedule
from exeplan.policies import pass_limits
from exeplan.scheduling.fair_queue import (
    OUTPUT_TOKEN,
    PROMPT_TOKEN,
    ClientLines,
    ClientSequence,
    VirtualTokenCounters,
)
from exeplan.scheduling.scheduler import Scheduler, num_reserved_blocks
from exeplan.scheduling.sorted_queue import SortedQueue, take_out_of_all

STRETCH = 1.5
"""How much longer a light client's tokens may take than in passes of its own."""
MOST_EXPRESS = 16
"""Express passes between two of the policy."""
_SMOOTHING = 0.2
"""Weight of the latest pass in the mean seconds of passes."""
KEPT_FREE = 1 / 8
"""Of the places and of the blocks, for clients below their share."""
_FEW_PLACES = 4
"""From this many on at least one is kept free."""
_LEAST_OFFERED = 64


class FairScheduler(Scheduler):
    """A `Scheduler` of `ClientSequence`s. `counters` outlive it: another schedule goes on with them.

    `clock` tells how long ago a client was here, in seconds.
    """

    def __init__(
        self,
        schedule: Schedule,
        num_blocks: int,
        *,
        counters: VirtualTokenCounters,
        clock: Callable[[], float],
        num_prefill_stages: int = 1,
        num_decode_stages: int = 1,
        whole_prompts: bool = False,
        pass_tokens: int | None = None,
    ) -> None:
        super().__init__(
            schedule,
            num_blocks,
            num_prefill_stages=num_prefill_stages,
            num_decode_stages=num_decode_stages,
            whole_prompts=whole_prompts,
            pass_tokens=pass_tokens,
        )
        self._counters, self._clock = counters, clock
        self._lines: ClientLines | None = None
        """Of the waiting sequences, as soon as there are several clients; None while the policy sees some of them."""
        limits = pass_limits(schedule)
        self._num_places = limits.decode_rows
        policy = self.policy
        in_rounds = policy.KEEPS_FINISHED_ROWS or policy.PADS_PROMPTS or policy.SEPARATE_STAGES
        self._has_express = not in_rounds and len(self.groups) == 1
        self._express: set[int] = set()
        """Express passes that have not been timed, by identity."""
        self._credit = 0.0
        """Express passes that are due."""
        self._seconds = self._express_seconds = 0.0
        """Of the policy's passes and of the express ones; 0 as long as they are not known."""
        self._num_offered = 2 * max(limits.decode_rows or 0, limits.prompts or 0, _LEAST_OFFERED // 2)

    def add(self, sequence: SequenceState) -> None:
        self.check(sequence)
        self._counters.join(_of_client(sequence), self._present())
        self.add_again(sequence)

    def _dropped(self, due: list[SequenceState]) -> list[SequenceState]:
        return [one for one in _of_clients(due) if not one.may_begin_late]

    def next_batch(self, phase: str = "") -> Batch | None:
        if self._counters.is_shared:
            self._counters.look(self._present(), self._clock())
        if not self._counters.is_shared:
            return super().next_batch(phase)
        if self._has_express and self._credit >= 1 and not self.in_flight and (batch := self._express_batch()):
            self._credit -= 1
            self._express.add(id(batch))
            return batch
        if not self.waiting:
            return super().next_batch(phase)
        everything, lines, by_deadline = self.waiting, self._client_lines(), self._by_deadline
        order = self._counters.order(lines.lines(everything), _of_clients(self.running))
        offered = tuple(islice(order, self._num_offered))
        self.waiting, self._lines, self._by_deadline = deque(offered), None, None
        try:
            return super().next_batch(phase)
        finally:
            self._lines, self._by_deadline = lines, by_deadline
            self._put_back(everything, offered)

    def took(self, batch: Batch, seconds: float) -> None:
        """How long a pass ran; only with this there are express passes."""
        if id(batch) in self._express:
            self._express.discard(id(batch))
            self._express_seconds = _mean(self._express_seconds, seconds)
            return
        self._seconds = _mean(self._seconds, seconds)
        due = 1.0
        if self._express_seconds:
            due = max(0.0, (self._seconds / self._express_seconds - STRETCH) / (STRETCH - 1))
        self._credit = min(self._credit + due, MOST_EXPRESS)

    def _express_batch(self) -> Batch | None:
        """A pass of the light clients' sequences alone; None where they have none that can run."""
        light = self._light_clients()
        if not light:
            return None
        rows = (s for s in _of_clients(self.running) if s.client in light)
        decode = tuple(s for s in rows if not (s.finished or s.num_computed_tokens))
        cut = any(s.num_computed_tokens for s in self.running)
        prefill = () if cut else self._express_prefill(light, num_decode=len(decode))
        batch = Batch(prefill=prefill, decode=decode)
        grown = self._grow(batch)
        admitted = self._admit(batch) if prefill else ()
        if not grown and not admitted:
            return None
        batch = replace(batch, prefill=admitted, decode=grown)
        self.busy.add(batch.group)
        self._launch(batch)
        self.num_prefills_in_flight += bool(batch.prefill)
        return batch

    def _express_prefill(self, light: set[str], *, num_decode: int) -> tuple[SequenceState, ...]:
        """Of the light clients' waiting sequences those that fit with these decodes, places and tokens of a pass
        included."""
        lines = self._client_lines().lines(self.waiting)
        merged = heapq.merge(*(line for name, line in lines.items() if name in light))  # In the order of the queue.
        waiting: Iterator[SequenceState] = (sequence for _, sequence in merged)
        most_tokens = pass_limits(self.schedule).tokens
        if most_tokens is not None:
            waiting = takewhile(lambda s: s.num_tokens <= most_tokens - num_decode, islice(waiting, 1))
        room = len(self.waiting) if self._num_places is None else self._num_places - len(self.running)
        chosen = self.fitting(waiting, limit=room, reserve=getattr(self.policy, "RESERVES", False))
        limit = self.schedule.variables.get("max_num_batched_tokens")
        return within(chosen, limit - num_decode) if limit else chosen

    def _light_clients(self) -> set[str]:
        """Those with at most a quarter of their share of all sequences, waiting ones included."""
        sizes = self._client_lines().sizes(self.waiting) + Counter(one.client for one in _of_clients(self.running))
        return {name for name, size in sizes.items() if 4 * size <= self._counters.share(name) * sizes.total()}

    def fitting(
        self, sequences: Iterable[SequenceState], *, limit: int, reserve: bool = False, max_tokens: int | None = None
    ) -> tuple[SequenceState, ...]:
        if self._counters.knows_more_than(self._waiting_clients()):
            sequences = self._within_shares(_of_clients(sequences), reserve=reserve)
        return super().fitting(sequences, limit=limit, reserve=reserve, max_tokens=max_tokens)

    def complete(self, batch: Batch) -> list[SequenceState]:
        if self._counters.is_shared:
            for row in _of_clients(chain(batch.whole_prefills, batch.decode)):
                self._counters.charge(row, OUTPUT_TOKEN)
        return super().complete(batch)

    def _present(self) -> Iterator[str]:
        """Clients with sequences that wait or run, some of them more than once."""
        yield from self._client_lines().sizes(self.waiting)
        yield from (one.client for one in _of_clients(self.running))

    def _waiting_clients(self) -> Iterable[str]:
        """Clients of all that wait; of those offered, some of them more than once, while the policy sees these."""
        if self._lines is not None:
            return self._lines.sizes(self.waiting)
        return (one.client for one in _of_clients(self.waiting))

    def _client_lines(self) -> ClientLines:
        if self._lines is None:
            self._lines = ClientLines()
        return self._lines

    def _followers(self) -> list[SortedQueue]:
        return [*super()._followers(), *([self._lines] if self._lines else [])]

    def _put_back(self, everything: deque[SequenceState], offered: tuple[ClientSequence, ...]) -> None:
        """What was not admitted waits on as it came; what was preempted meanwhile is in front."""
        known, left = {id(s) for s in offered}, {id(s) for s in self.waiting}
        preempted = [s for s in self.waiting if id(s) not in known]
        followers = [one for one in (self._lines, self._by_deadline) if one]
        take_out_of_all(followers, everything, [s for s in offered if id(s) not in left])
        everything.extendleft(reversed(preempted))
        self.waiting = everything

    def _within_shares(self, sequences: Iterable[ClientSequence], *, reserve: bool) -> Iterator[ClientSequence]:
        """Without those of clients at their share that would take what is kept free for others.

        A client with nothing running is never left out, so that every sequence starts at last.
        """
        rows, blocks = self._held(reserve=reserve)
        free_blocks = self.num_blocks - blocks.total() if reserve else self.free_blocks
        over: set[str] = set()
        for sequence in sequences:
            name = sequence.client
            need = num_reserved_blocks(sequence) if reserve else num_blocks_for(sequence.num_tokens + 1)
            at_share = self._is_last_place(name, rows) or (
                free_blocks - need < max(1, int(KEPT_FREE * self.num_blocks))
                and blocks[name] + need > self._counters.share(name) * self.num_blocks
            )
            if name in over or (rows[name] and at_share):
                over.add(name)
                continue
            yield sequence
            rows[name] += 1
            blocks[name] += need
            free_blocks -= need

    def _is_last_place(self, client: str, rows: Counter[str]) -> bool:
        """Whether the next place is one of those that are kept free for others than this client."""
        places = self._num_places
        if places is None or rows.total() < places - max(int(KEPT_FREE * places), int(places >= _FEW_PLACES)):
            return False
        return rows[client] >= math.ceil(self._counters.share(client) * places)

    def _held(self, *, reserve: bool) -> tuple[Counter[str], Counter[str]]:
        """Running sequences and their blocks by client; with `reserve` at their full lengths."""
        rows, blocks = Counter[str](), Counter[str]()
        for one in _of_clients(self.running):
            rows[one.client] += 1
            blocks[one.client] += num_reserved_blocks(one) if reserve else one.num_blocks
        return rows, blocks

    def _enter(self, sequence: SequenceState) -> None:
        if not sequence.begun:
            self._counters.charge(_of_client(sequence), PROMPT_TOKEN * sequence.num_prompt_tokens)
        super()._enter(sequence)

    def _youngest_idle(self) -> SequenceState | None:
        if not self._counters.is_shared:
            return super()._youngest_idle()
        _, blocks = self._held(reserve=False)
        idle = [s for s in _of_clients(reversed(self.running)) if not s.in_flight]
        younger = [s for s in idle if s is not self.running[0]] or idle
        return max(younger, key=lambda s: blocks[s.client] / s.client_weight, default=None)


def _mean(before: float, now: float) -> float:
    return now if not before else before + _SMOOTHING * (now - before)


def _of_client(sequence: SequenceState) -> ClientSequence:
    return cast(ClientSequence, sequence)


def _of_clients(sequences: Iterable[SequenceState]) -> Iterator[ClientSequence]:
    return cast(Iterator[ClientSequence], iter(sequences))
