"""Of a long trace the first requests are replayed, and the answer says which part of it they are."""

import json
from pathlib import Path

import pytest

from exeplan.cli import main
from exeplan.planner.problems import replays
from exeplan.planner.problems.replays import TracePart, most_of_trace

PART = TracePart(num_requests=101, of_requests=301, seconds=3600.0, of_seconds=10800.0)
SAID = "the first 101 of 301 requests of the trace, 1 of 3 hours, were replayed"
AS_JSON = {"num_requests": 101, "of_requests": 301, "seconds": 3600.0, "of_seconds": 10800.0}
OPTIMIZE = ["optimize", "--profile", "p.json", "--workload", "trace.csv", "--arrivals", "trace"]
OPTIMIZE += ["--latency-bound", "1s", "--policy", "orca", "--max-num-seqs", "8"]


@pytest.fixture
def folder(folder: Path) -> Path:
    """With a trace of three hours."""
    rows = "".join(f"{36 * number},20,6\n" for number in range(301))
    (folder / "trace.csv").write_text(f"arrival_s,input_tokens,output_tokens\n{rows}")
    return folder


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(list(argv)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(90.0, "30 of 90 seconds"), (240.0, "1.33 of 4 minutes"), (5400.0, "30 of 90 minutes"), (10800.0, "1 of 3 hours")],
)
def test_times_are_told_in_units_that_suit_them(seconds: float, said: str) -> None:
    part = TracePart(num_requests=10_000, of_requests=30_000, seconds=seconds / 3, of_seconds=seconds)
    assert str(part) == f"the first 10,000 of 30,000 requests of the trace, {said}, were replayed"


def test_several_replicas_replay_more_of_a_trace_up_to_a_limit() -> None:
    assert [most_of_trace(replicas) for replicas in (1, 2, 4, 8)] == [10_000, 20_000, 40_000, 40_000]


def test_optimize_says_which_part_of_a_trace_it_replayed(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = printed(capsys, *OPTIMIZE)
    assert "of the trace" not in whole
    assert json.loads(printed(capsys, *OPTIMIZE, "--json"))["trace_part"] is None
    monkeypatch.setattr(replays, "_MOST_ARRIVING", 101)
    assert str(PART) == SAID
    assert SAID in printed(capsys, *OPTIMIZE)
    assert json.loads(printed(capsys, *OPTIMIZE, "--json"))["trace_part"] == AS_JSON


def test_simulate_says_which_part_of_a_trace_it_replayed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed(capsys, *OPTIMIZE, "-o", "plan.yaml")
    assert "of the trace" not in printed(capsys, "simulate", "plan.yaml")
    assert json.loads(printed(capsys, "simulate", "plan.yaml", "--json"))["trace_part"] is None
    assert SAID in printed(capsys, "simulate", "plan.yaml", "--requests", "101")
    body = json.loads(printed(capsys, "simulate", "plan.yaml", "--requests", "101", "--json"))
    assert body["trace_part"] == AS_JSON
