"""`exeplan demo` runs everything: profile, plan, slices of load, and predicted against measured for every policy."""

import re
import subprocess
import sys
from pathlib import Path

import pytest


def demo(folder: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "exeplan", "demo", "--dir", str(folder), "--budget", "3s", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


def test_the_demo_ends_with_two_errors_for_every_policy_and_a_picture(folder: Path) -> None:
    trace = folder / "short.csv"
    trace.write_text("\n".join(["input_tokens,output_tokens", *(f"{5 + n},{1 + n % 9}" for n in range(40)), "20,400"]))
    done = demo(folder, "--workload", str(trace), "--duration", "1s")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    table = done.stdout.split("== 4. predicted against measured")[1]
    for policy in ("static", "orca", "rra"):
        row = next(line for line in table.splitlines() if line.startswith(f"{policy}("))
        assert len(re.findall(r"[+-]\d+\.\d %", row)) >= 2, row
        assert (folder / f"{policy}.yaml").exists()
    assert "its speed moved by" in table
    # A slice is shorter than an answer of the longest: what its latency is from is said.
    assert "no request of the 99th-percentile length, 400 tokens, began and ended" in done.stdout
    assert len(re.findall("serves [0-9.]+ times what|within noise|too short to tell", table)) == 2
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--duration", "0s", "--duration must be above zero, found '0s'"),
        ("--duration", "inf", "--duration must be at most 30 days (720h), found 'inf'"),
        ("--budget", "inf", "--budget must be at most 30 days (720h), found 'inf'"),
        ("--dir", "README.md", f"cannot write README.md/demo.png: {Path('README.md').resolve()} is not a directory"),
        ("--latency-bound", "soon", "--latency-bound must be a duration such as 2s, 500ms or 1m, found 'soon'"),
    ],
)
def test_a_wrong_duration_is_one_sentence_before_any_work(folder: Path, option: str, value: str, message: str) -> None:
    done = demo(folder, option, value)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"exeplan demo: {message}\n")
