"""A plan round-trips through its file; model, schedule and placement suffice; a wrong field is named."""

import math
from pathlib import Path

import pytest

from exeplan.core.bounds import Bound
from exeplan.core.plan import Plan, as_json, save_plan, single_plans
from exeplan.core.schedule import Estimate, Schedule, Stage
from exeplan.errors import InputError
from exeplan.planner.load_problem import load_plan
from exeplan.policies import policy_names

BY_HAND = """
model: demo
schedule: {policy: rra, prefill_batch: 4, decode_steps: 16}
placement: [{devices: [0], layers: [0, 6]}]
"""
ESTIMATE = Estimate(
    throughput=2.0,
    token_throughput=20.0,
    ttft=1e-5,
    tpot=0.01,
    latency=None,
    latency_p50=0.1,
    latency_p99=0.2,
    kv_tokens=100.0,
    memory_bytes_per_gpu=1e9,
)


def written(folder: Path, text: str) -> Path:
    path = folder / "plan.yaml"
    path.write_text(text)
    return path


def refusal(folder: Path, text: str) -> str:
    path = written(folder, text)
    with pytest.raises(InputError) as error:
        load_plan(path)
    message = str(error.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message.removeprefix(f"{path}").lstrip(": ")


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    plan = Plan(
        model="demo",
        schedule=Schedule("rra", {"prefill_batch": 4, "decode_steps": 16}),
        placement=(Stage(devices=(0,), layers=(0, 2)), Stage(devices=(1, 2), layers=(2, 6))),
        workload="normal:in=128,81,256;out=128,68,320",
        fit_context=True,
        profile="demo.json",
        bound=Bound(seconds=2.0, metric="p99-requests"),
        dtype="float32",
        device="cpu",
        num_threads=2,
        kv_cache_tokens=4096,
        max_seqs=8,
        model_fingerprint="1234567890123456",
        quantization="awq, 4 bits, groups of 128",
        workload_fingerprint="12345678e1234567",
        profile_fingerprint="0b00000000000001",
        estimate=ESTIMATE,
        replay=ESTIMATE,
        drift_headroom=0.25,
        search={"method": "exhaustive", "points": 3, "seconds": 0.5, "gap": None},
    )
    save_plan(plan, tmp_path / "plan.yaml")
    assert load_plan(tmp_path / "plan.yaml") == plan


def test_an_endless_bound_survives_its_file(tmp_path: Path) -> None:
    plan = load_plan(written(tmp_path, BY_HAND + "bound: {seconds: .inf}"))
    assert plan.bound == Bound(seconds=math.inf)
    save_plan(plan, tmp_path / "again.yaml")
    assert load_plan(tmp_path / "again.yaml") == plan


def test_model_schedule_and_placement_suffice(tmp_path: Path) -> None:
    plan = load_plan(written(tmp_path, BY_HAND))
    assert plan == Plan(
        model="demo",
        schedule=Schedule("rra", {"prefill_batch": 4, "decode_steps": 16}),
        placement=(Stage(devices=(0,), layers=(0, 6)),),
    )


def test_programs_get_the_schedule_flat(tmp_path: Path) -> None:
    body = as_json(load_plan(written(tmp_path, BY_HAND)))
    assert body["schedule"] == {"policy": "rra", "prefill_batch": 4, "decode_steps": 16}
    assert body["placement"] == [{"devices": [0], "tensor_parallel_size": 1, "layers": [0, 6]}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense: 1", "unknown field 'nonsense'; a plan has arrival_rate, bound"),
        ("7: 1", "unknown field '7'"),
        ("exeplan: 2", "is a plan of a newer exeplan"),
        ("model: 5", "model must be text, found 5"),
        ("model:", "a plan needs 'model'"),
        ("schedule: rra", "schedule must name a policy and its control variables"),
        ("schedule: {policy: best}", f"no policy 'best'; there are {', '.join(policy_names())}"),
        ("schedule: {policy: static}", "policy static takes the control variables batch_size; found none"),
        ("schedule: {policy: static, batch_size: 0}", "static: batch_size must be a positive integer, found 0"),
        ("schedule: {policy: orca, max_num_seqs: 1.5}", "orca: max_num_seqs must be a positive integer, found 1.5"),
        ("placement: []", "placement must list at least one stage"),
        ("placement: {devices: [0], layers: [0, 6]}", "placement must list at least one stage"),
        ("placement: [5]", "each stage of a placement needs devices and layers, found 5"),
        ("placement: [{devices: 0, layers: [0, 6]}]", "a stage needs devices such as [0] and layers"),
        ("placement: [{devices: [], layers: [0, 6]}]", "a stage needs devices such as [0] and layers"),
        ("placement: [{devices: [0], layers: [0]}]", "a stage needs devices such as [0] and layers"),
        ("placement: [{devices: [0], layers: [6, 0]}]", "a stage needs devices such as [0] and layers"),
        ("placement: [{devices: [true], layers: [0, 6]}]", "a stage needs devices such as [0] and layers"),
        ("bound: 2", "a bound has seconds and about, found 2"),
        ("bound: {seconds: 2s}", "a latency bound must be a positive number of seconds, found '2s'"),
        ("bound: {seconds: -1}", "a latency bound must be a positive number of seconds, found -1"),
        ("bound: {seconds: .nan}", "a latency bound must be a positive number of seconds, found nan"),
        ("bound: {seconds: 1, about: p50}", "a bound can be on p99-length or pNN-requests, such as"),
        ("max_seqs: lots", "max_seqs must be a positive integer, found 'lots'"),
        ("kv_cache_tokens: -3", "kv_cache_tokens must be a positive integer, found -3"),
        ("num_threads: true", "num_threads must be a positive integer, found True"),
        (
            "placement: [{devices: [0], layer: [0, 6], layers: [0, 6]}]",
            "unknown field 'layer' of a stage; it has devices",
        ),
        ("placement: [{devices: [0, 0], layers: [0, 6]}]", "a stage has a device twice: [0, 0]"),
        (
            "placement: [{devices: [0], tensor_parallel_size: 3, layers: [0, 6]}]",
            "tensor_parallel_size is the number of devices of a stage, here 1, found 3",
        ),
        ("device: tpu", "device must be cpu or cuda, found 'tpu'"),
        ("dtype: int4", "dtype must be one of float32, bfloat16, float16, fp8, found 'int4'"),
        ("fit_context: maybe", "fit_context must be true or false, found 'maybe'"),
        ("workload: 5", "workload must be text, found 5"),
        ("drift_headroom: wide", "drift_headroom must be a number, found 'wide'"),
        ("search: 5", "search must be a mapping, found 5"),
        ("estimate: {throughput: 1}", "estimate must have exactly throughput, token_throughput, ttft"),
        ("replay: 5", "replay must have exactly throughput"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, line: str, message: str) -> None:
    field = line.partition(":")[0]
    rest = [known for known in BY_HAND.strip().split("\n") if not known.startswith(f"{field}:")]
    assert refusal(tmp_path, "\n".join([*rest, line])).startswith(message)


@pytest.mark.parametrize("size", range(1, len(BY_HAND) - 3, 9))
def test_a_truncated_plan_is_refused(tmp_path: Path, size: int) -> None:
    refusal(tmp_path, BY_HAND[:size])


def test_a_number_in_an_estimate_is_a_number(tmp_path: Path) -> None:
    save_plan(Plan(**{**vars_of(BY_HAND, tmp_path), "estimate": ESTIMATE}), tmp_path / "plan.yaml")
    text = (tmp_path / "plan.yaml").read_text().replace("throughput: 2.0", "throughput: fast", 1)
    assert refusal(tmp_path, text) == "estimate: throughput must be a number, found 'fast'"


def vars_of(text: str, folder: Path) -> dict[str, object]:
    plan = load_plan(written(folder, text))
    return {"model": plan.model, "schedule": plan.schedule, "placement": plan.placement}


REPLICAS = """
model: demo
schedule: {policy: orca, max_num_seqs: 4, micro_batches: 2}
placement: [{devices: [0], layers: [0, 2]}, {devices: [1], layers: [2, 6]}]
replicas: [0, 2]
more_replicas:
- schedule: {policy: rra, prefill_batch: 4, decode_steps: 16}
  placement: [{devices: [0], layers: [0, 6]}]
  replicas: [4]
"""


def test_replicas_survive_a_file_and_each_is_a_plan_on_its_own_devices(tmp_path: Path) -> None:
    plan = load_plan(written(tmp_path, REPLICAS))
    assert (plan.num_replicas, plan.router) == (3, "shortest-queue")
    save_plan(plan, tmp_path / "again.yaml")
    assert load_plan(tmp_path / "again.yaml") == plan
    alone = single_plans(plan)
    assert [[stage.devices for stage in one.placement] for one in alone] == [[(0,), (1,)], [(2,), (3,)], [(4,)]]
    assert [one.schedule.policy for one in alone] == ["orca", "orca", "rra"]
    assert all(one.num_replicas == 1 and one.router is None for one in alone)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("replicas: [0, 2]", "replicas: 2", "replicas must list the first device of each, such as [0, 8], found 2"),
        ("replicas: [0, 2]", "replicas: [0, 0]", "replicas must list the first device of each"),
        (
            "replicas: [4]",
            "replica: [4]",
            "more_replicas must list groups of capacity, kv_cache_tokens, placement, replicas",
        ),
        ("max_num_seqs: 4", "max_num_seqs: 0", "max_num_seqs"),
        ("prefill_batch: 4", "prefill_batch: 0", "prefill_batch"),
        ("replicas: [0, 2]", "replicas: [0, 2]\nrouter: nearest", "router must be one of shortest-queue, round-robin"),
    ],
)
def test_a_wrong_group_of_replicas_is_named(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert message in refusal(tmp_path, REPLICAS.replace(old, new))


def test_one_pipeline_has_no_router(tmp_path: Path) -> None:
    assert "is for several replicas" in refusal(tmp_path, BY_HAND + "router: random\n")
