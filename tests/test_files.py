"""A file that a user names is read whole or refused in one sentence that says which file and where; writing replaces it
in one step."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exeplan import files
from exeplan.errors import InputError
from exeplan.files import read_json, read_text, read_yaml, shipped, shipped_names, write_text


def test_reads_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "a.json"
    write_text(path, json.dumps({"grüße": [1, 2]}))
    assert read_json(path) == {"grüße": [1, 2]}
    assert read_yaml(path) == {"grüße": [1, 2]}
    assert [entry.name for entry in path.parent.iterdir()] == ["a.json"]


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfhello")
    assert read_text(tmp_path / "a") == "hello"


@pytest.mark.parametrize(
    ("content", "read", "message"),
    [
        (b"\xff\xfe\x00", read_text, "is not UTF-8 text (byte 0)"),
        (b'{"a": 1,\n"b"', read_json, "is not valid JSON: Expecting ':' delimiter at line 2"),
        (b"[1]", read_json, "must hold a mapping of names to values, found list"),
        (b"[" * 100_000, read_json, "is not valid JSON: nested too deeply"),
        (b'{"a": ' + b"9" * 5_000 + b"}", read_json, "is not valid JSON: it holds an integer of thousands of digits"),
        (
            b"a: [1,\nb: {",
            read_yaml,
            "is not valid YAML: expected the node content, but found '<stream end>' at line 2",
        ),
        (b"", read_yaml, "must hold a mapping of names to values, found NoneType"),
        (b"a: \x00", read_yaml, "is not valid YAML: a control character at line 1"),
        (b"#" * 1_048_577, read_yaml, "is larger than 1 MiB"),
    ],
)
def test_a_damaged_file_is_refused_with_its_name(
    tmp_path: Path, content: bytes, read: Callable[[Path], Any], message: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(InputError) as refusal:
        read(path)
    assert str(refusal.value) == f"{path} {message}"


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no file .*nothing"):
        read_text(tmp_path / "nothing")
    with pytest.raises(InputError, match=r"is a directory, not a file$"):
        read_text(tmp_path)
    with pytest.raises(InputError, match=r"^cannot read .*: File name too long$"):
        read_text(tmp_path / ("x" * 300))


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "huge"
    with path.open("wb") as file:
        file.truncate(files.MAX_BYTES + 1)  # Sparse: takes no room.
    with pytest.raises(InputError, match=r"huge is larger than 256 MiB$"):
        read_text(path)


def test_what_cannot_be_written_leaves_the_old_file_alone(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^cannot write .*: it is a directory$"):
        write_text(tmp_path, "x")
    (tmp_path / "a").write_text("old")
    with pytest.raises(InputError, match=r"^cannot write .*a/b: (File exists|Not a directory)$"):
        write_text(tmp_path / "a" / "b", "x")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "old"


def test_a_link_stays_a_link_and_a_file_keeps_its_mode(tmp_path: Path) -> None:
    there, link = tmp_path / "folder" / "there.yaml", tmp_path / "link.yaml"
    write_text(there, "old")
    there.chmod(0o600)
    link.symlink_to(there)
    write_text(link, "new")
    assert link.is_symlink()
    assert there.read_text() == "new"
    assert stat.S_IMODE(there.stat().st_mode) == 0o600
    assert [entry.name for entry in there.parent.iterdir()] == ["there.yaml"]


def test_what_is_no_file_is_written_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "null"
    os.mkfifo(pipe)
    link.symlink_to("/dev/null")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(pipe, "text")
        assert os.read(reader, 100) == b"text"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    write_text(link, "text")
    assert link.is_char_device()
    write_text(Path("/dev/stdout"), "text\n")
    assert capsys.readouterr().out == "text\n"


@pytest.mark.parametrize("kind", ["models", "workloads"])
def test_shipped_names_are_files(kind: str) -> None:
    assert shipped_names(kind)
    assert all(shipped(kind, name).is_file() for name in shipped_names(kind))
