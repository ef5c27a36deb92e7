"""The documentation holds: its scripts run, its generated pages are up to date, and every page is reachable."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from docs.make_pictures import predicted_rows
from docs.make_results import PAGE, page
from exeplan.cli import _parse
from exeplan.policies.interface import _members

DOCS = Path(__file__).parents[2] / "docs"


def test_the_results_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m docs.make_results"


def test_the_picture_of_predictions_has_a_point_for_each_case_of_the_record() -> None:
    rows = predicted_rows()
    assert {row["policy"] for row in rows} >= {"rra", "orca", "static"}
    assert all(0 < row["measured"] < 2 * row["predicted"] for row in rows)


def test_the_tutorial_runs(tmp_path: Path) -> None:
    script = [sys.executable, str(DOCS / "examples" / "tutorial.py"), str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True, check=False, cwd=DOCS.parent)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"frontier.png", "timeline.png", "opt-13b.json", "plan.yaml"}
    assert "infeasible: latency bound 20 s" in done.stdout


def test_every_command_of_the_docs_exists() -> None:
    """`python -m benchmarks.x` and `python -m docs.x` are modules, and files named in backticks are there."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in (*DOCS.rglob("*.md"), DOCS.parent / "README.md"))
    for module in re.findall(r"python -m ((?:benchmarks|docs)\.[\w.]+)", text):
        place = DOCS.parent / module.replace(".", "/")
        assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), module
    named = set(re.findall(r"`((?:exeplan|runner|simulator|profiler|kernels|tests|benchmarks|docs)/[\w/.-]+)`", text))
    assert [path for path in sorted(named) if not (DOCS.parent / path).exists()] == []


def _shell_commands() -> list[str]:
    """Lines of the blocks of shell that call exeplan, continued lines as one."""
    pages = (*DOCS.rglob("*.md"), DOCS.parent / "README.md")
    blocks = [block for page in pages for block in re.findall(r"```bash\n(.*?)```", page.read_text("utf-8"), re.S)]
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return sorted({line for line in lines if line.startswith("exeplan ") and "--help" not in line})


@pytest.mark.parametrize("line", _shell_commands())
def test_the_options_of_every_command_in_a_block_are_there(line: str) -> None:
    words = shlex.split(line.partition(" | ")[0], comments=True)
    assert _parse(words[1:]).command == words[1]


def test_what_a_policy_defines_is_in_its_table() -> None:
    table = (DOCS / "how-to" / "add-a-policy.md").read_text(encoding="utf-8")
    assert [name for name in _members() if not re.search(rf"`{name}\b", table)] == []
