"""All-reduce of one tensor over two ranks: gloo against shared memory, median microseconds a call.

    python -m benchmarks.engine.collectives

A round is CALLS consecutive sums, timed together and divided; the figure is the median of the rounds. Both backends run
in the same two processes and alternate by round, with one compute thread each. Writes records/collectives.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.lib.record import write_record
from exeplan.runner.compute.weights.shard import Group
from exeplan.runner.ipc.collectives import DistributedGroup, SharedBuffer, SharedMemoryGroup, group_bytes

SIZES = (4 << 10, 64 << 10, 1 << 20)
"""Bytes."""
ROUNDS, CALLS, RANKS = 30, 100, 2


def run_rank(rank: int, folder: str, buffer: str) -> None:
    """One of the processes; rank 0 prints the median seconds by way and size."""
    torch.set_num_threads(1)
    where = (Path(folder) / "store").resolve().as_uri()
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=RANKS)
    groups: dict[str, Group] = {
        "gloo": DistributedGroup(),
        "shared memory": SharedMemoryGroup(buffer, rank, RANKS, 60.0),
    }
    seconds: dict[str, list[float]] = {}
    for size in SIZES:
        for _ in range(ROUNDS):
            for way, group in groups.items():
                seconds.setdefault(f"{way} {size}", []).append(time_sum(group, size))
    if rank == 0:
        print(json.dumps({key: statistics.median(values) for key, values in seconds.items()}))


@torch.inference_mode()
def time_sum(group: Group, size: int) -> float:
    """Seconds of one sum of `size` bytes, in one round."""
    x = torch.zeros(size // 4)
    group.all_reduce(x)
    start = time.perf_counter()
    for _ in range(CALLS):
        group.all_reduce(x)
    return (time.perf_counter() - start) / CALLS


def main() -> None:
    buffer = SharedBuffer(group_bytes(RANKS))
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "benchmarks.engine.collectives",
            "--folder",
            folder,
            "--buffer",
            buffer.path,
            "--rank",
        ]
        ranks = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True, env=environment)
            for rank in range(RANKS)
        ]
        answers = [rank.communicate()[0] for rank in ranks]
    found = json.loads(answers[0])
    print(f"{'bytes':>8} {'gloo us':>9} {'shared memory us':>17}")
    for size in SIZES:
        print(f"{size:8d} {found[f'gloo {size}'] * 1e6:9.1f} {found[f'shared memory {size}'] * 1e6:17.1f}")
    settings = {"ranks": RANKS, "rounds": ROUNDS, "calls": CALLS}
    print(f"record: {write_record('collectives', {**settings, 'median_seconds': found})}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int)
    parser.add_argument("--folder", default="")
    parser.add_argument("--buffer", default="")
    arguments = parser.parse_args()
    if arguments.rank is None:
        main()
    else:
        run_rank(arguments.rank, arguments.folder, arguments.buffer)
