"""KV transfer: keys and values go from the stages that prefill to those that decode, while both compute.

Source: ExeGPT (ASPLOS 2024) section 4.1: layer by layer, so that neither device waits for the other; there through
host memory. A prefilling worker keeps no cache: what a layer would store is what it sends. A thread sends it, a few
layers in one piece (`exeplan/core/handover.py`), while the next layers compute. A thread of each decoding worker
receives the pieces and stores them in the rows' blocks, while the worker decodes others. The scheduler limits how many
requests may be in transfer or waiting.

On GPUs a piece goes from device to device by NCCL, on streams of their own. It is announced through the host once it is
computed, and received then: a receive that waited on the device would take multiprocessors from the passes. The
decoding worker's main thread only launches passes there, so that rows have their blocks before anything comes. On CPUs
pieces go through shared memory on one host, else by gloo, and what comes in a pass, before rows have blocks, waits.

All ends process the pieces of a batch in one order: by the stage that prefills, then layers, sender, receiver. So no
two of them wait for each other.

For encoder-decoder models the encoder's output goes instead: `[N, E]` is far less than keys and values of every decoder
layer, which the decoding stages compute from it. It waits in host memory until the rows are decoded.
Of latent attention the latent vectors go, which are one head whose key is its value; every rank has them whole.
Letters: L layers, N tokens of the flat batch, K key/value heads of a shard, T vectors of each (a key and a value, or a
latent vector), D their width.
"""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from exeplan.core.handover import pieces
from exeplan.core.models.model import ModelSpec
from exeplan.core.schedule import Placement, Stage
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.distributed.links import Seat, sources, stage_ranks
from exeplan.runner.distributed.shared_link import SharedMemoryLink

_ANNOUNCEMENT = torch.zeros(1, dtype=torch.uint8)
"""Of a piece that a GPU will send."""


class Transfer(NamedTuple):
    """A part of what a batch sends: from one rank to another, some layers and some key/value heads."""

    sender: int
    receiver: int
    layers: tuple[int, int]
    """Of the model; (0, 0) for an encoder's output."""
    heads: tuple[int, ...]


def kv_heads_of(spec: ModelSpec, size: int, rank: int) -> tuple[int, ...]:
    """The key/value heads on one rank of a stage; where there are fewer heads than ranks, some are on several."""
    if spec.num_kv_shares >= size:
        share = spec.num_kv_shares // size
        return tuple(range(rank * share, (rank + 1) * share))
    return (rank * spec.num_kv_shares // size,)


def transfers(spec: ModelSpec, placement: Placement) -> list[Transfer]:
    """All transfers of a batch, in the order in which both ends process them."""
    ranks = stage_ranks(placement)
    prefill, decode = ([n for n, stage in enumerate(placement) if stage.phase == p] for p in ("prefill", "decode"))
    if spec.is_encoder_decoder:
        pairs = [pair for stage in decode for pair in sources(ranks[stage], ranks[prefill[-1]])]
        return [Transfer(sender, receiver, (0, 0), ()) for sender, receiver in pairs]
    found = []
    for target in decode:
        for source in prefill:
            first = max(placement[source].layers[0], placement[target].layers[0])
            last = min(placement[source].layers[1], placement[target].layers[1])
            if first < last:
                found += _between(spec, ranks[source], ranks[target], (first, last))
    return found


def transfer_pairs(spec: ModelSpec, placement: Placement) -> set[tuple[int, int]]:
    """(sender, receiver) of all transfers; none where every stage does both."""
    apart = any(stage.phase for stage in placement)
    return {(transfer.sender, transfer.receiver) for transfer in transfers(spec, placement)} if apart else set()


def _between(
    spec: ModelSpec, senders: Sequence[int], receivers: Sequence[int], layers: tuple[int, int]
) -> list[Transfer]:
    """Of the senders that have a head, the receivers take turns."""
    found, count = [], len(senders)
    for index, receiver in enumerate(receivers):
        missing = list(kv_heads_of(spec, len(receivers), index))
        first = index * count // len(receivers)
        for number in (*range(first, count), *range(first)):
            heads = tuple(head for head in kv_heads_of(spec, count, number) if head in missing)
            if heads:
                missing = [head for head in missing if head not in heads]
                found.append(Transfer(senders[number], receiver, layers, heads))
    return found


class PassingCache:
    """Takes the place of a KV cache on a stage that only prefills: what a layer stores is passed on."""

    def __init__(self, device: torch.device, store: Callable[[int, Tensor], None]) -> None:
        """`store` is called with the number of a layer in this shard and its keys and values `[N, TK, D]`."""
        self.device, self._store = device, store

    def slots(self, request_id: str, start: int, stop: int) -> NDArray[np.int64]:
        return np.arange(start, stop)

    def slots_of_all(self, request_ids: Sequence[str], tokens: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
        return np.concatenate([np.zeros(0, dtype=np.int64), *(np.arange(*span) for span in tokens)])

    def store_rows(self, slot_N: NDArray[np.int64]) -> Tensor:
        return torch.empty(0, dtype=torch.int64, device=self.device)

    def blocks(self, request_id: str) -> NDArray[np.int32]:
        return np.zeros(0, dtype=np.int32)

    def both_tables(self, layer: int) -> Tensor:
        return torch.empty((2, 0, 1), device=self.device)

    def store(self, layer: int, row_X: Tensor, kv_NMD: Tensor) -> None:
        # On a GPU a copy: a view would keep the queries in memory until it is sent.
        self._store(layer, kv_NMD.clone() if kv_NMD.is_cuda else kv_NMD)

    def resize(self, request_id: str, num_blocks: int, hint_blocks: int) -> None:
        """There are no blocks."""

    def free(self, request_id: str) -> None:
        """There is nothing to free."""


Groups = Mapping[tuple[int, int], dist.ProcessGroup]
"""Of the GPUs of each (sender, receiver)."""
_NO_GROUPS: Groups = MappingProxyType({})


class Wire:
    """Tensors between this worker and others: from GPU to GPU by NCCL; on hosts through shared memory where there is
    some, else by torch.distributed."""

    def __init__(
        self,
        rank: int,
        group: dist.ProcessGroup,
        shared: Mapping[str, str | None],
        *,
        timeout: float,
        devices: Groups = _NO_GROUPS,
    ) -> None:
        """`group` is one of all hosts; `shared` names the memory of links between two workers of one host, as
        `sender-receiver`."""
        self._rank, self._group, self._shared, self._timeout = rank, group, shared, timeout
        self._devices = devices
        self._links: dict[str, SharedMemoryLink] = {}

    def attach(self, peers: Iterable[tuple[int, int]]) -> None:
        """Takes its end of the links between these (sender, receiver), while their memory can be attached to."""
        for sender, receiver in peers:
            if path := self._shared.get(name := f"{sender}-{receiver}"):
                self._links[name] = SharedMemoryLink(path, timeout=self._timeout)

    def send(self, x: Tensor, receiver: int) -> None:
        """On a GPU in the current stream."""
        if x.is_cuda:
            self.send(_ANNOUNCEMENT, receiver)
            dist.send(x, receiver, group=self._devices[self._rank, receiver])
        elif link := self._links.get(f"{self._rank}-{receiver}"):
            link.send(x)
        else:
            dist.send(x, receiver, group=self._group)

    def receive(self, x: Tensor, sender: int) -> Tensor:
        """Fills a contiguous tensor, on a GPU in the current stream once the host knows that it will come."""
        if x.is_cuda:
            self.receive(torch.empty_like(_ANNOUNCEMENT), sender)
            dist.recv(x, sender, group=self._devices[sender, self._rank])
            return x
        if link := self._links.get(f"{sender}-{self._rank}"):
            return link.receive(x)
        dist.recv(x, sender, group=self._group)
        return x


def piece_layers(spec: ModelSpec, stage: Stage, num_tokens: int, dtype: torch.dtype) -> list[tuple[int, int]]:
    """The pieces in which each worker of a stage sends its share of so many tokens."""
    heads = len(kv_heads_of(spec, stage.tensor_parallel_size, 0))
    return pieces(stage.layers, num_tokens * heads * spec.kv_width // spec.num_kv_shares * dtype.itemsize)


class _Piece(NamedTuple):
    layers: tuple[int, int]
    """Of the model."""
    computed: list[Tensor]
    """Keys and values `[N, TK, D]` of each of these layers, or an encoder's output."""
    ready: "torch.cuda.Event | None"


class Sender:
    """Sends what a prefilling worker computes, in a thread of its own."""

    def __init__(self, spec: ModelSpec, placement: Placement, seat: Seat, wire: Wire, device: torch.device) -> None:
        self._spec, self._stage, self._wire, self._device = spec, placement[seat.stage], wire, device
        self._heads = kv_heads_of(spec, self._stage.tensor_parallel_size, seat.rank_in_stage)
        self._transfers = [transfer for transfer in transfers(spec, placement) if transfer.sender == seat.rank]
        wire.attach((transfer.sender, transfer.receiver) for transfer in self._transfers)
        self._layers: list[Tensor] = []
        """Computed, and in no piece yet."""
        self._pieces: queue.SimpleQueue[_Piece] = queue.SimpleQueue()

    def start(self, failed: Callable[[BaseException], None]) -> None:
        _in_thread(self._run, failed, "kv-transfer")

    def put_layer(self, layer: int, kv_NMD: Tensor) -> None:
        """The keys and values of a layer of this stage: one after the other, in each pass all."""
        self._layers.append(kv_NMD)
        last = self._stage.layers[0] + layer + 1
        if any(last == end for _, end in piece_layers(self._spec, self._stage, len(kv_NMD), kv_NMD.dtype)):
            self._put((last - len(self._layers), last), self._layers)
            self._layers = []

    def put_encoded(self, encoded_NE: Tensor) -> None:
        """An encoder's output."""
        self._put((0, 0), [encoded_NE])

    def _put(self, layers: tuple[int, int], computed: list[Tensor]) -> None:
        self._pieces.put(_Piece(layers, computed, _recorded(self._device)))

    @torch.inference_mode()
    def _run(self) -> None:
        _use(self._device)
        stream = _stream(self._device)
        while True:
            self._send(self._pieces.get(), stream)

    def _send(self, piece: _Piece, stream: "torch.cuda.Stream | None") -> None:
        """On a GPU in another stream than the pass; the piece is kept until it has been sent."""
        if piece.ready is not None:
            piece.ready.synchronize()
        with _in_stream(stream):
            for transfer in self._transfers:
                part = self._part(piece, transfer)
                if part is not None:
                    self._wire.send(part, transfer.receiver)
        if stream is not None:
            _wait_for(stream)

    def _part(self, piece: _Piece, transfer: Transfer) -> Tensor | None:
        """What a receiver gets of a piece, in one copy."""
        if self._spec.is_encoder_decoder:
            return piece.computed[0].contiguous()
        first, last = _shared_layers(piece.layers, transfer.layers)
        if first >= last:
            return None
        layers = piece.computed[first - piece.layers[0] : last - piece.layers[0]]
        tables = self._spec.num_kv_tables
        return torch.stack([_of_heads(kv_NMD, tables, self._heads, transfer.heads) for kv_NMD in layers])


class Expected(NamedTuple):
    """A batch that will be sent."""

    number: int
    num_tokens: int


@dataclass(slots=True)
class _Arriving:
    """A batch on its way into the cache."""

    slots: NDArray[np.int64] | None = None
    """Where its tokens go; negative for one that goes nowhere. None until the rows have blocks."""
    granted: "torch.cuda.Event | None" = None
    """After the passes that may still use those slots, of rows that have left."""
    has_slots: threading.Event = field(default_factory=threading.Event)
    held: list[tuple[int, Tensor]] = field(default_factory=list)
    """Pieces that have come before that, by their first layer; on CPUs only."""
    complete: bool = False
    """Whether all have come."""


class Receiver:
    """Receives what is sent to a decoding worker, in a thread of its own; `on_received` is called for every batch."""

    def __init__(self, spec: ModelSpec, placement: Placement, seat: Seat, wire: Wire, runner: ModelRunner) -> None:
        """Keys and values go into the cache of `runner`, which must not be replaced."""
        self._spec, self._placement, self._wire, self._runner = spec, placement, wire, runner
        self._stage, self._dtype = placement[seat.stage], runner.activation
        self._heads = kv_heads_of(spec, self._stage.tensor_parallel_size, seat.rank_in_stage)
        self._transfers = [transfer for transfer in transfers(spec, placement) if transfer.receiver == seat.rank]
        wire.attach((transfer.sender, transfer.receiver) for transfer in self._transfers)
        self._device = runner.device
        self._stream = _stream(self._device)
        self._stored: torch.cuda.Event | None = None
        """After what has been stored so far."""
        self._expected: queue.SimpleQueue[Expected] = queue.SimpleQueue()
        self._arriving: dict[int, _Arriving] = {}
        """Batches that have not been received, or have no slots."""
        self._lock = threading.Lock()
        """For these: a row that leaves frees its slots."""
        self.received: dict[int, Tensor] = {}
        """By the number of the batch: an encoder's output `[N, E]`."""

    def start(self, on_received: Callable[[int], None], failed: Callable[[BaseException], None]) -> None:
        _in_thread(lambda: self._run(on_received), failed, "kv-transfer")

    def expect(self, batch: Expected) -> None:
        """Receives a batch behind those before; any thread may call it. What comes waits for slots."""
        if not self._spec.is_encoder_decoder:
            self._arriving[batch.number] = _Arriving()
        self._expected.put(batch)

    def grant(self, number: int, slots: NDArray[np.int64]) -> None:
        """Where the tokens of an expected batch go. Stores what has come of them, and what comes from now on."""
        with self._lock:
            batch = self._arriving[number]
            batch.slots, held = slots, batch.held
            batch.granted = _recorded(self._device)
            for layer, kv_LNMD in held:
                self._runner.cache.store_layers(layer, slots, kv_LNMD)
            batch.held = []
            if batch.complete:
                del self._arriving[number]
        batch.has_slots.set()

    def drop(self, number: int, first: int, last: int) -> None:
        """Tokens `first` to `last` of a batch go nowhere from now on: their slots may be given to others."""
        with self._lock:
            if (batch := self._arriving.get(number)) and batch.slots is not None:
                batch.slots[first:last] = -1
                if self._stored is not None:
                    torch.cuda.current_stream(self._device).wait_event(self._stored)

    @torch.inference_mode()
    def _run(self, on_received: Callable[[int], None]) -> None:
        _use(self._device)
        while True:
            batch = self._expected.get()
            if self._spec.is_encoder_decoder:
                self.received[batch.number] = self._encoded(batch.num_tokens)
            else:
                self._layers(batch)
            on_received(batch.number)

    def _encoded(self, num_tokens: int) -> Tensor:
        encoded_NE = self._received((num_tokens, self._spec.hidden_size), self._transfers[0].sender)
        if self._stream is None:
            return encoded_NE
        with _in_stream(self._stream):
            held_NE = encoded_NE.to("cpu", non_blocking=True)
        _wait_for(self._stream)
        return held_NE

    def _layers(self, batch: Expected) -> None:
        if self._stream is not None:  # So that nothing has to be held, for which a GPU has no memory.
            self._arriving[batch.number].has_slots.wait()
        ranks = stage_ranks(self._placement)
        for stage, senders in zip(self._placement, ranks, strict=True):
            ours = [transfer for transfer in self._transfers if transfer.sender in senders]
            if not ours:
                continue
            for layers in piece_layers(self._spec, stage, batch.num_tokens, self._dtype):
                first, last = _shared_layers(layers, ours[0].layers)
                if first < last:
                    self._store(batch.number, first, self._piece(ours, last - first, batch.num_tokens))
        if self._stream is not None:
            _wait_for(self._stream)
        with self._lock:
            arrived = self._arriving[batch.number]
            arrived.complete = True
            if arrived.slots is not None:
                del self._arriving[batch.number]

    def _piece(self, ours: Sequence[Transfer], num_layers: int, num_tokens: int) -> Tensor:
        """Some layers of a batch, `[L, N, TK, D]`, of all heads of this worker."""
        tables = self._spec.num_kv_tables
        width = self._spec.kv_width // self._spec.num_kv_shares // tables
        ours = sorted(ours, key=lambda transfer: transfer.sender)
        parts = [
            self._received((num_layers, num_tokens, tables, len(transfer.heads), width), transfer.sender)
            for transfer in ours
        ]
        by_heads = [parts[number] for number in sorted(range(len(ours)), key=lambda number: ours[number].heads)]
        with _in_stream(self._stream):
            whole = parts[0] if len(parts) == 1 else torch.cat(by_heads, 3)
            return whole.flatten(2, 3)

    def _received(self, shape: tuple[int, ...], sender: int) -> Tensor:
        """A tensor that has arrived."""
        with _in_stream(self._stream):
            x = self._wire.receive(torch.empty(shape, dtype=self._dtype, device=self._device), sender)
        if self._stream is not None:
            _wait_for(self._stream)
        return x

    def _store(self, number: int, layer: int, kv_LNMD: Tensor) -> None:
        """Into the cache, from layer `layer` of the model on, with one copy and one launch; or holds it."""
        layer -= self._stage.layers[0]
        with self._lock, _in_stream(self._stream):
            batch = self._arriving[number]
            if batch.slots is None:
                batch.held.append((layer, kv_LNMD))
            else:
                if batch.granted is not None and self._stream is not None:
                    self._stream.wait_event(batch.granted)
                self._runner.cache.store_layers(layer, batch.slots, kv_LNMD)
                if self._stream is not None:
                    self._stored = self._stream.record_event()


def _of_heads(kv_NMD: Tensor, num_tables: int, held: Sequence[int], chosen: Sequence[int]) -> Tensor:
    """Of some adjacent heads among a shard's `[N, T, K, D]`: all keys stand before all values."""
    first = held.index(chosen[0])
    return kv_NMD.view(len(kv_NMD), num_tables, len(held), -1)[:, :, first : first + len(chosen)]


def _shared_layers(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return max(one[0], other[0]), min(one[1], other[1])


def _use(device: torch.device) -> None:
    """In this thread; a new one uses the first GPU, on which it would take memory whenever it leaves a stream."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _stream(device: torch.device) -> "torch.cuda.Stream | None":
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call] # has none


def _recorded(device: torch.device) -> "torch.cuda.Event | None":
    """On a GPU, what its current stream has been given so far."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # torch has none
    event.record(torch.cuda.current_stream(device))
    return event


def _in_stream(stream: "torch.cuda.Stream | None") -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def _wait_for(stream: "torch.cuda.Stream") -> None:
    """Sleeps until it has done what it has been given so far; `Stream.synchronize` would keep a core busy."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # torch has none
    event.record(stream)
    event.synchronize()


def _in_thread(run: Callable[[], Any], failed: Callable[[BaseException], None], name: str) -> None:
    def guarded() -> None:
        try:
            run()
        except BaseException as error:  # Otherwise it would end the thread unnoticed.
            failed(error)

    threading.Thread(target=guarded, name=name, daemon=True).start()
