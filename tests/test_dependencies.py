"""Every third-party module that exeplan imports is declared: in the base or in the extra that its room may need."""

import ast
import os
import re
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

import exeplan
from exeplan.cli import main
from exeplan.extras import EXTRA_OF, SERVING, missing

PACKAGE = Path(exeplan.__file__).parent
PROJECT = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DISTRIBUTION_OF = {
    "yaml": "pyyaml",
    "prometheus_client": "prometheus-client",
    "typing_extensions": "typing-extensions",
}
"""Where the name of a module is not that of its distribution."""
COMES_WITH_TORCH = {"triton"}
"""Builds of torch for GPUs bring it along, the others run without."""
ELSEWHERE = {("through_engine", "vllm_driver.py"), ("vllm_plugin", "scheduler.py")}
"""Modules that only the interpreter of vLLM's environment runs, by folder and name."""


def distributions(lines: list[str]) -> set[str]:
    """The names in a list of requirements."""
    names = (re.match(r"[A-Za-z0-9._-]+", line) for line in lines)
    return {name[0].lower() for name in names if name}


@pytest.fixture(scope="module")
def imported() -> dict[str, set[str]]:
    """The third-party modules, each with the rooms (`runner`, `planner`) that import it, lazily or not."""
    found: dict[str, set[str]] = defaultdict(set)
    for folder, _, names in os.walk(PACKAGE, followlinks=True):
        paths = [Path(folder) / name for name in names if name.endswith(".py")]
        for path in (path for path in paths if path.parts[-2:] not in ELSEWHERE):
            room = path.relative_to(PACKAGE).parts[0]
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    modules = [alias.name for alias in node.names]
                else:
                    modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                for module in {name.partition(".")[0] for name in modules}:
                    if module and module not in sys.stdlib_module_names and module != "exeplan":
                        found[module].add(room)
    return found


EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
BASE = distributions(PROJECT["dependencies"])


def test_imports_are_found(imported: dict[str, set[str]]) -> None:
    assert {"numpy", "torch", "yaml", "uvicorn"} <= set(imported)
    assert "runner" in imported["uvicorn"]


def test_a_module_that_is_imported_is_declared(imported: dict[str, set[str]]) -> None:
    undeclared = {
        module
        for module in set(imported) - COMES_WITH_TORCH
        if (name := DISTRIBUTION_OF.get(module, module)) not in BASE
        and name not in distributions(EXTRAS.get(EXTRA_OF.get(module, ""), []))
    }
    assert undeclared == set()


@pytest.mark.parametrize("name", sorted(BASE | distributions(EXTRAS["serve"]) | distributions(EXTRAS["analysis"])))
def test_a_distribution_that_is_declared_is_imported(name: str, imported: dict[str, set[str]]) -> None:
    assert name in {DISTRIBUTION_OF.get(module, module) for module in imported}


def test_rooms_that_only_plan_need_nothing_to_serve_with(imported: dict[str, set[str]]) -> None:
    serving = {"runner", "kernels", "profiler"}
    wrong = {
        module: rooms - serving
        for module, rooms in imported.items()
        if EXTRA_OF.get(module) == "serve" and rooms - serving - {"commands"}
    }
    assert wrong == {}


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["serve", "plan.yaml"], "serving needs torch, which is not installed: pip install 'exeplan[serve]'"),
        (["bench", "plan.yaml"], "a load needs torch, which is not installed: pip install 'exeplan[serve]'"),
        (["bench", "--url", "http://127.0.0.1:9"], "a load needs aiohttp, which is not installed: pip install"),
        (["demo"], "the demo needs torch, which is not installed: pip install 'exeplan[serve]'"),
        (["profile", "demo", "-o", "x.json"], "measuring needs torch, which is not installed: pip install"),
        (["profile", "demo", "-o", "x.json", "--device", "cpu"], "measuring needs torch, which is not installed"),
        (
            [
                "profile",
                "import",
                "t.csv",
                "--model",
                "demo",
                "--device",
                "x",
                "-o",
                "x.json",
                "--format",
                "aiconfigurator",
            ],
            "this needs pandas, which is not installed: pip install 'exeplan[analysis]'",
        ),
        (
            ["optimize", "--profile", "p.json", "--workload", "S", "--latency-bound", "1s", "--plot", "f.png"],
            "drawing needs matplotlib, which is not installed: pip install 'exeplan[analysis]'",
        ),
        (
            ["optimize", "--profile", "p.json", "--workload", "S", "--latency-bound", "1s", "--method", "bayesian"],
            "--method bayesian needs optuna, which is not installed: pip install 'exeplan[analysis]'",
        ),
        (
            ["simulate", "plan.yaml", "--timeline", "t.png"],
            "drawing needs matplotlib, which is not installed: pip install 'exeplan[analysis]'",
        ),
    ],
)
def test_a_command_without_its_packages_says_which_extra_to_install(
    argv: list[str],
    sentence: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (folder / "t.csv").write_text("m,n,k,latency\n1,2,3,4\n")
    for module in EXTRA_OF:
        monkeypatch.setitem(sys.modules, module, None)
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"exeplan {argv[0]}: {sentence}")
    assert (captured.out, captured.err.count("\n")) == ("", 1)


def test_a_missing_package_of_no_extra_is_a_fault_of_ours(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "exeplan.planner.reports.plan_diff", None)
    with pytest.raises(ModuleNotFoundError):
        main(["diff", "a.yaml", "b.yaml"])


def test_what_serving_checks_is_part_of_its_extra() -> None:
    assert {EXTRA_OF[module] for module in SERVING} == {"serve"}


def test_all_extras_that_are_missing_are_named_at_once() -> None:
    assert missing("the demo", "torch", "fastapi", "matplotlib") == (
        "the demo needs torch, which is not installed: pip install 'exeplan[serve]' 'exeplan[analysis]'"
    )
