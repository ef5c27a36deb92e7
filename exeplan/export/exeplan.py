"""exeplan itself on Kubernetes: `exeplan serve` of the plan, which goes along as a ConfigMap.

    form          processes
    kubernetes    a server for each replica, which KEDA scales (`--replicas`); equal replicas, each within one host
    kuberay       one server with workers on a Ray cluster, which Ray's autoscaler scales (`kuberay.py`)

Not here: command lines, as the plan's file itself is what `exeplan serve` takes.
"""

from collections.abc import Iterator
from pathlib import Path

from exeplan.core.cluster import load_cluster
from exeplan.core.models.model import ModelSpec
from exeplan.core.plan import Plan, plan_yaml
from exeplan.core.schedule import ReplicaGroup, needs_other_engine
from exeplan.errors import InputError
from exeplan.export.interface import PLAN_PATH, Export, Instance
from exeplan.version import __version__

_PORT = 8000


def export(plan: Plan, spec: ModelSpec, *, model: str) -> Export:
    """See `interface.Exporter`."""
    for group in plan.groups:
        if group.schedule.has_policy_file:
            raise InputError(f"the plan's policy is the file {group.schedule.policy}, which no image of exeplan has")
        if needs_other_engine(group.placement):
            raise InputError("other engines run this placement, `exeplan serve` does not")
    names = ["exeplan"] if len(plan.groups) == 1 else [f"exeplan-{number}" for number in range(len(plan.groups))]
    return Export(
        engine="exeplan",
        versions=(__version__, __version__),
        image=f"exeplan:{__version__}",
        package="exeplan",
        port=_PORT,
        health_path="/ready",
        instances=tuple(_instance(plan, group, name, model) for group, name in zip(plan.groups, names, strict=True)),
        remarks=tuple(_remarks(plan, model)),
        plan_text=plan_yaml(plan, Path()),
    )


def _instance(plan: Plan, group: ReplicaGroup, name: str, model: str) -> Instance:
    num_devices = len({device for stage in group.placement for device in stage.devices})
    on_cpu = plan.device == "cpu"
    each = load_cluster(plan.cluster).gpus_per_node if plan.cluster else num_devices
    options = [
        PLAN_PATH,
        "--host",
        "0.0.0.0",
        "--port",
        f"{_PORT}",
        "--allowed-host",
        "exeplan",
        "--log-format",
        "json",
    ]
    options += ["--replan-file", "/tmp/replanned.yaml", "--drain", "60s"]
    options += ["--model-dir", model] if model != plan.model else []
    return Instance(
        name=name,
        program=("exeplan", "serve"),
        options=tuple(options),
        hosts=tuple(range(group.num_replicas)),
        gpus=tuple(() if on_cpu else tuple(range(num_devices)) for _ in range(group.num_replicas)),
        num_cpus=num_devices * plan.num_threads if on_cpu else 0,
        num_hosts=1 if on_cpu else -(-num_devices // each),
    )


def _remarks(plan: Plan, model: str) -> Iterator[str]:
    yield f"the image exeplan:{__version__} is one that you build, from runner/deploy/Containerfile"
    yield f"each pod loads {model}: from the Hub, or where the image or a volume that you add has it"
    yield (
        "clients name the host exeplan, others need another --allowed-host; they need no key unless the secret "
        "exeplan has an api-key, which /metrics asks for, too"
    )
    yield "where KEDA scales, its serverAddress is your Prometheus, which scrapes the pods"
    if plan.profile or plan.workload:
        yield "the plan's profile and workload are not in the pods: replicas follow the load by the plan's own figures"
