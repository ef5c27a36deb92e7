"""benchmarks/mutants.py: each of its rows fits the tree, and one that does not is refused by name; nothing is run."""

import ast
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def mutants() -> ModuleType:
    """The script, which finds what benchmarks share as it does when it is run."""
    folder = str(ROOT / "benchmarks")
    sys.path.insert(0, folder)
    try:
        return import_module("mutants")
    finally:
        sys.path.remove(folder)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "sums.py").write_text("total = 2 * width + 1\nhalf = total / 2\n")
    (tmp_path / "test_sums.py").write_text("")
    return tmp_path


def test_each_mutant_applies_to_the_tree_once_and_is_a_program(mutants: ModuleType) -> None:
    for mutant in mutants.MUTANTS:
        text = mutant.applied(ROOT)
        assert text != (ROOT / mutant.file).read_text(), mutant.breaks
        ast.parse(text)


def test_every_room_that_plans_or_serves_has_mutants(mutants: ModuleType) -> None:
    rows = mutants.MUTANTS
    assert len(rows) >= 45
    assert len({row.breaks for row in rows}) == len({(row.file, row.old, row.new) for row in rows}) == len(rows)
    files = " ".join(row.file for row in rows)
    assert all(
        word in files for word in ("simulator", "policies", "search", "schedul", "order", "sampling", "protocol")
    )


def test_a_mutant_changes_its_fragment_and_nothing_else(mutants: ModuleType, tree: Path) -> None:
    mutant = mutants.Mutant("sums.py", "2 * width", "width", "halved", ("test_sums.py",))
    assert mutant.applied(tree) == "total = width + 1\nhalf = total / 2\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"old": "3 * width"},
            r"sums.py holds '3 \* width' 0 times, so 'halved' cannot be tried; correct the row's frag",
        ),
        ({"old": "total"}, "sums.py holds 'total' 2 times, so 'halved' cannot be tried"),
        ({"file": "gone.py"}, "gone.py does not exist, so 'halved' cannot be tried; correct the row's file"),
        ({"tests": ("test_gone.py",)}, "no test file test_gone.py for 'halved'; correct the row's tests"),
    ],
)
def test_a_row_that_does_not_fit_is_refused(
    change: dict[str, object], message: str, mutants: ModuleType, tree: Path
) -> None:
    mutant = mutants.Mutant("sums.py", "2 * width", "width", "halved", ("test_sums.py",))
    with pytest.raises(mutants.MutantError, match=message):
        replace(mutant, **change).applied(tree)
