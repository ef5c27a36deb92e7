"""Keys and values go from one GPU to another while both compute, no stream uses them too early; faults are found."""

import queue
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from exeplan.core.model import model_spec
from exeplan.core.schedule import Stage
from exeplan.runner.compute.kv_cache import KVCache
from exeplan.runner.distributed import kv_transfer
from exeplan.runner.distributed.kv_transfer import Expected, PassingCache, Receiver, Sender, Wire
from exeplan.runner.distributed.links import Seat
from exeplan.runner.distributed.shared_link import LINK_BYTES
from exeplan.runner.ipc.collectives import SharedBuffer

from .streams import OrderError, TrackedQueue, opaque_kernels, stand_in

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
        paths = {"0-1": buffer.path}
        self.failures, self.received = queue.SimpleQueue(), TrackedQueue(machine)
        self.sender = Sender(SPEC, PLACEMENT, Seat(0, 0, 0), Wire(0, None, paths, timeout=5.0), FROM)
        self.passing = PassingCache(FROM, self.sender.put_layer)
        self.cache = KVCache(SPEC, SLOTS // 16, torch.float32, TO, kernels=opaque_kernels(machine))
        runner = SimpleNamespace(cache=self.cache, device=TO, activation=torch.float32)
        self.receiver = Receiver(SPEC, PLACEMENT, Seat(1, 1, 0), Wire(1, None, paths, timeout=5.0), runner)
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


def hand_over(*, granted_first: bool) -> None:
    """A pass is handed over while other slots are read; then its first half leaves and gives its slots to others."""
    slots = np.random.default_rng(0).permutation(SLOTS)
    with stand_in(threaded=(kv_transfer,)) as machine, torch.inference_mode():
        ends = Ends(machine)
        ends.receiver.expect(Expected(1, TOKENS))
        if granted_first:
            ends.receiver.grant(1, slots[:TOKENS].copy())
        stored = ends.prefill()
        ends.decode(slots[TOKENS:])
        ends.wait()
        if not granted_first:
            ends.receiver.grant(1, slots[:TOKENS].copy())
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
    def on_host(made, computed, stream):
        return original(made, SimpleNamespace(clock={}), stream)

    original = kv_transfer._on_host
    patch.setattr(kv_transfer, "_on_host", on_host)


def sending_before_the_copy_to_the_host_is_complete(patch):
    def on_host(made, computed, stream):
        with torch.cuda.stream(stream):
            stream.wait_event(computed)
            part = made()
            return torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part, non_blocking=True)

    patch.setattr(kv_transfer, "_on_host", on_host)


def reporting_before_the_cache_holds_them(patch):
    original = Receiver._layers

    def layers(self, batch):
        stream = self._stream
        patch.setattr(stream, "synchronize", lambda: None)
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
    sending_before_the_copy_to_the_host_is_complete: "the host reads",
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
    with stand_in(threaded=(kv_transfer,)) as machine, torch.inference_mode():
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
