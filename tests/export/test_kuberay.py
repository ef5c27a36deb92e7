"""A plan as a RayJob, or as a Deployment that KEDA scales: the operators' own schemas take both, and what they start is
a command line that `exeplan serve` takes.
"""

import argparse
import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema_rs
import kubernetes_validate
import pytest
import yaml

from benchmarks.quality.exported import plans
from exeplan.cli import main
from exeplan.core.models.model import load_model_spec
from exeplan.core.plan import Plan, save_plan
from exeplan.core.schedule import Schedule, Stage
from exeplan.errors import InputError
from exeplan.export import load_exporter
from exeplan.export.forms import FORMS
from exeplan.export.interface import Export
from exeplan.planner.load_problem import read_plan
from exeplan.runner.server.arguments import add_arguments

SCHEMAS = Path(__file__).parent / "schemas"
KUBERNETES = "1.34"
PLANS = dict(plans())


def exported(plan: Plan, *, replicas: tuple[int, int] | None = None) -> Export:
    export = load_exporter("exeplan").export(plan, load_model_spec(plan.model), model=plan.model)
    return replace(export, replicas=replicas)


def objects(export: Export, form: str) -> dict[str, Any]:
    return {one["kind"]: one for one in yaml.safe_load_all(FORMS[form](export))}


def strict(schema: Any) -> Any:
    """Unknown fields are errors: the operators' API server would drop them."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: strict(one) for name, one in schema.items()}
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema and "type" in schema:
        found["additionalProperties"] = False
    return found


def problems(name: str, one: Any) -> list[str]:
    schema = strict(json.loads((SCHEMAS / f"{name}.json").read_text()))
    schema["properties"]["metadata"] = {"type": "object"}  # As every object of Kubernetes has it.
    return [error.message for error in jsonschema_rs.validator_for(schema).iter_errors(one)]


def pods(job: Any) -> Iterator[Any]:
    """The pod templates of the RayJob's cluster, as Kubernetes has them in an object of its own."""
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        template = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, **group["template"]}
        yield template


@pytest.mark.parametrize("name", ["two replicas", "two stages", "a CPU", "chunked"])
@pytest.mark.parametrize("replicas", [None, (1, 4)])
def test_kuberay_takes_the_job_and_serve_its_entrypoint(name: str, replicas: tuple[int, int] | None) -> None:
    found = objects(exported(PLANS[name], replicas=replicas), "kuberay")
    job = found["RayJob"]
    assert problems("rayjob", job) == []
    kubernetes_validate.validate(found["ConfigMap"], KUBERNETES, strict=True)
    for pod in pods(job):
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    program, serve, *words = shlex.split(job["spec"]["entrypoint"])
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(words)
    assert (program, serve, args.ray) == ("exeplan", "serve", "auto")
    assert args.replicas == ("1:4" if replicas else None)
    assert job["spec"]["rayClusterSpec"].get("enableInTreeAutoscaling", False) == bool(replicas)


def test_the_plan_that_goes_along_is_the_plan(tmp_path: Path) -> None:
    """It is mounted where the entrypoint reads it."""
    plan = replace(PLANS["two replicas"], router="shortest-queue")
    found = objects(exported(plan), "kuberay")
    [(name, text)] = found["ConfigMap"]["data"].items()
    (tmp_path / name).write_text(text)
    assert read_plan(tmp_path / name) == plan
    head = found["RayJob"]["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    mounted = {mount["name"]: mount["mountPath"] for mount in head["containers"][0]["volumeMounts"]}
    assert f"{mounted['plan']}/{name}" in found["RayJob"]["spec"]["entrypoint"].split()


def test_worker_pods_are_the_hosts_that_replicas_need() -> None:
    wide = (Stage(devices=tuple(range(8)), layers=(0, 40)), Stage(devices=tuple(range(8, 16)), layers=(40, 80)))
    plan = replace(PLANS["chunked"], placement=wide)
    for replicas, expected in ((None, (2, 2, 2)), ((1, 4), (2, 2, 8)), ((2, 3), (4, 4, 6))):
        cluster = objects(exported(plan, replicas=replicas), "kuberay")["RayJob"]["spec"]["rayClusterSpec"]
        [group] = cluster["workerGroupSpecs"]
        assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == expected
        expected_resources = {"limits": {"nvidia.com/gpu": 8}, "requests": {"cpu": "8"}}
        assert group["template"]["spec"]["containers"][0]["resources"] == expected_resources


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'exeplan[ray]'")
@pytest.mark.parametrize(("name", "worker"), [("chunked", {"CPU": 8, "GPU": 8}), ("a CPU", {"CPU": 1})])
def test_rays_autoscaler_reads_the_cluster(name: str, worker: dict[str, int]) -> None:
    """It ends where a group does not say how many cores its pods have."""
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr as derived

    job = objects(exported(PLANS[name], replicas=(1, 4)), "kuberay")["RayJob"]
    config = derived({"metadata": {"name": "one", "namespace": "any"}, "spec": job["spec"]["rayClusterSpec"]})
    kinds = config["available_node_types"]
    assert kinds["headgroup"]["resources"]["CPU"] == 0
    assert (kinds["exeplan-workers"]["min_workers"], kinds["exeplan-workers"]["max_workers"]) == (1, 4)
    assert kinds["exeplan-workers"]["resources"] == worker


@pytest.mark.parametrize("name", ["two replicas", "a CPU"])
def test_keda_takes_the_scaled_object_of_a_deployment(name: str) -> None:
    found = objects(exported(PLANS[name], replicas=(1, 4)), "kubernetes")
    scaled = found.pop("ScaledObject")
    assert problems("scaledobject", scaled) == []
    for one in found.values():
        kubernetes_validate.validate(one, KUBERNETES, strict=True)
    assert scaled["spec"]["scaleTargetRef"]["name"] == found["Deployment"]["metadata"]["name"]
    assert (scaled["spec"]["minReplicaCount"], scaled["spec"]["maxReplicaCount"]) == (1, 4)
    [container] = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert parser.parse_args(container["args"]).replicas == "1:1"


def test_another_plan_replaces_the_pods_and_leaves_their_number_to_keda() -> None:
    plan = PLANS["two replicas"]
    other = replace(plan, router="shortest-queue")
    for replicas in (None, (1, 4)):
        before, same, after = (
            objects(exported(one, replicas=replicas), "kubernetes")["Deployment"]["spec"] for one in (plan, plan, other)
        )
        assert before == same
        assert before["template"] != after["template"]
        assert before.get("replicas") == (None if replicas else 2)
    text = FORMS["kuberay"](exported(plan))
    assert "# a RayJob that runs keeps its plan: to apply another one, `kubectl delete rayjob exeplan` first" in text


def test_a_pod_drains_once_no_requests_come_to_it_any_more() -> None:
    """And has the time for both, and to end, before it is killed."""
    pod = objects(exported(PLANS["a CPU"]), "kubernetes")["Deployment"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "5"]
    drain = container["args"][container["args"].index("--drain") + 1]
    assert pod["terminationGracePeriodSeconds"] >= 5 + float(drain.removesuffix("s")) + 10


def test_a_field_that_an_operator_does_not_know_would_fail() -> None:
    job = objects(exported(PLANS["a CPU"]), "kuberay")["RayJob"]
    job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["minReplica"] = 1
    assert len(problems("rayjob", job)) == 1
    scaled = objects(exported(PLANS["a CPU"], replicas=(1, 2)), "kubernetes")["ScaledObject"]
    scaled["spec"]["maxReplicaCount"] = "2"
    assert len(problems("scaledobject", scaled)) == 1


def test_what_cannot_be_exported_is_said() -> None:
    with pytest.raises(InputError, match="`exeplan serve PLAN` takes the plan itself; use --as kubernetes"):
        FORMS["command"](exported(PLANS["a CPU"]))
    vllm = load_exporter("vllm").export(PLANS["chunked"], load_model_spec(PLANS["chunked"].model), model="a/b")
    with pytest.raises(InputError, match="KubeRay starts exeplan's workers, not vLLM's"):
        FORMS["kuberay"](vllm)
    wide = (Stage(devices=tuple(range(16)), layers=(0, 80)),)
    with pytest.raises(InputError, match="several hosts each; use --as kuberay"):
        FORMS["kubernetes"](exported(replace(PLANS["chunked"], placement=wide)))
    with pytest.raises(InputError, match=r"the plan's policy is the file \./mine.py"):
        exported(replace(PLANS["a CPU"], schedule=Schedule("./mine.py", {})))


def test_the_road_from_a_plan_to_a_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_plan(PLANS["a CPU"], plan := tmp_path / "plan.yaml")
    asked = ["export", str(plan), "--replicas", "1:3", "-o", str(tmp_path / "job.yaml")]
    assert main([*asked, "--to", "exeplan", "--as", "kuberay"]) == 0
    assert "the image exeplan:" in capsys.readouterr().err
    [_, job] = yaml.safe_load_all((tmp_path / "job.yaml").read_text())
    assert job["spec"]["entrypoint"].endswith("--ray auto --replicas 1:3")
    assert main([*asked, "--to", "sglang", "--model", "a/b"]) == 2
