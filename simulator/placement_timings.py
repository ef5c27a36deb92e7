"""What a placement takes its times from: the profile's curves for its shards and links, and the kinds of its stages.

Not here: batches (`cost.py`) and passes of a steady cycle (`passes.py`), which are timed with it.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from exeplan.arrays import Floats
from exeplan.core.cluster import Cluster
from exeplan.core.models.layer_costs import activation_bytes, all_to_all_bytes, num_all_to_alls
from exeplan.core.profile import Profile
from exeplan.core.schedule import Placement, Sharding, Stage, num_devices, num_ranks, servers, single_stage
from exeplan.errors import InputError
from exeplan.simulator.memory import PlacementMemory
from exeplan.simulator.timings import Timings

SumsOver = tuple[Sharding, str, int]
"""Sharding, link and nodes of a stage that sums over its devices."""


@dataclass(frozen=True, slots=True)
class StageKind:
    """What the time of a stage depends on; stages of one kind take equal time."""

    size: Sharding
    layers: int
    encoder_layers: int
    first: bool
    last: bool
    phase: str
    all_reduce: str
    """`intra`, `inter`, or '' for a stage of one device."""
    nodes: int
    """Those that have equally many of a rank's devices; 1 where it is spread unevenly."""
    send: str
    """The link to the next stage, '' for the last one."""
    near: float = 1.0
    """Of what a device sends to others' experts, the share that stays in its node: of the device with the least."""

    @property
    def sums(self) -> SumsOver:
        """What the time of its all-reduces depends on."""
        return self.size, self.all_reduce, self.nodes


class PlacementTimings:
    """Curves and kinds of the stages of a placement; a pure function of profile, placement and cluster.

    Without a placement: all layers on one device. Raises InputError when the profile lacks a tensor-parallel size, or
    profile and cluster a link, that the placement needs.
    """

    def __init__(
        self, timed: Profile | Timings, placement: Placement | None = None, cluster: Cluster | None = None
    ) -> None:
        self.timings = timed if isinstance(timed, Timings) else Timings(timed)
        self.profile, self.cluster = self.timings.profile, cluster
        self.spec = spec = self.profile.model
        self.placement = placement or single_stage(spec)
        self.first_token_from_prefill = spec.first_token_from_prefill
        self.prefill_stages = tuple(i for i, s in enumerate(self.placement) if s.phase != "decode")
        self.decode_stages = tuple(i for i, s in enumerate(self.placement) if s.phase != "prefill")
        self.servers = {phase: servers(self.placement, phase) for phase in {s.phase for s in self.placement}}
        """Of each phase the stages of its servers, which take passes in turn; mostly there is one."""
        self.num_prefill_servers = len(self.servers[self.placement[self.prefill_stages[0]].phase])
        multi_device = num_devices(self.placement) > 1
        self.num_ranks = num_ranks(self.placement)
        """Among which requests are divided; every pass waits for the fullest."""
        self.num_caches = self.num_ranks * len(self.servers[self.placement[self.decode_stages[0]].phase])
        """KV caches among which the requests that decode are divided."""
        sizes = {stage.sharding for stage in self.placement}
        self.shards = {size: self.timings.shard(size, multi_device) for size in sizes}
        widest = max(stage.tensor_parallel_size for stage in self.placement)
        self.overhead, self.prefill_overhead = (self.timings.overhead(phase, widest) for phase in ("decode", "prefill"))
        self.control = self.timings.control if multi_device else None
        one_object: dict[StageKind, StageKind] = {}
        kinds = (self._kind(i) for i in range(len(self.placement)))
        self.kinds = [one_object.setdefault(kind, kind) for kind in kinds]
        """Of each stage; equal ones are the same object."""
        self.all_reduces = {
            k.sums: self._all_reduce_curve(k.size.tensor_parallel_size, k.all_reduce, k.nodes)
            for k in self.kinds
            if k.all_reduce
        }
        self.exchanges = {(k.size, k.near): self._exchange(k.size, k.near) for k in self.kinds if self.num_ranks > 1}
        """Seconds of a layer's exchanges with its experts, both ways, by the tokens of the fullest rank."""
        self.sends = {k.send: self.send_curve(k.send) for k in self.kinds if k.send}
        self.times_repeats = len(self.placement) == 1 and self.num_ranks == 1
        """Whether equal batches in a row may be timed together."""
        self._bytes_per_token = activation_bytes(spec, 1, self.profile.dtype)
        self.memory = PlacementMemory(self.profile, self.placement)

    def of_phase(self, phase: str) -> list[StageKind]:
        """The stages that run a batch of this phase, in order: those of one server, as all are alike."""
        return [self.kinds[number] for number in self.servers[phase][0]]

    def _kind(self, number: int) -> StageKind:
        stage = self.placement[number]
        same = next(own for own in self.servers[stage.phase] if number in own)
        last = number == same[-1]
        rank = stage.devices[: stage.tensor_parallel_size]
        return StageKind(
            size=stage.sharding,
            layers=stage.layers[1] - stage.layers[0],
            encoder_layers=stage.encoder_layers[1] - stage.encoder_layers[0],
            first=number == same[0],
            last=last,
            phase=stage.phase,
            all_reduce=self.link(rank) if len(rank) > 1 else "",
            nodes=self._even_nodes(rank),
            send="" if last else self.link((stage.devices[-1], self.placement[number + 1].devices[0])),
            near=self._near(stage) if stage.data_parallel_size > 1 else 1.0,
        )

    def _even_nodes(self, devices: tuple[int, ...]) -> int:
        """Nodes that each have equally many of these devices; 1 where they have not."""
        if self.cluster is None:
            return 1
        by_node = Counter(self.cluster.node_of(device) for device in devices)
        return len(by_node) if len(set(by_node.values())) == 1 else 1

    def _near(self, stage: Stage) -> float:
        if self.cluster is None:
            return 1.0
        fewest = min(Counter(self.cluster.node_of(device) for device in stage.devices).values())
        return (fewest - 1) / (stage.num_devices - 1)

    def _exchange(self, sharding: Sharding, near: float) -> Callable[[Floats | float], Floats]:
        """A device sends to its node and to others at the same time."""
        number, spec = sharding.num_devices, self.spec
        by_link = {link: share for link, share in (("intra", near), ("inter", 1.0 - near)) if share}
        curves = [(share, self._all_to_all_curve(number, link)) for link, share in by_link.items()]
        size = all_to_all_bytes(spec, 1, self.profile.dtype, devices=number, parts=sharding.expert_parallel_size)
        size, count = size / sharding.tensor_parallel_size, num_all_to_alls(spec)

        def seconds(tokens: Floats | float) -> Floats:
            sent = size * np.asarray(tokens)
            return np.asarray(count * np.max([curve(share * sent) for share, curve in curves], axis=0))

        return seconds

    def _all_to_all_curve(self, number: int, link: str) -> Callable[[Floats | float], Floats]:
        if (timed := self.timings.all_to_all(number, link)) is not None:
            return timed
        if self.cluster is None:
            raise InputError(
                f"the profile times no all_to_all of {number} devices ({link} node); a cluster's links can stand in"
            )
        wire = getattr(self.cluster, link)
        return lambda size_bytes: wire.latency + np.asarray(size_bytes) / wire.bytes_per_second

    def link(self, devices: tuple[int, ...]) -> str:
        """`intra` where these devices are in one node, else `inter`."""
        return "intra" if self.cluster is None or self.cluster.same_node(devices) else "inter"

    def _all_reduce_curve(self, size: int, link: str, nodes: int) -> Callable[[Floats | float], Floats]:
        """As the profile has it; otherwise as one ring or, where GPUs have adapters of their own and it is faster, by
        parts: summed and scattered within each node, each part summed across nodes, and gathered within."""
        whole = self._ring_curve(size, link)
        if self.cluster is None or nodes == 1 or self.timings.all_reduce(size, link) is not None:
            return whole
        each = size // nodes
        parts = each * self.cluster.adapters_per_node / self.cluster.gpus_per_node
        if parts <= 1:
            return whole
        within, across = self._ring_curve(each, "intra"), self._ring_curve(nodes, "inter")

        def seconds(size_bytes: Floats | float) -> Floats:
            by_parts = within(size_bytes) + across(np.asarray(size_bytes) / parts)
            return np.minimum(whole(size_bytes), by_parts)

        return seconds

    def _ring_curve(self, size: int, link: str) -> Callable[[Floats | float], Floats]:
        if (timed := self.timings.all_reduce(size, link)) is not None:
            return timed
        if self.cluster is None:
            raise InputError(
                f"the profile times no all_reduce of {size} devices ({link} node); a cluster's links can stand in"
            )
        wire = getattr(self.cluster, link)
        # A ring: reduce-scatter and all-gather, each in size - 1 steps of one share.
        return lambda size_bytes: (
            2 * (size - 1) * (wire.latency + np.asarray(size_bytes) / size / wire.bytes_per_second)
        )

    def send_curve(self, link: str) -> Callable[[Floats | float], Floats]:
        """Seconds of a send over the link by its bytes. Raises InputError where neither profile nor cluster has it."""
        if (timed := self.timings.send(link)) is not None:
            return timed
        if self.cluster is None:
            raise InputError(f"the profile times no send ({link} node); give a cluster whose links can stand in")
        wire = getattr(self.cluster, link)
        return lambda size_bytes: wire.latency + np.asarray(size_bytes) / wire.bytes_per_second

    def activation_bytes(self, tokens: Floats | float) -> Floats | float:
        """Bytes of the hidden states of that many tokens: what a send or an all-reduce carries."""
        return self._bytes_per_token * tokens
