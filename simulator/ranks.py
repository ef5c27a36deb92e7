"""Passes of stages whose ranks attend for requests of their own: as slow as the fullest rank, which all wait for.

    layer = max over ranks (attention + products and all-reduces of its own tokens)
          + routed experts (tokens of all ranks, the busiest device) + exchanges (tokens of the fullest rank)

A rank without requests takes part in the exchanges and the experts. A request goes to the rank with the fewest, and
stays there. So under a backlog the ranks of a full batch have equally many, and as requests end anywhere, those that
take their places begin on ranks at random: of k prompts in a pass the fullest rank has the expected maximum of k things
dealt out (`core/fullest.py`), and between admissions the ranks fall apart by as much. Contexts differ by chance: the
fullest rank's is as many standard deviations above the mean as the expected maximum of normal numbers.

Not here: which rank a request is on (`exeplan/scheduling`), and the seconds of a pass (`cost.py`, `passes.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from exeplan.core.batch import Batch
from exeplan.core.models.fullest import fullest, normal_maximum
from exeplan.policies.interface import Cycle
from exeplan.simulator.timings import prompt_points

_CUT = 1 / 3
"""Square of the spread, relative, of the part of a prompt that is in a pass where it may be cut anywhere."""


@dataclass(slots=True)
class RankLoad:
    """What a rank has in one real pass."""

    rows: int = 0
    """That decode."""
    tokens: int = 0
    """Prompt and output tokens of these."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """Of its prompts: first and last token that is computed."""
    prefills: int = 0

    @property
    def prompts(self) -> int:
        """Prompt tokens computed."""
        return sum(end - start for start, end in self.spans)


def rank_loads(batch: Batch, num_ranks: int, decoding: Sequence[tuple[int, int]] | None = None) -> list[RankLoad]:
    """Of each rank that has something; `decoding` has rows and tokens of each, where they have been counted already."""
    loads = [RankLoad() for _ in range(num_ranks)]
    if decoding is not None and batch.decode:
        loads = [RankLoad(rows, tokens) for rows, tokens in decoding]
    elif batch.decode:
        for row in batch.decode:
            loads[row.rank].rows += 1
            loads[row.rank].tokens += row.num_tokens
    spans = batch.spans
    for number, row in enumerate(batch.prefill):
        loads[row.rank].prefills += 1
        if batch.packing is None:
            loads[row.rank].spans.append(spans[number])
    if batch.packing is not None:  # Whole slots of many prompts: dealt out evenly.
        for number, span in enumerate(spans):
            loads[number % num_ranks].spans.append(span)
    return [load for load in loads if load.rows or load.spans]


class FullestRank:
    """What the fullest rank has in each pass of a steady cycle: arrays over the passes.

    Of two kinds: with the most rows that decode, and with the most prompts.
    """

    def __init__(self, cycle: Cycle, num_ranks: int) -> None:
        rows, prefills = cycle.num_decode, cycle.num_prefill
        most, points = normal_maximum(num_ranks), prompt_points(cycle.prompt_law)
        share, full = rows / num_ranks, max(cycle.num_seqs, 1.0)
        on_full = np.ceil(full / num_ranks - 1e-9)
        missing = np.maximum(full - rows, 0.0)
        apart = most * np.sqrt(missing * (num_ranks - 1)) / num_ranks
        least = np.maximum(share, np.minimum(rows, 1.0))
        of_full = on_full - missing / num_ranks + apart
        self.rows = np.maximum(np.minimum(of_full, np.minimum(on_full, rows)), least)
        each = cycle.kv_tokens_std / np.sqrt(full)
        context = cycle.context_tokens / np.maximum(rows, 1e-12)
        above = most * np.sqrt(share * each**2 + context**2 * missing * (num_ranks - 1) / num_ranks**2)
        tokens = np.maximum(share * context + above, self.rows * context)
        self.context = np.where(rows > 1, tokens / np.maximum(self.rows, 1e-12), context)
        """Of a row."""
        self.prefills = np.maximum(fullest(prefills, num_ranks), np.minimum(prefills, 1.0))
        self.rows_with_prompts = np.minimum(share, np.maximum(full / num_ranks - self.prefills, 0.0))
        self.context_with_prompts = context
        mean = float(points.mean())
        spread = float(points.std() / mean) ** 2
        if cycle.prompt_tokens is not None:  # Of one that is cut any part is as likely.
            spread += _CUT
        # One prompt is as long as any; of many the rank with the most tokens has long ones, too.
        wider = np.sqrt(1 + spread * num_ranks / (num_ranks - 1)) - 1
        factor = 1 + wider * np.clip(prefills - 1, 0.0, 1.0)
        even = prefills / num_ranks
        self.prompt_share = (even + (self.prefills - even) * factor) / np.maximum(prefills, 1e-12)
        """Of the pass's prompt tokens."""
