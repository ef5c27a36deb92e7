"""Keys and values go from one GPU to another while both compute, no stream uses them too early; faults are found."""

import contextlib
import queue
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from exeplan.core.models.model import model_spec
from exeplan.core.schedule import Stage
from exeplan.runner.compute.passes.kv_cache import KVCache
from exeplan.runner.distributed import kv_transfer
from exeplan.runner.distributed.kv_transfer import Expected, PassingCache, Receiver, Sender, Wire
from exeplan.runner.distributed.links import Seat
from exeplan.runner.distributed.shared_link import LINK_BYTES
from exeplan.runner.ipc.collectives import SharedBuffer

from .nccl import Fabric, Handle
from .streams import Machine, OrderError, TrackedQueue, opaque_kernels, stand_in

SPEC = model_spec(
    {"model_type": "llama", "vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    | {"num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 96},
    name="tiny",
)
PLACEMENT = (
    Stage(devices=(0,), layers=(0, 3), phase="prefill"),
    Stage(devices=(1,), layers=(0, 3), phase="decode"),
)
TOKENS, SLOTS = 20, 64
FROM, TO = torch.device("cuda:0"), torch.device("cuda:1")


class Ends:
    """A prefilling and a decoding worker's ends of the hand-over; this thread is the main thread of both."""

    def __init__(self, machine) -> None:
        buffer = SharedBuffer(LINK_BYTES)
        wires = [
            Wire(rank, None, {"0-1": buffer.path}, timeout=5.0, devices={(0, 1): Handle(0, (0, 1), rank, "nccl")})
            for rank in range(2)
        ]
        self.failures, self.received = queue.SimpleQueue(), TrackedQueue(machine)
        self.sender = Sender(SPEC, PLACEMENT, Seat(0, 0, 0), wires[0], FROM)
        self.passing = PassingCache(FROM, self.sender.put_layer)
        self.cache = KVCache(SPEC, SLOTS // 16, torch.float32, TO, kernels=opaque_kernels(machine))
        runner = SimpleNamespace(cache=self.cache, device=TO, activation=torch.float32)
        self.receiver = Receiver(SPEC, PLACEMENT, Seat(1, 1, 0), wires[1], runner)
        buffer.close()
        self.sender.start(self.fail)
        self.receiver.start(self.received.put, self.fail)

    def fail(self, error: BaseException) -> None:
        self.failures.put(error)
        self.received.put(error)

    def prefill(self) -> list[torch.Tensor]:
        """The layers of a pass; returns what they stored."""
        torch.cuda.set_device(FROM)
        found = []
        for layer in range(3):
            token_N11 = torch.arange(TOKENS, device=FROM)[:, None, None]
            qkv_NMD = torch.full((TOKENS, 6, 8), float(layer), device=FROM) + token_N11
            self.passing.store(layer, None, qkv_NMD[:, 2:])
            found.append(qkv_NMD.values[:, 2:])
        torch.cuda.set_device(TO)
        return found

    def wait(self) -> None:
        if isinstance(found := self.received.get(timeout=5.0), BaseException):
            raise found

    def decode(self, slots: np.ndarray) -> list[torch.Tensor]:
        """Reads keys and values of these slots on the device's default stream."""
        found = []
        index = torch.from_numpy(slots).pin_memory().to(TO, non_blocking=True)
        for layer in range(3):
            table_MSD = self.cache.both_tables(layer).view(4, SLOTS, 8)
            found.append(torch.index_select(table_MSD, 1, index))
        return [layer.values.transpose(0, 1) for layer in found]

    def overwrite(self, slots: np.ndarray) -> None:
        """Another row's tokens, which decode in these slots."""
        index = torch.from_numpy(slots).pin_memory().to(TO, non_blocking=True)
        for layer in range(3):
            table_MSD = self.cache.both_tables(layer).view(4, SLOTS, 8)
            table_MSD.index_copy_(1, index, torch.zeros(4, len(slots), 8, device=TO))


@contextlib.contextmanager
def gpus() -> Iterator[Machine]:
    """Two GPUs, between which NCCL's rules hold."""
    with pytest.MonkeyPatch.context() as patch, stand_in(threaded=(kv_transfer,)) as machine:
        patch.setattr(kv_transfer, "dist", Fabric(patience=5.0))
        yield machine


def hand_over(*, granted_first: bool) -> None:
    """A pass is handed over while other slots are read; then its first half leaves and gives its slots to others."""
    slots = np.random.default_rng(0).permutation(SLOTS)
    with gpus() as machine, torch.inference_mode():
        ends = Ends(machine)
        ends.receiver.expect(Expected(1, TOKENS))
        if granted_first:
            ends.receiver.grant(1, slots[:TOKENS].copy())
        stored = ends.prefill()
        ends.decode(slots[TOKENS:])
        if not granted_first:
            ends.receiver.grant(1, slots[:TOKENS].copy())
        ends.wait()
        for expected, found in zip(stored, ends.decode(slots[:TOKENS]), strict=True):
            torch.testing.assert_close(found, expected)
        ends.receiver.expect(Expected(2, TOKENS))
        ends.receiver.grant(2, slots[TOKENS : 2 * TOKENS].copy())
        ends.prefill()
        ends.wait()
        machine.synchronize()


@pytest.mark.parametrize("granted_first", [True, False], ids=["granted first", "granted later"])
def test_keys_and_values_arrive_in_order_and_hold_what_was_computed(granted_first):
    hand_over(granted_first=granted_first)


def sending_before_the_layer_is_computed(patch):
    original = Sender._send
    patch.setattr(Sender, "_send", lambda self, piece, stream: original(self, piece._replace(ready=None), stream))


def freeing_a_piece_before_it_is_sent(patch):
    """The sender goes on while its stream still copies from what the pass made."""

    def wait_for(stream):
        if stream.device != FROM:
            original(stream)

    original = kv_transfer._wait_for
    patch.setattr(kv_transfer, "_wait_for", wait_for)


def storing_before_a_piece_has_arrived(patch):
    def receive(self, x, sender):
        if x.is_cuda:
            original(self, torch.empty(1, dtype=torch.uint8), sender)
            kv_transfer.dist.irecv(x, sender, group=self._devices[sender, self._rank])
            return x
        return original(self, x, sender)

    original = Wire.receive
    patch.setattr(Wire, "receive", receive)


def overwriting_what_is_being_sent(patch):
    """One buffer for all pieces, and no wait between them."""
    kept = {}

    def send(self, x, receiver):
        if not x.is_cuda:
            return original(self, x, receiver)
        kept.setdefault("buffer", torch.empty_like(x)).copy_(x)
        original(self, torch.zeros(1, dtype=torch.uint8), receiver)
        return kv_transfer.dist.isend(kept["buffer"], receiver, group=self._devices[self._rank, receiver])

    original = Wire.send
    patch.setattr(Wire, "send", send)


def reporting_before_the_cache_holds_them(patch):
    original = Receiver._layers

    def layers(self, batch):
        waits = kv_transfer._wait_for
        patch.setattr(kv_transfer, "_wait_for", lambda stream: None if self._stored else waits(stream))
        original(self, batch)

    patch.setattr(Receiver, "_layers", layers)


def storing_before_the_last_user_of_the_slots_is_done(patch):
    """A request that a client leaves gives its slots to others while the pass that writes them runs."""
    original = Receiver.grant

    def grant(self, number, slots):
        batch = self._arriving[number]
        original(self, number, slots)
        batch.granted = None

    patch.setattr(Receiver, "grant", grant)


FAULTS = {
    storing_before_the_last_user_of_the_slots_is_done: "scatter_slots .* still be written on the default stream",
    sending_before_the_layer_is_computed: "may still be written on the default stream of cuda:0",
    freeing_a_piece_before_it_is_sent: "is freed while it may still be read on stream",
    storing_before_a_piece_has_arrived: "scatter_slots .* may still be written on stream",
    overwriting_what_is_being_sent: "may still be read on stream",
    reporting_before_the_cache_holds_them: "may still be written on stream",
}


@pytest.mark.parametrize(("fault", "found"), FAULTS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_seeded_fault_is_found(fault, found, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(OrderError, match=found):
        hand_over(granted_first=True)


def dropping_without_a_wait(patch):
    def drop(self, number, first, last):
        with self._lock:
            self._arriving[number].slots[first:last] = -1

    patch.setattr(Receiver, "drop", drop)


def leave_while_arriving(patch) -> None:
    """A row leaves after its first layers were stored, and another takes its slots at once."""
    slots, stored, gone = np.arange(TOKENS), queue.SimpleQueue(), queue.SimpleQueue()
    original = Receiver._store

    def store(self, *args):
        original(self, *args)
        stored.put(None)
        gone.get(timeout=5.0)

    patch.setattr(Receiver, "_store", store)
    with gpus() as machine, torch.inference_mode():
        ends = Ends(machine)
        ends.receiver.expect(Expected(1, TOKENS))
        ends.receiver.grant(1, slots.copy())
        ends.prefill()
        try:
            stored.get(timeout=5.0)
            ends.receiver.drop(1, 0, TOKENS)
            ends.overwrite(slots)
        finally:
            gone.put(None)
        ends.wait()


def test_slots_of_a_row_that_left_are_overwritten_behind_what_was_stored_in_them(monkeypatch):
    leave_while_arriving(monkeypatch)


def test_slots_that_are_overwritten_too_early_are_found(monkeypatch):
    dropping_without_a_wait(monkeypatch)
    with pytest.raises(OrderError, match=r"index_copy_.* may still be written on stream"):
        leave_while_arriving(monkeypatch)
