"""The probe separates the parts of a pass and does not change its result."""

import gc
import weakref

import pytest
import torch

from exeplan.core.batch import Batch, SequenceState
from exeplan.core.models.model import ModelSpec, model_spec
from exeplan.profiler.measuring.memory import peak_bytes, tensor_bytes
from exeplan.profiler.measuring.probe import PassTimes, Probe
from exeplan.runner.compute.model_runner import ModelRunner


@pytest.fixture
def spec() -> ModelSpec:
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 50,
        "max_position_embeddings": 64,
    }
    return model_spec(config, name="tiny")


def test_a_probed_model_computes_the_same_and_its_parts_fill_the_pass(spec: ModelSpec) -> None:
    torch.set_num_threads(1)
    runner = ModelRunner(spec, num_blocks=4, dummy_weights=True)
    batch = Batch(prefill=(SequenceState(request_id="a", num_prompt_tokens=20, max_output_tokens=1, num_blocks=2),))
    token_ids = {"a": list(range(20))}
    expected = runner.forward(batch, token_ids)
    probe = runner.model = Probe(runner.model, runner.device)
    assert torch.equal(runner.forward(batch, token_ids), expected)
    times = probe.times()
    assert len(times.layers) == len(times.attentions) == 3
    assert min(times.embed, times.head, *times.attentions) > 0
    assert all(attention < layer for attention, layer in zip(times.attentions, times.layers, strict=True))


def test_visits_only_the_chosen_layers(spec: ModelSpec) -> None:
    runner = ModelRunner(spec, num_blocks=4, dummy_weights=True)
    probe = runner.model = Probe(runner.model, runner.device)
    probe.use_layers(2)
    batch = Batch(prefill=(SequenceState(request_id="a", num_prompt_tokens=3, max_output_tokens=1, num_blocks=1),))
    runner.forward(batch, {"a": [1, 2, 3]})
    assert len(probe.times().layers) == 2


def test_a_probe_lets_go_of_its_model_at_once(spec: ModelSpec) -> None:
    """Python's collector, which would find a circle, counts objects, not the bytes of weights."""
    runner = ModelRunner(spec, num_blocks=4, dummy_weights=True)
    gc.disable()
    try:
        probe = Probe(runner.model, runner.device)
        ref = weakref.ref(probe)
        del probe
        assert ref() is None
    finally:
        gc.enable()


def test_the_first_layer_counts_once_however_many_the_others_stand_for() -> None:
    times = PassTimes(embed=1.0, layers=(7.0, 3.0), attentions=(5.0, 1.0), head=2.0)
    assert times.total == 13.0
    assert times.layer(4) * 4 == 7.0 + 3 * 3.0
    assert times.attention(4) * 4 == 5.0 + 3 * 1.0
    assert PassTimes(embed=0.0, layers=(7.0,), attentions=(5.0,), head=0.0).layer(4) == 7.0


def test_counts_the_bytes_of_a_layer(spec: ModelSpec) -> None:
    runner = ModelRunner(spec, num_blocks=4, dummy_weights=True)
    # Projections of 4 * 32 * 32, a feed-forward block of 3 * 32 * 64, and two norms of 32.
    assert tensor_bytes(runner.model.layers[0]) == 4 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32)


def test_sees_the_peak_of_what_is_allocated_and_freed() -> None:
    size = 64 * 2**20
    found = peak_bytes(lambda: torch.ones(size // 4).sum(), torch.device("cpu"))
    assert 0.9 * size < found < 1.5 * size
