"""A warmed-up runner has captured its decode iterations and holds no sequence."""

import pytest

from exeplan.kernels.select import REFERENCE
from exeplan.runner.compute.passes.decode_graphs import ladder
from exeplan.runner.compute.warm_up import warm_up_runner

from .test_decode_graphs import SPECS, prefilled, runner_of


@pytest.mark.parametrize("phase", ["", "decode"])
@pytest.mark.parametrize("family", SPECS)
def test_every_family_is_ready_to_decode(family, phase, monkeypatch):
    kinds = []
    runner = runner_of(family)
    forward = runner.forward
    monkeypatch.setattr(runner, "forward", lambda batch, *rest: kinds.append(batch) or forward(batch, *rest))
    warm_up_runner(runner, 5, phase=phase)
    assert runner.graphs.sizes == ladder(5)
    assert runner.cache.free_blocks == runner.cache.num_blocks
    assert any(batch.decode for batch in kinds)
    assert any(batch.prefill for batch in kinds) == (phase == "")
    prefilled(runner, [5, 9])


def test_kernels_are_compiled_for_prompts_and_later_chunks_with_one_decode_or_many(monkeypatch):
    kinds = []
    runner = runner_of("llama", num_blocks=96)
    forward = runner.forward
    monkeypatch.setattr(runner, "forward", lambda batch, *rest: kinds.append(batch) or forward(batch, *rest))
    warm_up_runner(runner, 5)
    mixed = [batch for batch in kinds if batch.prefill and batch.decode]
    assert {(any(chunk.start for chunk in batch.chunks), len(batch.decode) > 1) for batch in mixed} == {
        *((False, True), (True, True), (False, False), (True, False))
    }


def test_stages_that_only_prefill_capture_nothing():
    runner = runner_of("llama")
    assert runner.kernels is REFERENCE
    warm_up_runner(runner, 5, phase="prefill")
    assert runner.graphs is None
