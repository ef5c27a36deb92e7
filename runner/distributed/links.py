"""Links: the hidden states that workers send one another, through shared memory or torch.distributed.

All ranks of a stage hold the same hidden states, so rank j of a stage takes them from rank j, modulo the width, of the
stage before. Sends are asynchronous: a stage continues while the next one is busy; a tensor is kept until it was sent.
Letters: N tokens of the flat batch, E hidden size.

On GPUs every pair of ranks has a group of its own for each direction. NCCL gives the sends and receives of a group
between two ranks one communicator, whose operations run one after the other on each of them, and a send ends when the
other rank has come to its receive: in one group, hidden states and an encoder's output that cross each other would wait
for one another for ever.
"""

import datetime
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined] # it is not in their __all__

from exeplan.core.schedule import Placement
from exeplan.runner.compute.weights.shard import ALONE, Group
from exeplan.runner.distributed.shared_link import SharedMemoryLink
from exeplan.runner.ipc.addresses import interface_of, is_loopback
from exeplan.runner.ipc.collectives import DistributedGroup, SharedMemoryGroup

_SENDS_KEPT = 16
_JOIN_SECONDS = 120.0
"""How long workers wait for the others to start."""


@dataclass(frozen=True, slots=True)
class Seat:
    """The position of a worker: its rank among all, its stage, and its rank within that stage."""

    rank: int
    stage: int
    rank_in_stage: int


def stage_ranks(placement: Placement) -> list[list[int]]:
    """The ranks of each stage: workers are numbered stage by stage."""
    ranks, first = [], 0
    for stage in placement:
        ranks.append(list(range(first, first + stage.tensor_parallel_size)))
        first += stage.tensor_parallel_size
    return ranks


def seat_of(placement: Placement, rank: int) -> Seat:
    for number, ranks in enumerate(stage_ranks(placement)):
        if rank in ranks:
            return Seat(rank, number, ranks.index(rank))
    raise ValueError(f"no stage has a rank {rank}")


def neighbours(placement: Placement, stage: int) -> tuple[int | None, int | None]:
    """The stages before and after one, among those of its phase."""
    same = [number for number, other in enumerate(placement) if other.phase == placement[stage].phase]
    at = same.index(stage)
    return (same[at - 1] if at else None), (same[at + 1] if at + 1 < len(same) else None)


def sources(receivers: Sequence[int], senders: Sequence[int]) -> list[tuple[int, int]]:
    """(sender, receiver) for each receiver of what all senders hold."""
    return [(senders[index % len(senders)], receiver) for index, receiver in enumerate(receivers)]


def connect(
    store: tuple[str, int],
    prefix: str,
    *,
    rank: int,
    size: int,
    timeout: float,
    device: torch.device,
    address: str = "127.0.0.1",
    says: str = "",
) -> list[str]:
    """Joins the workers of one generation, and listens for them only on the interface with this address.

    Returns what each of them `says`, by rank.

    Raises RuntimeError when they do not all join in time.
    """
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if (
            is_loopback(address) or variable not in os.environ
        ):  # Over several hosts the user may have chosen a faster one.
            os.environ[variable] = interface_of(address)
    tcp = TCPStore(*store, is_master=False, timeout=datetime.timedelta(seconds=_JOIN_SECONDS))
    ours = PrefixStore(prefix, tcp)
    ours.set(f"here-{rank}", says)
    present = [f"here-{other}" for other in range(size)]
    ours.wait(present)  # A group would time out on a late peer.
    patience = datetime.timedelta(seconds=timeout)
    gpu = device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpu else "gloo",
        store=ours,
        rank=rank,
        world_size=size,
        timeout=patience,
        device_id=device if gpu else None,  # Otherwise NCCL guesses it from the rank.
    )
    return [ours.get(name).decode() for name in present]


def tensor_parallel_group(placement: Placement, seat: Seat, buffers: Sequence[str | None], *, timeout: float) -> Group:
    """The group of a worker's stage: shared memory where the stage has a buffer for it, torch.distributed elsewhere."""
    mine: Group = ALONE
    for stage, ranks in enumerate(stage_ranks(placement)):
        if len(ranks) == 1:
            continue
        buffer = buffers[stage]
        if buffer is None:
            group = dist.new_group(ranks)  # Every worker takes part in making every group.
            if stage == seat.stage:
                mine = DistributedGroup(group)
        elif stage == seat.stage:
            mine = SharedMemoryGroup(buffer, rank=seat.rank_in_stage, size=len(ranks), timeout=timeout)
    return mine


def hidden_pairs(placement: Placement) -> list[tuple[int, int]]:
    """(sender, receiver) of all hidden states that go from one stage to the next."""
    ranks = stage_ranks(placement)
    followers = [(stage, neighbours(placement, stage)[1]) for stage in range(len(placement))]
    return [pair for stage, after in followers if after is not None for pair in sources(ranks[after], ranks[stage])]


def encoded_pairs(placement: Placement) -> list[tuple[int, int]]:
    """(sender, receiver) of all encoder outputs, from the last stage of a phase to its others."""
    ranks, found = stage_ranks(placement), []
    for phase in dict.fromkeys(stage.phase for stage in placement):
        *others, last = (number for number, stage in enumerate(placement) if stage.phase == phase)
        found += [pair for number in others for pair in sources(ranks[number], ranks[last])]
    return found


class HiddenLinks:
    """The hidden states between neighbouring stages, and from the last encoder stage to all that decode."""

    def __init__(
        self,
        placement: Placement,
        seat: Seat,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        shared: Mapping[str, str | None],
        timeout: float,
        encodes: bool,
    ) -> None:
        """`shared` names the memory of links between two workers of one host, as `sender-receiver`. `encodes`: the
        model has an encoder. Every worker makes its links, because every one takes part in making every group.
        """
        ranks = stage_ranks(placement)
        before, after = neighbours(placement, seat.stage)
        self._source = None if before is None else _source(ranks[seat.stage], ranks[before], seat)
        self._targets = [] if after is None else _targets(ranks[after], ranks[seat.stage], seat)
        same = [number for number, other in enumerate(placement) if other.phase == placement[seat.stage].phase]
        last = same[-1]
        others = [number for number in same if number != last]
        self._encoded_source = None if seat.stage == last else _source(ranks[seat.stage], ranks[last], seat)
        self._encoded_targets = (
            [rank for number in others for rank in _targets(ranks[number], ranks[last], seat)]
            if seat.stage == last
            else []
        )
        self._size, self._dtype, self._device = hidden_size, dtype, device
        self._kept: deque[tuple[dist.Work, Tensor]] = deque()
        links = {pair: shared.get(f"{pair[0]}-{pair[1]}") for pair in hidden_pairs(placement)}
        self._shared = {
            pair: SharedMemoryLink(path, timeout=timeout) for pair, path in links.items() if path and seat.rank in pair
        }
        self._rank = seat.rank
        self._groups: dict[tuple[int, int], dist.ProcessGroup] = {}
        """By (sender, receiver); empty where the group of all ranks has a channel for each direction, as gloo's."""
        if device.type == "cuda":
            pairs = [*hidden_pairs(placement), *(encoded_pairs(placement) if encodes else ())]
            self._groups = {pair: dist.new_group(pair) for pair in pairs}

    def receive(self, num_tokens: int) -> Tensor | None:
        """Hidden states `[N, E]` from the stage before; None on a first stage."""
        if self._source is None:
            return None
        if link := self._shared.get((self._source, self._rank)):
            return link.receive(torch.empty((num_tokens, self._size), dtype=self._dtype))
        return self._receive(self._source, num_tokens)

    def send(self, hidden_NE: Tensor) -> None:
        """To the next stage."""
        for target in self._targets:
            if link := self._shared.get((self._rank, target)):
                link.send(hidden_NE)
            else:
                self._send(hidden_NE, [target])

    def receive_encoded(self, num_tokens: int) -> Tensor:
        """The encoder's output of an earlier batch, on any stage but the last, which made it."""
        assert self._encoded_source is not None
        return self._receive(self._encoded_source, num_tokens)

    def send_encoded(self, encoded_NE: Tensor) -> None:
        """To all other stages, each of which takes it before it decodes those rows."""
        self._send(encoded_NE, self._encoded_targets)

    def _receive(self, source: int, num_tokens: int) -> Tensor:
        hidden_NE = torch.empty((num_tokens, self._size), dtype=self._dtype, device=self._device)
        dist.recv(hidden_NE, source, group=self._groups.get((source, self._rank)))
        return hidden_NE

    def _send(self, hidden_NE: Tensor, targets: Sequence[int]) -> None:
        hidden_NE = hidden_NE.contiguous()
        for target in targets:
            work = dist.isend(hidden_NE, target, group=self._groups.get((self._rank, target)))
            assert work is not None
            self._kept.append((work, hidden_NE))
        while len(self._kept) > _SENDS_KEPT:
            self._kept.popleft()[0].wait()


def _source(receivers: Sequence[int], senders: Sequence[int], seat: Seat) -> int:
    return next(sender for sender, receiver in sources(receivers, senders) if receiver == seat.rank)


def _targets(receivers: Sequence[int], senders: Sequence[int], seat: Seat) -> list[int]:
    return [receiver for sender, receiver in sources(receivers, senders) if sender == seat.rank]
