"""Files are looked at before long work: what can be written passes, what cannot is named."""

import os
from pathlib import Path

import pytest

from exeplan.errors import InputError
from exeplan.outputs import check_output


def test_what_can_be_written_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tmp_path / "link.yaml"
    link.symlink_to(tmp_path / "plan.yaml")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "new" / "plan.yaml", link, Path("/dev/null"), tmp_path / "pipe"):
        check_output(path)
    writable = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != "/dev" and writable(path, mode))
    check_output(Path("/dev/null"))


def test_what_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for path, why in ((tmp_path, "it is a directory"), (tmp_path / "file" / "plan.yaml", "file is not a directory")):
        with pytest.raises(InputError, match=why):
            check_output(path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for path in (tmp_path / "plan.yaml", Path("/dev/null")):
        with pytest.raises(InputError, match=f"cannot write {path}: Permission denied"):
            check_output(path)
