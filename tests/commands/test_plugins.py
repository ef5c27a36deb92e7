"""A command is one file in the room: a toy one in its own folder is listed by --help and runs."""

import re
from pathlib import Path

import pytest

from exeplan import commands
from exeplan.cli import main

TOY = '''"""print a greeting

A longer text.
"""

POSITION = 15


def add_arguments(parser):
    parser.add_argument("name")


def run(args):
    print(f"hello {args.name}")
    return 3
'''


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "greet.py").write_text(TOY)
    monkeypatch.setattr(commands, "__path__", [*commands.__path__, str(tmp_path)])


@pytest.mark.usefixtures("toy")
def test_a_file_in_the_room_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["greet", "reader"]) == 3
    assert capsys.readouterr().out == "hello reader\n"


@pytest.mark.usefixtures("toy")
def test_commands_stand_by_their_positions(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = re.findall(r"^    (\w+)", capsys.readouterr().out, re.MULTILINE)
    first = ["profile", "calibrate", "convert", "greet", "optimize"]
    assert listed == [
        *first,
        "compare",
        "simulate",
        "diff",
        "drift",
        "export",
        "watch",
        "serve",
        "replicas",
        "bench",
        "demo",
    ]
