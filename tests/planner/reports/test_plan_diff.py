"""A diff counts each GPU's loads and the requests that keep their KV cache, names every change and its seconds."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from exeplan.cli import main
from exeplan.core.bounds import Bound
from exeplan.core.models.layer_costs import embedding_parameters, layer_parameters, model_parameters
from exeplan.core.models.model import load_model_spec
from exeplan.core.plan import Plan, save_plan
from exeplan.core.schedule import Estimate, Placement, ReplicaGroup, Schedule, Stage
from exeplan.errors import InputError
from exeplan.planner.reports.plan_diff import Change, PlanDiff, diff_plans, gains
from exeplan.planner.reports.plan_diff_text import diff_text

DEMO = load_model_spec("demo")
LAYER, EMBEDDING = 2 * layer_parameters(DEMO), 2 * embedding_parameters(DEMO)
"""Bytes in bfloat16; the head of this model is its embedding."""
ESTIMATE = Estimate(
    throughput=2.0,
    token_throughput=20.0,
    ttft=0.1,
    tpot=0.01,
    latency=0.5,
    latency_p50=0.2,
    latency_p99=0.5,
    kv_tokens=100.0,
    memory_bytes_per_gpu=1e9,
)


def pipeline(*counts: int) -> Placement:
    ends = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return tuple(Stage(devices=(i,), layers=(ends[i], ends[i + 1])) for i in range(len(counts)))


PARALLEL = (Stage(devices=(0, 1), layers=(0, 6)),)
APART = (
    Stage(devices=(0,), layers=(0, 6), phase="prefill"),
    Stage(devices=(1,), layers=(0, 6), phase="decode"),
)


def plan(placement: Placement, **fields: object) -> Plan:
    own = Plan(
        model="demo",
        schedule=Schedule("rra", {"prefill_batch": 4, "decode_steps": 6}),
        placement=placement,
        dtype="bfloat16",
        estimate=ESTIMATE,
        workload="S",
    )
    return replace(own, **fields)  # type: ignore[arg-type]


def diff(old: Plan, new: Plan, speed: float = 1e9) -> PlanDiff:
    return diff_plans(old, new, DEMO, DEMO, bytes_per_second={"from tape": speed})


def test_the_same_plan_moves_nothing() -> None:
    found = diff(plan(pipeline(3, 3)), plan(pipeline(3, 3)))
    assert found.changes == ()
    assert found.moving.loaded_bytes == {0: 0.0, 1: 0.0}
    assert found.moving.kv_share_kept == 1
    assert found.moving.recomputed_tokens == 0
    assert diff_text(found) == "the plans are the same"


def test_a_gpu_loads_the_layers_that_it_lacks() -> None:
    moving = diff(plan(pipeline(3, 3)), plan(pipeline(4, 2)), speed=1e6).moving
    assert moving.loaded_bytes == {0: LAYER, 1: 0.0}
    assert moving.load_seconds == {"from tape": LAYER / 1e6}
    assert moving.kv_share_kept == pytest.approx(5 / 6)
    assert moving.kv_bytes_moved == pytest.approx(100 * DEMO.kv_bytes_per_token("bfloat16") / 6)
    assert (moving.kv_carried, moving.recomputed_tokens) == (True, 0)


def test_a_new_gpu_loads_everything_and_the_others_nothing() -> None:
    moving = diff(plan(pipeline(3, 3)), plan(pipeline(2, 2, 2))).moving
    assert DEMO.tied_head
    assert moving.loaded_bytes == {0: 0.0, 1: LAYER, 2: 2 * LAYER + EMBEDDING}
    assert moving.kv_share_kept == pytest.approx(3 / 6)


def test_a_tensor_parallel_share_counts_as_what_of_a_layer_it_is() -> None:
    moving = diff(plan(pipeline(3, 3)), plan(PARALLEL)).moving
    # Each GPU holds half of what it needs: its half of its own three layers, and half of the embedding.
    assert moving.loaded_bytes == {0: 3 * LAYER / 2, 1: 3 * LAYER / 2}
    assert moving.kv_share_kept == pytest.approx(1 / 2)


def test_a_prefilling_stage_holds_the_layers_but_no_cache() -> None:
    moving = diff(plan(pipeline(6)), plan(APART)).moving
    assert moving.loaded_bytes == {0: 0.0, 1: 2 * model_parameters(DEMO)}
    assert moving.kv_share_kept == 0


@pytest.mark.parametrize("change", [{"dtype": "float16"}, {"cluster": "a40"}, {"model": "/elsewhere/demo"}])
def test_other_weights_or_machines_start_afresh(change: dict[str, str]) -> None:
    moving = diff(plan(pipeline(6), cluster="a100"), replace(plan(pipeline(6), cluster="a100"), **change)).moving  # type: ignore[arg-type]
    assert moving.loaded_bytes == {0: 2 * model_parameters(DEMO)}
    assert (moving.kv_share_kept, moving.kv_carried, moving.recomputed_tokens) == (0, False, 100)


def test_keys_and_values_of_another_dtype_are_recomputed() -> None:
    moving = diff(plan(pipeline(3, 3)), plan(pipeline(4, 2), kv_dtype="fp8")).moving
    assert (moving.kv_carried, moving.recomputed_tokens) == (False, 100)


def test_a_smaller_cache_recomputes_what_it_cannot_hold() -> None:
    moving = diff(plan(pipeline(6)), plan(pipeline(6), kv_cache_tokens=64)).moving
    assert (moving.kv_share_kept, moving.recomputed_tokens) == (1, 36)


def test_every_change_is_named() -> None:
    new = plan(
        PARALLEL,
        schedule=Schedule("orca", {"max_num_seqs": 8}),
        bound=Bound(seconds=2.0),
        workload="T",
        workload_fingerprint="only one has it",
    )
    assert diff(plan(pipeline(6)), new).changes == (
        Change(what="policy", old="rra", new="orca"),
        Change(what="prefill_batch", old="4", new=""),
        Change(what="decode_steps", old="6", new=""),
        Change(what="placement", old="all layers on GPU 0", new="1 stage: GPUs 0-1 (tensor parallel 2), layers 6"),
        Change(what="workload", old="S", new="T"),
        Change(what="max_num_seqs", old="", new="8"),
        Change(what="bounds", old="", new="bound 2 s on p99-length"),
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("deadline", "2s"),
        ("fit_context", True),
        ("quantization", "gptq"),
        ("num_threads", 2),
        ("gpu_memory_utilization", 0.5),
    ],
)
def test_what_a_plan_serves_and_on_what_is_compared(field: str, value: object) -> None:
    old = plan(pipeline(6))
    found = diff(old, replace(old, **{field: value}))  # type: ignore[arg-type]
    assert [(change.what, change.new) for change in found.changes] == [(field, str(value))]


def test_another_order_of_the_queue_is_a_change() -> None:
    old = plan(pipeline(6))
    found = diff(old, replace(old, schedule=replace(old.schedule, order="edf")))
    assert found.changes == (Change(what="order", old="fcfs", new="edf"),)


def test_other_estimates_of_one_plan_are_told() -> None:
    text = diff_text(diff(plan(pipeline(6)), plan(pipeline(6), estimate=replace(ESTIMATE, throughput=3.0))))
    assert text.startswith("the plans differ in their estimates alone\n")
    assert "+50.0 %" in text


def test_gains_are_relative_and_doubted_under_another_workload() -> None:
    better = replace(ESTIMATE, throughput=3.0, latency=0.25)
    found = diff(plan(pipeline(6)), plan(pipeline(6), estimate=better, workload="T"))
    assert gains(found)["throughput"] == pytest.approx(0.5)
    assert gains(found)["latency"] == pytest.approx(-0.5)
    assert not found.same_load
    assert "the gain is not due to the plan alone" in diff_text(found)


def test_without_an_estimate_it_says_how_to_get_one() -> None:
    text = diff_text(diff(plan(pipeline(6), estimate=None), plan(PARALLEL)))
    assert "the gain is unknown: the old plan has no estimate; `exeplan simulate PLAN -o PLAN` fills it in" in text
    assert "running requests: 50 % of the keys and values are on other GPUs, and move there over host memory" in text


def test_different_models_are_refused() -> None:
    with pytest.raises(InputError, match=r"^the plans are for different models, demo and t5-11b: none of the weights"):
        diff_plans(plan(pipeline(6)), plan(pipeline(6)), DEMO, load_model_spec("t5-11b"), bytes_per_second={"": 1.0})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with two plans."""
    monkeypatch.chdir(tmp_path)
    save_plan(plan(pipeline(3, 3)), tmp_path / "old.yaml")
    save_plan(plan(pipeline(4, 2)), tmp_path / "new.yaml")
    return tmp_path


def test_the_command_prints_times_from_both_places(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "old.yaml", "new.yaml"]) == 0
    text = capsys.readouterr().out
    assert "from host memory" in text
    assert "from disk" in text
    assert main(["diff", "old.yaml", "new.yaml", "--load-bandwidth", "1MB"]) == 0
    assert " at 1MB/s" in capsys.readouterr().out


def test_the_command_prints_one_object_for_programs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "old.yaml", "new.yaml", "--json"]) == 0
    body = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert set(body) == {"changes", "old", "new", "gains", "same_load", "moving"}
    assert body["moving"]["loaded_bytes"] == {"0": LAYER, "1": 0.0}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["old.yaml", "none.yaml"], "no file none.yaml"),
        (["old.yaml", "other.yaml"], "the plans are for different models, demo and llama-50m: none of the weights can"),
        (["old.yaml", "half.yaml"], "the plan places layers [0, 3]; demo needs 0 to 6 in order"),
        (["old.yaml", "new.yaml", "--load-bandwidth", "0"], "--load-bandwidth must be above zero, found '0'"),
        (["old.yaml", "new.yaml", "--load-bandwidth", "fast"], "--load-bandwidth must be a size such as 4GiB or 500MB"),
    ],
)
def test_a_mistake_is_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    layers = load_model_spec("llama-50m").num_layers
    save_plan(plan(pipeline(layers), model="llama-50m"), folder / "other.yaml")
    save_plan(plan(pipeline(3)), folder / "half.yaml")
    assert main(["diff", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith(f"exeplan diff: {message}")


def test_every_replica_of_every_group_counts() -> None:
    group = ReplicaGroup(
        schedule=Schedule("orca", {"max_num_seqs": 2}), placement=pipeline(6), first_devices=(2,), kv_cache_tokens=30
    )
    old = plan(pipeline(6), replicas=(0, 1), router="round-robin", kv_cache_tokens=30)
    found = diff(old, replace(old, more_replicas=(group,)))
    assert found.moving.loaded_bytes == {0: 0.0, 1: 0.0, 2: 2 * model_parameters(DEMO)}
    assert (found.moving.kv_share_kept, found.moving.recomputed_tokens) == (1, 10)
    assert "weights: GPU 2 loads " in diff_text(found)
    assert [change.what for change in found.changes] == ["replicas", "group 2"]
    assert "1 x 1 GPU: orca(max_num_seqs=2)" in found.changes[1].new
    moved = diff(old, replace(old, replicas=(0, 2)))
    assert moved.moving.loaded_bytes == {0: 0.0, 2: 2 * model_parameters(DEMO)}
    assert moved.moving.kv_share_kept == 0.5
