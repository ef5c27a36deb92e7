"""Planning is a pure function of plain data: it needs no torch, help needs not even numpy, and no file can run code."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import exeplan
from exeplan.core.profile import Profile, save_profile

PACKAGE = Path(exeplan.__file__).parent
# os.walk, because the package's folders are links, which Path.rglob does not follow before Python 3.13.
SOURCES = sorted(
    Path(folder) / name
    for folder, _, names in os.walk(PACKAGE, followlinks=True)
    for name in names
    if name.endswith(".py")
)


def loaded_after(code: str, folder: Path) -> set[str]:
    """The top-level modules that are there after this code has run in a fresh interpreter."""
    code = f"import sys\nout, sys.stdout = sys.stdout, sys.stderr\n{code}\nprint(*sys.modules, file=out)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=folder)
    return {name.partition(".")[0] for name in done.stdout.split()}


def command(argv: list[str]) -> str:
    """Code that runs a command line to its end."""
    return f"from exeplan.cli import main\ntry:\n    main({argv!r})\nexcept SystemExit:\n    pass"


@pytest.mark.parametrize("code", ["import exeplan", command(["--help"]), command(["optimize", "--help"])])
def test_import_and_help_load_nothing_heavy(code: str, tmp_path: Path) -> None:
    loaded = loaded_after(code, tmp_path)
    assert "exeplan" in loaded
    assert not loaded & {"torch", "numpy", "scipy", "pandas", "yaml", "optuna", "matplotlib", "fastapi", "aiohttp"}


def test_planning_and_replaying_need_no_torch(profile: Profile, tmp_path: Path) -> None:
    save_profile(profile, tmp_path / "p.json")
    plan = [
        "optimize",
        "--profile",
        "p.json",
        "--workload",
        "fixed:in=10;out=5",
        "--latency-bound",
        "1s",
        "-o",
        "a.yaml",
    ]
    (tmp_path / "t.csv").write_text("input_tokens,output_tokens\n" + "10,5\n" * 100)
    replay = command(["simulate", "a.yaml", "--timeline", "t.json"])
    loaded = loaded_after("\n".join([command(plan), replay, command(["drift", "--plan", "a.yaml", "t.csv"])]), tmp_path)
    assert (tmp_path / "t.json").exists()
    assert "numpy" in loaded
    assert not loaded & {"torch", "pandas", "optuna", "matplotlib", "fastapi", "transformers", "safetensors"}


def test_the_sources_are_all_looked_at() -> None:
    names = {path.relative_to(PACKAGE).as_posix() for path in SOURCES}
    assert {"cli.py", "simulator/cost.py", "runner/compute/weights/checkpoint.py", "policies/rra.py"} <= names


@pytest.mark.parametrize(
    "forbidden",
    [
        r"^\s*(import|from) (pickle|marshal|shelve|dill)\b",
        r"\btorch\.load\(",
        r"(?<![\w.])(eval|exec)\(",
        r"\byaml\.(unsafe_)?load\(",
        r"\bos\.system\(|shell=True",
        r"trust_remote_code",
    ],
)
def test_no_source_can_run_what_a_file_says(forbidden: str) -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in SOURCES
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1)
        if re.search(forbidden, line)
    ]
    assert found == []
