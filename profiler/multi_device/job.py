"""What the ranks of a group are asked to time.

Not here: how they time it (`links.py`, `contention.py`).
"""

from dataclasses import dataclass

from exeplan.core.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a group of ranks times: `all_reduce`, `send` from the first to the second of two, or a whole `pass`."""

    op: str
    size: int
    spec: ModelSpec
    dtype: str
    device: str
    num_threads: int
    num_tokens: tuple[int, ...]
    """Whose hidden states are summed or sent."""
    seconds: float = 0.0
    """In all, about; sends are short and of a fixed number."""
    split: bool = False
    """Of a pass: the ranks split every layer, and not the layers among them."""
