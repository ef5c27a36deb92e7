"""TGI and LightLLM, which have the interval of round-robin allocation as a constant, are given the planned one."""

import shlex
from dataclasses import replace

import pytest

from exeplan.core.bounds import Bound
from exeplan.core.models.model import load_model_spec
from exeplan.core.plan import Plan
from exeplan.core.schedule import Schedule, Stage
from exeplan.errors import InputError
from exeplan.export import load_exporter
from exeplan.export.forms import FORMS
from exeplan.export.interface import Export
from exeplan.plain_yaml import load

from .test_vllm import ESTIMATE

RRA = Schedule("rra", {"prefill_batch": 8, "decode_steps": 24, "decode_batch": 120, "max_num_batched_tokens": 99000})
PLAN = Plan(
    model="llama-3.1-8b",
    schedule=RRA,
    placement=(Stage(devices=(0, 1), layers=(0, 32)),),
    cluster="h100",
    dtype="bfloat16",
    device="cuda",
    kv_cache_tokens=64_000,
    bound=Bound(seconds=10.0),
    replay=ESTIMATE,
)
engines = pytest.mark.parametrize("engine", ["tgi", "lightllm"])


def exported(engine: str, plan: Plan) -> Export:
    return load_exporter(engine).export(plan, load_model_spec("llama-3.1-8b"), model="organisation/name")


def test_tgi() -> None:
    [instance] = exported("tgi", PLAN).instances
    assert instance.options == (
        "--model-id", "organisation/name", "--dtype", "bfloat16", "--num-shard", "2", "--max-input-tokens", "63999",
        "--max-total-tokens", "64000", "--max-waiting-tokens", "25", "--waiting-served-ratio", "1000",
        "--max-batch-size", "124", "--max-batch-prefill-tokens", "99000",
        "--max-concurrent-requests", "300", "--port", "3000",
    )  # fmt: skip
    # With chunks of prompts, its default, it looks at none of its three limits of a prefill.
    assert instance.environment == {"PREFIX_CACHING": "0", "PREFILL_CHUNKING": "0"}
    fp8 = exported("tgi", replace(PLAN, dtype="fp8")).instances[0].options
    assert fp8[2:6] == ("--quantize", "fp8", "--kv-cache-dtype", "fp8_e4m3fn")


def test_weights_are_kept_where_the_image_of_tgi_looks_for_them() -> None:
    """Its HF_HOME is /data."""
    volumes = {
        engine: load(FORMS["compose"](exported(engine, PLAN)))["services"][engine]["volumes"]
        for engine in ("tgi", "lightllm")
    }
    assert volumes == {
        "tgi": ["~/.cache/huggingface:/data"],
        "lightllm": ["~/.cache/huggingface:/root/.cache/huggingface"],
    }


@pytest.mark.parametrize("size", [1, 2])
def test_servers_of_tgi_on_one_host_share_neither_sockets_nor_ports(size: int) -> None:
    """A launcher removes the sockets `PATH-RANK` that it finds."""
    stage = Stage(devices=tuple(range(size)), layers=(0, 32))
    found = exported("tgi", replace(PLAN, placement=(stage,), replicas=(0, size, 2 * size, 8)))
    script = FORMS["command"](found).replace("\\\n", " ")
    servers = [shlex.split(line) for line in script.splitlines() if "text-generation-launcher" in line]
    own = {"--port": "3000", "--shard-uds-path": "/tmp/text-generation-server", "--prometheus-port": "9000"}
    own |= {"--master-port": "29500"} if size > 1 else {}
    for option, usual in own.items():
        used = [words[words.index(option) + 1] if option in words else usual for words in servers]
        assert len(set(used[:3])) == 3
        assert used[3] == usual  # On the next host.
    assert ("--master-port" in script) == (size > 1)
    sockets = [f"{words[words.index('--shard-uds-path') + 1]}" for words in servers[1:3]]
    assert sockets == ["/tmp/text-generation-server-3001", "/tmp/text-generation-server-3002"]
    assert "before 3.3 has no --prometheus-port" in " ".join(found.remarks)
    assert "--prometheus-port" not in FORMS["kubernetes"](found).split("apiVersion", 1)[1]


def test_lightllm() -> None:
    found = exported("lightllm", PLAN)
    assert found.instances[0].options == (
        "--model_dir", "organisation/name", "--tp", "2", "--max_req_total_len", "64000",
        "--router_max_wait_tokens", "24", "--disable_aggressive_schedule", "--running_max_req_size", "124",
        "--batch_max_tokens", "99000", "--max_total_token_num", "64000", "--mem_fraction", "0.9",
        "--disable_chunked_prefill", "--disable_dynamic_prompt_cache", "--host", "0.0.0.0", "--port", "8000",
    )  # fmt: skip
    assert "more than 300 requests in flight break the plan's bound" in " ".join(found.remarks)
    with pytest.raises(InputError, match="by a file of calibrated scales only"):
        exported("lightllm", replace(PLAN, kv_dtype="fp8"))


@engines
def test_adjusted_prefills_are_said_and_replayed_without(engine: str) -> None:
    assert exported(engine, PLAN).as_run is None
    adjusted = replace(PLAN, schedule=Schedule("rra", {**RRA.variables, "adjust_percent": 20}))
    found = exported(engine, adjusted)
    assert found.as_run == PLAN
    assert "adjusts the number of prefills" in " ".join(found.remarks)


@engines
def test_what_they_cannot_run_is_refused(engine: str) -> None:
    stages = (Stage(devices=(0,), layers=(0, 9)), Stage(devices=(1,), layers=(9, 32)))
    for changes, message in (
        ({"placement": stages}, "has no pipeline parallelism"),
        ({"device": "cpu", "cluster": None}, "runs on no CPU"),
        (
            {"schedule": Schedule("orca", {"max_num_seqs": 4})},
            "cannot schedule as 'orca' does; plan again with --policy",
        ),
    ):
        with pytest.raises(InputError, match=message):
            exported(engine, replace(PLAN, **changes))
