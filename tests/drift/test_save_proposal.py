"""Lengths of plans that were replaced and not adopted are removed, unless a plan names them."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from exeplan.core.models.model import load_model_spec
from exeplan.core.plan import Plan, save_plan
from exeplan.core.schedule import Schedule, single_stage
from exeplan.drift.save_proposal import Cleared, remove_lengths
from exeplan.planner.load_problem import with_relative_references


@pytest.fixture
def saved(tmp_path: Path):
    """Writes a plan to next.yaml and its lengths next to it, and returns it as `save_proposal` does."""

    def save(fingerprint: str) -> Plan:
        lengths = tmp_path / f"next-lengths-{fingerprint}.csv"
        lengths.write_text("input_tokens,output_tokens\n1,1\n")
        schedule, placement = Schedule("orca", {"max_num_seqs": 4}), single_stage(load_model_spec("demo"))
        plan = Plan(model="demo", schedule=schedule, placement=placement, workload=str(lengths))
        save_plan(with_relative_references(plan, tmp_path / "next.yaml"), tmp_path / "next.yaml")
        return plan

    return save


def left(folder: Path) -> list[str]:
    return sorted(file.stem.rpartition("-")[2] for file in folder.glob("*.csv"))


def test_lengths_of_a_replaced_plan_are_removed_and_those_of_the_plan_on_disk_stay(saved, tmp_path):
    first, second = saved("aa1"), saved("bb2")
    removed = (Path(first.workload),)
    assert remove_lengths([first, second], [], tmp_path / "next.yaml") == Cleared(removed=removed, left=(second,))
    assert left(tmp_path) == ["bb2"]
    assert remove_lengths([first, second], [], tmp_path / "next.yaml") == Cleared(removed=(), left=(second,))
    assert left(tmp_path) == ["bb2"]


def test_what_a_plan_in_use_names_stays_however_it_names_it(saved, tmp_path, monkeypatch):
    first, second, _ = saved("aa1"), saved("bb2"), saved("cc3")
    monkeypatch.chdir(tmp_path)
    active = replace(first, workload="./next-lengths-aa1.csv")
    remove_lengths([first, second], [active], Path("next.yaml"))
    assert left(tmp_path) == ["aa1", "cc3"]


def test_what_a_copy_of_the_plan_names_stays(saved, tmp_path):
    first = saved("aa1")
    shutil.copy(tmp_path / "next.yaml", tmp_path / "friday")
    second, _ = saved("bb2"), saved("cc3")
    remove_lengths([first, second], [], tmp_path / "next.yaml")
    assert left(tmp_path) == ["aa1", "cc3"]


@pytest.mark.parametrize("refused", ["iterdir", "unlink"])
def test_lengths_that_cannot_be_removed_are_still_there(saved, tmp_path, monkeypatch, refused):
    plans = first, second = saved("aa1"), saved("bb2")

    def refuse(self: Path, **options):
        raise PermissionError(13, "Permission denied", str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, refused, refuse)
        assert remove_lengths(plans, [], tmp_path / "next.yaml") == Cleared(removed=(), left=(first, second))
    assert remove_lengths(plans, [], tmp_path / "next.yaml").left == (second,)
    assert left(tmp_path) == ["bb2"]


def test_a_file_that_may_not_be_looked_at_names_nothing(saved, tmp_path, monkeypatch):
    """Such as a link into a folder of another user's."""
    plans = _, second = saved("aa1"), saved("bb2")
    tmp_path.joinpath("theirs").symlink_to("/home/theirs/plan.yaml")
    look = os.stat

    def refuse(path, **options):
        if str(path).endswith("/theirs"):
            raise PermissionError(13, "Permission denied", str(path))
        return look(path, **options)

    monkeypatch.setattr(os, "stat", refuse)
    assert remove_lengths(plans, [], tmp_path / "next.yaml").left == (second,)
    assert left(tmp_path) == ["bb2"]
