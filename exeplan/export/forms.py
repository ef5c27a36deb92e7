"""An export as a file that a person or a program starts it by: a shell script, a compose file, Kubernetes objects, a
config of Ray Serve, a RayJob of KubeRay.

Every form has the same words of the same command lines.
"""

import hashlib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from exeplan import plain_yaml
from exeplan.errors import InputError
from exeplan.export.dynamo import as_graph, graph_remarks
from exeplan.export.interface import PLAN_PATH, Export, Instance, Join
from exeplan.export.kuberay import as_ray_job

_RAY = "2.60"
"""Whose `LLMConfig` takes what `as_ray_serve` writes. Source: docs.ray.io, configuration of ray.serve.llm."""
_NEEDED = "exeplan:replicas_needed"
_SHARED_MEMORY = {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}
_MEMORY_MOUNT = {"name": "shared-memory", "mountPath": "/dev/shm"}
_PLAN_VOLUME = {"name": "plan", "configMap": {"name": "exeplan-plan"}}
_PLAN_MOUNT = {"name": "plan", "mountPath": str(PurePosixPath(PLAN_PATH).parent)}
_LEADERS = "leaderworkerset.sigs.k8s.io/name"
_OF_LEADERS = ("ports", "readinessProbe", "startupProbe")
_POD = {"enableServiceLinks": False}
"""Of every pod: Kubernetes sets NAME_PORT for each Service, and vLLM reads VLLM_PORT."""
_STILL_REACHED_SECONDS = 5
"""Until no new requests come to a pod that is to end, as its address is removed from the Service meanwhile; the server
refuses them once it drains."""
_SECRET = {"secretKeyRef": {"name": "exeplan", "key": "api-key", "optional": True}}


def as_command(export: Export) -> str:
    """A shell script for each host; several servers of a host run in the background, each on a port of its own."""
    _check_takes_no_file(export)
    lines, placed = [f"# {line}" for line in _head(export)], list(_placed(export))
    hosts = sorted({host for server in placed for host in server.hosts})
    for host in hosts:
        own = [server for server in placed if host in server.hosts]
        lines += [f"# on host {host}"] if export.num_hosts > 1 else []
        commands = [
            [*_assignments(export, server), *_quoted((*_on_port(export, server), *_joined(export, server, host)))]
            for server in own
        ]
        if export.router and host == hosts[0]:
            workers = [_worker(export, s, f"http://{_address(export, s)}:{s.port}") for s in placed]
            commands.append(_quoted(export.router.command(workers)))
        several = len(commands) > 1
        lines += [" \\\n    ".join(_lines(words)) + (" &" if several else "") for words in commands]
        lines += ["wait"] if several else []
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


def _quoted(words: Sequence[str]) -> list[str]:
    return [shlex.quote(word) for word in words]


def _assignments(export: Export, server: "_Server") -> list[str]:
    values = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, server.gpus))} if server.gpus else {}
    values |= _environment(server)
    if server.instance.address_variable and export.num_hosts > 1:
        values[server.instance.address_variable] = _address(export, server)
    return [f"{name}={shlex.quote(value)}" for name, value in values.items()]


def _environment(server: "_Server") -> dict[str, str]:
    """With the ports that are this server's own."""
    ports = {name: f"{port}" for name, port in server.own_ports.items() if not name.startswith("--")}
    return {**server.instance.environment, **ports}


def _joined(export: Export, server: "_Server", host: int) -> tuple[str, ...]:
    """What a process of a server on several hosts is told of the others."""
    if (join := server.instance.join) is None:
        return ()
    leader = _address(export, server)
    return join.words(hosts=f"{len(server.hosts)}", rank=f"{server.hosts.index(host)}", leader=leader)


def _address(export: Export, server: "_Server") -> str:
    return "127.0.0.1" if export.num_hosts == 1 else f"host-{server.host}"


def _worker(export: Export, server: "_Server", url: str) -> tuple[str, str, int | None]:
    """A server as its router is told of it."""
    assert export.router
    return server.instance.phase, url, server.own_ports.get(export.router.bootstrap)


def as_compose(export: Export) -> str:
    """Services of the Compose specification, a server each. Raises InputError for servers on several hosts."""
    _check_takes_no_file(export)
    if export.num_hosts > 1:
        raise InputError(f"a compose file is of one host, and the plan has {export.num_hosts}; use --as kubernetes")
    services = {server.name: _compose_service(export, server) for server in _apart(export)}
    if router := export.router:
        workers = [_worker(export, s, f"http://{s.name}:{export.port}") for s in _apart(export)]
        services["router"] = {
            "image": router.image,
            "entrypoint": list(router.program),
            "command": list(router.command(workers)[len(router.program) :]),
            "ports": [f"127.0.0.1:{router.port}:{router.port}"],
            "depends_on": list(services),
        }
    return _commented(export) + plain_yaml.dump({"services": services})


def _compose_service(export: Export, server: "_Server") -> dict[str, Any]:
    instance = server.instance
    service: dict[str, Any] = {
        "image": export.image,
        "entrypoint": list(instance.program),
        "command": list(instance.options),
        "ports": [f"127.0.0.1:{server.port}:{export.port}"],
        "ipc": "host",
        "volumes": [f"~/.cache/huggingface:{export.cache_path}"],
    }
    if export.router:  # It alone is reached from outside.
        del service["ports"]
    environment = _environment(server)
    if instance.address_variable:
        environment[instance.address_variable] = server.name
    if environment:
        service["environment"] = environment
    if server.gpus:
        devices = {"driver": "nvidia", "device_ids": [str(number) for number in server.gpus], "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [devices]}}}
    return service


def as_kubernetes(export: Export) -> str:
    """A Deployment and a Service for each kind of server; replicas are the Deployment's, and KEDA's where they follow
    the load.

    Raises InputError for a server of exeplan on several hosts, and for several kinds of them.
    """
    objects = [one for instance in export.instances for one in _served(export, instance)]
    objects += _router(export)
    if export.plan_text is not None and (len(export.instances) > 1 or export.instances[0].num_hosts > 1):
        raise InputError("the plan's replicas differ, or are on several hosts each; use --as kuberay")
    texts = [_config_map(export)] if export.plan_text is not None else []
    if export.replicas:
        objects.append(_scaled_object(export))
    return _commented(export) + "---\n".join([*texts, *map(plain_yaml.dump, objects)])


def as_kuberay(export: Export) -> str:
    """The plan as a ConfigMap, and a RayJob of `exeplan serve --ray`."""
    workers = {"image": export.image, "volumeMounts": [_MEMORY_MOUNT]}
    head = {
        "image": export.image,
        "env": [{"name": "EXEPLAN_API_KEY", "valueFrom": _SECRET}],
        "volumeMounts": [_MEMORY_MOUNT, _PLAN_MOUNT],
    }
    job = as_ray_job(
        export,
        head=({**_POD, "volumes": [_SHARED_MEMORY, _PLAN_VOLUME]}, head),
        workers=({**_POD, "volumes": [_SHARED_MEMORY]}, workers),
    )
    return _commented(export, "kuberay") + "---\n".join([_config_map(export), plain_yaml.dump(job)])


def form_remarks(export: Export, form: str) -> list[str]:
    """What a form has to be said of, beside the remarks of the export."""
    if form == "dynamo":
        return list(graph_remarks(export))
    if form == "kuberay":
        return ["a RayJob that runs keeps its plan: to apply another one, `kubectl delete rayjob exeplan` first"]
    return list(export.router.remarks) if export.router else []


def as_dynamo(export: Export) -> str:
    """A DynamoGraphDeployment of the engine's workers."""
    graph = as_graph(export)
    comments = "".join(f"# {line}\n" for line in (*export.remarks, *form_remarks(export, "dynamo")))
    return comments + plain_yaml.dump(graph)


def _check_takes_no_file(export: Export) -> None:
    if export.plan_text is not None:
        raise InputError(f"`{' '.join(export.instances[0].program)} PLAN` takes the plan itself; use --as kubernetes")


def _config_map(export: Export) -> str:
    """With the plan as it is written, line by line."""
    assert export.plan_text is not None
    lines = "".join(f"    {line}\n" for line in export.plan_text.splitlines())
    head = plain_yaml.dump({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "exeplan-plan"}})
    return f"{head}data:\n  {PurePosixPath(PLAN_PATH).name}: |\n{lines}"


def _scaled_object(export: Export) -> dict[str, Any]:
    """Of KEDA: as many pods as the servers say they need together. Source: kedacore/keda, CRD of 2.x."""
    assert export.replicas
    least, most = export.replicas
    trigger = {
        "type": "prometheus",
        "metricType": "AverageValue",
        "metadata": {
            "serverAddress": "http://prometheus-operated.monitoring.svc:9090",
            "query": f"sum({_NEEDED})",
            "threshold": "1",
        },
    }
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": {"name": "exeplan"},
        "spec": {
            "scaleTargetRef": {"name": export.instances[0].name},
            "minReplicaCount": least,
            "maxReplicaCount": most,
            "pollingInterval": 5,
            "triggers": [trigger],
        },
    }


def _served(export: Export, instance: Instance) -> Iterator[dict[str, Any]]:
    """What runs the servers of an instance, and what has their name. Servers of one phase have a name each, by which
    the router knows them, and others are found by those that they hand over to."""
    deployment, service = _deployment(export, instance), _service(export, instance)
    if instance.join:
        yield _leader_worker_set(instance, instance.join, deployment)
        if not instance.phase:  # Its controller makes one without an address, with the set's own name.
            service["metadata"]["name"] = f"{instance.name}-leader"
            service["spec"]["selector"] = {_LEADERS: instance.name, "role": "leader"}
            yield service
        return
    if instance.phase:
        deployment["kind"] = "StatefulSet"
        deployment["spec"] |= {"serviceName": instance.name, "podManagementPolicy": "Parallel"}
        # A pod has its name while it starts: the router waits for it.
        service["spec"] |= {"clusterIP": "None", "publishNotReadyAddresses": True}
    yield deployment
    yield service


def _leader_worker_set(instance: Instance, join: Join, deployment: Mapping[str, Any]) -> dict[str, Any]:
    """A pod for each host of a server, of which the first is asked.

    Source: kubernetes-sigs/lws v0.9.0, its CRD and `docs/examples`.
    """
    pod = deployment["spec"]["template"]["spec"]

    def template(rank: str) -> dict[str, Any]:
        [container] = pod["containers"]
        words = join.words(hosts="$(LWS_GROUP_SIZE)", rank=rank, leader="$(LWS_LEADER_ADDRESS)")
        found = {**container, "args": [*container["args"], *words]}
        if rank != "0":  # It listens for no requests.
            found = {name: value for name, value in found.items() if name not in _OF_LEADERS}
        return {
            "metadata": {"labels": {"role": "leader" if rank == "0" else "worker"}},
            "spec": {**pod, "containers": [found]},
        }

    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": instance.name},
        "spec": {
            "replicas": instance.count,
            "leaderWorkerTemplate": {
                "size": instance.num_hosts,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": template("0"),
                "workerTemplate": template("$(LWS_WORKER_INDEX)"),
            },
        },
    }


def _router(export: Export) -> Iterator[dict[str, Any]]:
    """One pod, if servers need a router."""
    if (router := export.router) is None:
        return
    workers = [
        _worker(export, s, f"http://{s.instance.name}-{s.number}.{s.instance.name}:{export.port}")
        for s in _apart(export)
    ]
    words, labels = router.command(workers), {"app": "router"}
    probe = {"httpGet": {"path": router.health_path, "port": router.port}}
    container = {
        "name": "router",
        "image": router.image,
        "command": list(router.program),
        "args": list(words[len(router.program) :]),
        "ports": [{"containerPort": router.port}],
        "readinessProbe": {**probe, "periodSeconds": 5},
    }
    yield {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "router", "labels": labels},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {**_POD, "containers": [container]}},
        },
    }
    yield {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "router"},
        "spec": {"selector": labels, "ports": [{"name": "http", "port": router.port, "targetPort": router.port}]},
    }


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
        "volumeMounts": [_MEMORY_MOUNT],
    }
    template: dict[str, Any] = {"labels": labels}
    spec: dict[str, Any] = {**_POD, "containers": [container], "volumes": [_SHARED_MEMORY]}
    if instance.address_variable:
        address = {"fieldRef": {"fieldPath": "status.podIP"}}
        container["env"].append({"name": instance.address_variable, "valueFrom": address})
    if instance.num_gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": instance.num_gpus}}
    elif instance.num_cpus:  # One more for the server.
        container["resources"] = {"requests": {"cpu": f"{instance.num_cpus + 1}"}}
    if export.plan_text is not None:
        container["args"] += ["--replicas", "1:1"]  # A replica a pod, which says how many are needed.
        container["env"].append({"name": "EXEPLAN_API_KEY", "valueFrom": _SECRET})
        container["volumeMounts"] = [_MEMORY_MOUNT, _PLAN_MOUNT]
        container["livenessProbe"] = {"httpGet": {"path": "/health", "port": export.port}, "periodSeconds": 10}
        spec["volumes"] = [_SHARED_MEMORY, _PLAN_VOLUME]
        container["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", f"{_STILL_REACHED_SECONDS}"]}}}
        spec["terminationGracePeriodSeconds"] = 75 + _STILL_REACHED_SECONDS
        scrape = {"scrape": "true", "port": f"{export.port}", "path": "/metrics"}
        template["annotations"] = {f"prometheus.io/{name}": value for name, value in scrape.items()}
        # Pods read the plan when they start, and are replaced only where their template changes.
        template["annotations"]["exeplan/plan"] = hashlib.sha256(export.plan_text.encode()).hexdigest()
    deployed: dict[str, Any] = {"selector": {"matchLabels": labels}, "template": {"metadata": template, "spec": spec}}
    if not export.replicas:  # KEDA's number would be overwritten by each further `kubectl apply`.
        deployed = {"replicas": instance.count, **deployed}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": instance.name, "labels": labels},
        "spec": deployed,
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
    number: int
    """Among those of its instance."""
    host: int
    gpus: tuple[int, ...]
    port: int
    own_ports: Mapping[str, int]

    @property
    def hosts(self) -> tuple[int, ...]:
        return tuple(range(self.host, self.host + self.instance.num_hosts))


def _placed(export: Export) -> Iterator[_Server]:
    """Every server; those of a host have ports in sequence, or as far apart as the engine needs."""
    ports: dict[tuple[int, str], int] = {}

    def taken(host: int, name: str, first: int, step: int = 1) -> int:
        ports[host, name] = ports.get((host, name), first - step) + step
        return ports[host, name]

    for instance in export.instances:
        for number, (host, gpus) in enumerate(zip(instance.hosts, instance.gpus, strict=True)):
            name = instance.name if instance.count == 1 else f"{instance.name}-replica-{number}"
            own_ports = {other: taken(host, other, first) for other, first in instance.own_ports.items()}
            port = taken(host, export.port_option, export.port, export.port_step)
            yield _Server(instance, name, number, host, gpus, port, own_ports)


def _apart(export: Export) -> Iterator[_Server]:
    """Every server, with the first of all ports, as in a container of its own."""
    return (server._replace(own_ports=server.instance.own_ports) for server in _placed(export))


def _on_port(export: Export, server: _Server) -> tuple[str, ...]:
    words = list(server.instance.command)
    for option, port in {export.port_option: server.port, **server.own_ports}.items():
        if option in words:
            words[words.index(option) + 1] = f"{port}"
        elif option.startswith("--") and port != server.instance.own_ports[option]:
            words += [option, f"{port}"]
    if server.port != export.port:
        words += [
            word for option, path in server.instance.own_paths.items() for word in (option, f"{path}-{server.port}")
        ]
    return tuple(words)


def _head(export: Export, form: str = "") -> list[str]:
    versions = " to ".join(dict.fromkeys(export.versions))
    return [f"{export.engine} {versions}", *export.remarks, *form_remarks(export, form)]


def _commented(export: Export, form: str = "") -> str:
    return "".join(f"# {line}\n" for line in _head(export, form))


FORMS: Mapping[str, Callable[[Export], str]] = {
    "command": as_command,
    "compose": as_compose,
    "kubernetes": as_kubernetes,
    "ray-serve": as_ray_serve,
    "kuberay": as_kuberay,
    "dynamo": as_dynamo,
}
"""By the name that `--as` takes."""
