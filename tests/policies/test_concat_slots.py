"""Policy concat with slots: the rows that decode, and what they hold, are those of batches drawn one by one."""

import numpy as np
import pytest

from exeplan.policies.concat import _CLASSES, _Held, _kept
from exeplan.workload.length_law import LengthLaw
from exeplan.workload.workload import Workload

OUTPUTS = np.array([4, 7, 2, 11, 4])
INPUTS = np.array([10, 20, 40, 70, 90])
WEIGHTS = np.array([0.2, 0.2, 0.3, 0.1, 0.2])
"""Outputs and rising prompts of the five kinds of requests, and how likely each is."""
STEPS = OUTPUTS - 1
WORKLOAD = Workload.of("five kinds", inputs=INPUTS, outputs=OUTPUTS, weights=WEIGHTS)
DRAWS = 20_000


def drawn(slots: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Mean rows that decode, and their tokens in the cache, in each iteration, whether it occurs or not.

    `slots` has the classes of the requests of each: slices of the prompts' law.
    """
    classes = np.array([number for slot in slots for number in slot])
    share = (classes + np.random.default_rng(0).random((DRAWS, len(classes)))) / _CLASSES
    kinds = np.searchsorted(np.cumsum(WEIGHTS)[:-1], share)
    steps, inputs = STEPS[kinds], INPUTS[kinds]
    slot_of = np.repeat(np.arange(len(slots)), [len(slot) for slot in slots])
    rows, context = [], []
    for iteration in range(1, STEPS.max() + 1):
        going_on = np.stack([(steps[:, slot_of == slot] >= iteration).any(axis=1) for slot in range(len(slots))], 1)
        there = going_on[:, slot_of]
        rows.append(there.sum() / DRAWS)
        context.append((there * (inputs + np.minimum(iteration - 1, steps))).sum() / DRAWS)
    return np.array(rows), np.array(context)


@pytest.mark.parametrize(
    "slots",
    [[[0], [3], [7]], [[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 1, 2, 3], [4, 5, 6], [7]], [[0, 7], [1, 6], [2, 5]]],
)
def test_each_slot_stays_until_the_last_of_its_requests_is_done(slots: list[list[int]]) -> None:
    contents = np.array([np.bincount(slot, minlength=_CLASSES) for slot in slots], dtype=float)
    batch = float(contents.sum())
    held = _Held(float(len(slots)), LengthLaw(np.array([99]), np.ones(1)), contents, np.ones(len(slots)))
    rows, context = _kept(WORKLOAD, 1, held, batch)
    occurs = WORKLOAD.decode_law().max_survival(batch)
    expected_rows, expected_context = drawn(slots)
    # Given that an iteration occurs, no more than all of the batch is there.
    assert rows * occurs == pytest.approx(np.minimum(expected_rows, batch * occurs), rel=0.03)
    assert context * occurs == pytest.approx(expected_context, rel=0.03)
    assert (np.diff(rows * occurs) <= 1e-9).all()
