"""Links are timed between processes of their own, of which none is left: not in the end, not after a failure, and not
when the profiler is interrupted or killed."""

import multiprocessing
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from exeplan.core.models.model import model_spec
from exeplan.profiler.multi_device.links import _mean, link_rows
from exeplan.profiler.multi_device.rank_job import RankJob

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 50,
    "max_position_embeddings": 64,
}
SUMS = RankJob(
    op="all_reduce",
    size=2,
    spec=model_spec(CONFIG, name="tiny"),
    dtype="float32",
    device="cpu",
    num_threads=1,
    num_tokens=(1, 60),
    seconds=0.1,
)
PROFILER = f"""
from exeplan.core.models.model import model_spec
from exeplan.profiler.multi_device.rank_job import RankJob
from exeplan.profiler.multi_device.links import link_rows
if __name__ == "__main__":
    job = RankJob(op="all_reduce", size=2, spec=model_spec({CONFIG!r}, name="tiny"), dtype="float32", device="cpu",
              num_threads=1, num_tokens=(1,), seconds=600.0)
    link_rows(job)
"""


def test_sums_of_a_group_are_rows_by_bytes() -> None:
    rows = link_rows(SUMS)
    assert [(row.op, row.phase, row.bytes, row.tensor_parallel_size) for row in rows] == [
        ("all_reduce", "intra", 4 * 32, 2),
        ("all_reduce", "intra", 60 * 4 * 32, 2),
    ]
    assert all(row.seconds > 0 and row.repeats > 1 for row in rows)
    assert not multiprocessing.active_children()


def test_a_sum_takes_as_long_as_on_the_rank_that_came_last() -> None:
    early, late = [0.9, 0.1, 0.5], [0.1, 0.8, 0.1]
    assert _mean([early, late], "all_reduce") == pytest.approx(0.1)


def test_sends_are_rows_of_no_degree() -> None:
    rows = link_rows(replace(SUMS, op="send"))
    assert [(row.op, row.bytes, row.tensor_parallel_size) for row in rows] == [("send", 128, 1), ("send", 7680, 1)]
    assert all(row.seconds > 0 for row in rows)
    assert not multiprocessing.active_children()


def test_a_rank_that_fails_is_named_and_ends_the_others() -> None:
    with pytest.raises(ChildProcessError, match=r"rank \d of 2 failed to time all_reduce: .*device"):
        link_rows(replace(SUMS, device="nonsense"))
    assert not multiprocessing.active_children()


def test_an_interrupt_leaves_no_process() -> None:
    def interrupt_once_there_are_ranks() -> None:
        while len(multiprocessing.active_children()) < 2:
            time.sleep(0.01)
        time.sleep(0.5)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt_once_there_are_ranks, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        link_rows(replace(SUMS, seconds=600.0))
    assert not multiprocessing.active_children()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the processes of a session in /proc")
def test_a_killed_profiler_leaves_no_process(tmp_path: Path) -> None:
    script = tmp_path / "profiler.py"
    script.write_text(PROFILER)
    profiler = subprocess.Popen([sys.executable, str(script)], start_new_session=True)
    # The profiler, its fork server with the resource tracker, and two ranks that have begun.
    assert soon(lambda: len(processes_of(profiler.pid)) >= 5)
    profiler.send_signal(signal.SIGKILL)
    profiler.wait()
    assert soon(lambda: not processes_of(profiler.pid))


def processes_of(session: int) -> list[int]:
    """Ids of the living processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # It has just ended.
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def soon(holds: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether it holds within that time."""
    ended = time.monotonic() + seconds
    while time.monotonic() < ended:
        if holds():
            return True
        time.sleep(0.05)
    return False
