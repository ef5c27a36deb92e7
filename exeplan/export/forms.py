"""An export as a file that a person or a program starts it by: a shell script, a compose file, Kubernetes objects, a
config of Ray Serve.

Every form has the same words of the same command lines.
"""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from exeplan import plain_yaml
from exeplan.errors import InputError
from exeplan.export.interface import Export, Instance

_RAY = "2.60"
"""Whose `LLMConfig` takes what `as_ray_serve` writes. Source: docs.ray.io, configuration of ray.serve.llm."""


def as_command(export: Export) -> str:
    """A shell script for each host; several servers of a host run in the background, on ports in sequence."""
    lines, placed = [f"# {line}" for line in _head(export)], list(_placed(export))
    for host in sorted({server.host for server in placed}):
        own = [server for server in placed if server.host == host]
        lines += [f"# on host {host}"] if export.num_hosts > 1 else []
        for server in own:
            words = [*_assignments(server), *(shlex.quote(word) for word in _on_port(export, server))]
            lines.append(" \\\n    ".join(_lines(words)) + (" &" if len(own) > 1 else ""))
        lines += ["wait"] if len(own) > 1 else []
    return "\n".join([*lines, ""])


def _lines(words: list[str]) -> Iterator[str]:
    """An option and its value in one line."""
    line: list[str] = []
    for word in words:
        if line and word.startswith("--"):
            yield " ".join(line)
            line = []
        line.append(word)
    yield " ".join(line)


def _assignments(server: "_Server") -> list[str]:
    shown = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, server.gpus))} if server.gpus else {}
    return [f"{name}={shlex.quote(value)}" for name, value in {**shown, **server.instance.environment}.items()]


def as_compose(export: Export) -> str:
    """Services of the Compose specification, a server each. Raises InputError for servers on several hosts."""
    if export.num_hosts > 1:
        raise InputError(f"a compose file is of one host, and the plan has {export.num_hosts}; use --as kubernetes")
    services = {server.name: _compose_service(export, server) for server in _placed(export)}
    return _commented(export) + plain_yaml.dump({"services": services})


def _compose_service(export: Export, server: "_Server") -> dict[str, Any]:
    instance = server.instance
    service: dict[str, Any] = {
        "image": export.image,
        "entrypoint": list(instance.program),
        "command": list(instance.options),
        "ports": [f"127.0.0.1:{server.port}:{export.port}"],
        "ipc": "host",
        "volumes": ["~/.cache/huggingface:/root/.cache/huggingface"],
    }
    if instance.environment:
        service["environment"] = dict(instance.environment)
    if server.gpus:
        devices = {"driver": "nvidia", "device_ids": [str(number) for number in server.gpus], "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [devices]}}}
    return service


def as_kubernetes(export: Export) -> str:
    """A Deployment and a Service for each kind of server; replicas are the Deployment's."""
    objects = [
        one for instance in export.instances for one in (_deployment(export, instance), _service(export, instance))
    ]
    return _commented(export) + "---\n".join(map(plain_yaml.dump, objects))


def _deployment(export: Export, instance: Instance) -> dict[str, Any]:
    labels = {"app": instance.name}
    probe = {"httpGet": {"path": export.health_path, "port": export.port}}
    container: dict[str, Any] = {
        "name": instance.name,
        "image": export.image,
        "command": list(instance.program),
        "args": list(instance.options),
        "env": [{"name": name, "value": value} for name, value in instance.environment.items()],
        "ports": [{"containerPort": export.port}],
        "readinessProbe": {**probe, "periodSeconds": 5},
        "startupProbe": {**probe, "periodSeconds": 10, "failureThreshold": 120},
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    if instance.num_gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": instance.num_gpus}}
    memory = {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": instance.name, "labels": labels},
        "spec": {
            "replicas": instance.count,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"containers": [container], "volumes": [memory]},
            },
        },
    }


def _service(export: Export, instance: Instance) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": instance.name},
        "spec": {
            "selector": {"app": instance.name},
            "ports": [{"name": "http", "port": export.port, "targetPort": export.port}],
        },
    }


def as_ray_serve(export: Export) -> str:
    """A config of `serve run` or `serve deploy`, whose replicas run vLLM with these options behind Ray's own router.

    Raises InputError for other engines, and for replicas that are not equal.
    """
    if export.engine != "vLLM":
        raise InputError(f"Ray Serve runs vLLM, not {export.engine}; export --to vllm")
    if len(export.instances) > 1:
        raise InputError("Ray Serve has equal replicas of a model; plan with --arrival-rate, whose replicas are equal")
    [instance] = export.instances
    model, *words = instance.options
    options = _values(words)
    options.pop(export.port_option.removeprefix("--").replace("-", "_"))
    deployment: dict[str, Any] = {"num_replicas": instance.count}
    if limit := options.pop("max_num_queued_reqs", None):
        deployment["max_ongoing_requests"] = limit
    config: dict[str, Any] = {
        "model_loading_config": {"model_id": model, "model_source": model},
        "deployment_config": deployment,
        "engine_kwargs": options,
    }
    if instance.environment:
        config["runtime_env"] = {"env_vars": dict(instance.environment)}
    application = {
        "name": instance.name,
        "route_prefix": "/",
        "import_path": "ray.serve.llm:build_openai_app",
        "args": {"llm_configs": [config]},
    }
    body = {"http_options": {"host": "127.0.0.1", "port": export.port}, "applications": [application]}
    more = f"# Ray {_RAY}; its router holds requests beyond max_ongoing_requests, without a limit\n"
    return _commented(export) + more + plain_yaml.dump(body)


def _values(words: Sequence[str]) -> dict[str, Any]:
    """Options as vLLM's engine arguments: numbers as numbers, `--no-enable-x` as false."""
    found: dict[str, Any] = {}
    for line in _lines(list(words)):
        name, *values = line.split(" ", 1)
        name = name.removeprefix("--").replace("-", "_")
        if not values:
            off = name.startswith("no_")
            found[name.removeprefix("no_") if off else name] = not off
        else:
            found[name] = _number(values[0])
    return found


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


class _Server(NamedTuple):
    """One of an instance."""

    instance: Instance
    name: str
    host: int
    gpus: tuple[int, ...]
    port: int


def _placed(export: Export) -> Iterator[_Server]:
    """Every server; those of a host have ports in sequence."""
    ports: dict[int, int] = {}
    for instance in export.instances:
        for number, (host, gpus) in enumerate(zip(instance.hosts, instance.gpus, strict=True)):
            name = instance.name if instance.count == 1 else f"{instance.name}-replica-{number}"
            port = ports.setdefault(host, export.port)
            ports[host] += 1
            yield _Server(instance, name, host, gpus, port)


def _on_port(export: Export, server: _Server) -> tuple[str, ...]:
    words = server.instance.command
    at = words.index(export.port_option) + 1
    return (*words[:at], f"{server.port}", *words[at + 1 :])


def _head(export: Export) -> list[str]:
    return [f"{export.engine} {export.versions[0]} to {export.versions[1]}", *export.remarks]


def _commented(export: Export) -> str:
    return "".join(f"# {line}\n" for line in _head(export))


FORMS: Mapping[str, Callable[[Export], str]] = {
    "command": as_command,
    "compose": as_compose,
    "kubernetes": as_kubernetes,
    "ray-serve": as_ray_serve,
}
"""By the name that `--as` takes."""
