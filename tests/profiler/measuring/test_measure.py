"""A visit on one CPU thread is short, and what other processes take of the core is not counted."""

import time

import pytest
import torch
from torch import Tensor

from exeplan.core.models.model import load_model_spec
from exeplan.core.profile import Device
from exeplan.profiler.measuring.measure import Rig, passes_of_visit
from exeplan.profiler.measuring.points import Point, Work

PAUSE = 0.02
"""Seconds for which a pass waits; a pass of this model takes a few of a thousand."""


@pytest.mark.parametrize("point", [Point("prefill", 1, 8), Point("decode", 2, 16)])
def test_a_visit_has_few_passes_and_does_not_count_where_its_thread_waits(
    point: Point, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.get_num_threads() != 1:
        pytest.skip("torch has several threads here")
    spec = load_model_spec("demo")
    device = Device(
        name="",
        kind="cpu",
        memory_bytes=1 << 34,
        copy_bytes_per_second=1e10,
        flops_per_second=1e10,
        cache_bytes=1 << 25,
    )
    rig = Rig(spec, dtype="float32", device="cpu", copies=2, num_blocks=32, dummy_weights=True)
    embed, passes = rig.probe.model.embed, []

    def waits(*arguments: Tensor) -> Tensor:
        passes.append(time.perf_counter())
        time.sleep(PAUSE)
        return embed(*arguments)

    monkeypatch.setattr(rig.probe.model, "embed", waits)
    found = rig.visit(point, Work(spec=spec, dtype="float32", device=device, layer_bytes=1 << 20))
    assert len(passes) == passes_of_visit(device) == 4
    assert found.seconds > 4 * PAUSE
    assert sum(found.values.values()) < PAUSE
