"""Dynamo: vLLM or SGLang as workers of a DynamoGraphDeployment, behind Dynamo's own frontend and router.

    plan                           component
    servers of a phase             type prefill and type decode
    other servers                  type worker
    a server on several hosts      multinode.nodeCount; its processes are told of each other by Dynamo's operator

Source: ai-dynamo/dynamo 1.6, `deploy/operator/api/v1beta1` and `examples/backends/*/deploy`; `dynamo.vllm` and
`dynamo.sglang` of the package ai-dynamo 1.6.1 take the engines' own options. Not here: Dynamo's planner and profiler.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from exeplan.errors import InputError
from exeplan.export.interface import Export, Instance

_VERSION = "1.6.1"
_ENGINES = {"vLLM": ("vllm", "0.31.0"), "SGLang": ("sglang", "0.5.21")}
"""By what an export calls it: Dynamo's name, and the version in its image."""
_LISTENING = ("--port", "--host")
"""Of a server, which a worker is none."""


def as_graph(export: Export) -> dict[str, Any]:
    """The deployment. Raises InputError for another engine, and for what Dynamo's version of it has no option for."""
    framework, _ = _framework(export)
    image = f"nvcr.io/nvidia/ai-dynamo/{framework}-runtime:{_VERSION}"
    frontend = _component("frontend", "frontend", 1, {"name": "main", "image": image})
    workers = [_worker(framework, image, instance) for instance in export.instances]
    return {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": framework},
        "spec": {"backendFramework": framework, "components": [frontend, *workers]},
    }


def graph_remarks(export: Export) -> Iterator[str]:
    """What Dynamo does otherwise than the engine's own servers and router."""
    version = _framework(export)[1]
    yield f"Dynamo {_VERSION} has {export.engine} {version}; its frontend sends a request to each worker in turn"
    if export.router and "--max-concurrent-requests" in export.router.options:
        yield "the limit on requests that keeps the plan's bound is not set in Dynamo: above the planned rate it breaks"


def _framework(export: Export) -> tuple[str, str]:
    if export.engine not in _ENGINES:
        raise InputError(f"Dynamo starts vLLM and SGLang, not {export.engine}; use --as kubernetes")
    return _ENGINES[export.engine]


def _worker(framework: str, image: str, instance: Instance) -> dict[str, Any]:
    words = _without_listening(instance.options)
    if "--attn-dp-size" in words:
        raise InputError(f"attention data parallelism has another option in the SGLang of Dynamo {_VERSION}")
    if framework == "vllm":
        words = ["--model", *words, *(("--disaggregation-mode", instance.phase) if instance.phase else ())]
    container: dict[str, Any] = {
        "name": "main",
        "image": image,
        "command": ["python3", "-m", f"dynamo.{framework}"],
        "args": words,
    }
    if instance.environment:
        container["env"] = [{"name": name, "value": value} for name, value in instance.environment.items()]
    if instance.num_gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": instance.num_gpus}}
    found = _component(instance.name, instance.phase or "worker", instance.count, container)
    return {**found, "multinode": {"nodeCount": instance.num_hosts}} if instance.num_hosts > 1 else found


def _component(name: str, kind: str, replicas: int, container: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "type": kind,
        "replicas": replicas,
        "podTemplate": {"spec": {"enableServiceLinks": False, "containers": [dict(container)]}},
    }


def _without_listening(options: Sequence[str]) -> list[str]:
    words = list(options)
    for option in _LISTENING:
        if option in words:
            at = words.index(option)
            del words[at : at + 2]
    return words
