"""Two laws of lengths as histograms over the same edges, to be drawn in one picture."""

import numpy as np

from exeplan.drift.state import Histogram, Lengths
from exeplan.workload.length_law import LengthLaw
from exeplan.workload.workload import Workload

_BINS, _SHOWN = 24, 0.995


def lengths_of(planned: Workload, observed: Workload | None) -> tuple[Lengths, Lengths | None]:
    """Inputs and outputs of both; lengths beyond nearly all requests fall into the last bin."""
    sides = []
    for side in ("input_law", "output_law"):
        laws = [getattr(workload, side) for workload in (planned, observed) if workload]
        longest = max(law.quantile(_SHOWN) for law in laws)
        edges = np.unique(np.linspace(0, longest, _BINS + 1).round().astype(int))
        edges[-1] = max(law.max for law in laws)
        sides.append([_histogram(law, edges) for law in laws])
    found = [Lengths(inputs=inputs, outputs=outputs) for inputs, outputs in zip(*sides, strict=True)]
    return found[0], found[1] if observed else None


def _histogram(law: LengthLaw, edges: np.ndarray) -> Histogram:
    below = np.concatenate([[0.0], law.cdf])[np.searchsorted(law.tokens, edges, side="right")]
    shares = np.diff(below)
    return Histogram(edges=tuple(edges.tolist()), shares=tuple(shares.tolist()), mean=law.mean, p99=law.quantile(0.99))
