"""Lengths in rising order, cut into batches at the least cost: each batch costs its size times its longest, plus an
overhead. Many queues at once.

Source: TurboTransformers (PPoPP 2021) section 5. Not here: which of the batches runs, and when (`turbo.py`).
"""

import numpy as np

from exeplan.arrays import Floats
from exeplan.workload.length_law import Ints


def best_begins(lengths: Floats | Ints, size: int, overhead: float) -> Ints:
    """Of each queue, [queues, waiting]: where the last batch begins if the first 0, 1, 2, ... requests are cut at the
    least cost, [queues, waiting + 1]."""
    queues, waiting = lengths.shape
    cost, begins = np.zeros((queues, waiting + 1)), np.zeros((queues, waiting + 1), dtype=np.int64)
    every = np.arange(queues)
    for end in range(1, waiting + 1):
        low = max(end - size, 0)
        tried = cost[:, low:end] + np.arange(end - low, 0, -1) * lengths[:, end - 1 : end]
        best = tried.argmin(axis=1)
        cost[:, end], begins[:, end] = tried[every, best] + overhead, low + best
    return begins


def around(begins: Ints, places: Ints, counts: Ints | int) -> tuple[Ints, Ints]:
    """Of each queue, where the batch begins and ends that holds the request in this place, of `counts` that wait."""
    every = np.arange(len(places))
    ends = np.full(len(places), counts)
    while (later := begins[every, ends] > places).any():
        ends = np.where(later, begins[every, ends], ends)
    return begins[every, ends], ends
