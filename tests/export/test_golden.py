"""What is written for each engine is as it was, and Kubernetes takes it.

A change that is meant is written by `EXEPLAN_WRITE_GOLDEN=1 python -m pytest tests/export/test_golden.py`, and read in
the difference.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from benchmarks.quality.exported import plans
from exeplan.core.models.model import load_model_spec
from exeplan.core.plan import Plan
from exeplan.errors import InputError
from exeplan.export import FORM_NAMES, exporter_names, load_exporter
from exeplan.export.forms import FORMS
from exeplan.export.interface import Export

GOLDEN = Path(__file__).parent / "golden"
OF_ENGINE = {
    "exeplan": "two replicas",
    "vllm": "two replicas",
    "sglang": "rra",
    "lmdeploy": "rra",
    "tgi": "rra",
    "lightllm": "rra",
}
APART = ("vllm", "sglang")
ONLY = {"ray-serve": ("vllm",), "kuberay": ("exeplan",), "dynamo": ("vllm", "sglang")}
PLANS = dict(plans())
KUBERNETES = "1.34"


def exported(engine: str, plan: Plan) -> Export:
    return load_exporter(engine).export(plan, load_model_spec(plan.model), model="organisation/name")


@pytest.mark.parametrize(
    ("engine", "form"),
    [
        (engine, form)
        for engine in exporter_names()
        for form in FORM_NAMES
        if engine in ONLY.get(form, exporter_names()) and (engine != "exeplan" or form in ("kubernetes", "kuberay"))
    ],
)
def test_what_is_written_is_as_it_was(engine: str, form: str) -> None:
    export = exported(engine, PLANS[OF_ENGINE[engine]])
    if engine == "exeplan":
        export = replace(export, replicas=(1, 4))
    text, path = FORMS[form](export), GOLDEN / f"{engine}.{form}"
    if os.environ.get("EXEPLAN_WRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


def test_sglangs_own_order_of_work_is_as_it_was() -> None:
    text, path = FORMS["command"](exported("sglang", PLANS["sglang"])), GOLDEN / "sglang-own-order.command"
    if os.environ.get("EXEPLAN_WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("engine", APART)
@pytest.mark.parametrize("form", ["command", "kubernetes"])
def test_pipelines_on_two_hosts_are_as_they_were(engine: str, form: str) -> None:
    text, path = FORMS[form](exported(engine, PLANS["two hosts"])), GOLDEN / f"{engine}-two-hosts.{form}"
    if os.environ.get("EXEPLAN_WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("engine", APART)
@pytest.mark.parametrize("form", ["command", "compose", "kubernetes", "dynamo"])
def test_servers_of_one_phase_are_as_they_were(engine: str, form: str) -> None:
    text, path = FORMS[form](exported(engine, PLANS["2P3D"])), GOLDEN / f"{engine}-2p3d.{form}"
    if os.environ.get("EXEPLAN_WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("engine", sorted({*exporter_names()} - {"vllm"}))
def test_ray_serve_runs_vllm_alone(engine: str) -> None:
    with pytest.raises(InputError, match="Ray Serve runs vLLM, not"):
        FORMS["ray-serve"](exported(engine, PLANS[OF_ENGINE[engine]]))


def test_ray_serve_has_the_words_of_the_command_line() -> None:
    export = exported("vllm", PLANS["two replicas"])
    [application] = yaml.safe_load(FORMS["ray-serve"](export))["applications"]
    [config] = application["args"]["llm_configs"]
    words = [
        word
        for name, value in config["engine_kwargs"].items()
        for word in (
            [f"--{'' if value else 'no-'}{name.replace('_', '-')}"]
            if isinstance(value, bool)
            else [f"--{name.replace('_', '-')}", str(value)]
        )
    ]
    [instance] = export.instances
    left = [word for word in instance.options if word not in words]
    assert left == ["organisation/name", "--max-num-queued-reqs", "100", "--port", "8000"]
    assert config["deployment_config"] == {"num_replicas": 2, "max_ongoing_requests": 100}


@pytest.mark.parametrize("engine", exporter_names())
def test_kubernetes_takes_the_objects_of_every_plan(engine: str) -> None:
    taken = 0
    for plan in PLANS.values():
        try:
            text = FORMS["kubernetes"](exported(engine, plan))
        except InputError:
            continue
        for one in yaml.safe_load_all(text):
            if one["kind"] == "LeaderWorkerSet":
                continue
            kubernetes_validate.validate(one, KUBERNETES, strict=True)
            taken += 1
    assert taken >= 2


def pod_specs(found: object) -> Iterator[dict[str, Any]]:
    """Every mapping with containers."""
    if isinstance(found, dict):
        if "containers" in found:
            yield found
        found = list(found.values())
    for one in found if isinstance(found, list) else ():
        yield from pod_specs(one)


@pytest.mark.parametrize(
    ("engine", "form"),
    [(engine, form) for form in ("kubernetes", "kuberay", "dynamo") for engine in ONLY.get(form, exporter_names())],
)
def test_no_pod_has_variables_of_services_of_which_vllm_takes_one_for_its_port(engine: str, form: str) -> None:
    """A Service `vllm` sets VLLM_PORT=tcp://... in every pod that has such variables."""
    names = [name for name in (OF_ENGINE[engine], "two hosts", "2P3D") if name == OF_ENGINE[engine] or engine in APART]
    for name in names:
        specs = list(pod_specs([*yaml.safe_load_all(FORMS[form](exported(engine, PLANS[name])))]))
        assert specs
        assert all(spec.get("enableServiceLinks") is False for spec in specs)


def test_a_field_that_kubernetes_does_not_know_would_fail() -> None:
    [deployment, _] = yaml.safe_load_all(FORMS["kubernetes"](exported("vllm", PLANS["chunked"])))
    deployment["spec"]["template"]["spec"]["containers"][0]["imagePullPolice"] = "Always"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, KUBERNETES, strict=True)
