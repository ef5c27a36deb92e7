"""`exeplan demo` does the whole job: profile, plan, serve, load, and predicted against measured for every policy."""

import subprocess
import sys
from pathlib import Path


def test_the_demo_ends_with_a_row_for_every_policy(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "exeplan", "demo", "--dir", str(tmp_path), "--budget", "5s", "--duration", "1s"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    table = done.stdout.split("== predicted against measured")[1]
    for policy in ("static", "orca", "rra"):
        row = next(line for line in table.splitlines() if line.startswith(f"{policy}("))
        assert row.count("%") == 2, row
        assert (tmp_path / f"{policy}.yaml").exists()
    assert "Traceback" not in done.stderr
