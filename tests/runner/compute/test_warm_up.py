"""A runner that was made ready has recorded its decode iterations and holds nothing."""

import pytest

from exeplan.kernels.select import REFERENCE
from exeplan.runner.compute.decode_graphs import ladder
from exeplan.runner.compute.warm_up import make_ready

from .test_decode_graphs import SPECS, prefilled, runner_of


@pytest.mark.parametrize("phase", ["", "decode"])
@pytest.mark.parametrize("family", SPECS)
def test_every_family_is_ready_to_decode(family, phase, monkeypatch):
    kinds = []
    runner = runner_of(family)
    forward = runner.forward
    monkeypatch.setattr(runner, "forward", lambda batch, *rest: kinds.append(batch) or forward(batch, *rest))
    make_ready(runner, 5, phase=phase)
    assert runner.graphs.sizes == ladder(5)
    assert runner.cache.free_blocks == runner.cache.num_blocks
    assert any(batch.decode for batch in kinds)
    assert any(batch.prefill for batch in kinds) == (phase == "")
    prefilled(runner, [5, 9])


def test_stages_that_only_prefill_record_nothing():
    runner = runner_of("llama")
    assert runner.kernels is REFERENCE
    make_ready(runner, 5, phase="prefill")
    assert runner.graphs is None
