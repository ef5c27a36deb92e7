"""profile_model() writes a whole profile that the cost model reproduces, and continues an interrupted run."""

import gc
import threading
import time
import weakref
from _thread import interrupt_main
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from exeplan.core.batch import Batch, SequenceState
from exeplan.core.models.model import ModelSpec, model_spec
from exeplan.core.profile import COMPUTE_OPS, Profile, load_profile, save_profile
from exeplan.core.schedule import Sharding
from exeplan.errors import InputError
from exeplan.profiler.measuring.lint import row_name
from exeplan.profiler.measuring.measure import Rig
from exeplan.profiler.multi_device.multi_device import MultiDeviceProfiler
from exeplan.profiler.profile_model import profile_model
from exeplan.profiler.thread_counts import profile_thread_counts
from exeplan.simulator.cost import CostModel

pytestmark = pytest.mark.usefixtures("rates_measured_once")
CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 50,
    "max_position_embeddings": 64,
}


def tiny(**changes: object) -> ModelSpec:
    return model_spec({**CONFIG, **changes}, name="tiny")


def run(output: Path, spec: ModelSpec | None = None, **options: object) -> Profile:
    settings = {"budget_seconds": 2.0, "max_num_seqs": 8, "dummy_weights": True, "progress": False, **options}
    return profile_model(spec or tiny(), output=output, **settings)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profile") / "tiny.json"


@pytest.fixture(scope="module")
def profile(output: Path) -> Profile:
    return run(output)


def test_the_file_holds_what_was_measured(profile: Profile, output: Path) -> None:
    loaded = load_profile(output)
    assert loaded.measurements == profile.measurements
    assert loaded.fingerprint == profile.fingerprint
    assert loaded.complete


def test_every_op_is_measured_once_a_point(profile: Profile) -> None:
    names = [row_name(m) for m in profile.measurements]
    assert len(set(names)) == len(names)
    assert {m.op for m in profile.measurements} == set(COMPUTE_OPS)
    assert {m.phase for m in profile.measurements if m.op in ("attention", "overhead")} == {"prefill", "decode"}


def test_covers_the_range_that_was_asked_for(profile: Profile) -> None:
    attention = [m for m in profile.measurements if m.op == "attention"]
    assert max(m.num_seqs for m in attention) == 8
    assert max(m.context_tokens // m.num_seqs for m in attention) == 63
    assert max(m.num_tokens for m in attention if m.num_seqs == 1) == 63


def test_counts_the_weights_of_all_layers(profile: Profile) -> None:
    layer = 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32
    assert profile.weight_bytes == 4 * (3 * layer + 2 * 50 * 32 + 32)
    assert profile.workspace_bytes > 0


def test_interpolation_reproduces_measured_points(profile: Profile) -> None:
    cost = CostModel(replace(profile, calibration=1.0, prefill_calibration=1.0, pass_seconds=0.0))
    for m in profile.measurements:
        if m.op == "rest":
            assert cost.shards[Sharding()].rest["decode"](m.num_tokens) == pytest.approx(m.seconds)
        elif m.op == "attention" and m.phase == "decode":
            assert cost.shards[Sharding()].decode_attention(m.num_seqs, m.context_tokens / m.num_seqs) == pytest.approx(
                m.seconds
            )
        elif m.op == "attention":
            assert cost.shards[Sharding()].prefill_attention(m.num_seqs, m.num_tokens / m.num_seqs) == pytest.approx(
                m.seconds
            )


def test_a_batch_costs_more_than_its_layers(profile: Profile) -> None:
    rows = tuple(SequenceState(request_id=str(n), num_prompt_tokens=20 + n, max_output_tokens=1) for n in range(4))
    cost = CostModel(replace(profile, calibration=1.0, prefill_calibration=1.0, pass_seconds=0.0))
    assert cost.batch_seconds(Batch(decode=rows)) > 3 * float(cost.shards[Sharding()].rest["decode"](4))


def test_an_unfinished_profile_is_resumed_and_keeps_its_points(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "half.json"
    once = tuple(replace(m, repeats=1, spread=0.0) for m in profile.measurements)
    save_profile(replace(profile, measurements=once, speed_spread=0.7, complete=False), path)
    again = run(path)
    repeats = {row_name(m): m.repeats for m in again.measurements}
    assert {row_name(m) for m in once} <= repeats.keys()
    assert sum(repeats.values()) > len(once)
    assert again.complete
    assert again.reference_passes == profile.reference_passes != ()  # Its rows are at their speed.
    assert again.speed_spread >= 0.7  # So far it moved while they were measured.


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"spec": tiny(intermediate_size=96)}, "another model"),
        ({"dtype": "bfloat16"}, "another dtype (float32, now bfloat16)"),
    ],
)
def test_what_was_made_for_something_else_is_measured_anew(
    profile: Profile, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, object], reason: str
) -> None:
    path = tmp_path / "half.json"
    save_profile(replace(profile, complete=False), path)
    run(path, budget_seconds=1.0, progress=True, **changes)
    assert reason in capsys.readouterr().err


def stop_once_there_is(path: Path) -> None:
    """Interrupts this thread from another one."""

    def stop() -> None:
        while not path.exists():
            time.sleep(0.01)
        interrupt_main()

    threading.Thread(target=stop, daemon=True).start()


def test_stopping_by_hand_keeps_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "stopped.json"

    stop_once_there_is(path)
    with pytest.raises(KeyboardInterrupt, match=r"stopped; .* the same command resumes from there"):
        run(path, budget_seconds=60.0, target_error=0.0001)
    assert not load_profile(path).complete


def test_several_thread_counts_that_are_interrupted_are_all_resumed(
    tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    path, part = tmp_path / "both.json", tmp_path / "both.json.2-threads"
    settings = {"output": path, "budget_seconds": 2.0, "max_num_seqs": 4, "max_context": 16, "dummy_weights": True}
    stop_once_there_is(part)
    with pytest.raises(KeyboardInterrupt):
        profile_thread_counts(tiny(), (1, 2), target_error=0.0001, **settings)
    assert not load_profile(path).complete
    capsys.readouterr()
    found = profile_thread_counts(tiny(), (1, 2), **settings)
    assert "measuring anew" not in capsys.readouterr().err
    assert found.complete
    assert found.thread_counts == (1, 2)
    assert not part.exists()


def test_the_rig_of_one_device_is_gone_before_shards_are_measured(tmp_path: Path, monkeypatch) -> None:
    """Also where parts of it hold each other."""
    rigs = []

    class Circular(Rig):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)
            self.own = self
            rigs.append(weakref.ref(self))

    def extend(self: MultiDeviceProfiler, profile: Profile, **options: object) -> Profile:
        assert [ref() for ref in rigs] == [None]
        return profile

    monkeypatch.setattr("exeplan.profiler.profile_model.Rig", Circular)
    monkeypatch.setattr(MultiDeviceProfiler, "extend", extend)
    gc.disable()
    try:
        run(tmp_path / "p.json", num_devices=2)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget_seconds": 0.0}, "budget must be above zero"),
        ({"target_error": 1.5}, "target error is a share between 0 and 1, found 1.5"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"max_context": 65}, "max_context 65 is beyond the 64 tokens that tiny can hold"),
        ({"max_context": 4}, "a context of at least 16 tokens"),
        ({"device": "tpu"}, "no device 'tpu'"),
        ({"device": "cuda:1"}, "'cuda:1' has a number; choose it by --device cuda and CUDA_VISIBLE_DEVICES=1"),
        ({"device": "cpu:0"}, "'cpu:0' has a number; choose it by --device cpu"),
    ],
)
def test_what_cannot_be_measured_is_said(tmp_path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(tmp_path / "never.json", **options)


def test_a_file_that_is_no_profile_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "notes.json"
    path.write_text('{"mine": 1}')
    with pytest.raises(InputError, match="cannot be resumed"):
        run(path)
    assert path.read_text() == '{"mine": 1}'


def test_layers_that_differ_in_their_windows_are_measured_up_to_the_window(tmp_path: Path) -> None:
    mixed = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}
    with pytest.raises(InputError, match="measure up to --max-context 32, below which they do not, or derive a"):
        run(tmp_path / "p.json", tiny(**mixed))
