"""Sequences, batches and packed rows: the values that scheduler, policies, replay and engine exchange.

Not here: which sequence is admitted, preempted or finished (`exeplan/scheduling/scheduler.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace
from itertools import accumulate
from typing import NamedTuple

BLOCK_SIZE = 16
"""Tokens in one KV block."""


@dataclass(eq=False, slots=True, kw_only=True)
class SequenceState:
    """One request as the scheduler sees it. Identity, not value: two sequences of equal lengths are not equal."""

    request_id: str
    num_prompt_tokens: int
    max_output_tokens: int
    num_output_tokens: int = 0
    """Tokens generated so far; they survive preemption."""
    num_blocks: int = 0
    """KV blocks held; 0 while waiting."""
    num_computed_tokens: int = 0
    """Tokens computed by the chunks of a prefill that is not complete; 0 otherwise."""
    group: int = 0
    """The micro-batch in which it decodes."""
    in_flight: bool = False
    """In a batch in flight, or in KV transfer."""
    admission: int = 0
    """Number of sequences admitted before it: a smaller number is older."""
    finished: bool = False
    preemptions: int = 0
    num_begin_tokens: int = 0
    """Tokens counted in the prompt that the client did not send: 1 for an encoder-decoder model, the decoder's
    start."""
    deadline: float | None = None
    """Seconds on the driver's clock; a request that has not started by then expires."""
    weight: float = 1.0
    """Worth of its answer relative to others of its length."""
    slot: int = 0
    """Where finished rows are kept: the sequences of one slot leave together (see `Packing.slots`)."""
    rank: int = 0
    """Of attention data parallelism, the one that attends for it and has its keys and values."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output together: what a prefill computes, and what a decode attends to."""
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def begun(self) -> bool:
        """Whether anything has been computed for it: it is not dropped any more, and goes before those that wait."""
        return self.num_output_tokens > 0 or self.preemptions > 0

    @property
    def num_packed_tokens(self) -> int:
        """What a packed row holds of it: an encoder reads the prompt alone, a decoder all that there is."""
        return self.num_prompt_tokens - self.num_begin_tokens if self.num_begin_tokens else self.num_tokens


class Chunk(NamedTuple):
    """Tokens `start` to `end` of a row's prefill; nothing is left to prefill after the `last` one."""

    start: int
    end: int
    last: bool


class PackedPrompt(NamedTuple):
    """Where a prompt lies in a packed batch: its first token is token `start` of a row."""

    row: int
    start: int


@dataclass(frozen=True, slots=True)
class Packing:
    """Prompts concatenated in rows of `row_tokens`, each row cut into slots of `slot_tokens` (TCB, section 4).

    Every row has a whole number of slots, no prompt crosses the border of one, and two never overlap. What computes is
    rows x row_tokens tokens in the matrix products, and attention over every slot as a square of its own, masked to the
    blocks of its prompts. One slot a row is pure ConcatBatching.
    """

    row_tokens: int
    slot_tokens: int
    places: tuple[PackedPrompt, ...]
    """One for each prefilled row of the batch, in its order."""

    @property
    def num_rows(self) -> int:
        return 1 + max(place.row for place in self.places)

    @property
    def num_slots(self) -> int:
        """Slots of all rows, empty ones included."""
        return self.num_rows * (self.row_tokens // self.slot_tokens)

    @property
    def num_tokens(self) -> int:
        """What the matrix products compute."""
        return self.num_rows * self.row_tokens

    @property
    def slots(self) -> tuple[int, ...]:
        """The slot of each prompt, by which memory is freed early; all the same in pure rows, which are one tensor."""
        if self.slot_tokens == self.row_tokens:
            return (0,) * len(self.places)
        slots_a_row = self.row_tokens // self.slot_tokens
        return tuple(place.row * slots_a_row + place.start // self.slot_tokens for place in self.places)


@dataclass(frozen=True, slots=True)
class Batch:
    """One pass over the layers: rows that are prefilled and rows that decode one token.

    A prefilled row computes all its `num_tokens`; `pad_to` > 0, no less than any row has, makes it compute that many,
    the rest being padding; `chunks`, one for each prefilled row, make it compute a part of them; with a `packing`
    several share a row, and what computes are the packed rows as they are, with the padding at the ends of their slots.
    A decode row computes 1 token and attends to `num_tokens`.
    """

    prefill: tuple[SequenceState, ...] = ()
    decode: tuple[SequenceState, ...] = ()
    pad_to: int = 0
    chunks: tuple[Chunk, ...] = ()
    group: int = 0
    """The group that decodes, and that the prefilled rows join."""
    phase: str = ""
    """The stages it runs on: all of them, or those set apart for `prefill` or `decode`."""
    dealt_later: bool = False
    """Its prefilled rows are dealt out to groups afterwards: no group is in flight with it."""
    packing: Packing | None = None

    @property
    def whole_prefills(self) -> tuple[SequenceState, ...]:
        """Prefilled rows of which nothing is left to prefill after this pass."""
        if not self.chunks:
            return self.prefill
        return tuple(row for row, chunk in zip(self.prefill, self.chunks, strict=True) if chunk.last)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First and, exclusive, last token of everything that attends to itself in a prefill, padding included."""
        if self.chunks:
            return [(chunk.start, chunk.end) for chunk in self.chunks]
        if self.packing:
            return [(0, self.packing.slot_tokens)] * self.packing.num_slots
        return [(0, self.pad_to or s.num_tokens) for s in self.prefill]

    @property
    def num_new_tokens(self) -> int:
        """Rows of the flat matrix products, padding included."""
        if not self.prefill:
            return len(self.decode)
        return sum(end - start for start, end in self.spans) + len(self.decode)


def num_blocks_for(num_tokens: int) -> int:
    """KV blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // BLOCK_SIZE)


def balanced_part(rows: tuple[SequenceState, ...], parts: int) -> tuple[SequenceState, ...]:
    """The largest of `parts` nearly equal shares of the rows by tokens: longest first, each to the smallest share."""
    if parts == 1:
        return rows
    shares: list[tuple[int, int, list[SequenceState]]] = [(0, number, []) for number in range(parts)]
    for row in sorted(rows, key=lambda s: -s.num_tokens):
        tokens, number, share = shares[0]
        heapreplace(shares, (tokens + row.num_tokens, number, [*share, row]))
    _, _, largest = max(shares, key=lambda share: (share[0], -share[1]))
    chosen = {id(row) for row in largest}
    return tuple(row for row in rows if id(row) in chosen)


def cut_prompts(rows: Sequence[SequenceState], room: int, *, whole: bool) -> tuple[Chunk, ...]:
    """What of the first rows a pass with room for so many tokens computes: the last one is cut, unless prompts stay
    `whole`, of which one that does not fit waits for a pass of its own."""
    chunks: list[Chunk] = []
    for row in rows:
        start = row.num_computed_tokens
        end = row.num_tokens if whole else min(row.num_tokens, start + room)
        if chunks and (room <= 0 or end - start > room):
            break
        chunks.append(Chunk(start, end, end == row.num_tokens))
        room -= end - start
    return tuple(chunks)


def within(rows: tuple[SequenceState, ...], limit: int) -> tuple[SequenceState, ...]:
    """The first rows with at most `limit` tokens together; at least one, where there is one."""
    reached = accumulate(row.num_tokens for row in rows)
    return rows[: max(1, sum(1 for tokens in reached if tokens <= limit))]
