"""An exporter is one file in the room: a toy one in a folder of its own is found, loaded and used."""

from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

import exeplan.export
from exeplan.cli import main
from exeplan.core.bounds import Bound
from exeplan.core.models.model import load_model_spec
from exeplan.core.plan import Plan, save_plan
from exeplan.core.schedule import Schedule, single_stage
from exeplan.errors import InputError
from exeplan.export import FORM_NAMES, engine_model, exporter_names, installed_remark, load_exporter
from exeplan.export.forms import FORMS
from exeplan.export.interface import Export
from exeplan.plain_yaml import load

from .test_vllm import ESTIMATE

TOY = '''"""A toy engine that takes one number."""

from exeplan.export.interface import Export, Instance


def export(plan, spec, *, model):
    words = (model, f"--max-num-seqs={plan.schedule['max_num_seqs']}", "--port", "80")
    return Export(
        engine="Toy", versions=("1.2", "1.4"), image="toy:1.4", package="toy", port=80, health_path="/",
        instances=(Instance(name="toy", program=("toy", "run"), options=words, hosts=(0,), gpus=((),)),),
    )
'''


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Export:
    (tmp_path / "toy.py").write_text(TOY)
    monkeypatch.setattr(exeplan.export, "__path__", [*exeplan.export.__path__, str(tmp_path)])
    spec = load_model_spec("demo")
    plan = Plan(model="demo", schedule=Schedule("orca", {"max_num_seqs": 8}), placement=single_stage(spec))
    return load_exporter("toy").export(plan, spec, model="a/b")


def test_a_file_in_the_room_is_an_exporter(toy: Export) -> None:
    assert "toy" in exporter_names()
    assert toy.instances[0].command[2:4] == ("a/b", "--max-num-seqs=8")
    with pytest.raises(
        InputError, match="no exporter 'forms'; there are exeplan, lightllm, lmdeploy, sglang, tgi, toy, vllm"
    ):
        load_exporter("forms")


@pytest.mark.parametrize(
    ("installed", "said"),
    [("1.2.0", False), ("1.4.9.post1", False), ("1.1", True), ("1.5.0", True), ("2.0", True), (None, False)],
)
def test_another_version_that_is_installed_is_said(
    installed: str | None, said: bool, toy: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str:
        assert package == "toy"
        if installed is None:
            raise metadata.PackageNotFoundError
        return installed

    monkeypatch.setattr(metadata, "version", version)
    found = list(installed_remark(replace(toy)))
    assert found == ([f"the options are those of Toy 1.2 to 1.4; installed here is {installed}"] if said else [])


def test_the_forms_of_the_command_line_are_those_there_are() -> None:
    assert tuple(FORMS) == FORM_NAMES


def test_an_engine_loads_a_directory_an_id_or_what_a_shipped_shape_is_on_the_hub() -> None:
    assert engine_model("/models/mine") == "/models/mine"
    assert engine_model("meta-llama/Llama-3.1-8B") == "meta-llama/Llama-3.1-8B"
    assert engine_model("flan-t5-xxl") == "google/flan-t5-xxl"
    with pytest.raises(InputError, match=r"\(on the Hub: meta-llama/Llama-3.1-8B, .*\); say what the engine loads"):
        engine_model("llama-3.1-8b")
    with pytest.raises(InputError, match="'demo' is a shipped shape without weights; say what"):
        engine_model("demo")


def test_the_road_from_a_datasheet_to_another_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where a policy here schedules as the engine does, what that costs is replayed; a bound that breaks is named."""
    monkeypatch.chdir(tmp_path)
    assert main(["profile", "llama-3.1-8b", "--datasheet", "h100-80gb", "--engine", "sglang", "-o", "p.json"]) == 0
    asked = ["--workload", "azure-2023-conv", "--latency-bound", "20s", "--policy", "rra", "-o", "plan.yaml"]
    assert main(["optimize", "--profile", "p.json", *asked]) == 0
    assert "for sglang: `exeplan export plan.yaml --to sglang`" in capsys.readouterr().out
    assert main(["export", "plan.yaml", "--to", "lmdeploy", "--model", "a/b", "--as", "compose", "-o", "c.yaml"]) == 0
    said = capsys.readouterr()
    assert said.out == "wrote c.yaml\n"
    assert "LMDeploy prefills at every step that has a place" in said.err
    assert "replayed as" not in said.err
    services = load(Path("c.yaml").read_text())["services"]
    assert services["lmdeploy"]["entrypoint"] == ["lmdeploy", "serve", "api_server"]
    shortest = Path("plan.yaml").read_text().replace("policy: rra", "policy: rra, order: sjf")
    Path("other.yaml").write_text(shortest.replace("seconds: 20.0", "seconds: 10.0"))
    assert main(["export", "other.yaml", "--to", "lightllm", "--model", "a/b"]) == 0
    said = capsys.readouterr()
    assert "note: replayed as LightLLM schedules it: " in said.err
    assert "; this breaks the bound 10 s on p99-length" in said.err
    assert main(["export", "plan.yaml", "--to", "sglang"]) == 2
    assert "'llama-3.1-8b' is a shipped shape without weights" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"workload": "gone.csv"}, "no workload 'gone.csv'"),
        ({"workload": None}, "the plan names no workload to replay\n"),
        ({"replay": None}, "the plan has no replay to compare with; `exeplan simulate PLAN -o PLAN` fills it in\n"),
    ],
)
def test_what_cannot_be_replayed_is_exported_all_the_same(
    changes: dict[str, object],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["profile", "llama-3.1-8b", "--datasheet", "h100-80gb", "-o", "p.json"]) == 0
    schedule = Schedule("rra", {"prefill_batch": 8, "decode_steps": 24, "decode_batch": 120}, order="sjf")
    plan = Plan(
        model="llama-3.1-8b",
        schedule=schedule,
        placement=single_stage(load_model_spec("llama-3.1-8b")),
        profile="p.json",
        workload="fixed:in=20;out=6",
        dtype="bfloat16",
        device="cuda",
        kv_cache_tokens=64_000,
        bound=Bound(seconds=10.0),
        replay=ESTIMATE,
    )
    save_plan(replace(plan, **changes), Path("plan.yaml"))  # type: ignore[arg-type]
    capsys.readouterr()
    assert main(["export", "plan.yaml", "--to", "lightllm", "--model", "a/b"]) == 0
    said = capsys.readouterr()
    assert "lightllm.server.api_server" in said.out
    assert f"note: what that costs is not known: {why}" in said.err
