"""A graph of Dynamo has a component for each kind of server, with the engine's options; Kubernetes takes its pods."""

from typing import Any

import kubernetes_validate
import pytest
import yaml

from benchmarks.quality.exported import plans
from exeplan.core.models.model import load_model_spec
from exeplan.errors import InputError
from exeplan.export import load_exporter
from exeplan.export.forms import FORMS
from exeplan.export.interface import Export

from .test_kuberay import KUBERNETES

PLANS = dict(plans())
engines = pytest.mark.parametrize("engine", ["vllm", "sglang"])


def exported(engine: str, name: str) -> Export:
    plan = PLANS[name]
    return load_exporter(engine).export(plan, load_model_spec(plan.model), model="organisation/name")


def components(export: Export) -> dict[str, Any]:
    graph = yaml.safe_load(FORMS["dynamo"](export))
    return {one["name"]: one for one in graph["spec"]["components"]}


def args(component: Any) -> list[str]:
    [container] = component["podTemplate"]["spec"]["containers"]
    return list(container["args"])


@engines
def test_servers_of_a_phase_are_components_of_that_type(engine: str) -> None:
    found = components(exported(engine, "2P3D"))
    kinds = {name: (one["type"], one["replicas"]) for name, one in found.items()}
    assert kinds == {
        "frontend": ("frontend", 1),
        f"{engine}-prefill": ("prefill", 2),
        f"{engine}-decode": ("decode", 3),
    }
    for phase in ("prefill", "decode"):
        words = args(found[f"{engine}-{phase}"])
        assert words[words.index("--disaggregation-mode") + 1] == phase
        assert "--port" not in words


@engines
@pytest.mark.parametrize("name", ["chunked", "two replicas", "two hosts", "2P3D"])
def test_pods_are_kubernetes_and_options_the_engines(engine: str, name: str) -> None:
    export = exported(engine, name)
    found = components(export)
    for instance in export.instances:
        component = found[instance.name]
        assert component["replicas"] == instance.count
        assert component.get("multinode", {"nodeCount": 1}) == {"nodeCount": instance.num_hosts}
        left = set(instance.options) - set(args(component))
        assert left <= {"--port", "--host", "0.0.0.0", "8000", "8100", "30000"}
    for one in found.values():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, **one["podTemplate"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_other_engines_and_other_options_are_refused() -> None:
    with pytest.raises(InputError, match="Dynamo starts vLLM and SGLang, not LightLLM"):
        FORMS["dynamo"](exported("lightllm", "rra"))
    with pytest.raises(InputError, match="attention data parallelism has another option"):
        FORMS["dynamo"](exported("sglang", "ranks"))
