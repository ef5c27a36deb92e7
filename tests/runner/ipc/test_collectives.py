"""Sums and gathers are equal on all ranks, to the bit, in shared memory and over torch.distributed."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from exeplan.runner.ipc.collectives import SharedBuffer, SharedMemoryGroup, group_bytes

RANKS = """
import json, os, sys, torch, torch.distributed as dist
from safetensors.torch import save_file
from exeplan.runner.ipc.collectives import DistributedGroup, SharedMemoryGroup, group_bytes

def run(way, rank, size, place, output):
    torch.set_num_threads(1)
    if way == "shared":
        group = SharedMemoryGroup(place, rank, size, 120.0)
    else:
        dist.init_process_group("gloo", store=dist.FileStore(place, size), rank=rank, world_size=size)
        group = DistributedGroup()
    assert (group.rank, group.size) == (rank, size)
    found = {}
    with torch.inference_mode():
        for round in range(200):  # Both slots in turn, at whatever pace.
            total = group.all_reduce(torch.full((1000,), float(rank + round)))
            assert (total == sum(range(size)) + size * round).all(), round
        for name, (shape, dtype) in messages.items():
            x = torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(getattr(torch, dtype))
            found[f"{name} sum"] = group.all_reduce(x.clone())
            found[f"{name} gathered"] = group.all_gather(x)
            found[f"{name} strided"] = group.all_reduce(x.t()).contiguous()
    save_file(found, output)

messages, groups = json.loads(sys.argv[1])
for way, place, outputs in groups:
    ranks = []
    for rank, output in enumerate(outputs):
        ranks.append(os.fork())
        if not ranks[-1]:
            run(way, rank, len(outputs), place, output)
            os._exit(0)
    assert [os.waitpid(pid, 0)[1] for pid in ranks] == [0] * len(ranks), way
"""
MESSAGES = {
    "small": ((3, 7), "float32"),
    "short": ((5, 64), "bfloat16"),
    "long": ((3, 700_000), "float32"),
    "none": ((0, 4), "float32"),
}


GROUPS = {"shared-2": ("shared", 2), "shared-3": ("shared", 3), "gloo-2": ("gloo", 2)}


@pytest.fixture(scope="module")
def gathered(tmp_path_factory) -> dict[str, list[dict[str, torch.Tensor]]]:
    """What each rank of each group got from the others; their process imports torch once and forks them."""
    folder = tmp_path_factory.mktemp("ranks")
    buffers = {name: SharedBuffer(group_bytes(size)) for name, (_, size) in GROUPS.items()}
    outputs = {name: [str(folder / f"{name}-{rank}") for rank in range(size)] for name, (_, size) in GROUPS.items()}
    places = {
        name: buffers[name].path if way == "shared" else str(folder / "store") for name, (way, _) in GROUPS.items()
    }
    groups = [(way, places[name], outputs[name]) for name, (way, _) in GROUPS.items()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run([sys.executable, "-c", RANKS, json.dumps([MESSAGES, groups])], env=environment, check=True)
    for buffer in buffers.values():
        buffer.close()
    return {name: [load_file(output) for output in files] for name, files in outputs.items()}


@pytest.fixture(params=GROUPS)
def found(request, gathered) -> list[dict[str, torch.Tensor]]:
    return gathered[request.param]


@pytest.mark.parametrize("name", MESSAGES)
def test_all_ranks_get_the_sum_and_all_parts_in_rank_order(name, found):
    shape, dtype = MESSAGES[name]
    inputs = [
        torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(getattr(torch, dtype))
        for rank in range(len(found))
    ]
    expected = inputs[0]
    for x in inputs[1:]:
        expected = expected + x
    for mine in found:
        assert torch.equal(mine[f"{name} sum"], found[0][f"{name} sum"])
        torch.testing.assert_close(mine[f"{name} sum"], expected)
        assert torch.equal(mine[f"{name} strided"], mine[f"{name} sum"].t())
        assert torch.equal(mine[f"{name} gathered"], torch.cat(inputs, -1))


@pytest.fixture
def buffer():
    shared = SharedBuffer(group_bytes(2))
    yield shared
    shared.close()


def test_a_muted_rank_waits_for_no_other(buffer):
    group, x = SharedMemoryGroup(buffer.path, 0, 2, timeout=0.01), torch.ones(3, 4)
    with group.muted():
        assert group.all_reduce(x.clone()).shape == (3, 4)
        assert group.all_gather(x).shape == (3, 8)
    with pytest.raises(TimeoutError):
        group.all_reduce(x)


def test_a_rank_that_never_answers_is_named_after_the_timeout(buffer):
    group = SharedMemoryGroup(buffer.path, 0, 2, timeout=0.05)
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"rank 1 of a group of 2 did not answer within 0\.05 s: it is gone, or it"):
        group.all_reduce(torch.ones(4))
    assert time.monotonic() - start >= 0.05


def test_a_buffer_is_gone_once_it_is_closed_and_stays_with_processes_that_attached():
    shared = SharedBuffer(group_bytes(2))
    group = SharedMemoryGroup(shared.path, 1, 2, timeout=0.01)
    shared.close()
    with pytest.raises(FileNotFoundError):
        SharedMemoryGroup(shared.path, 0, 2, timeout=0.01)
    with pytest.raises(TimeoutError):
        group.all_gather(torch.ones(4))


def test_a_buffer_for_another_number_of_ranks_is_refused(buffer):
    with pytest.raises(ValueError, match="is not for 3 ranks"):
        SharedMemoryGroup(buffer.path, 0, 3, timeout=1.0)
