"""The scheduler for a replay: rows that decode together are counted together, and a pass costs what changes in it.

A row that decodes has one token more after each pass of its group. So a lane counts the passes of a group, a row keeps
the count at which it joined, and what a pass does to each row follows: its tokens, its KV blocks (every row crosses a
block's border once in BLOCK_SIZE passes: rows are counted by when), the pass that yields its last token. The rules are
the Scheduler's own: admission, preemption, groups, and the policy's choice; where blocks run short its code runs row by
row. At any time a Row reads like any other SequenceState.

Not here: the time of a pass, and what waits for what (`replay.py`).
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import cast

from exeplan.core.batch import BLOCK_SIZE, Batch, SequenceState
from exeplan.core.schedule import Schedule
from exeplan.scheduling.scheduler import Scheduler, num_reserved_blocks, take_out
from exeplan.simulator.run import RunLog

_MANY = 1 << 40
"""Passes; more than any request takes."""


class Row(SequenceState):
    """One request of a replay. In a lane its tokens and blocks follow from the lane's count."""

    __slots__ = ("_blocks", "_flying", "_output", "advancing", "border", "index", "lane", "left_at", "since", "track")

    def __init__(self, index: int, prompt: int, output: int, deadline: float | None, weight: float) -> None:
        self.index = index
        self.lane: Lane | None = None
        self.advancing = False
        """In a lane, and not finished: `_output` and `_blocks` are then relative to the lane's count."""
        self.border = 0
        """The count at which it needs a block more than when it joined."""
        self.track: Lane | None = None
        """The lane that it is or was in, and its counts when the row joined and left: a stretch of its tokens."""
        self.since = self.left_at = 0
        self._output = self._blocks = 0
        self._flying = False
        self.num_prompt_tokens, self.max_output_tokens = prompt, output
        self.deadline, self.weight = deadline, weight
        self.num_computed_tokens = self.group = self.admission = self.preemptions = 0
        self.num_begin_tokens = self.slot = self.rank = 0
        self.finished = False

    @property
    def request_id(self) -> str:  # type: ignore[override]
        return str(self.index)

    @property
    def num_output_tokens(self) -> int:
        return self._output + self.lane.count if self.advancing else self._output  # type: ignore[union-attr]

    @num_output_tokens.setter
    def num_output_tokens(self, count: int) -> None:
        self._output = count

    @property
    def num_tokens(self) -> int:
        if self.advancing:
            return self.num_prompt_tokens + self._output + self.lane.count  # type: ignore[union-attr]
        return self.num_prompt_tokens + self._output

    @property
    def num_blocks(self) -> int:
        if not self.advancing:
            return self._blocks
        return self._blocks + max((self.lane.booked - self.border) // BLOCK_SIZE + 1, 0)  # type: ignore[union-attr]

    @num_blocks.setter
    def num_blocks(self, count: int) -> None:
        self._blocks = count

    @property
    def in_flight(self) -> bool:
        return self._flying or (self.lane is not None and self.lane.in_flight)

    @in_flight.setter
    def in_flight(self, flying: bool) -> None:
        self._flying = flying

    def join(self, lane: "Lane") -> bool:
        """Advances with the lane from its next pass on. Returns whether it needs another block for that."""
        count, tokens = lane.count, self.num_prompt_tokens + self._output
        self.border = count + self._blocks * BLOCK_SIZE - tokens + 1
        assert count <= self.border <= count + BLOCK_SIZE
        if self.track is not lane or self.left_at != count:
            self.track, self.since = lane, count
        self._output -= count
        self.advancing = True
        return self.border == count

    def settle(self) -> None:
        """Advances no more: its numbers are its own again."""
        self._output, self._blocks = self.num_output_tokens, self.num_blocks
        self.advancing = False
        self.left_at = self.lane.count  # type: ignore[union-attr]


class Lane:
    """The rows that decode in one group, as its last batch had them, and the passes that they had."""

    def __init__(self, log: RunLog, num_ranks: int = 1) -> None:
        self.by_rank = [[0, 0, 0] for _ in range(num_ranks)] if num_ranks > 1 else []
        """Rows, tokens, and rows that advance, of each rank; empty where there is one."""
        self.count = 0
        """Passes that are complete."""
        self.booked = -1
        """The number, from 0, of the last pass for which the rows have blocks."""
        self.rows: list[Row] = []
        """In the order of the batch; finished ones too where the policy keeps them."""
        self.num_advancing = 0
        self.num_tokens = 0
        """Of all rows."""
        self.in_flight = False
        self.log = log
        self.number, self.ends = log.new_track()
        self._crossing = [0] * BLOCK_SIZE
        """Rows that advance, by the place of their borders among BLOCK_SIZE passes."""
        self._finishing: dict[int, list[Row]] = {}
        """Rows by the count at which they have their last token; rows that have left, too."""
        self._next_counts: list[int] = []
        """A heap of these counts, of which there may be hundreds."""
        self._late: list[Row] = []
        """Finished rows that are kept, and that the next batch gives the block of their last token."""

    def match(self, rows: Sequence[Row]) -> int:
        """Makes these the rows. Returns how many need one more block for the next pass."""
        assert self.booked < self.count
        now, known = list(rows), len(self.rows)
        if now[:known] == self.rows:
            fresh = now[known:]
        else:
            self._drop_all_but(rows)
            fresh = [row for row in rows if row.lane is not self]
        short = self._crossing[self.count % BLOCK_SIZE]
        for row in fresh:
            short += self._join(row)
        self.rows = now
        return short + len(self._late)

    def _drop_all_but(self, rows: Sequence[Row]) -> None:
        kept = {id(row) for row in rows}
        for row in [row for row in self.rows if id(row) not in kept]:
            self.remove(row)

    def _join(self, row: Row) -> bool:
        if row.lane is not None:
            row.lane.remove(row)
        self.num_tokens += row.num_tokens
        if self.by_rank:
            self.by_rank[row.rank][0] += 1
            self.by_rank[row.rank][1] += row.num_tokens
        row.lane = self
        if row.finished:
            if row.num_tokens > row.num_blocks * BLOCK_SIZE:
                self._late.append(row)
            return False
        if row.track is not None and (row.track is not self or row.left_at != self.count):
            self.flush(row)
        needs_block = row.join(self)
        self._crossing[row.border % BLOCK_SIZE] += 1
        last = row.max_output_tokens - row._output
        if last not in self._finishing:
            self._finishing[last] = []
            heappush(self._next_counts, last)
        self._finishing[last].append(row)
        self.num_advancing += 1
        if self.by_rank:
            self.by_rank[row.rank][2] += 1
        return needs_block

    def book(self) -> None:
        """The blocks of the next pass have been taken."""
        self.booked = self.count
        for row in self._late:
            row.num_blocks += 1
        self._late.clear()

    def growth(self, count: int) -> int:
        """Blocks that the rows need for that many passes after the one that is booked."""
        whole, rest = divmod(count, BLOCK_SIZE)
        return whole * self.num_advancing + sum(self._crossing[(self.booked + 1 + i) % BLOCK_SIZE] for i in range(rest))

    @property
    def num_left(self) -> int:
        """Passes until a row has its last token."""
        return self._next_counts[0] - self.count if self._next_counts else 1

    def advance(self, ends: Sequence[float]) -> list[Row]:
        """Passes that ended then: a token for every row. Returns those that finished, at the last of them."""
        self.count += len(ends)
        self.ends.extend(ends)
        self.num_tokens += self.num_advancing * len(ends)
        for rank in self.by_rank:
            rank[1] += rank[2] * len(ends)
        if self.count not in self._finishing:
            return []
        heappop(self._next_counts)
        finished = []
        for row in self._finishing.pop(self.count):
            if row.lane is self and row.advancing and row.num_output_tokens == row.max_output_tokens:
                self._stop(row)
                self.flush(row)
                row.finished = True
                finished.append(row)
                if row.num_tokens > row.num_blocks * BLOCK_SIZE:
                    self._late.append(row)
        return finished

    def remove(self, row: Row) -> None:
        """The row is in no lane any more."""
        if row.advancing:
            self._stop(row)
        if row in self._late:
            self._late.remove(row)
        take_out(self.rows, row)
        self.num_tokens -= row.num_tokens
        if self.by_rank:
            self.by_rank[row.rank][0] -= 1
            self.by_rank[row.rank][1] -= row.num_tokens
        row.lane = None

    def scatter(self) -> None:
        """Removes all rows."""
        for row in self.rows:
            if row.advancing:
                self._stop(row)
            row.lane = None
        self.rows, self.num_tokens = [], 0
        self.by_rank = [[0, 0, 0] for _ in self.by_rank]
        self._late.clear()
        self._finishing.clear()
        self._next_counts.clear()

    def _stop(self, row: Row) -> None:
        row.settle()
        self._crossing[row.border % BLOCK_SIZE] -= 1
        self.num_advancing -= 1
        if self.by_rank:
            self.by_rank[row.rank][2] -= 1

    def flush(self, row: Row) -> None:
        """Writes down the row's last stretch."""
        if row.track is not None and row.left_at > row.since:
            self.log.stretch(row.index, row.track.number, row.since, row.left_at)
        row.track = None


class Queue(deque[SequenceState]):
    """Waiting rows, of which those that have just arrived exist when the scheduler looks at them."""

    def __init__(self, make: Callable[[int], Row]) -> None:
        super().__init__()
        self._make = make
        self._made = self._arrived = 0

    def arrive(self, until: int) -> None:
        """The requests before this number are there."""
        self._arrived = until

    def __len__(self) -> int:
        return super().__len__() + self._arrived - self._made

    def __bool__(self) -> bool:
        return self._made < self._arrived or super().__len__() > 0

    def __iter__(self) -> Iterator[SequenceState]:
        yield from tuple(super().__iter__())
        while self._made < self._arrived:
            yield self._next()

    def __getitem__(self, number: int) -> SequenceState:  # type: ignore[override]
        while super().__len__() <= number:
            self._next()
        return super().__getitem__(number)

    def drop(self, gone: set[int]) -> None:
        """Leaves out these, by identity."""
        kept = [row for row in super().__iter__() if id(row) not in gone]
        self.clear()
        self.extend(kept)

    def _next(self) -> Row:
        row = self._make(self._made)
        self._made += 1
        self.append(row)
        return row


class LockstepScheduler(Scheduler):
    """The Scheduler, with the rows of each group in a Lane. Its sequences are Rows; `advance` gives them tokens."""

    def __init__(
        self,
        schedule: Schedule,
        num_blocks: int,
        *,
        make: Callable[[int], Row],
        log: RunLog,
        num_prefill_stages: int,
        num_decode_stages: int,
        whole_prompts: bool,
        num_ranks: int = 1,
    ) -> None:
        """`make` makes the row of a request by its number."""
        super().__init__(
            schedule,
            num_blocks,
            num_prefill_stages=num_prefill_stages,
            num_decode_stages=num_decode_stages,
            whole_prompts=whole_prompts,
            num_ranks=num_ranks,
        )
        self.log = log
        self.queue = self.waiting = Queue(make)
        self.lanes = [Lane(log, num_ranks) for _ in self.groups]
        self._prefill_track, self._prefill_ends = log.new_track()
        self._finished: list[Row] = []
        """That have had their last token since a batch was completed, or kept rows since slots were."""
        self._reserved = 0

    def arrive(self, until: int, deadline: float) -> None:
        """The requests before this number are there; none of the new ones has a deadline before `deadline`."""
        self.queue.arrive(until)
        self._next_deadline = min(self._next_deadline, deadline)

    @property
    def next_expiry(self) -> float:
        """No waiting sequence expires before."""
        return self._next_deadline - self.schedule.lead_seconds

    def context_tokens(self, batch: Batch) -> int:
        """Prompt and output tokens of the rows that decode, just scheduled."""
        return self.lanes[batch.group].num_tokens if batch.decode else 0

    def decoding(self, batch: Batch) -> list[tuple[int, int]] | None:
        """Rows that decode and their tokens, of each rank; None where there is one."""
        if len(self.on_ranks) == 1 or not batch.decode:
            return None
        return [(rows, tokens) for rows, tokens, _ in self.lanes[batch.group].by_rank]

    def advance(self, batch: Batch, start: float, ends: Sequence[float], *, prefills: bool) -> int:
        """Every row but finished ones, which are only kept, has a token at the end of each pass; a prefilled one only
        if `prefills`, at its last chunk. Returns how many have finished.
        """
        finished: list[Row] = self._prefilled(batch, start, ends[-1], prefills) if batch.prefill else []
        if batch.decode:
            finished += self.lanes[batch.group].advance(ends)
        for row in finished:
            self.log.lasts[row.index] = ends[-1]
        self._finished += finished
        return len(finished)

    def num_repeats(self, batch: Batch) -> int:
        """How often this batch, just scheduled, would repeat without arrivals: until a sequence has its last token.

        Above 1 only where a single group runs everything and only decodes: the next batch is then the same, whatever
        the policy. While sequences wait it is so where a batch runs to its end, and where the policy says so.
        """
        if batch.prefill or len(self.groups) > 1 or self.policy.SEPARATE_STAGES:
            return 1
        if len(batch.decode) != len(self.running):
            return 1
        lane = self.lanes[batch.group]
        left = lane.num_left
        if self.waiting and not self.policy.KEEPS_FINISHED_ROWS:
            left = min(left, 1 + self._promised())
        return left if left == 1 or lane.growth(left - 1) <= self.free_blocks else 1

    def _promised(self) -> int:
        """Repetitions of the batch just scheduled that the policy is sure of while sequences wait."""
        repeats = getattr(self.policy, "repeats", None)
        return int(min(repeats(self.schedule, self, self.state), _MANY)) if repeats else 0

    def repeat(self, batch: Batch, count: int) -> None:
        """Schedules a batch in flight `count` times in all, at most `num_repeats`, and takes all its blocks."""
        lane = self.lanes[batch.group]
        self.free_blocks -= lane.growth(count - 1)
        lane.booked += count - 1
        self.state.began(batch, count - 1)

    def rebalance(self, in_order: Iterable[SequenceState] = ()) -> None:
        for lane in self.lanes:
            lane.scatter()
        super().rebalance(in_order)

    def _prefilled(self, batch: Batch, start: float, end: float, prefills: bool) -> list[Row]:
        starts = self.log.starts
        for row in cast("tuple[Row, ...]", batch.prefill):
            if starts[row.index] != starts[row.index]:
                starts[row.index] = start
        if not prefills:
            return []
        finished, again = [], []
        for row in cast("tuple[Row, ...]", batch.whole_prefills):
            if row.num_output_tokens:
                again.append(row)
            else:
                self.log.leads[row.index] = end
            row.num_output_tokens += 1
            if row.num_output_tokens >= row.max_output_tokens:
                row.finished = True
                finished.append(row)
        if again:
            self._have_token(again, end)
        return finished

    def _have_token(self, rows: list[Row], end: float) -> None:
        """That their prefill yielded, which was not the first one."""
        self._prefill_ends.append(end)
        count = len(self._prefill_ends)
        for row in rows:
            self.lanes[0].flush(row)
            self.log.stretch(row.index, self._prefill_track, count - 1, count)

    def _grow(self, batch: Batch) -> tuple[SequenceState, ...]:
        if not batch.decode:
            return ()
        lane = self.lanes[batch.group]
        short = lane.match(cast("tuple[Row, ...]", batch.decode))
        if short <= self.free_blocks:
            self.free_blocks -= short
            lane.book()
            return batch.decode
        lane.scatter()
        decode = super()._grow(batch)
        if decode:
            lane.match(cast("tuple[Row, ...]", decode))
            lane.book()
        return decode

    def _enter(self, sequence: SequenceState) -> None:
        super()._enter(sequence)
        self._reserved += num_reserved_blocks(sequence)

    def _leave(self, sequence: SequenceState) -> None:
        row = cast(Row, sequence)
        if row.lane is not None:
            row.lane.remove(row)
        self._reserved -= num_reserved_blocks(sequence)
        super()._leave(sequence)

    def _reserved_blocks(self) -> int:
        return self._reserved

    def _launch(self, batch: Batch) -> None:
        for row in batch.prefill:
            row.in_flight = True
        if batch.decode:
            self.lanes[batch.group].in_flight = True

    def _land(self, batch: Batch) -> None:
        handing_over = batch.phase == "prefill"
        for row in batch.prefill:
            row.in_flight = handing_over and not row.finished
        if batch.decode:
            self.lanes[batch.group].in_flight = False

    def _done(self, batch: Batch) -> list[SequenceState]:
        keeps = self.policy.KEEPS_FINISHED_ROWS
        if not self._finished or (keeps and self.busy):
            return []
        done: list[SequenceState] = []
        if not keeps:
            done += self._finished
        elif any(self._is_over(slot) for slot in {row.slot for row in self._finished}):
            done = self._done_slots()
        self._finished = []
        return done

    def _is_over(self, slot: int) -> bool:
        return not any(row.slot == slot and not row.finished for row in self.running)

    def _drop_waiting(self, gone: set[int]) -> None:
        self.queue.drop(gone)
