"""An exporter is one file in the room: a toy one in a folder of its own is found, loaded and used."""

from pathlib import Path

import pytest

import exeplan.export
from exeplan.core.model import load_model_spec
from exeplan.core.plan import Plan
from exeplan.core.schedule import Schedule, single_stage
from exeplan.errors import InputError
from exeplan.export import exporter_names, load_exporter

TOY = '''"""A toy engine that takes one number."""

from exeplan.export.interface import Export


def export(plan, spec):
    return Export(command=("toy", spec.name, f"--max-num-seqs={plan.schedule['max_num_seqs']}"), remarks=("no chunks",))
'''


def test_there_is_no_exporter_yet() -> None:
    assert exporter_names() == ()
    with pytest.raises(InputError, match="no exporter 'vllm'; there are none"):
        load_exporter("vllm")


def test_a_file_in_the_room_is_an_exporter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy.py").write_text(TOY)
    monkeypatch.setattr(exeplan.export, "__path__", [*exeplan.export.__path__, str(tmp_path)])
    assert exporter_names() == ("toy",)
    spec = load_model_spec("demo")
    plan = Plan(model="demo", schedule=Schedule("orca", {"max_num_seqs": 8}), placement=single_stage(spec))
    exported = load_exporter("toy").export(plan, spec)
    assert exported.command == ("toy", "demo", "--max-num-seqs=8")
    assert (exported.files, exported.remarks) == ({}, ("no chunks",))
    with pytest.raises(InputError, match="no exporter 'vllm'; there are toy"):
        load_exporter("vllm")
