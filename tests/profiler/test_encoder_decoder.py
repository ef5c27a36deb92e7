"""An encoder-decoder model is profiled with separate encoder and decoder layers, each with its own parts."""

from dataclasses import replace

import pytest
import torch

from exeplan.core.batch import Batch, SequenceState, num_blocks_for
from exeplan.core.models.model import ModelSpec, model_spec
from exeplan.core.profile import Profile
from exeplan.core.schedule import Sharding
from exeplan.profiler.measuring.calibrate import BurstStep, calibrate
from exeplan.profiler.measuring.lint import row_name
from exeplan.profiler.measuring.measure import Rig
from exeplan.profiler.measuring.points import Point
from exeplan.profiler.measuring.probe import PassTimes
from exeplan.profiler.measuring.samples import Samples, resumed
from exeplan.profiler.profile_model import profile_model
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.engine.engine import StepRecord
from exeplan.simulator.cost import CostModel

pytestmark = pytest.mark.usefixtures("rates_measured_once")
CONFIG = {
    "model_type": "t5",
    "is_encoder_decoder": True,
    "d_model": 32,
    "d_kv": 8,
    "num_heads": 4,
    "d_ff": 64,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "vocab_size": 50,
    "relative_attention_num_buckets": 8,
    "decoder_start_token_id": 0,
}


def tiny() -> ModelSpec:
    return model_spec(CONFIG, name="tiny")


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    path = tmp_path_factory.mktemp("profile") / "tiny.json"
    return profile_model(
        tiny(), output=path, budget_seconds=2.0, max_num_seqs=8, max_context=64, dummy_weights=True, progress=False
    )


@pytest.fixture(scope="module")
def rig() -> Rig:
    torch.set_num_threads(1)
    spec = replace(tiny(), max_context=64)
    return Rig(spec, dtype="float32", device="cpu", copies=2, num_blocks=40, dummy_weights=True)


def test_a_probed_model_computes_the_same_and_its_parts_fill_the_pass(rig: Rig) -> None:
    spec = rig.runner.spec
    plain = ModelRunner(spec, num_blocks=4, dummy_weights=True)
    token_ids = {"a": [*range(1, 20), 0, 7]}
    row = SequenceState(request_id="a", num_prompt_tokens=20, max_output_tokens=2, num_blocks=num_blocks_for(21))
    found = []
    for runner in (plain, rig.runner):
        row.num_output_tokens = 0
        runner.forward(Batch(prefill=(row,)), token_ids)
        prefill = rig.probe.times() if runner is rig.runner else None
        row.num_output_tokens = 1
        found.append(runner.forward(Batch(decode=(row,)), token_ids))
    decode = rig.probe.times()
    assert torch.equal(*found)
    assert prefill is not None
    assert (len(prefill.encoder_layers), len(prefill.layers), prefill.head) == (2, 0, 0.0)
    assert (len(decode.encoder_layers), len(decode.layers), decode.cross) == (0, 2, 0.0)
    assert min(prefill.embed, prefill.cross, *prefill.encoder_attentions, decode.head, *decode.attentions) > 0
    for attentions, layers in (
        (prefill.encoder_attentions, prefill.encoder_layers),
        (decode.attentions, decode.layers),
    ):
        assert all(attention < layer for attention, layer in zip(attentions, layers, strict=True))
    rig.runner.free("a")


def test_an_encoder_layer_carries_its_share_of_the_cross_keys_and_values(rig: Rig) -> None:
    """Two decoder layers take 6 s for them: 2 decoder layers for 3 encoder layers make it 2 s each."""
    rig.probe.use_layers(2)
    times = PassTimes(
        embed=1.0,
        layers=(),
        attentions=(),
        head=0.0,
        encoder_layers=(7.0, 5.0),
        encoder_attentions=(3.0, 1.0),
        cross=6.0,
    )
    found = rig._parts(Point("prefill", 2, 10), times, 0.0)
    layer, attention = (7.0 + 2 * 5.0) / 3 + 2.0, (3.0 + 2 * 1.0) / 3
    assert found == pytest.approx(
        {
            ("layer", "prefill", 2, 20, 0): layer,
            ("attention", "prefill", 2, 20, 0): attention,
            ("rest", "prefill", 0, 20, 0): layer - attention,
            ("embed", "", 0, 20, 0): 1.0,
        }
    )


def test_a_decode_visits_rows_whose_caches_are_full(rig: Rig) -> None:
    """Half of a row's context is its prompt's, half its output's, and one token of each row is computed."""
    point = Point("decode", 3, 21)
    batch, _ = rig.batch(point)
    assert sum(row.num_tokens - 1 for row in batch.decode) == point.total_tokens
    assert all(abs(row.num_prompt_tokens - 1 - row.num_output_tokens) <= 1 for row in batch.decode)
    with rig.placed(point) as forward:
        assert rig.runner.num_tokens(batch) == 3
        assert forward().shape == (3, 50)
    assert rig.runner.cache.free_blocks == 40


def test_every_op_is_measured_in_the_phases_that_it_has(profile: Profile) -> None:
    phases = {(m.op, m.phase) for m in profile.measurements}
    both = {(op, phase) for op in ("attention", "rest", "overhead") for phase in ("prefill", "decode")}
    assert phases == both | {("embed", ""), ("head", "")}
    names = [row_name(m) for m in profile.measurements]
    assert len(set(names)) == len(names)


def test_covers_the_range_that_was_asked_for(profile: Profile) -> None:
    attention = [m for m in profile.measurements if m.op == "attention"]
    assert max(m.context_tokens // m.num_seqs for m in attention) == 63
    assert max(m.num_tokens for m in attention if m.num_seqs == 1) == 63
    assert {m.num_tokens for m in profile.measurements if m.op == "rest" and m.phase == "decode"} >= {1, 8}


def test_counts_the_weights_of_all_layers(profile: Profile) -> None:
    whole = ModelRunner(tiny(), num_blocks=1, dummy_weights=True)
    tables = 4 * 8 * 4  # Each layer's bytes count its stack's table of biases, which is there once.
    assert profile.weight_bytes == pytest.approx(whole.weight_bytes, abs=3 * tables)


def test_the_cost_model_reproduces_measured_layers(profile: Profile) -> None:
    cost = CostModel(replace(profile, calibration=1.0, prefill_calibration=1.0, pass_seconds=0.0))
    for m in profile.measurements:
        if m.op == "rest":
            assert cost.shards[Sharding()].rest[m.phase](m.num_tokens) == pytest.approx(m.seconds)
        elif m.op == "attention" and m.phase == "decode":
            found = cost.shards[Sharding()].decode_attention(m.num_seqs, m.context_tokens / m.num_seqs)
            assert found == pytest.approx(m.seconds)


def test_what_was_measured_is_resumed(profile: Profile) -> None:
    own = [m for m in profile.measurements if m.repeats > 1]
    after = {row_name(m): m.seconds for m in resumed(profile.measurements).measurements()}
    assert own
    assert after == pytest.approx({row_name(m): m.seconds for m in profile.measurements}, rel=1e-3)


def test_attention_is_what_a_layer_takes_beyond_the_rest_of_its_own_phase() -> None:
    samples = Samples()
    samples.add({("rest", "prefill", 0, 8, 0): 40.0, ("rest", "decode", 0, 8, 0): 10.0})
    for phase, tokens in (("prefill", (8, 0)), ("decode", (0, 80))):
        samples.add({("layer", phase, 8, *tokens): 60.0, ("attention", phase, 8, *tokens): 30.0})
    found = {m.phase: m.seconds for m in samples.measurements() if m.op == "attention"}
    assert found == {"prefill": 20.0, "decode": 50.0}


def test_the_calibration_does_not_count_the_start_tokens(profile: Profile) -> None:
    """A step of 2 prompts of 30 tokens and 4 rows with 20 in the cache, as the engine counts it; 2 layers a stack."""
    model = replace(profile.model, num_layers=2, num_encoder_layers=2)
    plain = replace(profile, model=model, calibration=1.0, prefill_calibration=1.0, pass_seconds=0.0)
    prompts = [SequenceState(request_id=str(n), num_prompt_tokens=30, max_output_tokens=1) for n in range(2)]
    rows = [SequenceState(request_id=str(n), num_prompt_tokens=20, max_output_tokens=1) for n in range(4)]
    seconds = CostModel(plain).batch_seconds(Batch(prefill=tuple(prompts), decode=tuple(rows)))
    record = StepRecord(0.0, 1.0, 2, 4, 2 * 31 + 4, 4 * 21)
    assert calibrate([[BurstStep(record, 3 * seconds, 0.0)]], profile, num_layers=2).factor == pytest.approx(3.0)
