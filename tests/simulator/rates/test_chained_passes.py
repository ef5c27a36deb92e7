"""What an arriving request meets of the passes before it: oracles for passes whose seconds are a straight line."""

import numpy as np
import pytest

from exeplan.simulator.rates.chained_passes import PROMPTS, Chained, chained
from exeplan.workload.length_law import LengthLaw

ALIKE = LengthLaw(np.array([100]), np.ones(1))
SPREAD = LengthLaw(np.array([20, 100, 300]), np.array([0.4, 0.4, 0.2]))
ALONE = 0.02


def met(
    *,
    law: LengthLaw = ALIKE,
    rate: float = 20.0,
    prompt: float = 0.02,
    stages: int = 1,
    room: float = np.inf,
    variability: float = 1.0,
) -> Chained:
    """Of passes that a prompt of mean length makes longer by `prompt` seconds."""
    seconds, groups = (ALONE + prompt * PROMPTS)[None], np.array([stages])
    return chained(
        rate=rate,
        seconds=seconds,
        law=law,
        stages=stages,
        groups=groups,
        room=np.array([room]),
        variability=variability,
    )[0]


@pytest.mark.parametrize("stages", [1, 3])
def test_passes_that_are_all_alike_are_waited_for_half_of_one(stages: int) -> None:
    found = met(prompt=0.0, stages=stages)
    assert found.wait == pytest.approx(ALONE / 2, rel=0.06)
    assert found.first == pytest.approx(stages * ALONE)
    assert found.both.max() == pytest.approx(ALONE, rel=0.2)


@pytest.mark.parametrize("law", [ALIKE, SPREAD])
@pytest.mark.parametrize("rate", [10.0, 30.0])
def test_long_passes_are_met_more_often_as_their_variance_says(law: LengthLaw, rate: float) -> None:
    """With c seconds a prompt and f = rate c, passes have the mean g = alone / (1 - f) and the variance
    rate g E[c^2] / (1 - f^2), as each holds what came during the one before; half of g + variance / g is waited."""
    prompt = 0.02
    share, squares = rate * prompt, prompt**2 * (law.std**2 + law.mean**2) / law.mean**2
    mean = ALONE / (1 - share)
    interval = mean + rate * squares / (1 - share**2)
    found = met(law=law, rate=rate, prompt=prompt)
    assert 2 * found.wait == pytest.approx(interval, rel=0.06)
    assert found.first == pytest.approx(ALONE + prompt + rate * prompt * interval, rel=0.06)


def test_even_arrivals_are_met_by_shorter_passes() -> None:
    even, chance = met(rate=30.0, variability=0.1), met(rate=30.0)
    assert even.wait < 0.8 * chance.wait
    assert even.first < chance.first


def test_on_a_pipeline_a_pass_waits_behind_longer_ones() -> None:
    """Without blocking, three stages take three times what one does for the same prompts."""
    found = met(law=SPREAD, rate=20.0, stages=3)
    own = ALONE + 0.02 + 20.0 * 0.02 * 2 * found.wait
    assert found.first > 1.05 * 3 * own


def test_prompts_beyond_the_room_of_a_pass_end_in_later_ones() -> None:
    free, tight = met(rate=20.0), met(rate=20.0, room=100.0)
    assert tight.first > 1.3 * free.first
    assert (np.diff(tight.both) >= -1e-9).all()
    assert tight.shares.sum() == pytest.approx(1.0)


def test_a_request_that_comes_alone_meets_passes_without_others() -> None:
    found = met(rate=1e-4, prompt=0.02)
    assert found.wait == pytest.approx(ALONE / 2, rel=0.2)
    assert found.first == pytest.approx(ALONE + 0.02, rel=0.05)
