"""The wheel and the sdist hold every file of the package: rooms behind links, plans, the page, the typing marker."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import exeplan

ROOT = Path(exeplan.__file__).parents[1]
LINKED = ("kernels", "plans", "profiler", "runner", "simulator")
MOST_BYTES = 20e6
BUILD = "from setuptools import build_meta as b; b.build_wheel('dist'); b.build_sdist('dist')"


def package_files() -> set[str]:
    """The files of the package as they are installed, those behind its links included."""
    return {
        (Path(folder) / name).relative_to(ROOT).as_posix()
        for folder, _, names in os.walk(ROOT / "exeplan", followlinks=True)
        for name in names
        if "__pycache__" not in folder and not name.endswith(".so")  # Built in place.
    }


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with a wheel and an sdist, built from a copy of the tree with the links that it has."""
    copy = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for folder in ("exeplan", *LINKED):
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    project = copy / "pyproject.toml"
    project.write_text(project.read_text().replace('"-O3"', '"-O0"'))  # What is built is listed, and not run.
    subprocess.run([sys.executable, "-c", BUILD], cwd=copy, check=True, capture_output=True)
    return copy / "dist"


def test_what_must_be_there_is_in_the_tree() -> None:
    needed = {
        "exeplan/py.typed",
        "exeplan/kernels/products/linear.py",
        "exeplan/runner/server/page.html",
        "exeplan/plans/models/demo.yaml",
        "exeplan/plans/workloads/alpaca.yaml",
        "exeplan/plans/calibration/serving.yaml",
        "exeplan/runner/deploy/Containerfile",
    }
    assert needed <= package_files()


def test_the_wheel_is_the_package(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        metadata = next(name for name in wheel.namelist() if name.endswith("METADATA"))
        lines = wheel.read(metadata).decode().splitlines()
    assert {name for name in names if not name.endswith(".so")} == package_files()
    assert len([name for name in names if name.endswith(".so")]) == (1 if shutil.which("cc") else 0)
    needed = [line for line in lines if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert not any("torch" in line for line in needed)


def test_a_mixture_is_planned_from_the_wheel_alone(built: Path, tmp_path: Path) -> None:
    wheel = next(built.glob("*.whl"))
    assert wheel.stat().st_size < MOST_BYTES
    installed, empty = tmp_path / "installed", tmp_path / "empty"
    empty.mkdir()
    with zipfile.ZipFile(wheel) as file:
        file.extractall(installed)
    model = ["--model", "Qwen/Qwen3-235B-A22B-FP8", "--cluster", "h100", "--engine", "vllm"]
    command = ["optimize", *model, "--workload", "S", "--latency-bound", "30s", "--policy", "orca"]
    program = (
        f"import exeplan, sys; assert exeplan.__file__.startswith({str(installed)!r}); from exeplan.cli import main; "
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"{program}sys.exit(main({command!r}))"],
        cwd=empty,
        env={**os.environ, "PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "corrected by measured serving runs" in done.stdout
    assert not list(empty.iterdir())


def test_the_sdist_holds_the_package_as_files(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        files = {member.name.partition("/")[2] for member in sdist if member.isfile()}
        assert not [member.name for member in sdist if member.issym()]
    assert package_files() | {"pyproject.toml", "LICENSE", "README.md"} <= files
    assert not [name for name in files if name.startswith("tests/")]
