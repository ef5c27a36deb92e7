"""A SharedMemoryLink delivers every tensor whole and in order, and waits for a slow reader until its timeout."""

import threading

import pytest
import torch

from exeplan.runner.distributed.shared_link import LINK_BYTES, RING_BYTES, SharedMemoryLink
from exeplan.runner.ipc.collectives import SharedBuffer


@pytest.fixture
def ends():
    buffer = SharedBuffer(LINK_BYTES)
    sender, receiver = (SharedMemoryLink(buffer.path, timeout=120.0) for _ in range(2))
    buffer.close()
    return sender, receiver


def exchanged(ends, tensors):
    sender, receiver = ends
    thread = threading.Thread(target=lambda: [sender.send(x) for x in tensors])
    thread.start()
    received = [receiver.receive(torch.empty(x.shape, dtype=x.dtype)) for x in tensors]
    thread.join()
    return received


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_arrive_whole_and_in_order(ends, dtype):
    sizes = [(1, 8), (300, 64), (7, 3), (1000, 512), (2, 2)] * 30  # Several times around the ring.
    tensors = [torch.randn(size).to(dtype) for size in sizes]
    for sent, received in zip(tensors, exchanged(ends, tensors), strict=True):
        assert torch.equal(sent, received)


def test_a_tensor_may_be_larger_than_the_ring(ends):
    large = torch.arange(RING_BYTES // 4 * 2 + 5, dtype=torch.int32)
    (received,) = exchanged(ends, [large])
    assert torch.equal(received, large)


def test_a_view_of_a_tensor_is_sent_as_its_own_values(ends):
    x = torch.arange(24.0).view(4, 6)
    assert torch.equal(exchanged(ends, [x[:, 1:3]])[0], x[:, 1:3])


def test_a_sender_runs_ahead_until_the_ring_is_full():
    buffer = SharedBuffer(LINK_BYTES)
    sender = SharedMemoryLink(buffer.path, timeout=0.1)
    buffer.close()
    for _ in range(16):
        sender.send(torch.zeros(RING_BYTES // 16, dtype=torch.uint8))
    with pytest.raises(TimeoutError, match=r"did not move for 0\.1 s"):
        sender.send(torch.zeros(1))


def test_a_reader_waits_until_its_timeout():
    buffer = SharedBuffer(LINK_BYTES)
    receiver = SharedMemoryLink(buffer.path, timeout=0.1)
    buffer.close()
    with pytest.raises(TimeoutError, match="did not move"):
        receiver.receive(torch.empty(3))
