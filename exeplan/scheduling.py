"""What replay and runner share: sequences, batches, KV-block accounting, and the scheduler that a policy steers.

The drivers differ in one thing only: the replay times a batch with a profile, the runner executes it. Which batch comes
next, who is admitted, who is preempted and who leaves is decided here and in `exeplan/policies/<policy>.py`, once.

Life of a sequence: `add` puts it into `waiting`; a prefill batch moves it to `running` and yields its first token; each
decode batch yields one more; it leaves `running` when it is finished (at once, unless the policy keeps finished rows).
When KV blocks run out, the youngest running sequence goes back to the front of `waiting` and is computed again later,
its tokens kept; the oldest is never preempted, so there is always progress.

Not here: which blocks (the runner's KV cache places them) and what tokens mean.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from exeplan.errors import InputError
from exeplan.plan import Schedule
from exeplan.policies import Policy, load_policy

BLOCK_SIZE = 16
"""Tokens in one KV block."""


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """One request as the scheduler sees it. Identity, not value: two sequences of equal lengths are not equal."""

    request_id: str
    num_prompt_tokens: int
    max_output_tokens: int
    num_output_tokens: int = 0
    """Tokens generated so far; they survive preemption."""
    num_blocks: int = 0
    """KV blocks held; 0 while waiting."""
    finished: bool = False
    preemptions: int = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and output together: what a prefill computes, and what a decode attends to."""
        return self.num_prompt_tokens + self.num_output_tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """One pass over the layers: rows that are prefilled and rows that decode one token.

    A prefilled row computes all its `num_tokens`; `pad_to` > 0 makes it compute that many, the rest being padding.
    A decode row computes 1 token and attends to `num_tokens`.
    """

    prefill: tuple[Sequence, ...] = ()
    decode: tuple[Sequence, ...] = ()
    pad_to: int = 0

    @property
    def num_new_tokens(self) -> int:
        """Rows of the flat matrix products, padding included."""
        prefill = len(self.prefill) * self.pad_to if self.pad_to else sum(s.num_tokens for s in self.prefill)
        return prefill + len(self.decode)


def num_blocks_for(num_tokens: int) -> int:
    """KV blocks that hold so many tokens."""
    return -(-num_tokens // BLOCK_SIZE)


class Scheduler:
    """Drives one policy over one KV cache of `num_blocks` blocks.

    Use: `add` sequences; then repeat `batch = next_batch()`, run it, give every row that produced a token
    `num_output_tokens += 1` (and `finished = True` at its end), and call `complete(batch)`.
    """

    def __init__(self, schedule: Schedule, num_blocks: int) -> None:
        self.schedule = schedule
        self.policy: Policy = load_policy(schedule.policy)
        self.num_blocks = num_blocks
        self.free_blocks = num_blocks
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """Admitted sequences, oldest first."""
        self.steps_since_prefill = 0
        """Decode iterations since the last prefill."""
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence. Raises InputError when the cache could not hold it even alone."""
        needed = num_blocks_for(sequence.num_prompt_tokens + sequence.max_output_tokens)
        if needed > self.num_blocks:
            raise InputError(
                f"{sequence.num_prompt_tokens} prompt and {sequence.max_output_tokens} output tokens need {needed} "
                f"KV blocks, the cache has {self.num_blocks} ({self.num_blocks * BLOCK_SIZE} tokens)"
            )
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Drops a sequence wherever it is and frees its blocks at once."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def admissible(self, limit: int, *, reserve: bool = False) -> tuple[Sequence, ...]:
        """The first waiting sequences, in order, that fit into the free blocks: at most `limit`.

        `reserve` counts every sequence at its full length (ORCA's slots reserved by max_tokens), so that nobody is ever
        preempted; otherwise each is counted at its tokens so far and the one it is about to produce.
        """
        room = self.free_blocks
        if reserve:
            room = self.num_blocks - sum(_reserved(s) for s in self.running)
        chosen: list[Sequence] = []
        for sequence in self.waiting:
            room -= _reserved(sequence) if reserve else num_blocks_for(sequence.num_tokens + 1)
            if room < 0 or len(chosen) >= limit:
                break
            chosen.append(sequence)
        return tuple(chosen)

    def next_batch(self) -> Batch | None:
        """What to run now, with its blocks taken; None when there is nothing to do."""
        batch: Batch | None = self.policy.next_batch(self.schedule, self)
        if batch is None:
            return None
        decode = self._grow(batch.decode)
        admitted = self._admit(batch.prefill)
        if not decode and not admitted:  # Everything proposed was preempted: ask again with the blocks that came free.
            return self.next_batch() if self.has_work else None
        return Batch(prefill=admitted, decode=decode, pad_to=batch.pad_to)

    def complete(self, batch: Batch) -> list[Sequence]:
        """Books a batch that has run. Returns the sequences that left and freed their blocks."""
        self.steps_since_prefill = 0 if batch.prefill else self.steps_since_prefill + 1
        if self.policy.KEEPS_FINISHED_ROWS and not all(s.finished for s in self.running):
            return []
        left = [s for s in self.running if s.finished]
        for sequence in left:
            self._release(sequence)
        self.running = [s for s in self.running if not s.finished]
        return left

    def _grow(self, rows: Iterable[Sequence]) -> tuple[Sequence, ...]:
        granted: list[Sequence] = []
        for sequence in rows:
            if sequence.num_blocks == 0:  # Preempted for an older row of this very batch.
                continue
            needed = num_blocks_for(sequence.num_tokens) - sequence.num_blocks
            while needed > self.free_blocks and self.running[-1] is not sequence:
                self._preempt(self.running[-1])
            if needed > self.free_blocks:
                self._preempt(sequence)
                continue
            if needed > 0:
                sequence.num_blocks += needed
                self.free_blocks -= needed
            granted.append(sequence)
        return tuple(s for s in granted if s.num_blocks)

    def _admit(self, rows: Iterable[Sequence]) -> tuple[Sequence, ...]:
        admitted: list[Sequence] = []
        for sequence in rows:
            needed = num_blocks_for(sequence.num_tokens)
            if needed > self.free_blocks or self.waiting[0] is not sequence:
                break
            self.waiting.popleft()
            sequence.num_blocks = needed
            self.free_blocks -= needed
            self.running.append(sequence)
            admitted.append(sequence)
        return tuple(admitted)

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.free_blocks += sequence.num_blocks
        sequence.num_blocks = 0


def _reserved(sequence: Sequence) -> int:
    return num_blocks_for(sequence.num_prompt_tokens + sequence.max_output_tokens)
