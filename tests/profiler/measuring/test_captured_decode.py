"""A device that captures decode iterations is profiled by its graphs, and their parts add up to the whole."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from exeplan.core.batch import Batch, SequenceState
from exeplan.core.models.model import ModelSpec, model_spec
from exeplan.core.profile import COMPUTE_OPS, Device, load_profile
from exeplan.core.schedule import Schedule, Sharding
from exeplan.kernels.select import REFERENCE
from exeplan.profiler.measuring.captured_decode import captured_executor, decode_parts, overheads, replay_seconds
from exeplan.profiler.measuring.measure import Rig
from exeplan.profiler.measuring.points import Point, Work
from exeplan.profiler.profile_model import profile_model
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.passes.paged_step import PagedAttention
from exeplan.runner.compute.tokens.sampling import SamplingParams
from exeplan.runner.engine.engine import Engine, Request
from exeplan.simulator.cost import CostModel

DEVICE = Device(
    name="small",
    kind="cpu",
    memory_bytes=1 << 30,
    copy_bytes_per_second=1e10,
    flops_per_second=1e11,
    cache_bytes=1 << 20,
)
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 50,
    "max_position_embeddings": 64,
}
T5 = {
    "model_type": "t5",
    "is_encoder_decoder": True,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_heads": 4,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "vocab_size": 50,
    "relative_attention_num_buckets": 8,
    "decoder_start_token_id": 0,
}


def tiny(config: dict[str, object] = LLAMA) -> ModelSpec:
    return model_spec(config, name="tiny")


class _Clock:
    """Seconds that pass only where a test says so: what is timed is the same on every machine."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def slowed(self, compute, seconds: float):
        """The function, of a known length."""

        def slowly(*arguments):
            self.now += seconds
            return compute(*arguments)

        return slowly

    def slowed_layer(self, layer, *, rest: float, attention: float):
        """The layer; a profile that leaves out attention puts a function of its own in its place."""

        def run(hidden_NE, angles, attend):
            slow = self.slowed(attend, attention) if isinstance(attend, PagedAttention) else attend
            return layer(hidden_NE, angles, slow)

        return self.slowed(run, rest)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def test_the_parts_are_separated(clock: _Clock):
    runner = ModelRunner(tiny(), num_blocks=16, paged_with=REFERENCE)
    model = runner.model
    model.layers = [clock.slowed_layer(layer, rest=5e-3, attention=10e-3) for layer in model.layers]
    model.embed, model.head = clock.slowed(model.embed, 2e-3), clock.slowed(model.head, 3e-3)
    rows = tuple(
        SequenceState(request_id=name, num_prompt_tokens=9, max_output_tokens=1, num_blocks=1)
        for name in ("a", "b", "c")
    )
    found = decode_parts(runner, model, Batch(decode=rows), {row.request_id: [1] * 9 for row in rows}, num_layers=3)
    parts = (found.embed, found.layer, found.attention, found.head)
    assert parts == pytest.approx((2e-3, 15e-3, 10e-3, 3e-3))


@pytest.mark.parametrize(
    ("first", "rounds", "seconds"),
    [(4e-3, [9e-3, 2e-3, 1e-3, 7e-3, 2e-3], 2e-3), (1e-3, [1e-3, 2e-3, 3e-3, 6e-3] * 5, 3e-3)],
    ids=["one a round", "four a round"],
)
def test_a_replay_is_timed_by_the_median_of_rounds_of_the_mean_of_many(clock: _Clock, first, rounds, seconds):
    left = [first, *rounds]

    def replay():
        clock.now += left.pop(0)

    assert replay_seconds(replay, torch.device("cpu")) == pytest.approx(seconds)
    assert left == []


def test_a_sleep_is_not_timed_shorter():
    assert replay_seconds(lambda: time.sleep(1e-3), torch.device("cpu")) >= 1e-3


def test_overheads_are_what_steps_take_beyond_the_passes():
    runner = ModelRunner(tiny(), num_blocks=64, paged_with=REFERENCE)
    before = runner.model
    with captured_executor(runner, runner.model, (1, 4)) as executor:
        engine = Engine(executor, Schedule("orca", {"max_num_seqs": 4}), num_blocks=64)
        for number in range(4):
            sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
            engine.add(Request(request_id=str(number), prompt_token_ids=[3] * 5, sampling=sampling))
        began = time.perf_counter()
        prefill, decode = overheads(engine, runner, num_steps=5)
        took = time.perf_counter() - began
    assert 0 < decode < took
    assert 0 < prefill < took
    assert (runner.model, runner.graphs) == (before, None)
    assert "forward" not in vars(runner)


@pytest.mark.parametrize("config", [LLAMA, T5], ids=["llama", "t5"])
@pytest.mark.parametrize("kind", ["decode", "engine", "prefill"])
def test_every_point_yields_its_measurements(config, kind):
    spec = replace(tiny(config), max_context=64)
    rig = Rig(spec, dtype="float32", device="cpu", copies=2, num_blocks=64, dummy_weights=True, captured=True)
    work = Work(spec=spec, dtype="float32", device=DEVICE, layer_bytes=1000)
    values = rig.visit(Point(kind, 3, 10), work).values
    ops = {
        "decode": {"layer", "attention", "rest", "embed", "head"},
        "engine": {"overhead"},
        "prefill": {"layer", "attention", "rest", "embed"},
    }
    assert {key[0] for key in values} == ops[kind]
    assert all(seconds > 0 for seconds in values.values())
    assert {key[1] for key in values if key[0] == "rest"} <= {kind}
    assert rig.runner.cache.free_blocks == 64


@pytest.mark.usefixtures("rates_measured_once")
def test_a_profile_of_recordings_is_one_that_the_cost_model_reads(tmp_path: Path):
    output = tmp_path / "p.json"
    settings = {"budget_seconds": 2.0, "max_num_seqs": 8, "dummy_weights": True, "progress": False}
    profile_model(tiny(), output=output, captured=True, **settings)
    profile = load_profile(output)
    assert {m.op for m in profile.measurements} == set(COMPUTE_OPS)
    assert {m.phase for m in profile.measurements if m.op == "rest"} == {"prefill", "decode"}
    assert max(m.num_seqs for m in profile.measurements if m.op == "attention") == 8
    assert CostModel(profile).shards[Sharding()].rest["decode"].at(4) > 0
