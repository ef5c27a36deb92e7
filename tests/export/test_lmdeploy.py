"""LMDeploy is started as far as its command line goes, and what it does otherwise is said."""

from dataclasses import replace

import pytest

from exeplan.core.bounds import Bound
from exeplan.core.models.model import load_model_spec
from exeplan.core.plan import Plan
from exeplan.core.schedule import Schedule, Stage
from exeplan.errors import InputError
from exeplan.export.forms import FORMS
from exeplan.export.interface import Export
from exeplan.export.lmdeploy import export

from .test_vllm import ESTIMATE

RRA = Schedule("rra", {"prefill_batch": 8, "decode_steps": 24, "decode_batch": 120, "max_num_batched_tokens": 16384})


def plan(**changes: object) -> Plan:
    base = Plan(
        model="llama-3.1-8b",
        schedule=RRA,
        placement=(Stage(devices=(0, 1), layers=(0, 32)),),
        replicas=(0, 2),
        cluster="h100",
        dtype="bfloat16",
        device="cuda",
        kv_cache_tokens=64_000,
    )
    return replace(base, **changes)


def exported(found: Plan) -> Export:
    return export(found, load_model_spec("llama-3.1-8b"), model="organisation/name")


def test_two_servers_and_what_they_do_otherwise() -> None:
    found = exported(plan(bound=Bound(seconds=10.0), replay=ESTIMATE))
    assert FORMS["command"](found).count("lmdeploy serve api_server organisation/name") == 2
    assert "CUDA_VISIBLE_DEVICES=2,3" in FORMS["command"](found)
    assert "--server-port 23334 &" in FORMS["command"](found)
    assert found.instances[0].options == (
        "organisation/name", "--backend", "pytorch", "--dtype", "bfloat16", "--tp", "2", "--session-len", "64000",
        "--max-batch-size", "124", "--max-prefill-token-num", "16384", "--num-gpu-blocks", "1000",
        "--cache-block-seq-len", "64", "--cache-max-entry-count", "0.9",
        "--server-port", "23333",
    )  # fmt: skip
    assert "decodes 24 steps between prefills; LMDeploy at most 16" in " ".join(found.remarks)


def test_the_bound_is_no_limit_on_health_checks() -> None:
    """Its --max-concurrent-requests is a semaphore around each HTTP request until a response begins."""
    found = exported(plan(bound=Bound(seconds=10.0), replay=ESTIMATE))
    assert "--max-concurrent-requests" not in found.instances[0].options
    assert "LMDeploy's queue has no limit; more than 150 requests in flight break" in " ".join(found.remarks)
    assert "queue has no limit" not in " ".join(exported(plan(replay=ESTIMATE)).remarks)


@pytest.mark.parametrize("steps", [16, 24])
def test_its_interval_does_not_hold_under_a_backlog_and_no_replay_says_that_it_does(steps: int) -> None:
    found = exported(plan(schedule=Schedule("rra", {**RRA.variables, "decode_steps": steps}), replay=ESTIMATE))
    said = " ".join(found.remarks)
    assert "under a backlog is always so, LMDeploy prefills at every step that has a place" in said
    assert ("steps between prefills" in said) == (steps != 16)
    assert found.as_run is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "cpu", "cluster": None}, "LMDeploy runs on no CPU"),
        ({"dtype": "float32"}, "computes in float16 or bfloat16"),
        ({"placement": (Stage(devices=(0,), layers=(0, 9)), Stage(devices=(1,), layers=(9, 32)))}, "no pipeline"),
        ({"schedule": Schedule("orca", {"max_num_seqs": 4})}, "LMDeploy cannot schedule as 'orca' does; plan again"),
    ],
)  # fmt: skip
def test_what_it_cannot_run_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        exported(plan(**changes))
