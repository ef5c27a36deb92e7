"""A pipeline on several hosts is one server with a process on each of them: by hand, and as a LeaderWorkerSet, which
its controller's own schema takes."""

import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import kubernetes_validate
import pytest
import yaml

from benchmarks.quality.exported import plans
from exeplan.core.models.model import load_model_spec
from exeplan.core.plan import Plan
from exeplan.core.schedule import Stage
from exeplan.errors import InputError
from exeplan.export import load_exporter
from exeplan.export.forms import FORMS
from exeplan.export.interface import Export

from .test_kuberay import KUBERNETES, problems

PLANS = dict(plans())
HOSTS = PLANS["two hosts"]
engines = pytest.mark.parametrize("engine", ["vllm", "sglang"])
LEADER = {"vllm": "--master-addr", "sglang": "--dist-init-addr"}


def exported(engine: str, plan: Plan = HOSTS) -> Export:
    return load_exporter(engine).export(plan, load_model_spec(plan.model), model="organisation/name")


def sets(export: Export) -> Iterator[dict[str, Any]]:
    return (one for one in yaml.safe_load_all(FORMS["kubernetes"](export)) if one["kind"] == "LeaderWorkerSet")


@engines
@pytest.mark.parametrize("name", ["two hosts", "a side on two hosts"])
def test_the_controllers_schema_and_kubernetes_take_it(engine: str, name: str) -> None:
    side = tuple(
        Stage(devices=tuple(range(16 * n, 16 * n + 16)), layers=(0, 80), phase=phase)
        for n, phase in enumerate(("prefill", "decode"))
    )
    plan = HOSTS if name == "two hosts" else replace(PLANS["1P1D on two hosts"], placement=side)
    found = list(sets(exported(engine, plan)))
    assert len(found) == (1 if name == "two hosts" else 2)
    for one in found:
        assert problems("leaderworkerset", one) == []
        template = one["spec"]["leaderWorkerTemplate"]
        assert template["size"] == 2
        for role in ("leaderTemplate", "workerTemplate"):
            pod = {"apiVersion": "v1", "kind": "Pod", **template[role]}
            pod["metadata"] = {"name": "one", **pod["metadata"]}
            kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_a_field_that_the_controller_does_not_know_would_fail() -> None:
    [one] = sets(exported("vllm"))
    one["spec"]["leaderWorkerTemplate"]["sise"] = 2
    assert problems("leaderworkerset", one)


@engines
def test_a_replica_is_a_group_of_as_many_pods_as_hosts_and_the_leader_is_asked(engine: str) -> None:
    objects = {one["kind"]: one for one in yaml.safe_load_all(FORMS["kubernetes"](exported(engine)))}
    found, service = objects["LeaderWorkerSet"], objects["Service"]
    assert found["spec"]["replicas"] == 2
    template = found["spec"]["leaderWorkerTemplate"]
    words = {role: template[role]["spec"]["containers"][0] for role in ("leaderTemplate", "workerTemplate")}
    ranks = {role: one["args"][one["args"].index("--node-rank") + 1] for role, one in words.items()}
    assert ranks == {"leaderTemplate": "0", "workerTemplate": "$(LWS_WORKER_INDEX)"}
    assert all(one["resources"] == {"limits": {"nvidia.com/gpu": 8}} for one in words.values())
    assert "readinessProbe" in words["leaderTemplate"]
    assert "readinessProbe" not in words["workerTemplate"]
    assert ("--headless" in words["workerTemplate"]["args"]) == (engine == "vllm")
    assert service["spec"]["selector"] == {"leaderworkerset.sigs.k8s.io/name": engine, "role": "leader"}
    assert service["metadata"]["name"] != found["metadata"]["name"]


@engines
def test_by_hand_every_host_has_its_rank_and_the_address_of_the_first(engine: str) -> None:
    export = exported(engine)
    text = FORMS["command"](export).replace("\\\n", " ")
    lines = [shlex.split(line) for line in text.splitlines() if line and not line.startswith("#")]
    found = [(words[words.index("--node-rank") + 1], words[words.index(LEADER[engine]) + 1]) for words in lines]
    port = ":20000" if engine == "sglang" else ""
    assert found == [(rank, f"host-{first}{port}") for first in (0, 2) for rank in ("0", "1")]
    assert [line for line in text.splitlines() if line.startswith("# on host")] == [f"# on host {n}" for n in range(4)]
    assert any("host-N stands for" in remark for remark in export.remarks)


@engines
def test_unequal_parts_are_refused_and_other_engines_have_servers_within_a_host(engine: str) -> None:
    unequal = (Stage(devices=tuple(range(4, 12)), layers=(0, 40)), Stage(devices=tuple(range(12, 20)), layers=(40, 80)))
    with pytest.raises(InputError, match="unequal parts on its 3 hosts"):
        exported(engine, replace(HOSTS, placement=unequal))
    wide = replace(PLANS["rra"], placement=(Stage(devices=tuple(range(16)), layers=(0, 80)),))
    with pytest.raises(InputError, match="pipeline is on 2 hosts; exported to lightllm are servers within one"):
        exported("lightllm", wide)
