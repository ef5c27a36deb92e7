"""Control is paid once an iteration, on the first stage of a phase, where workers run it."""

from dataclasses import replace

import numpy as np
import pytest

from exeplan.core.batch import Batch, SequenceState
from exeplan.core.profile import Measurement, Profile
from exeplan.core.schedule import Placement, Stage
from exeplan.policies.interface import Cycle
from exeplan.simulator.cost import CostModel
from exeplan.workload.length_law import LengthLaw

PIPELINE = (Stage(devices=(0,), layers=(0, 3)), Stage(devices=(1,), layers=(3, 6)))
APART = (
    Stage(devices=(0,), layers=(0, 6), phase="prefill"),
    Stage(devices=(1,), layers=(0, 6), phase="decode"),
)
SEND = [Measurement(op="send", phase="intra", bytes=n, seconds=n * 1e-9) for n in (1, 1 << 20)]
CONTROL = [Measurement(op="control", num_seqs=n, seconds=1e-3 + n * 1e-5) for n in (1, 64)]


def decodes(*contexts: int) -> tuple[SequenceState, ...]:
    return tuple(
        SequenceState(request_id=str(i), num_prompt_tokens=n, max_output_tokens=9, num_output_tokens=1)
        for i, n in enumerate(contexts)
    )


def beyond(profile: Profile, placement: Placement | None, batch: Batch) -> list[float]:
    """Seconds of each stage's pass over those without control."""
    rows = (*profile.measurements, *SEND)
    with_, without = (
        CostModel(replace(profile, measurements=(*rows, *more)), placement).stage_seconds(batch)
        for more in (CONTROL, [])
    )
    return [a - b for a, b in zip(with_, without, strict=True)]


def test_the_first_stage_of_a_pipeline_pays_for_all_its_rows(profile: Profile) -> None:
    assert beyond(profile, PIPELINE, Batch(decode=decodes(30, 40))) == pytest.approx([1.02e-3, 0.0])
    assert beyond(profile, PIPELINE, Batch(prefill=decodes(8), decode=decodes(30, 40))) == pytest.approx([1.03e-3, 0.0])


def test_each_phase_has_a_first_stage(profile: Profile) -> None:
    assert beyond(profile, APART, Batch(prefill=decodes(8), phase="prefill")) == pytest.approx([1.01e-3])
    assert beyond(profile, APART, Batch(decode=decodes(8), phase="decode")) == pytest.approx([1.01e-3])


def test_one_device_has_no_workers(profile: Profile) -> None:
    assert beyond(profile, None, Batch(decode=decodes(30, 40))) == [0.0]


def test_an_expected_pass_costs_what_a_real_one_does(profile: Profile) -> None:
    cost = CostModel(replace(profile, measurements=(*profile.measurements, *SEND, *CONTROL)), PIPELINE)
    expected = Cycle(
        num_prefill=np.array([0.0]),
        num_decode=np.array([2.0]),
        context_tokens=np.array([70.0]),
        prompt_law=LengthLaw(np.array([8]), np.ones(1)),
        kv_tokens=1.0,
        kv_tokens_std=0.0,
        num_seqs=1.0,
    )
    assert cost.seconds(expected)[:, 0] == pytest.approx(cost.stage_seconds(Batch(decode=decodes(30, 40))))
