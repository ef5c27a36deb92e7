"""Sequences and batches: what a scheduler orders, a policy chooses from, and a driver runs or times.

Not here: who is admitted, preempted and dismissed (`exeplan/scheduling.py`).
"""

from dataclasses import dataclass
from typing import NamedTuple

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
    num_computed_tokens: int = 0
    """Tokens whose keys and values the chunks so far have computed of a prefill with more to come; 0 otherwise."""
    group: int = 0
    """The micro-batch in which it decodes."""
    in_flight: bool = False
    """In a batch that is under way, or being handed over."""
    admission: int = 0
    """How many were admitted before it: who is older."""
    finished: bool = False
    preemptions: int = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and output together: what a prefill computes, and what a decode attends to."""
        return self.num_prompt_tokens + self.num_output_tokens


class Chunk(NamedTuple):
    """Tokens `start` to `end` of a row's prefill; nothing is left to prefill after the `last` one."""

    start: int
    end: int
    last: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """One pass over the layers: rows that are prefilled and rows that decode one token.

    A prefilled row computes all its `num_tokens`; `pad_to` > 0 makes it compute that many, the rest being padding;
    `chunks`, one for each prefilled row, make it compute a part of them. A decode row computes 1 token and attends to
    `num_tokens`.
    """

    prefill: tuple[Sequence, ...] = ()
    decode: tuple[Sequence, ...] = ()
    pad_to: int = 0
    chunks: tuple[Chunk, ...] = ()
    group: int = 0
    """The group that decodes, and that the prefilled rows join."""
    phase: str = ""
    """The stages it runs on: all of them, or those set apart for `prefill` or `decode`."""

    @property
    def whole_prefills(self) -> tuple[Sequence, ...]:
        """Prefilled rows of which nothing is left to prefill after this pass."""
        if not self.chunks:
            return self.prefill
        return tuple(row for row, chunk in zip(self.prefill, self.chunks, strict=True) if chunk.last)

    @property
    def num_new_tokens(self) -> int:
        """Rows of the flat matrix products, padding included."""
        if self.chunks:
            return sum(chunk.end - chunk.start for chunk in self.chunks) + len(self.decode)
        prefill = len(self.prefill) * self.pad_to if self.pad_to else sum(s.num_tokens for s in self.prefill)
        return prefill + len(self.decode)


def num_blocks_for(num_tokens: int) -> int:
    """KV blocks that hold so many tokens."""
    return -(-num_tokens // BLOCK_SIZE)
