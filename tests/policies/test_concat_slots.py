"""Policy concat with slots: the rows that decode, and what they hold, are those of batches drawn one by one."""

import numpy as np
import pytest

from exeplan.policies.concat import _Held, _kept
from exeplan.workload.length_law import DecodeLaw, LengthLaw

STEPS = np.array([1, 3, 3, 6, 10])
INPUTS = np.array([40, 10, 90, 20, 70])
WEIGHTS = np.array([0.3, 0.2, 0.2, 0.2, 0.1])
"""Decode iterations and prompts of the five kinds of requests, and how likely each is."""
DRAWS = 20_000


def drawn(slots: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Mean rows that decode, and their tokens in the cache, in each iteration that a batch with such slots has."""
    rng = np.random.default_rng(0)
    kinds = rng.choice(len(STEPS), size=(DRAWS, sum(slots)), p=WEIGHTS)
    steps, inputs = STEPS[kinds], INPUTS[kinds]
    slot_of = np.repeat(np.arange(len(slots)), slots)
    rows, context = [], []
    for iteration in range(1, STEPS.max() + 1):
        going_on = np.stack([(steps[:, slot_of == slot] >= iteration).any(axis=1) for slot in range(len(slots))], 1)
        there = going_on[:, slot_of]
        held = inputs + np.minimum(iteration - 1, steps)
        occurs = going_on.any(axis=1).sum()
        rows.append(there.sum() / occurs)
        context.append((there * held).sum() / occurs)
    return np.array(rows), np.array(context)


@pytest.mark.parametrize("slots", [[1, 1, 1], [2, 2], [1, 2, 3], [3, 3, 1, 1]])
def test_each_slot_stays_until_the_last_of_its_requests_is_done(slots: list[int]) -> None:
    law = DecodeLaw.of(STEPS, INPUTS, WEIGHTS)
    counts, times = np.unique(slots, return_counts=True)
    held = _Held(LengthLaw(np.array([99]), np.ones(1)), counts.astype(float), times / times.sum())
    rows, context = _kept(law, float(INPUTS @ WEIGHTS), held, float(sum(slots)))
    expected_rows, expected_context = drawn(slots)
    assert rows == pytest.approx(expected_rows, rel=0.03)
    assert context == pytest.approx(expected_context, rel=0.03)
