"""Workers that join hear what each of them says, so that all multiply bfloat16 in one way, whatever each measured."""

import subprocess
import sys

import pytest
from torch.distributed import TCPStore

from exeplan.kernels import native

from ..processes import PATIENCE

_WORKER = """
import sys
import torch
from exeplan.kernels import native
from exeplan.runner.distributed.links import connect

port, rank, measured = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
native._measured_for_halves = lambda: measured
said = connect(
    ("127.0.0.1", port), "one", rank=rank, size=2, timeout=60, device=torch.device("cpu"), says=native.said_of_halves()
)
native.agree_on_halves(said)
print(native.fastest_for_halves())
"""


@pytest.mark.skipif(len(native.ways_of_halves()) < 2, reason="this processor multiplies bfloat16 in one way")
def test_ranks_that_measured_different_ways_use_that_of_the_first():
    first, second = native.ways_of_halves()[:2]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", _WORKER, str(store.port), str(rank), measured], stdout=subprocess.PIPE, text=True
        )
        for rank, measured in enumerate((first, second))
    ]
    assert [worker.communicate(timeout=PATIENCE)[0] for worker in workers] == [f"{first}\n"] * 2
