"""benchmarks/quality/mutants.py: each row fits the tree, and one that does not is refused by name; none is run."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.quality.mutants import MUTANTS, ROOT, Mutant, MutantError


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "sums.py").write_text("total = 2 * width + 1\nhalf = total / 2\n")
    (tmp_path / "test_sums.py").write_text("")
    return tmp_path


def test_each_mutant_applies_to_the_tree_once_and_is_a_program() -> None:
    for mutant in MUTANTS:
        text = mutant.applied(ROOT)
        assert text != (ROOT / mutant.file).read_text(), mutant.breaks
        ast.parse(text)


def test_every_room_that_plans_or_serves_has_mutants() -> None:
    rows = MUTANTS
    assert len(rows) >= 45
    assert len({row.breaks for row in rows}) == len({(row.file, row.old, row.new) for row in rows}) == len(rows)
    files = " ".join(row.file for row in rows)
    assert all(
        word in files for word in ("simulator", "policies", "search", "schedul", "queue_order", "sampling", "openai")
    )


def test_a_mutant_changes_its_fragment_and_nothing_else(tree: Path) -> None:
    mutant = Mutant("sums.py", "2 * width", "width", "halved", ("test_sums.py",))
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
def test_a_row_that_does_not_fit_is_refused(change: dict[str, object], message: str, tree: Path) -> None:
    mutant = Mutant("sums.py", "2 * width", "width", "halved", ("test_sums.py",))
    with pytest.raises(MutantError, match=message):
        replace(mutant, **change).applied(tree)
