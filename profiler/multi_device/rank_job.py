"""The job of a group of ranks that time together.

Not here: how they time it (`links.py`).
"""

from dataclasses import dataclass

from exeplan.core.models.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """A job for a group of ranks: time `all_reduce`, or `send` from the first to the second of two."""

    op: str
    size: int
    spec: ModelSpec
    dtype: str
    device: str
    num_threads: int
    num_tokens: tuple[int, ...]
    """Numbers of tokens whose hidden states are summed or sent."""
    seconds: float = 0.0
    """Approximate total; sends are short and their number is fixed."""
