"""A mixture of experts is profiled by the weights that passes read, over layers of both kinds, with other tokens."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from exeplan.core.models.layer_costs import layer_parameters, layer_parameters_read, layer_parameters_used
from exeplan.core.models.model import ModelSpec, model_spec
from exeplan.core.profile import Device, Measurement, Profile
from exeplan.profiler.measuring.campaign import num_copies
from exeplan.profiler.measuring.lint import lint
from exeplan.profiler.measuring.measure import Rig
from exeplan.profiler.measuring.points import Point, Work
from exeplan.profiler.profile_model import _layer_bytes

MIXTURE = {
    "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "vocab_size": 50,
    "intermediate_size": 96, "max_position_embeddings": 128, "num_experts": 16, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}  # fmt: skip
CPU = Device(
    name="test",
    kind="cpu",
    memory_bytes=2**33,
    copy_bytes_per_second=10e9,
    flops_per_second=100e9,
    cache_bytes=2**18,
)


def mixture(**change: Any) -> ModelSpec:
    return model_spec({**MIXTURE, **change}, name="mixture")


def work(spec: ModelSpec) -> Work:
    return Work(spec=spec, dtype="float32", device=CPU, layer_bytes=4 * layer_parameters(spec))


def test_few_rows_read_few_experts_and_visit_more_layers() -> None:
    found = work(mixture())
    few, many = (found.layers_needed(Point("decode", rows, 16), 6) for rows in (1, 64))
    assert few > many
    assert layer_parameters_read(found.spec, 1) == pytest.approx(layer_parameters_used(found.spec))


def test_layers_of_two_kinds_are_all_visited() -> None:
    spec = mixture(decoder_sparse_step=2)
    assert (mixture().layers_differ, spec.layers_differ) == (False, True)
    assert [spec.has_experts(layer) for layer in range(3)] == [False, True, False]
    found = work(spec)
    assert num_copies(found) == found.layers_needed(Point("prefill", 1, 100), 6) == 6


def test_a_layer_weighs_the_mean_of_both_kinds() -> None:
    """The norms are left out of the count: 2 of 64 and 2 of 16 numbers. In float16, which is in no panels."""
    spec = mixture(decoder_sparse_step=2)
    assert _layer_bytes(spec, dtype="float16", device="cpu")[0] == 2 * (layer_parameters(spec) + 2 * 64 + 2 * 16)


def test_each_pass_sends_other_tokens_to_other_experts() -> None:
    torch.set_num_threads(1)
    rig = Rig(mixture(), dtype="float32", device="cpu", copies=1, num_blocks=16, dummy_weights=True)
    rig.probe.use_layers(1)
    with rig.placed(Point("decode", 2, 20)) as forward:
        assert not torch.equal(forward(), forward())


def test_products_are_counted_by_the_experts_of_a_token() -> None:
    """At 90 % of the device's rate by the experts that a token meets, which is far beyond it by all of them."""
    spec = mixture()
    flops = 2.0 * 64 * layer_parameters_used(spec)
    row = Measurement(op="rest", num_tokens=64, seconds=flops / 90e9, repeats=3, spread=0.0)
    profile = Profile(
        model=spec,
        dtype="float32",
        device=CPU,
        weight_bytes=4 * (spec.num_layers * layer_parameters(spec) + 2 * 50 * 64),
        workspace_bytes=1,
        measurements=(row,),
    )
    assert not [finding for finding in lint(profile) if "GFLOP/s" in finding]
    assert [finding for finding in lint(replace_seconds(profile, flops / 200e9)) if "GFLOP/s" in finding]


def replace_seconds(profile: Profile, seconds: float) -> Profile:
    (row,) = profile.measurements
    return replace(profile, measurements=(replace(row, seconds=seconds),))
