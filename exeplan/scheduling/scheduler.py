"""The scheduler that replay and engine share: admission, KV-block accounting, preemption; a policy chooses the batches.

The drivers differ in one thing only: the replay times a batch with a profile, the engine executes it. The next batch,
admission, preemption and completion are decided here and in `exeplan/policies/<policy>.py`, once.

Life of a sequence: `add` puts it into `waiting`; a prefill batch moves it to `running` and yields its first token; each
decode batch yields one more; it leaves `running` when it is finished (at once, unless the policy keeps finished rows
until all of their slot are finished; by default all sequences share one slot).
When KV blocks run out, the youngest running sequence goes back to the front of `waiting` and is computed again later,
its tokens kept; the oldest is never preempted, so there is always progress.

On a pipeline several batches are in flight: the driver asks for the next one whenever the first stage is free, and
completes a batch when it has left the last. Decoding sequences are split into groups (micro-batches); a group in flight
cannot be scheduled again before it is complete. Where some stages only prefill, the keys and values of a prefilled
sequence are transferred to the others, and it waits in `ready` for a place in a group.

Waiting sequences start in the schedule's order (`exeplan/core/queue_order.py`), preempted ones first. A sequence with a
deadline that has not begun by then is dropped by `expire` and never computed.

Not here: which blocks (the runner's KV cache places them), and the tokens themselves.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain, islice
from operator import attrgetter
from typing import TypeVar

from exeplan.core.batch import BLOCK_SIZE, Batch, Packing, SequenceState, num_blocks_for
from exeplan.core.control_variables import slot_share
from exeplan.core.queue_order import das_of, queue_of, ranking
from exeplan.core.schedule import Schedule
from exeplan.errors import InputError
from exeplan.policies import load_policy
from exeplan.policies.interface import Policy, State
from exeplan.scheduling.sorted_queue import SORTED_ORDERS, SortedQueue, take_out_of_all


class Scheduler:
    """Drives one policy over one KV cache of `num_blocks` blocks.

    Use: `add` sequences; then repeat `batch = next_batch()`, run it, give every row that produced a token
    `num_output_tokens += 1` (and `finished = True` at its end), and call `complete(batch)`. On a pipeline `next_batch`
    may be called again before that; with separate prefill stages (`num_prefill_stages` of them) it is called for each
    `phase` on its own, and `kv_arrived(batch)` reports that a prefill's keys and values have been transferred.
    """

    def __init__(
        self,
        schedule: Schedule,
        num_blocks: int,
        *,
        num_prefill_stages: int = 1,
        num_decode_stages: int = 1,
        whole_prompts: bool = False,
        pass_tokens: int | None = None,
        num_ranks: int = 1,
    ) -> None:
        """`whole_prompts`: no prompt can be cut, because an encoder attends to all of it at once.

        An admitted sequence goes to the one of `num_ranks` that has the fewest; their blocks are counted together.

        The device has memory to prefill `pass_tokens` tokens at once; None for no limit. The replay has no such limit:
        where it binds, a plan's prefill becomes several, one after the other.
        """
        self.schedule = schedule
        self.policy: Policy = load_policy(schedule.policy)
        self.num_blocks = num_blocks
        self.free_blocks = num_blocks
        self.num_prefill_stages, self.num_decode_stages = num_prefill_stages, num_decode_stages
        self.whole_prompts = whole_prompts
        self.pass_tokens = pass_tokens
        self.on_ranks = [0] * num_ranks
        """Admitted sequences by the rank that attends for them."""
        self.waiting: deque[SequenceState] = deque()
        """In order of arrival, preempted ones first."""
        self._sorted = SortedQueue(schedule.order) if schedule.order in SORTED_ORDERS else None
        """The same in the schedule's order, where that is of a fixed key."""
        self._by_deadline: SortedQueue | None = None
        """The same by deadline, as soon as one has passed."""
        self._next_deadline = math.inf
        """No waiting sequence that has not begun has an earlier one."""
        self.running: list[SequenceState] = []
        """Admitted sequences, oldest first."""
        self.groups: list[list[SequenceState]] = [[] for _ in range(schedule.num_micro_batches)]
        """Running sequences by the micro-batch in which they decode, oldest first but for those moved to it."""
        self.ready: list[SequenceState] = []
        """Transferred to the stages that decode, and in no group yet; oldest first."""
        self.num_in_transfer = 0
        """Admitted to the stages that prefill, and not ready yet."""
        self.busy: set[int] = set()
        """Groups in flight."""
        self.group_order = list(range(len(self.groups)))
        """All groups, the one that was scheduled longest ago first."""
        self.state: State = self.policy.start(schedule, len(self.groups))
        """The policy's own: read by the policy alone; it is notified of what was scheduled."""
        self.num_prefills_in_flight = 0
        """Batches in flight that prefill."""
        self.num_admissions = 0
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def in_flight(self) -> bool:
        """Whether a batch or a KV transfer is in flight, which completes without anything being scheduled."""
        return bool(self.busy or self.num_in_transfer or self.num_prefills_in_flight)

    @property
    def is_short(self) -> bool:
        """Whether running sequences need more blocks for their next tokens than are free: some may be preempted."""
        needed = sum(s.num_tokens > s.num_blocks * BLOCK_SIZE for s in self.running)
        return needed > self.free_blocks

    def add(self, sequence: SequenceState) -> None:
        """Queues a sequence. Raises InputError when the cache could not hold it even alone."""
        self.check(sequence)
        self.add_again(sequence)

    def add_again(self, sequence: SequenceState) -> None:
        """Queues a sequence that another scheduler had, whose place this one takes."""
        self.waiting.append(sequence)
        if sequence.deadline is not None:
            self._next_deadline = min(self._next_deadline, sequence.deadline)

    @property
    def has_deadlines(self) -> bool:
        """Whether a waiting sequence may expire."""
        return math.isfinite(self._next_deadline)

    def expire(self, now: float) -> list[SequenceState]:
        """Drops and returns the sequences that can no longer begin in time; call it before `next_batch`.

        A sequence must begin by its deadline, or `lead_ms` before it where the schedule has that variable.
        """
        latest = now + self.schedule.lead_seconds
        if latest <= self._next_deadline:
            return []
        if self._by_deadline is None:
            self._by_deadline = SortedQueue("edf")
        due, self._next_deadline = self._by_deadline.due(self.waiting, latest)
        expired = self._dropped(due)
        self._leave_queue(expired)
        return expired

    def _dropped(self, due: list[SequenceState]) -> list[SequenceState]:
        """Of the waiting sequences whose deadline has passed, those that leave."""
        return due

    def _leave_queue(self, sequences: Iterable[SequenceState]) -> None:
        if followers := self._followers():
            take_out_of_all(followers, self.waiting, tuple(sequences))
            return
        gone = set()
        for sequence in sequences:
            if sequence is self.waiting[0]:
                self.waiting.popleft()
            else:
                gone.add(id(sequence))
        if gone:
            self._drop_waiting(gone)

    def _followers(self) -> list[SortedQueue]:
        """What follows the queue."""
        return [one for one in (self._by_deadline, self._sorted) if one]

    def _drop_waiting(self, gone: set[int]) -> None:
        self.waiting = deque(s for s in self.waiting if id(s) not in gone)

    def check(self, sequence: SequenceState) -> None:
        """Raises InputError when cache or device could not hold the sequence even alone."""
        check_fits(sequence, self.num_blocks)
        longest = sequence.num_prompt_tokens + sequence.max_output_tokens
        if self.pass_tokens is not None and longest > self.pass_tokens:
            raise InputError(
                f"{sequence.num_prompt_tokens} prompt and {sequence.max_output_tokens} output tokens are more than the "
                f"{self.pass_tokens} that the device's memory can prefill at once"
            )

    def remove(self, sequence: SequenceState) -> None:
        """Drops a sequence wherever it is and frees its blocks at once."""
        if sequence in self.running:
            self._leave(sequence)
        elif sequence in self.waiting:
            self._leave_queue([sequence])

    def admissible(
        self, limit: int, *, reserve: bool = False, max_tokens: int | None = None
    ) -> tuple[SequenceState, ...]:
        """The first waiting sequences, in the schedule's order, that fit into the free blocks: at most `limit`.

        With `max_tokens` no more follow once those chosen have as many tokens; the last of them may be cut. `reserve`
        counts every sequence at its full length (ORCA's slots reserved by max_tokens), so that none is ever preempted;
        otherwise each is counted at its tokens so far and the one it is about to produce.
        """
        if limit < 1 or not self.waiting:
            return ()
        return self.fitting(self._ranked(limit), limit=limit, reserve=reserve, max_tokens=max_tokens)

    def first_waiting(self, limit: int) -> tuple[SequenceState, ...]:
        """The first `limit` waiting sequences in the schedule's order, whether they fit or not."""
        return tuple(islice(self._ranked(limit), limit)) if self.waiting else ()

    def fitting(
        self, sequences: Iterable[SequenceState], *, limit: int, reserve: bool = False, max_tokens: int | None = None
    ) -> tuple[SequenceState, ...]:
        """The first of these waiting sequences, in the order given, that fit as `admissible` counts them."""
        room = self.free_blocks
        if reserve:
            room = self.num_blocks - self._reserved_blocks()
        chosen: list[SequenceState] = []
        pads, longest, total = self.policy.PADS_PROMPTS, 0, 0
        for sequence in sequences:
            if len(chosen) >= limit or (max_tokens is not None and max_tokens <= 0):
                break
            num_tokens = sequence.num_tokens
            if self.pass_tokens is not None:
                longest, total = max(longest, num_tokens), total + num_tokens
                if ((len(chosen) + 1) * longest if pads else total) > self.pass_tokens:
                    break
            room -= num_reserved_blocks(sequence) if reserve else num_blocks_for(num_tokens + 1)
            if room < 0:
                break
            chosen.append(sequence)
            if max_tokens is not None:
                max_tokens -= num_tokens
        return tuple(chosen)

    def _reserved_blocks(self) -> int:
        """Of the running sequences, at their full length."""
        return sum(num_reserved_blocks(s) for s in self.running)

    def _ranked(self, limit: int) -> Iterable[SequenceState]:
        """The waiting sequences in the schedule's order, behind those that have begun already."""
        if self.schedule.order == "fcfs":
            return self.waiting
        if self._sorted is not None:
            return self._sorted.of(self.waiting)
        begun, fresh = [s for s in self.waiting if s.begun], [s for s in self.waiting if not s.begun]
        rank = ranking(
            self.schedule.order,
            queue_of(fresh),
            room=self.free_blocks * BLOCK_SIZE,
            limit=max(limit - len(begun), 0),
            das=das_of(self.schedule),
            before=self.num_admissions,
        )
        return chain(begun, (fresh[number] for number in rank))

    def rebalance(self, in_order: Iterable[SequenceState] = ()) -> None:
        """Splits the running sequences into groups of nearly equal size; none may be in flight.

        They are dealt out; those of `in_order` that run still fill the groups up, the first ones the first group.
        """
        assert not self.busy
        filling = [s for s in in_order if s.num_blocks]
        filled, count = {id(s) for s in filling}, len(self.groups)
        dealt = [s for s in self.running if id(s) not in filled] if filled else self.running
        for number in range(count):
            rows = dealt[number::count]
            missing = slot_share(len(self.running), count, number) - len(rows)
            self.groups[number], filling = rows + filling[:missing], filling[missing:]
            for sequence in self.groups[number]:
                sequence.group = number

    def next_batch(self, phase: str = "") -> Batch | None:
        """What to run now, with its blocks taken; None when nothing can run before a batch in flight is complete."""
        batch: Batch | None = self.policy.next_batch(self.schedule, self, self.state, phase)
        if batch is None:
            return None
        decode = self._grow(batch)
        admitted = self._admit(batch) if batch.prefill else ()
        if not decode and not admitted:  # Everything proposed was preempted: ask again with the blocks that came free.
            return self.next_batch(phase) if self.has_work and not self.in_flight else None
        if (len(decode), len(admitted), phase) != (len(batch.decode), len(batch.prefill), batch.phase):
            chunks = batch.chunks[: len(admitted)]
            batch = replace(batch, prefill=admitted, decode=decode, chunks=chunks, phase=phase)
        if batch.packing:
            batch = replace(batch, packing=_placed(admitted, batch.packing))
        self._begin(batch)
        return batch

    def complete(self, batch: Batch) -> list[SequenceState]:
        """Accounts for a batch that has run. Returns the sequences that left and freed their blocks."""
        if batch.chunks:
            for row, chunk in zip(batch.prefill, batch.chunks, strict=True):
                row.num_computed_tokens = 0 if chunk.last else chunk.end
        self.num_prefills_in_flight -= bool(batch.prefill)
        if not (batch.phase == "prefill" or batch.dealt_later):
            self.busy.discard(batch.group)
        self._land(batch)
        left = self._done(batch)
        for sequence in left:
            self._leave(sequence)
        return left

    def _land(self, batch: Batch) -> None:
        handing_over = batch.phase == "prefill"
        for row in batch.prefill + batch.decode:
            row.in_flight = handing_over and not row.finished

    def _done(self, batch: Batch) -> list[SequenceState]:
        """Sequences that leave after this batch."""
        if self.policy.KEEPS_FINISHED_ROWS:
            return [] if self.busy else self._done_slots()
        return [s for s in batch.prefill + batch.decode if s.finished and s.num_blocks]

    def _done_slots(self) -> list[SequenceState]:
        kept = {s.slot for s in self.running if not s.finished}
        return [s for s in self.running if s.slot not in kept]

    def kv_arrived(self, batch: Batch) -> None:
        """The keys and values of a prefilled batch have arrived at the stages that decode."""
        for row in batch.prefill:
            if row.num_blocks:  # Neither finished by its prefill nor removed since.
                row.in_flight = False
                self.num_in_transfer -= 1
                insort(self.ready, row, key=_admission)

    def _begin(self, batch: Batch) -> None:
        if not (batch.phase == "prefill" or batch.dealt_later):
            self.busy.add(batch.group)
            self.group_order.remove(batch.group)
            self.group_order.append(batch.group)
        self._launch(batch)
        if batch.prefill:
            self.num_prefills_in_flight += 1
        self.state.began(batch, 1)

    def _launch(self, batch: Batch) -> None:
        for row in batch.prefill + batch.decode:
            row.in_flight = True

    def _grow(self, batch: Batch) -> tuple[SequenceState, ...]:
        """The decode rows that have room for one more token; younger ones are preempted for it."""
        rows = batch.decode
        short = [s for s in rows if s.num_prompt_tokens + s.num_output_tokens > s.num_blocks * BLOCK_SIZE]
        if not short:
            return rows
        if len(short) <= self.free_blocks and all(s.num_blocks == num_blocks_for(s.num_tokens) - 1 for s in short):
            for sequence in short:
                sequence.num_blocks += 1
            self.free_blocks -= len(short)
            return rows
        for sequence in rows:
            if sequence.num_blocks == 0:  # Preempted for an older row of this very batch.
                continue
            needed = num_blocks_for(sequence.num_tokens) - sequence.num_blocks
            while needed > self.free_blocks and (victim := self._youngest_idle()) not in (None, sequence):
                self._preempt(victim)
            if needed <= self.free_blocks:
                sequence.num_blocks += max(needed, 0)
                self.free_blocks -= max(needed, 0)
            elif not self.in_flight:
                self._preempt(sequence)
        return tuple(s for s in rows if 0 < num_blocks_for(s.num_tokens) <= s.num_blocks)

    def _admit(self, batch: Batch) -> tuple[SequenceState, ...]:
        admitted: list[SequenceState] = []
        fresh: list[SequenceState] = []
        begun: set[int] = set()
        if batch.chunks:
            begun = {id(row) for row, chunk in zip(batch.prefill, batch.chunks, strict=True) if chunk.start}
        for sequence in batch.prefill:
            if id(sequence) in begun:
                if not sequence.num_blocks:  # Preempted for a row of this very batch: it starts again.
                    break
                admitted.append(sequence)
                continue
            needed = num_blocks_for(sequence.num_tokens)
            if needed > self.free_blocks:
                break
            sequence.num_blocks = needed
            self.free_blocks -= needed
            self._enter(sequence)
            if self.policy.SEPARATE_STAGES:
                self.num_in_transfer += 1
            else:
                self.add_to_group(sequence, batch.group)
            admitted.append(sequence)
            fresh.append(sequence)
        self._leave_queue(fresh)
        return tuple(admitted)

    def _enter(self, sequence: SequenceState) -> None:
        self.running.append(sequence)
        sequence.rank = self.on_ranks.index(min(self.on_ranks))
        self.on_ranks[sequence.rank] += 1
        sequence.admission = self.num_admissions
        self.num_admissions += 1

    def add_to_group(self, sequence: SequenceState, group: int) -> None:
        """Puts a running sequence into a group."""
        sequence.group = group
        self.groups[group].append(sequence)

    def add_ready_to_group(self, group: int, limit: int) -> None:
        """Puts the oldest that are ready into a group, at most `limit`."""
        for sequence in self.ready[:limit]:
            self.add_to_group(sequence, group)
        del self.ready[:limit]

    def move_to_group(self, sequence: SequenceState, group: int) -> None:
        """Puts a sequence of a group into another, in front; its own may not be in flight."""
        assert sequence.group not in self.busy
        take_out(self.groups[sequence.group], sequence)
        sequence.group = group
        self.groups[group].insert(0, sequence)

    def _youngest_idle(self) -> SequenceState | None:
        return next((s for s in reversed(self.running) if not s.in_flight), None)

    def _preempt(self, sequence: SequenceState) -> None:
        self._leave(sequence)
        sequence.num_computed_tokens = 0
        sequence.preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(sequence)

    def _leave(self, sequence: SequenceState) -> None:
        take_out(self.running, sequence)
        self.on_ranks[sequence.rank] -= 1
        if not (take_out(self.groups[sequence.group], sequence) or take_out(self.ready, sequence)):
            self.num_in_transfer -= 1
        self.free_blocks += sequence.num_blocks
        sequence.num_blocks = 0
        if not self.running:
            self.state.drained()


_admission = attrgetter("admission")
_S = TypeVar("_S", bound=SequenceState)


def take_out(rows: list[_S], sequence: _S) -> bool:
    """Takes a sequence out of rows that are mostly in order of admission. Returns whether it was among them."""
    place = bisect_left(rows, sequence.admission, key=_admission)
    if not (place < len(rows) and rows[place] is sequence):
        if sequence not in rows:
            return False
        place = rows.index(sequence)
    del rows[place]
    return True


def _placed(admitted: tuple[SequenceState, ...], packing: Packing) -> Packing:
    """The packing of the admitted sequences, whose slots are set."""
    packing = replace(packing, places=packing.places[: len(admitted)])
    for sequence, slot in zip(admitted, packing.slots, strict=True):
        sequence.slot = slot
    return packing


def check_fits(sequence: SequenceState, num_blocks: int) -> None:
    """Raises InputError when a cache of `num_blocks` blocks could not hold the sequence even alone."""
    needed = num_reserved_blocks(sequence)
    if needed > num_blocks:
        raise InputError(
            f"{sequence.num_prompt_tokens} prompt and {sequence.max_output_tokens} output tokens need {needed} "
            f"KV blocks, the cache has {num_blocks} ({num_blocks * BLOCK_SIZE} tokens)"
        )


def num_reserved_blocks(sequence: SequenceState) -> int:
    """KV blocks at its full length."""
    return num_blocks_for(sequence.num_prompt_tokens + sequence.max_output_tokens)
