"""KubeRay: `exeplan serve --ray` as a RayJob, whose cluster has pods for the workers of all replicas.

The head pod runs the server and the engines, and no worker. A worker pod is a host of the plan's cluster, as far as a
replica needs one. Where the number of replicas follows the load, Ray's autoscaler adds worker pods for the server's
placement groups, and removes those that have none; a RayCluster has no scale subresource that KEDA could set.

Source: ray-project/kuberay 1.7, `ray-operator/config/crd/bases/ray.io_rayjobs.yaml` and `config/samples`.
"""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from exeplan.errors import InputError
from exeplan.export.interface import Export, Instance

RAY_VERSION = "2.60.0"
_RETRIES = 10
"""Clusters after the first: each failure of the server, such as the loss of its head pod, takes one."""
_IDLE_SECONDS = 300
"""Before the autoscaler removes a pod without workers: longer than a replica that failed to start waits."""


Pod = tuple[Mapping[str, Any], Mapping[str, Any]]
"""What a pod's spec and its container have in any case."""


def as_ray_job(export: Export, *, head: Pod, workers: Pod) -> dict[str, Any]:
    """The RayJob.

    Raises InputError for another engine than exeplan, and for a range of replicas that are not equal.
    """
    if export.plan_text is None:
        raise InputError(f"KubeRay starts exeplan's workers, not {export.engine}'s; use --as kubernetes")
    if export.replicas and len(export.instances) > 1:
        raise InputError("the plan's replicas differ, and --replicas is a number of equal ones")
    cluster: dict[str, Any] = {"rayVersion": RAY_VERSION, "authOptions": {"mode": "token"}}
    if export.replicas:
        cluster["enableInTreeAutoscaling"] = True
        cluster["autoscalerOptions"] = {"idleTimeoutSeconds": _IDLE_SECONDS}
    cluster["headGroupSpec"] = {
        "headService": {"metadata": {"name": "exeplan"}},
        "rayStartParams": {"num-cpus": "0", "num-gpus": "0"},
        "template": _head(export, *head),
    }
    cluster["workerGroupSpecs"] = [_workers(export, instance, *workers) for instance in export.instances]
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": "exeplan"},
        "spec": {
            "entrypoint": shlex.join(_entrypoint(export)),
            "backoffLimit": _RETRIES,
            "shutdownAfterJobFinishes": True,
            "rayClusterSpec": cluster,
        },
    }


def _entrypoint(export: Export) -> Sequence[str]:
    words = [*export.instances[0].command, "--ray", "auto"]
    return [*words, "--replicas", "{}:{}".format(*export.replicas)] if export.replicas else words


def _head(export: Export, pod: Mapping[str, Any], container: Mapping[str, Any]) -> dict[str, Any]:
    ports = {"gcs-server": 6379, "dashboard": 8265, "client": 10001, "http": export.port}
    engines = export.replicas[1] if export.replicas else sum(instance.count for instance in export.instances)
    head = {
        "name": "ray-head",
        **container,
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
        # A core for the server and Ray, and one for each engine.
        "resources": {"requests": {"cpu": f"{1 + engines}", "memory": f"{4 + engines}Gi"}},
    }
    return {"spec": {**pod, "containers": [head]}}


def _workers(
    export: Export, instance: Instance, pod: Mapping[str, Any], container: Mapping[str, Any]
) -> dict[str, Any]:
    least, most = export.replicas or (instance.count, instance.count)
    resources: dict[str, Any]
    if instance.num_gpus:
        num_gpus = -(-instance.num_gpus // instance.num_hosts)
        num_cpus = num_gpus  # A worker process for each.
        resources = {"limits": {"nvidia.com/gpu": num_gpus}, "requests": {"cpu": f"{num_cpus}"}}
    else:
        num_cpus = instance.num_cpus
        resources = {"limits": {"cpu": f"{num_cpus}"}, "requests": {"cpu": f"{num_cpus}"}}
    return {
        "groupName": f"{instance.name}-workers",
        "replicas": least * instance.num_hosts,
        "minReplicas": least * instance.num_hosts,
        "maxReplicas": most * instance.num_hosts,
        # Ray's autoscaler ends where it is not told of the cores. The GPUs it knows from the limits.
        "rayStartParams": {"num-cpus": f"{num_cpus}"},
        "template": {"spec": {**pod, "containers": [{"name": "ray-worker", **container, "resources": resources}]}},
    }
