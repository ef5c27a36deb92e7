"""KV transfer: keys and values go from the stages that prefill to those that decode, while both compute.

Source: ExeGPT (ASPLOS 2024) section 4.1: through (pinned) host memory, so that neither device waits for the other. A
prefilling worker keeps no cache: what a pass would store is what it sends. A thread sends it, all layers in one tensor
per receiver, a thread of each decoding worker receives it, and the keys and values wait in host memory until the rows
have blocks. The scheduler limits how many requests may be in transfer or waiting.

For encoder-decoder models the encoder's output goes instead: `[N, E]` is far less than keys and values of every decoder
layer, which the decoding stages compute from it.
Letters: L layers, N tokens of the flat batch, K key/value heads of a shard, D head_dim.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from exeplan.core.model import ModelSpec
from exeplan.core.schedule import Placement
from exeplan.runner.distributed.links import Seat, sources, stage_ranks


class Transfer(NamedTuple):
    """A part of what a batch sends: from one rank to another, some layers and some key/value heads."""

    sender: int
    receiver: int
    layers: tuple[int, int]
    """Of the model; (0, 0) for an encoder's output."""
    heads: tuple[int, ...]


def kv_heads_of(spec: ModelSpec, size: int, rank: int) -> tuple[int, ...]:
    """The key/value heads on one rank of a stage; where there are fewer heads than ranks, some are on several."""
    if spec.num_kv_heads >= size:
        share = spec.num_kv_heads // size
        return tuple(range(rank * share, (rank + 1) * share))
    return (rank * spec.num_kv_heads // size,)


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


def _between(
    spec: ModelSpec, senders: Sequence[int], receivers: Sequence[int], layers: tuple[int, int]
) -> list[Transfer]:
    found = []
    for index, receiver in enumerate(receivers):
        missing = list(kv_heads_of(spec, len(receivers), index))
        for number, sender in enumerate(senders):
            heads = tuple(head for head in kv_heads_of(spec, len(senders), number) if head in missing)
            if heads:
                missing = [head for head in missing if head not in heads]
                found.append(Transfer(sender, receiver, layers, heads))
    return found


class PassingCache:
    """Takes the place of a KV cache on a stage that only prefills: what is stored is kept for one pass, to be sent."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self.device = device
        self.kv_LNMD: list[Tensor | None] = [None] * num_layers
        """For each layer the keys and values `[N, 2K, D]` of the last pass."""

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
        # On a GPU a copy: a view would keep the queries of all layers in memory.
        self.kv_LNMD[layer] = kv_NMD.clone() if kv_NMD.is_cuda else kv_NMD

    def resize(self, request_id: str, num_blocks: int, hint_blocks: int) -> None:
        """There are no blocks."""

    def free(self, request_id: str) -> None:
        """There is nothing to free."""


class Sender:
    """Sends what a prefilling worker computed, in a thread of its own."""

    def __init__(
        self, spec: ModelSpec, placement: Placement, seat: Seat, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._stage, self._group, self._device = placement[seat.stage], group, device
        self._heads = kv_heads_of(spec, self._stage.tensor_parallel_size, seat.rank_in_stage)
        self._transfers = [transfer for transfer in transfers(spec, placement) if transfer.sender == seat.rank]
        self._batches: queue.SimpleQueue[tuple[list[Tensor], torch.cuda.Event | None]] = queue.SimpleQueue()

    def start(self, failed: Callable[[BaseException], None]) -> None:
        _in_thread(self._run, failed, "kv-transfer")

    def put_layers(self, kv_LNMD: Sequence[Tensor | None]) -> None:
        """The keys and values of one pass, a tensor `[N, 2K, D]` for each layer of this stage."""
        self._put([self._part(kv_LNMD, transfer) for transfer in self._transfers])

    def put_encoded(self, encoded_NE: Tensor) -> None:
        """An encoder's output."""
        self._put([encoded_NE.contiguous()] * len(self._transfers))

    def _put(self, parts: list[Tensor]) -> None:
        computed = None
        if any(part.is_cuda for part in parts):
            computed = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch has none
            computed.record()
        self._batches.put((parts, computed))

    def _part(self, kv_LNMD: Sequence[Tensor | None], transfer: Transfer) -> Tensor:
        chosen = [self._heads.index(head) for head in transfer.heads]
        rows = chosen + [len(self._heads) + index for index in chosen]
        first, last = (layer - self._stage.layers[0] for layer in transfer.layers)
        layers = [layer for layer in kv_LNMD[first:last] if layer is not None]
        return torch.stack([layer[:, rows] if len(chosen) < len(self._heads) else layer for layer in layers])

    def _run(self) -> None:
        stream = None
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # A new thread uses the first device.
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call] # torch has none
        while True:
            parts, computed = self._batches.get()
            for part, transfer in zip(parts, self._transfers, strict=True):
                dist.send(_on_host(part, computed, stream), transfer.receiver, group=self._group)


@dataclass(frozen=True, slots=True)
class Expected:
    """A batch that will be sent."""

    number: int
    num_tokens: int


class Receiver:
    """Receives what is sent to a decoding worker, in a thread of its own; `on_received` is called for every batch."""

    def __init__(
        self,
        spec: ModelSpec,
        placement: Placement,
        seat: Seat,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        *,
        pinned: bool = False,
    ) -> None:
        """A GPU copies from `pinned` memory without the CPU."""
        self._pinned = pinned
        self._spec, self._stage, self._group, self._dtype = spec, placement[seat.stage], group, dtype
        self._heads = kv_heads_of(spec, self._stage.tensor_parallel_size, seat.rank_in_stage)
        self._transfers = [transfer for transfer in transfers(spec, placement) if transfer.receiver == seat.rank]
        self._expected: queue.SimpleQueue[Expected] = queue.SimpleQueue()
        self.received: dict[int, Tensor] = {}
        """By the number of the batch: keys and values `[L, N, 2K, D]`, or an encoder's output `[N, E]`."""

    def start(self, on_received: Callable[[int], None], failed: Callable[[BaseException], None]) -> None:
        _in_thread(lambda: self._run(on_received), failed, "kv-transfer")

    def expect(self, batch: Expected) -> None:
        self._expected.put(batch)

    def _run(self, on_received: Callable[[int], None]) -> None:
        while True:
            batch = self._expected.get()
            receive = self._encoded if self._spec.is_encoder_decoder else self._layers
            self.received[batch.number] = receive(batch.num_tokens)
            on_received(batch.number)

    def _encoded(self, num_tokens: int) -> Tensor:
        encoded_NE = self._empty(num_tokens, self._spec.hidden_size)
        dist.recv(encoded_NE, self._transfers[0].sender, group=self._group)
        return encoded_NE

    def _layers(self, num_tokens: int) -> Tensor:
        layers, heads = self._stage.layers[1] - self._stage.layers[0], len(self._heads)
        whole = self._empty(layers, num_tokens, 2 * heads, self._spec.head_dim)
        for transfer in self._transfers:
            chosen = [self._heads.index(head) for head in transfer.heads]
            first, last = (layer - self._stage.layers[0] for layer in transfer.layers)
            part = self._empty(last - first, num_tokens, 2 * len(chosen), self._spec.head_dim)
            dist.recv(part, transfer.sender, group=self._group)
            whole[first:last, :, chosen + [heads + index for index in chosen]] = part
        return whole

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, pin_memory=self._pinned)


def _on_host(part: Tensor, computed: "torch.cuda.Event | None", stream: "torch.cuda.Stream | None") -> Tensor:
    """The part in pinned memory, copied in another stream than the computation; on a CPU the part itself."""
    if computed is None or stream is None:
        return part
    with torch.cuda.stream(stream):
        stream.wait_event(computed)
        host = torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part, non_blocking=True)
        stream.synchronize()
    return host


def _in_thread(run: Callable[[], Any], failed: Callable[[BaseException], None], name: str) -> None:
    def guarded() -> None:
        try:
            run()
        except BaseException as error:  # Otherwise it would end the thread unnoticed.
            failed(error)

    threading.Thread(target=guarded, name=name, daemon=True).start()
