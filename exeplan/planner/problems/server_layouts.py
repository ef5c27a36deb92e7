"""Server layouts: which GPUs are servers that only prefill, and which are servers that only decode (xPyD).

Each server holds the whole model on one stage; those of a phase are alike. On at most 16 GPUs every pair of numbers is
listed that leaves no room for one more server; on more, those around the share of the GPUs that prefills need.

Not here: stages of one pipeline that are divided between the phases (`layouts.py`), as exeplan's own engine has them.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from exeplan.core.cluster import Cluster
from exeplan.core.models.model import ModelSpec
from exeplan.core.profile import Profile
from exeplan.core.schedule import Placement, Sharding, Stage, num_servers, servers
from exeplan.simulator.memory import memory_bytes

_ALL_COUNTED = 16
"""GPUs up to which all numbers of servers are listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLayout:
    """So many equal servers for each phase."""

    prefill: Sharding
    decode: Sharding
    num_prefill: int
    num_decode: int


def server_layouts(
    cluster: Cluster, shardings: Sequence[Sharding], *, prefill_gpus: Sequence[int], one_pipeline: bool
) -> list[ServerLayout]:
    """Every layout worth trying on all GPUs, of servers with these shardings.

    Left out is what is several replicas of a smaller layout, unless all GPUs have to be `one_pipeline`. `prefill_gpus`
    are numbers of GPUs that may suit the prefills of a large cluster.
    """
    found = []
    for prefill, decode in product(shardings, shardings):
        sizes = prefill.tensor_parallel_size, decode.tensor_parallel_size
        if max(sizes) % min(sizes):  # No engine hands over keys and values between such.
            continue
        for layout in _numbers(cluster.num_gpus, prefill, decode, prefill_gpus):
            times = math.gcd(layout.num_prefill, layout.num_decode)
            if one_pipeline or times == 1 or cluster.num_gpus // times > cluster.gpus_per_node:
                found.append(layout)
    return found


def _numbers(num_gpus: int, prefill: Sharding, decode: Sharding, prefill_gpus: Sequence[int]) -> Iterator[ServerLayout]:
    each, other = prefill.num_devices, decode.num_devices
    most = (num_gpus - other) // each
    if num_gpus <= _ALL_COUNTED:
        tried = set(range(1, most + 1))
    else:
        tried = {min(max(1, round(number / each)), most) for number in prefill_gpus if most >= 1}
    layouts = (fullest(num_gpus, prefill, decode, number) for number in sorted(tried))
    yield from dict.fromkeys(layouts)


def fullest(num_gpus: int, prefill: Sharding, decode: Sharding, num_prefill: int) -> ServerLayout:
    """With so many servers that prefill, as many others as there is room for, and then more that prefill."""
    num_decode = (num_gpus - num_prefill * prefill.num_devices) // decode.num_devices
    num_prefill = (num_gpus - num_decode * decode.num_devices) // prefill.num_devices
    return ServerLayout(prefill=prefill, decode=decode, num_prefill=num_prefill, num_decode=num_decode)


def server_shardings(profile: Profile, cluster: Cluster, memory: float, *, across_nodes: bool) -> list[Sharding]:
    """How a server may share the layers: each within a node unless `across_nodes`, its weights within the memory, and
    without ranks, which no engine's servers of one phase are planned with."""
    cut = [Sharding(size) for size in profile.tensor_parallel_sizes]
    cut += [one for one in profile.expert_shardings if one.data_parallel_size == 1]
    return [
        one
        for one in cut
        if profile.model.num_heads % one.tensor_parallel_size == 0
        and one.num_devices < cluster.num_gpus
        and (across_nodes or one.num_devices <= cluster.gpus_per_node)
        and memory_bytes(profile, (_server(profile.model, one, 0, "decode"),), 0.0) < memory
    ]


def server_placement(cluster: Cluster, spec: ModelSpec, layout: ServerLayout) -> Placement | None:
    """The servers on GPUs of the cluster, no small one across nodes; None where they do not fit so."""
    sizes = [("prefill", layout.prefill)] * layout.num_prefill + [("decode", layout.decode)] * layout.num_decode
    first = _first_devices(cluster, [sharding.num_devices for _, sharding in sizes])
    if first is None:
        return None
    return tuple(_server(spec, sharding, at, phase) for (phase, sharding), at in zip(sizes, first, strict=True))


def layout_of(placement: Placement) -> ServerLayout | None:
    """Of a placement that `server_placement` may have made; None of others."""
    counts = num_servers(placement)
    if counts is None or len(placement) != sum(counts):
        return None
    first, other = (placement[servers(placement, phase)[0][0]] for phase in ("prefill", "decode"))
    return ServerLayout(prefill=first.sharding, decode=other.sharding, num_prefill=counts[0], num_decode=counts[1])


def _server(spec: ModelSpec, sharding: Sharding, first: int, phase: str) -> Stage:
    return Stage(
        devices=tuple(range(first, first + sharding.num_devices)),
        layers=(0, spec.num_layers),
        phase=phase,
        expert_parallel_size=sharding.expert_parallel_size,
    )


def _first_devices(cluster: Cluster, sizes: Sequence[int]) -> list[int] | None:
    """The first GPU of each, large ones first: whole nodes in a row, or a part of the first node with room."""
    free, per_node, found = [cluster.gpus_per_node] * cluster.num_nodes, cluster.gpus_per_node, dict[int, int]()
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        size, nodes = sizes[number], -(-sizes[number] // per_node)
        at = next((node for node in range(len(free) - nodes + 1) if _has_room(free[node : node + nodes], size)), None)
        if at is None:
            return None
        found[number] = at * per_node + per_node - free[at]
        for node in range(at, at + nodes):
            taken = min(size, per_node)
            free[node], size = free[node] - taken, size - taken
    return [found[number] for number in range(len(sizes))]


def _has_room(free: Sequence[int], size: int) -> bool:
    """Whether a server fits one node, or nodes of which all but the last are empty."""
    return sum(free) >= size and (len(free) == 1 or len({*free}) == 1)
