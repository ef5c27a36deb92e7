"""A profile of several devices predicts plans on them, and an interrupted run continues with the missing rows."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from exeplan.core.batch import Batch, SequenceState
from exeplan.core.models.model import ModelSpec, model_spec
from exeplan.core.profile import Measurement, Profile, ReferencePass, load_profile, save_profile
from exeplan.core.schedule import Schedule, Sharding, Stage
from exeplan.errors import InputError
from exeplan.profiler.measuring.measure import Rig
from exeplan.profiler.measuring.points import Work
from exeplan.profiler.multi_device import multi_device, worker_passes
from exeplan.profiler.multi_device.multi_device import MultiDeviceProfiler, check_num_devices
from exeplan.profiler.multi_device.worker_passes import WorkerPlan, pass_rows
from exeplan.profiler.profile_model import profile_model
from exeplan.runner.compute.reference_passes import ReferencePasses
from exeplan.runner.load import Load
from exeplan.simulator.cost import CostModel

pytestmark = pytest.mark.usefixtures("rates_measured_once")
CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 50,
    "max_position_embeddings": 64,
}
CPU = torch.device("cpu")


def tiny(**changes: object) -> ModelSpec:
    return model_spec({**CONFIG, **changes}, name="tiny")


def run(output: Path, *, budget_seconds: float = 2.0) -> Profile:
    options = {"max_num_seqs": 4, "dummy_weights": True, "progress": False, "num_devices": 2}
    return profile_model(tiny(), output=output, budget_seconds=budget_seconds, **options)


def multi_device_rows(profile: Profile) -> list[Measurement]:
    """The rows that a profile of one device has not."""
    several = ("all_reduce", "send", "control", "pass")
    return [m for m in profile.measurements if m.op in several or m.tensor_parallel_size > 1]


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profile") / "tiny.json"


@pytest.fixture(scope="module")
def profile(output: Path) -> Profile:
    return run(output)


def test_the_file_holds_shards_links_and_control(profile: Profile, output: Path) -> None:
    assert profile.complete
    assert profile.tensor_parallel_sizes == (1, 2)
    assert {(m.op, m.tensor_parallel_size) for m in multi_device_rows(profile)} == {
        *((op, 2) for op in ("attention", "rest", "embed", "head", "all_reduce")),
        ("send", 1),
        ("control", 1),
        ("pass", 1),
        ("pass", 2),
    }
    assert load_profile(output) == profile


def test_a_mixture_is_timed_with_its_experts_cut_and_divided(tmp_path: Path) -> None:
    mixture = {"model_type": "qwen3_moe", "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    options = {"max_num_seqs": 4, "dummy_weights": True, "progress": False, "num_devices": 2}
    found = profile_model(tiny(**mixture), output=tmp_path / "moe.json", budget_seconds=2.0, **options)
    assert found.complete
    assert found.expert_shardings == (Sharding(2, 1, 2),)
    assert {(m.op, m.sharding) for m in found.measurements if m.expert_parallel_size > 1} == {
        ("rest", Sharding(2, 1, 2))
    }
    rows = tuple(SequenceState(request_id=str(n), num_prompt_tokens=20, max_output_tokens=1) for n in range(4))
    divided = CostModel(found, (Stage(devices=(0, 1), layers=(0, 2), expert_parallel_size=2),))
    assert divided.batch_seconds(Batch(decode=rows)) > 0


@pytest.mark.parametrize(
    "placement",
    [
        (Stage(devices=(0, 1), layers=(0, 2)),),
        (Stage(devices=(0,), layers=(0, 1)), Stage(devices=(1,), layers=(1, 2))),
    ],
    ids=["tensor parallel", "pipeline"],
)
def test_it_predicts_plans_on_two_devices(profile: Profile, placement: tuple[Stage, ...]) -> None:
    rows = tuple(SequenceState(request_id=str(n), num_prompt_tokens=20 + n, max_output_tokens=1) for n in range(4))
    cost, silent = CostModel(profile, placement), replace(profile, measurements=())
    links = ("all_reduce", "send", "control")
    nothing = [replace(m, seconds=1e-12) if m.op in links else m for m in profile.measurements]
    parts = CostModel(replace(silent, measurements=tuple(nothing)), placement)
    assert cost.batch_seconds(Batch(decode=rows)) > parts.batch_seconds(Batch(decode=rows)) > 0


@pytest.fixture
def timed_shard(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> tuple[Rig, ReferencePasses]:
    """What the rows of a shard of two would be timed with, keys and values in float16."""
    found = []
    monkeypatch.setattr(multi_device, "shard_rows", lambda rig, *_, reference, **__: found.append((rig, reference)))
    profiler = MultiDeviceProfiler(
        num_devices=2,
        work=Work(spec=tiny(), dtype="bfloat16", device=profile.device, layer_bytes=1 << 20, kv_dtype="float16"),
        reach=SimpleNamespace(num_blocks=4),
        device="cpu",
        dummy_weights=True,
    )
    passes = (ReferencePass(kind="decode", num_seqs=1, num_tokens=8, num_layers=1),)
    profiler._shard(2, replace(profile, measurements=(), reference_passes=passes), 1.0)
    return found[0]


def test_a_shards_slowness_is_told_by_passes_of_the_whole_model(timed_shard: tuple[Rig, ReferencePasses]) -> None:
    _, reference = timed_shard
    assert reference._runner.spec == replace(tiny(), num_layers=1)


def test_a_shards_cache_has_the_dtype_of_the_models(timed_shard: tuple[Rig, ReferencePasses]) -> None:
    rig, _ = timed_shard
    assert rig.runner.cache.both_tables(0).dtype == torch.float16


def test_an_unfinished_run_measures_what_is_left_and_keeps_the_rest(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "half.json"
    half = [m for m in profile.measurements if m.op not in ("send", "control", "pass")]
    save_profile(replace(profile, measurements=tuple(half), complete=False), path)
    again = run(path, budget_seconds=1.0)
    assert again.complete
    assert [m for m in multi_device_rows(again) if m.op not in ("send", "control", "pass")] == multi_device_rows(
        replace(profile, measurements=tuple(half))
    )
    assert {m.op for m in again.measurements} == {m.op for m in profile.measurements}


def test_a_run_for_one_device_keeps_what_is_about_several(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "whole.json"
    save_profile(replace(profile, complete=False), path)
    alone = profile_model(tiny(), output=path, budget_seconds=1.0, max_num_seqs=4, dummy_weights=True, progress=False)
    assert multi_device_rows(alone) == multi_device_rows(profile)


def test_what_is_not_there_is_said() -> None:
    with pytest.raises(InputError, match="at least one device, found 0"):
        check_num_devices(tiny(), 0, CPU, 1)
    with pytest.raises(InputError, match="tiny has one layer, whose heads cannot be shared by 2 devices"):
        check_num_devices(tiny(num_hidden_layers=1, num_attention_heads=1), 2, CPU, 1)
    assert "share" in check_num_devices(tiny(), 4, CPU, 1000)
    assert check_num_devices(tiny(), 1, CPU, 1000) == ""


class Played:
    """Engines whose workers take that many times as long as in one process, and longer still once slots are empty."""

    def __init__(self, profile: Profile, plans: list[WorkerPlan], factor: float) -> None:
        self.profile, self.plans, self.factor = profile, plans, factor
        self.schedules: list[Schedule] = []

    def switch_plan(self, schedule: Schedule) -> None:
        self.schedules.append(schedule)

    def reference_passes(self, passes: object) -> None:
        """None are needed."""

    def close(self) -> None:
        """Nothing is held."""

    def play(self, engine: object, load: Load, **options: object) -> SimpleNamespace:
        (plan,) = (plan for plan in self.plans if plan.schedule == self.schedules[-1])
        requests = worker_passes._replayed(worker_passes._slowed(self.profile, plan.size, self.factor), plan, load)
        emptying = [
            replace(record, token_times=tuple(3 * time for time in record.token_times)) for record in requests.requests
        ]
        return SimpleNamespace(at_profile_speed=lambda one_thread: emptying)


@pytest.mark.parametrize("stages", [[(0,), (1,)], [(0, 1)]], ids=["pipeline", "tensor parallel"])
@pytest.mark.parametrize("factor", [0.8, 1.7])
def test_bursts_have_the_factor_with_which_their_replay_takes_as_long(
    factor: float, stages: list[tuple[int, ...]], profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = [WorkerPlan(spec=profile.model, stages=stages, slots=slots, longest=64) for slots in (3, 9)]
    engine = Played(profile, plans, factor)
    monkeypatch.setattr(worker_passes, "build_engine", lambda setup: engine)
    monkeypatch.setattr(worker_passes, "play_engine", engine.play)
    alone, together = pass_rows(profile, plans, num_threads=1, seconds=0.0)
    assert (alone.phase, together.phase, alone.tensor_parallel_size) == ("alone", "together", plans[0].size)
    assert together.seconds / alone.seconds == pytest.approx(worker_passes._likely([factor, factor]), rel=0.03)
    assert together.repeats == 2
    assert engine.schedules == [plan.schedule for plan in plans]
    assert "limit" not in worker_passes.remark((alone, together))


def test_bursts_are_measured_anew_where_a_run_is_resumed(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "interrupted.json"
    wrong = [replace(m, seconds=100.0) if m.op == "pass" else m for m in profile.measurements]
    save_profile(replace(profile, measurements=tuple(wrong), complete=False), path)
    again = run(path)
    assert all(m.seconds < 10 for m in again.measurements if m.op == "pass")
    assert {m.op for m in again.measurements} == {m.op for m in profile.measurements}


def test_few_bursts_are_drawn_toward_one_and_many_are_believed() -> None:
    few, many = (worker_passes._likely(number * [1.2]) for number in (2, 50))
    assert 1.1 < few < 1.17 < many < 1.2
    assert worker_passes._likely([0.9, 1.3, 0.8, 1.4]) < worker_passes._likely([1.07, 1.08, 1.06, 1.08])
    assert worker_passes._likely([1 / 1.2] * 2) == pytest.approx(1 / few)


def test_a_factor_beyond_its_limits_is_told() -> None:
    rows = worker_passes._rows(WorkerPlan(spec=tiny(), stages=[(0, 1)], slots=3, longest=64), 0.01, [30.0, 33.0])
    assert worker_passes.remark(rows).startswith("passes on workers take 4.000 times the sum of their parts")
    assert "a limit" in worker_passes.remark(rows)


def test_the_bursts_slow_down_plans_for_several_devices_only(profile: Profile) -> None:
    batch = Batch(decode=(SequenceState(request_id="0", num_prompt_tokens=8, max_output_tokens=1, num_blocks=1),))
    pipeline = (Stage(devices=(0,), layers=(0, 1)), Stage(devices=(1,), layers=(1, 2)))
    for placement, slower in ((None, False), (pipeline, True)):
        times = [CostModel(worker_passes._slowed(profile, 1, f), placement).batch_seconds(batch) for f in (1.0, 2.0)]
        assert (times[1] > times[0]) is slower
