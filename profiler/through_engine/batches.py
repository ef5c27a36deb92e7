"""Which batches are timed on an engine: passes that only decode, and passes of prompts alone."""

from collections.abc import Iterator
from dataclasses import dataclass

from exeplan.core.models.model import ModelSpec

_STEPS = 12
"""Successive decode passes that are timed together."""
_SHORT_PROMPT = 16
_BLOCK_TOKENS = 128
"""The largest block of keys and values that an engine may have: each sequence may leave one unfilled."""


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """`num_seqs` sequences that each get one token a pass, from `first_context` tokens on."""

    num_seqs: int
    first_context: int
    steps: int = _STEPS

    @property
    def context(self) -> float:
        """Tokens of a sequence in the cache, in the mean over the passes."""
        return self.first_context + (self.steps + 1) / 2

    @property
    def tokens(self) -> int:
        """That its passes read."""
        return self.num_seqs * self.first_context

    def covers(self, other: "Batch") -> bool:
        """Whether it takes at least as long as the other."""
        return (
            isinstance(other, DecodeBatch)
            and self.num_seqs >= other.num_seqs
            and self.first_context >= other.first_context
        )

    def __str__(self) -> str:
        return f"{self.num_seqs} sequences that decode from {self.first_context} tokens on"


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """A pass of `num_seqs` prompts of `num_tokens` tokens in all, as equal as can be."""

    num_seqs: int
    num_tokens: int

    @property
    def lengths(self) -> list[int]:
        each, more = divmod(self.num_tokens, self.num_seqs)
        return [each + (number < more) for number in range(self.num_seqs)]

    @property
    def tokens(self) -> int:
        """That its pass computes."""
        return self.num_tokens

    def covers(self, other: "Batch") -> bool:
        """Whether it takes at least as long as the other."""
        return (
            isinstance(other, PrefillBatch) and self.num_seqs <= other.num_seqs and self.num_tokens >= other.num_tokens
        )

    def __str__(self) -> str:
        return f"{self.num_seqs} prompts of {self.num_tokens} tokens in all"


Batch = DecodeBatch | PrefillBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The largest batches."""

    max_num_seqs: int
    max_context: int
    max_num_tokens: int
    """Of a pass."""
    kv_tokens: int
    """For which there are keys and values."""

    @classmethod
    def within(
        cls, spec: ModelSpec, dtype: str, *, kv_bytes: float, max_num_seqs: int, max_context: int, max_num_tokens: int
    ) -> "Reach":
        """As large as asked for, the keys and values of all at once within so many bytes."""
        wanted = max_num_seqs * (max_context + _BLOCK_TOKENS)
        return cls(
            max_num_seqs=max_num_seqs,
            max_context=max_context,
            max_num_tokens=max_num_tokens,
            kv_tokens=min(wanted, int(kv_bytes // spec.kv_bytes_per_token(dtype))),
        )

    def holds(self, batch: "Batch") -> bool:
        """Whether its keys and values fit."""
        longest = batch.first_context + batch.steps if isinstance(batch, DecodeBatch) else max(batch.lengths)
        return batch.num_seqs * (longest + _BLOCK_TOKENS) <= self.kv_tokens

    @property
    def longest(self) -> int:
        """Of a context from which rows decode: the first of them have tokens while the last are still prefilled."""
        passes = -(-self.max_num_seqs * self.max_context // self.max_num_tokens)
        return max(self.max_context - passes - _STEPS - 2, _SHORT_PROMPT)

    def kv_bytes(self, spec: ModelSpec, num_layers: int, dtype: str) -> int:
        """Of keys and values on that many layers."""
        return self.kv_tokens * spec.kv_bytes_per_token(dtype) * num_layers // spec.num_layers


def batches(reach: Reach) -> list[Batch]:
    """Powers of two up to what there is, and that: rows at three contexts; one prompt; many short ones."""
    contexts = sorted({_SHORT_PROMPT, reach.longest // 4, reach.longest} - set(range(_SHORT_PROMPT)))
    rows = _doubling(1, reach.max_num_seqs)
    prompts = _doubling(_SHORT_PROMPT, min(reach.max_context - 1, reach.max_num_tokens))
    many = [
        PrefillBatch(min(max(tokens // _SHORT_PROMPT, 1), reach.max_num_seqs), tokens)
        for tokens in _doubling(2 * _SHORT_PROMPT, min(reach.max_num_tokens, reach.max_num_seqs * reach.longest))
    ]
    decodes = (DecodeBatch(number, context) for context in contexts for number in rows)
    found: list[Batch] = [*decodes, *(PrefillBatch(1, tokens) for tokens in prompts), *many]
    return [batch for batch in dict.fromkeys(found) if reach.holds(batch)]


def _doubling(first: int, last: int) -> list[int]:
    return [*_powers(first, last), last] if first < last else [last]


def _powers(first: int, last: int) -> Iterator[int]:
    while first < last:
        yield first
        first *= 2
