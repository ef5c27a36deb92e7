"""Keys and values arrive in the blocks of their rows while the pass that makes them runs, however stages are split."""

import queue
import threading
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from exeplan.core.handover import PIECE_BYTES, num_receivers, pieces
from exeplan.core.models.model import load_model_spec
from exeplan.core.schedule import Stage
from exeplan.runner.compute.passes.kv_cache import KVCache
from exeplan.runner.compute.weights.shard import Shard
from exeplan.runner.distributed.kv_transfer import (
    Expected,
    Receiver,
    Sender,
    Wire,
    kv_heads_of,
    transfer_pairs,
    transfers,
)
from exeplan.runner.distributed.links import Seat, stage_ranks
from exeplan.runner.distributed.shared_link import LINK_BYTES
from exeplan.runner.ipc.collectives import SharedBuffer

SPEC = load_model_spec("demo")
TOKENS = 1200
"""Of which one layer of all heads is more than a piece."""
CPU = torch.device("cpu")


def stages(widths, phase, first):
    found, cut = [], np.linspace(0, SPEC.num_layers, len(widths) + 1).astype(int).tolist()
    for number, width in enumerate(widths):
        devices = tuple(range(first, first := first + width))
        found.append(Stage(devices=devices, layers=(cut[number], cut[number + 1]), phase=phase))
    return found


class Split:
    """All ends of a placement in one process, over shared memory."""

    def __init__(self, prefill, decode):
        self.placement = (*stages(prefill, "prefill", 0), *stages(decode, "decode", sum(prefill)))
        buffers = {f"{a}-{b}": SharedBuffer(LINK_BYTES) for a, b in transfer_pairs(SPEC, self.placement)}
        self.paths = {name: buffer.path for name, buffer in buffers.items()}
        self.failures, self.received = queue.SimpleQueue(), queue.SimpleQueue()
        self.senders, self.receivers = [], []
        for number, ranks in enumerate(stage_ranks(self.placement)):
            for index, rank in enumerate(ranks):
                self._end(Seat(rank, number, index), self.placement[number])
        for buffer in buffers.values():
            buffer.close()

    def _end(self, seat, stage):
        wire = Wire(seat.rank, None, self.paths, timeout=20.0)
        heads = kv_heads_of(SPEC, stage.tensor_parallel_size, seat.rank_in_stage)
        if stage.phase == "prefill":
            sender = Sender(SPEC, self.placement, seat, wire, CPU)
            sender.start(self.failures.put)
            self.senders.append((stage, heads, sender))
            return
        group = SimpleNamespace(size=stage.tensor_parallel_size, rank=seat.rank_in_stage)
        shard = Shard(layers=stage.layers, encoder_layers=(0, 0), first=True, last=True, group=group)
        cache = KVCache(SPEC, TOKENS // 16 + 4, torch.float32, CPU, shard=shard)
        runner = SimpleNamespace(cache=cache, device=CPU, activation=torch.float32)
        receiver = Receiver(SPEC, self.placement, seat, wire, runner)
        receiver.start(self.received.put, self.failures.put)
        self.receivers.append((stage, heads, cache, receiver))

    def expect(self, number):
        for _, _, _, receiver in self.receivers:
            receiver.expect(Expected(number, TOKENS))

    def grant(self, number, slots):
        for _, _, _, receiver in self.receivers:
            receiver.grant(number, slots.copy())

    def compute(self, kv_LNMD):
        """A pass: each stage's layers on all its ranks at once."""
        threads = [threading.Thread(target=self._put, args=(kv_LNMD, *end)) for end in self.senders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _put(self, kv_LNMD, stage, heads, sender):
        for number, layer in enumerate(range(*stage.layers)):
            sender.put_layer(number, of_heads(kv_LNMD[layer], heads))

    def wait(self):
        for _ in self.receivers:
            self.received.get(timeout=20.0)
        assert self.failures.empty()


def of_heads(kv_NMD, heads):
    rows = [*heads, *(SPEC.num_kv_heads + head for head in heads)]
    return kv_NMD[:, rows]


def stored(cache, heads, slots):
    """Keys and values of these slots, `[L, N, 2K, D]`."""
    both = torch.stack([cache.both_tables(layer) for layer in range(len(cache._layers))])
    return both.view(len(both), 2 * len(heads), cache.num_slots, SPEC.head_dim)[:, :, slots].transpose(1, 2)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [([1], [1]), ([2], [1]), ([1], [2]), ([1, 1], [2]), ([2, 2], [1, 1, 1]), ([4], [2])],
    ids=str,
)
def test_every_rank_that_decodes_gets_its_layers_and_heads(prefill, decode):
    split = Split(prefill, decode)
    slots = np.random.default_rng(0).permutation(TOKENS + 16)[:TOKENS]
    kv_LNMD = torch.randn(SPEC.num_layers, TOKENS, 2 * SPEC.num_kv_heads, SPEC.head_dim)
    for number, late in ((1, False), (2, True)):
        split.expect(number)
        if not late:
            split.grant(number, slots)
        split.compute(number * kv_LNMD)
        split.wait()
        if late:  # The worker was in a pass, and the rows had no blocks yet.
            split.grant(number, slots)
        for stage, heads, cache, _ in split.receivers:
            expected = torch.stack([of_heads(kv_NMD, heads) for kv_NMD in kv_LNMD[slice(*stage.layers)]])
            assert torch.equal(stored(cache, heads, slots), number * expected)


def test_pieces_arrive_before_the_pass_has_ended_and_what_is_dropped_meanwhile_is_not_stored():
    split = Split([1], [1])
    ((_, heads, sender),), ((_, _, cache, receiver),) = split.senders, split.receivers
    kv_LNMD, slots = torch.ones(SPEC.num_layers, TOKENS, 2 * SPEC.num_kv_heads, SPEC.head_dim), np.arange(TOKENS)
    split.expect(1)
    split.grant(1, slots)
    first = threading.Thread(target=lambda: [sender.put_layer(0, kv_LNMD[0]), sender.put_layer(1, kv_LNMD[1])])
    first.start()
    first.join()
    while not cache.both_tables(1)[1, -TOKENS:].any():
        assert split.failures.empty()
    receiver.drop(1, 0, 100)
    for layer in range(2, SPEC.num_layers):
        sender.put_layer(layer, kv_LNMD[layer])
    split.wait()
    arrived = stored(cache, heads, slots)
    assert arrived[:2].all()
    assert arrived[2:, 100:].all()
    assert not arrived[2:, :100].any()


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("senders", [1, 2, 4])
@pytest.mark.parametrize("receivers", [1, 2, 4])
def test_the_busiest_sender_sends_as_often_as_the_simulator_counts(heads, senders, receivers):
    spec = replace(SPEC, num_kv_heads=heads, num_heads=8)
    placement = (*stages([senders], "prefill", 0), *stages([receivers], "decode", senders))
    sent = Counter()
    for transfer in transfers(spec, placement):
        sent[transfer.sender] += len(transfer.heads)
    held = len(kv_heads_of(spec, senders, 0))
    assert max(sent.values()) == num_receivers(heads, senders, receivers) * held


def test_a_piece_is_large_unless_there_is_no_more():
    assert pieces((3, 9), PIECE_BYTES / 100) == [(3, 9)]
    assert pieces((3, 9), PIECE_BYTES / 2) == [(3, 5), (5, 7), (7, 9)]
    assert pieces((3, 9), 10 * PIECE_BYTES) == [(layer, layer + 1) for layer in range(3, 9)]
    assert pieces((0, 0), 0.0) == [(0, 0)]
