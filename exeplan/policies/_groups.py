"""Shared by orca and chunked: groups of slots run one after the other, each slot serves request after request."""

from functools import lru_cache

import numpy as np

from exeplan.arrays import Floats
from exeplan.workload.workload import Workload


def round_seconds(through: Floats, slowest: Floats, probability: Floats, groups: int) -> float:
    """Seconds in which every group has one pass, from times of passes [kinds, equally likely points].

    The longest of one pass a group holds up the others behind it.
    """
    if groups == 1:
        return float(probability @ through.mean(axis=1))
    weights = np.repeat(probability / through.shape[1], through.shape[1])
    order = np.argsort(slowest, axis=None)
    through, slowest, weights = through.ravel()[order], slowest.ravel()[order], weights[order]
    below = np.cumsum(weights)
    longest = np.diff(below**groups, prepend=0.0)
    # What never happens is irrelevant, but must be finite.
    others = np.cumsum(weights * slowest) / np.maximum(below, 1e-300)
    return float(longest @ np.maximum(through, slowest + (groups - 1) * others))


@lru_cache(maxsize=64)
def resident_tokens(workload: Workload) -> tuple[float, float]:
    """Mean and mean square of the tokens that one slot holds after an iteration; its ages are uniform over a life."""
    law = workload.decode_law()
    k = np.arange(1, len(law.survival) + 1)
    tokens = workload.mean_input + float(law.input_sum.sum() + (k * law.survival).sum())
    square = workload.input_law.std**2 + workload.mean_input**2
    square += float((law.input_square + 2 * k * law.input_sum + k**2 * law.survival).sum())
    return tokens / workload.mean_output, square / workload.mean_output
