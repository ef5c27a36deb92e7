"""vLLM is started as the plan says, on the GPUs that it has, and what it does otherwise is said."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from exeplan.cli import main
from exeplan.core.bounds import Bound
from exeplan.core.models.model import ModelSpec, load_model_spec
from exeplan.core.plan import Plan
from exeplan.core.schedule import Estimate, ReplicaGroup, Schedule, Stage
from exeplan.errors import InputError
from exeplan.export.forms import FORMS
from exeplan.export.interface import Export
from exeplan.export.vllm import export, export_with_plug_in
from exeplan.plain_yaml import load

ESTIMATE = Estimate(
    throughput=30.0,
    token_throughput=6000.0,
    ttft=0.5,
    tpot=0.03,
    latency=25.0,
    latency_p50=20.0,
    latency_p99=28.0,
    kv_tokens=3e5,
    memory_bytes_per_gpu=7e10,
)
CHUNKED = Schedule("chunked", {"max_num_seqs": 256, "max_num_batched_tokens": 2048})


def plan(**changes: object) -> Plan:
    """Llama-3.1-70B on all GPUs of one H100 host."""
    base = Plan(
        model="llama-3.1-70b",
        schedule=CHUNKED,
        placement=(Stage(devices=tuple(range(8)), layers=(0, 80)),),
        cluster="h100",
        dtype="bfloat16",
        device="cuda",
        kv_cache_tokens=400_000,
    )
    return replace(base, **changes)


def spec(name: str = "llama-3.1-70b") -> ModelSpec:
    return load_model_spec(name)


def exported(found: Plan, model: ModelSpec | None = None) -> Export:
    return export(found, model or spec(), model="organisation/name")


def options(found: Plan, model: ModelSpec | None = None) -> dict[str, str]:
    """By name, '' where an option has no value."""
    [instance] = exported(found, model).instances
    assert instance.command[:3] == ("vllm", "serve", "organisation/name")
    words, taken = instance.command[3:], {}
    for word, following in zip(words, (*words[1:], "--"), strict=True):
        if word.startswith("--"):
            assert word not in taken
            taken[word] = "" if following.startswith("--") else following
    return taken


def test_chunked_prefills_on_one_group_of_devices() -> None:
    assert options(plan()) == {
        "--dtype": "bfloat16",
        "--tensor-parallel-size": "8",
        "--max-num-seqs": "256",
        "--max-num-batched-tokens": "2048",
        "--gpu-memory-utilization": "0.9",
        "--no-enable-prefix-caching": "",
        "--port": "8000",
    }
    found = exported(plan())
    assert (found.instances[0].gpus, found.as_run) == (((0, 1, 2, 3, 4, 5, 6, 7),), None)
    assert len(found.remarks) == 1


def test_orca_has_whole_prompts_and_room_for_the_longest() -> None:
    found = options(plan(schedule=Schedule("orca", {"max_num_seqs": 64}), kv_cache_tokens=9000))
    assert found["--max-model-len"] == "9000"
    assert (found["--max-num-batched-tokens"], found["--no-enable-chunked-prefill"]) == ("9064", "")


def test_the_interval_of_rra_and_what_it_lacks() -> None:
    rra = Schedule("rra", {"prefill_batch": 8, "decode_steps": 24, "decode_batch": 120})
    found = plan(schedule=rra)
    assert options(found)["--prefill-schedule-interval"] == "24"
    assert options(found)["--max-num-seqs"] == "124"
    said = " ".join(exported(found).remarks)
    assert "prefills 8 requests at a time" in said
    assert "leaves others waiting, so under a backlog" in said
    assert "up to 0.32 for all but models with experts and --data-parallel-size above 1" in said
    assert "--plug-in keeps the planned cadence" in said
    assert exported(found).as_run is None


def test_the_plug_in_has_whole_prompts_and_reads_the_plan(tmp_path: Path) -> None:
    rra = Schedule("rra", {"prefill_batch": 8, "decode_steps": 24, "decode_batch": 120})
    found = export_with_plug_in(plan(schedule=rra, kv_cache_tokens=9000), spec(), model="m", file=tmp_path / "p.yaml")
    [instance] = found.instances
    words = dict(zip(instance.command, instance.command[1:], strict=False))
    assert "--prefill-schedule-interval" not in words
    assert words["--scheduler-cls"] == "exeplan.vllm_plugin.scheduler.RraScheduler"
    assert (words["--max-num-seqs"], words["--max-model-len"]) == ("248", "9000")
    assert int(words["--max-num-batched-tokens"]) == 16384
    assert "--no-enable-chunked-prefill" in words
    assert instance.environment["EXEPLAN_PLAN"] == str(tmp_path / "p.yaml")
    assert "exeplan must be installed in vLLM's environment" in found.remarks[0]
    assert "interval" not in " ".join(found.remarks)
    assert found.as_run is None
    on_cpu = replace(
        plan(schedule=rra, device="cpu", num_threads=2, cluster=None), placement=(Stage(devices=(0,), layers=(0, 80)),)
    )
    [instance] = export_with_plug_in(on_cpu, spec(), model="m", file=tmp_path / "p.yaml").instances
    assert instance.command[instance.command.index("--scheduler-cls") + 1].endswith(".RraSyncScheduler")


def test_the_plug_in_refuses_what_it_does_not_keep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rra = Schedule("rra", {"prefill_batch": 8, "decode_steps": 24})
    stages = (Stage(devices=(0,), layers=(0, 40)), Stage(devices=(1,), layers=(40, 80)))
    with pytest.raises(InputError, match="on one stage"):
        export_with_plug_in(plan(schedule=rra, placement=stages), spec(), model="m", file=tmp_path)
    with pytest.raises(InputError, match="chunked"):
        export_with_plug_in(plan(), spec(), model="m", file=tmp_path)
    file = tmp_path / "plan.yaml"
    file.write_text(
        "model: demo\nschedule: {policy: rra, prefill_batch: 4, decode_steps: 8}\n"
        "placement: [{devices: [0], layers: [0, 6]}]\n"
    )
    asked = ["export", str(file), "--model", "m", "--plug-in"]
    assert main([*asked, "--to", "sglang"]) == 2
    assert "--plug-in is a scheduler for vLLM, not for sglang" in capsys.readouterr().err
    assert main([*asked, "--to", "vllm", "--as", "compose"]) == 2
    assert "which its image does not have" in capsys.readouterr().err
    assert main([*asked, "--to", "vllm"]) == 0
    assert f"EXEPLAN_PLAN={file}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("cuts", "partition"),
    [((0, 40, 80), None), ((0, 41, 80), "41,39"), ((0, 27, 54, 80), "27,27,26"), ((0, 26, 53, 80), "26,27,27")],
)  # fmt: skip
def test_stages_whose_layers_are_not_vllms_own_split(cuts: tuple[int, ...], partition: str | None) -> None:
    stages = tuple(Stage(devices=(number,), layers=layers) for number, layers in enumerate(pairwise(cuts)))
    found = plan(placement=stages)
    assert options(found)["--pipeline-parallel-size"] == f"{len(stages)}"
    own = exported(found).instances[0].environment.get("VLLM_PP_LAYER_PARTITION")
    assert own == (None if partition == "27,27,26" else partition)  # What is left over goes to all but the last.


def test_experts_and_ranks() -> None:
    stage = Stage(devices=tuple(range(8)), layers=(0, 94), data_parallel_size=4, expert_parallel_size=8)
    found = options(plan(placement=(stage,), dtype="fp8"), spec("qwen3-235b-a22b"))
    assert found["--tensor-parallel-size"] == "2"
    assert found["--data-parallel-size"] == "4"
    assert found["--enable-expert-parallel"] == ""
    assert (found["--max-num-seqs"], found["--max-num-batched-tokens"]) == ("64", "512")  # Of each rank.
    assert (found["--quantization"], found["--kv-cache-dtype"]) == ("fp8_per_tensor", "fp8")


def test_who_would_wait_beyond_the_bound_is_not_let_in() -> None:
    bounded = plan(bound=Bound(seconds=40.0), replay=ESTIMATE)
    assert options(bounded)["--max-num-queued-reqs"] == "1200"
    assert options(replace(bounded, replicas=(0, 8)))["--max-num-queued-reqs"] == "600"
    assert "--max-num-queued-reqs" not in options(replace(bounded, bound=Bound(seconds=float("inf"))))


def test_at_a_rate_the_limit_is_what_full_batches_answer_within_the_bound() -> None:
    """Not the rate itself: at 0.5 requests/s and 5 s two requests had been let in."""
    slow = replace(ESTIMATE, throughput=0.5)
    bounded = plan(bound=Bound(seconds=5.0), replay=slow, arrival_rate=0.5)
    assert options(replace(bounded, capacity=30.0))["--max-num-queued-reqs"] == "150"
    assert options(replace(bounded, capacity=30.0, replicas=(0, 8)))["--max-num-queued-reqs"] == "150"
    assert "does not say" not in " ".join(exported(replace(bounded, capacity=30.0)).remarks)
    assert "--max-num-queued-reqs" not in options(bounded)
    assert "the plan does not say what its replicas serve with full batches" in " ".join(exported(bounded).remarks)


def test_replicas_are_placed_on_hosts_and_ports() -> None:
    half = (Stage(devices=(0, 1, 2, 3), layers=(0, 80)),)
    found = exported(plan(placement=half, replicas=(0, 4, 8)))
    assert found.instances[0].hosts == (0, 0, 1)
    assert found.instances[0].gpus == ((0, 1, 2, 3), (4, 5, 6, 7), (0, 1, 2, 3))
    script = FORMS["command"](found)
    assert "# on host 1\nCUDA_VISIBLE_DEVICES=0,1,2,3 vllm serve organisation/name" in script
    assert script.count("--port 8000") == 2
    assert script.count("--port 8001 &\nwait") == 1
    with pytest.raises(InputError, match="a compose file is of one host, and the plan has 2; use --as kubernetes"):
        FORMS["compose"](found)
    assert any("3 servers need a router" in remark for remark in found.remarks)


def test_unequal_replicas_are_instances_of_their_own() -> None:
    small = ReplicaGroup(
        schedule=Schedule("orca", {"max_num_seqs": 16}),
        placement=(Stage(devices=(0, 1), layers=(0, 80)),),
        first_devices=(4, 6),
        kv_cache_tokens=90_000,
    )
    found = exported(plan(placement=(Stage(devices=(0, 1, 2, 3), layers=(0, 80)),), more_replicas=(small,)))
    assert [(one.name, one.gpus) for one in found.instances] == [
        ("vllm-0", ((0, 1, 2, 3),)),
        ("vllm-1", ((4, 5), (6, 7))),
    ]
    services = load(FORMS["compose"](found))["services"]
    assert list(services) == ["vllm-0", "vllm-1-replica-0", "vllm-1-replica-1"]
    assert [service["ports"] for service in services.values()] == [
        ["127.0.0.1:8000:8000"], ["127.0.0.1:8001:8000"], ["127.0.0.1:8002:8000"],
    ]  # fmt: skip
    devices = services["vllm-1-replica-1"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "device_ids": ["6", "7"], "capabilities": ["gpu"]}]


def test_kubernetes_objects() -> None:
    text = FORMS["kubernetes"](exported(plan(replicas=(0, 8))))
    deployment, service = map(load, text.split("---\n"))
    assert deployment["spec"]["replicas"] == 2
    pod = deployment["spec"]["template"]
    assert pod["metadata"]["labels"] == deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    [container] = pod["spec"]["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert container["command"] + container["args"] == list(exported(plan()).instances[0].command)
    assert service["spec"]["ports"][0]["targetPort"] == container["ports"][0]["containerPort"]


def test_what_has_no_option_is_said_and_left_out_of_what_is_replayed() -> None:
    schedule = Schedule("chunked", {**CHUNKED.variables, "max_num_prefills": 2, "micro_batches": 4}, order="sjf")
    stages = (Stage(devices=(0,), layers=(0, 40)), Stage(devices=(1,), layers=(40, 80)))
    found = exported(plan(schedule=schedule, placement=stages))
    said = " ".join(found.remarks)
    assert "in the order sjf" in said
    assert "begins at most 2 prompts in a pass" in said
    assert "4 micro-batches on 2 stages" in said
    assert found.as_run is not None
    assert found.as_run.schedule == Schedule("chunked", {**CHUNKED.variables, "micro_batches": 2})


def test_a_cpu_has_threads_and_a_cache_of_whole_gib() -> None:
    found = exported(plan(device="cpu", cluster=None, dtype="float32", num_threads=2, kv_cache_tokens=4096))
    [instance] = found.instances
    assert instance.gpus == ((),)
    assert "--gpu-memory-utilization" not in instance.command
    assert instance.environment["OMP_NUM_THREADS"] == "2"
    assert instance.environment["VLLM_CPU_KVCACHE_SPACE"] == "3"  # 4096 tokens of 640 KiB are 2.5 GiB.
    assert "CUDA_VISIBLE_DEVICES" not in FORMS["command"](found)


APART = tuple(Stage(devices=(n,), layers=(0, 80), phase=phase) for n, phase in enumerate(("prefill", "decode")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": Schedule("static", {"batch_size": 4})}, "vLLM cannot schedule as 'static' does; plan again with"),
        (
            {"placement": (Stage(devices=(0, 1), layers=(0, 40)), Stage(devices=(2,), layers=(40, 80)))},
            "one tensor-parallel size for all stages",
        ),
        ({"placement": APART}, "vLLM cannot schedule as 'chunked' does; plan again with --policy waa-c or waa-m"),
        ({"placement": (Stage(devices=tuple(range(4, 12)), layers=(0, 80)),)}, "unequal parts on its 2 hosts"),
    ],
)  # fmt: skip
def test_what_vllm_cannot_run_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        exported(plan(**changes))


def test_encoder_decoder_models_are_refused() -> None:
    with pytest.raises(InputError, match="does not serve encoder-decoder models such as t5-11b"):
        exported(plan(), spec("t5-11b"))
