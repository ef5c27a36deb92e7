"""Layouts: which GPUs form which stages, and which layers each stage has.

Source: ExeGPT (ASPLOS 2024) sections 4.1 and 4.2. Partial tensor parallelism: degree t on g of N GPUs gives
N - g + g / t stages. Layers are distributed so that the slowest stage is as fast as memory allows; they are
equal, so that is a small exact problem, and their number need not be divisible.

Not here: which layout is best (`optimize.py`), and what a layer costs (`simulator/`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise

from exeplan.core.cluster import Cluster
from exeplan.core.models.model import ModelSpec
from exeplan.core.schedule import Placement, Sharding, Stage

_MOST_MOVED = 3
"""Stages to which a layer of the slowest one is moved."""
_ALL_COUNTED = 64
"""GPUs up to which every number of whole nodes is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Stages of `size` GPUs on `num_parallel` of the GPUs, and the number of GPUs that only prefill."""

    size: int = 1
    num_parallel: int = 0
    num_prefill: int = 0
    """0 where every GPU prefills and decodes."""
    across_nodes: bool = False
    """A tensor-parallel group may span nodes."""
    data_parallel_size: int = 1
    """Ranks of such a stage; of one rank the GPUs are tensor parallel."""
    expert_parallel_size: int = 1

    def sharding(self, devices: Sequence[int]) -> Sharding:
        """Of a stage on these GPUs: those that are in no group of `size` hold their layers alone."""
        if len(devices) != self.size:
            return Sharding(len(devices))
        return Sharding(self.size // self.data_parallel_size, self.data_parallel_size, self.expert_parallel_size)

    def __str__(self) -> str:
        if self.expert_parallel_size > 1:
            return f"{show_sharding(self.sharding(range(self.size)))} on {self.num_parallel} GPUs"
        parallel = (
            f"tensor parallel {self.size} on {self.num_parallel} GPUs" if self.num_parallel else "no tensor parallelism"
        )
        return parallel + (f", {self.num_prefill} GPUs prefill" if self.num_prefill else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoad:
    """The cost of the layers of a stage, by which stages are balanced."""

    layer_seconds: float
    fixed_seconds: float = 0.0
    most_layers: int
    """Layers that fit the memory."""


def layouts(
    cluster: Cluster,
    spec: ModelSpec,
    sizes: Sequence[int],
    *,
    shardings: Sequence[Sharding] = (),
    across_nodes: bool = False,
    even: bool = False,
) -> list[Layout]:
    """Every degree and number of tensor-parallel GPUs worth trying; a group stays in its node unless `across_nodes`.

    Degrees must divide the heads. On more than 16 GPUs the tensor-parallel ones come in whole nodes, and on more than
    64 the nodes of one kind, or those of the other, are 1, 2, 4, 8 ... With one of the `shardings` all stages have it;
    its ranks stay in their nodes too, and whole nodes may share the experts. With `even` all stages have as many GPUs:
    serving engines have one tensor-parallel size for all.
    """
    found = [Layout()] if 1 in sizes else []
    for size in sizes:
        fits = size <= cluster.num_gpus and (across_nodes or size <= cluster.gpus_per_node)
        if size == 1 or not fits or spec.num_heads % size:
            continue
        step = size if cluster.num_gpus <= 16 else max(size, cluster.gpus_per_node // size * size)
        most = _parallel_gpus(cluster, size, cluster.num_gpus, across_nodes)
        counts: Sequence[int] = range(1, most // step + 1)
        if cluster.num_gpus > _ALL_COUNTED:
            counts = _sparse(counts)
        found += [Layout(size=size, num_parallel=step * count, across_nodes=across_nodes) for count in counts]
    found += [
        Layout(
            size=one.num_devices,
            num_parallel=cluster.num_gpus,
            across_nodes=across_nodes or one.num_devices > cluster.gpus_per_node,
            data_parallel_size=one.data_parallel_size,
            expert_parallel_size=one.expert_parallel_size,
        )
        for one in shardings
        if _fits(cluster, spec, one, across_nodes)
    ]
    return [one for one in found if not even or one.size == 1 or one.num_parallel == cluster.num_gpus]


def _fits(cluster: Cluster, spec: ModelSpec, sharding: Sharding, across_nodes: bool) -> bool:
    """Whether stages of this sharding fill the cluster, each rank in one node."""
    per_node, rank, whole = cluster.gpus_per_node, sharding.tensor_parallel_size, sharding.num_devices
    if spec.num_heads % rank or cluster.num_gpus % whole:
        return False
    return across_nodes or (per_node % rank == 0 and (per_node % whole == 0 or whole % per_node == 0))


def show_sharding(sharding: Sharding) -> str:
    """`attention data parallel 8, expert parallel 8`: the degrees above 1."""
    names = ("tensor parallel", "attention data parallel", "expert parallel")
    return ", ".join(f"{name} {size}" for name, size in zip(names, sharding, strict=True) if size > 1)


def _sparse(counts: Sequence[int]) -> list[int]:
    """The last of these counts, and those that are a power of 2 or miss the last one by a power of 2."""
    last = counts[-1] if counts else 0
    return [n for n in counts if n & (n - 1) == 0 or (last - n) & (last - n - 1) == 0]


def groups(cluster: Cluster, layout: Layout) -> list[tuple[int, ...]]:
    """The GPUs of each stage, tensor-parallel stages first in each node."""
    return _groups(cluster, tuple(range(cluster.num_gpus)), layout.size, layout.num_parallel, layout.across_nodes)


def split_groups(cluster: Cluster, layout: Layout) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The GPUs of each prefilling and of each decoding stage; the latter are tensor parallel first."""
    gpus = tuple(range(cluster.num_gpus))
    prefill, decode = gpus[: layout.num_prefill], gpus[layout.num_prefill :]
    decoding = _groups(cluster, decode, layout.size, layout.num_parallel, layout.across_nodes)
    left = layout.num_parallel - sum(len(group) for group in decoding if len(group) > 1)
    return _groups(cluster, prefill, layout.size, left, layout.across_nodes), decoding


def share_out(num_layers: int, loads: Sequence[StageLoad]) -> list[int] | None:
    """Layers of each stage, at least one, so that the slowest stage is fastest; None when the memory is too small."""
    if num_layers < len(loads) or any(load.most_layers < 1 for load in loads):
        return None
    if sum(load.most_layers for load in loads) < num_layers:
        return None
    counts = [1] * len(loads)

    def with_one_more(stage: int) -> tuple[float, int]:
        return loads[stage].fixed_seconds + (counts[stage] + 1) * loads[stage].layer_seconds, stage

    open_stages = [with_one_more(stage) for stage, load in enumerate(loads) if load.most_layers > 1]
    heapify(open_stages)
    for _ in range(num_layers - len(loads)):
        # Adding the layer where the stage stays fastest is optimal, because a stage's time rises with its layers.
        _, best = heappop(open_stages)
        counts[best] += 1
        if counts[best] < loads[best].most_layers:
            heappush(open_stages, with_one_more(best))
    return counts


def moved_layers(placement: Placement, seconds: Sequence[float]) -> list[Placement]:
    """Placements with one layer less on the slowest stage of a phase and one more on another of its stages.

    `seconds` are those of each stage. The fastest stages come first, `_MOST_MOVED` of them.
    """
    found = []
    for phase in sorted({stage.phase for stage in placement}):
        stages = [n for n, stage in enumerate(placement) if stage.phase == phase]
        slowest = max(stages, key=lambda n: seconds[n])
        for other in sorted(stages, key=lambda n: seconds[n])[:_MOST_MOVED]:
            if other != slowest and (moved := _moved(placement, stages, slowest, other)):
                found.append(moved)
    return found


def _moved(placement: Placement, stages: Sequence[int], source: int, target: int) -> Placement | None:
    """One layer from a stage to another one of the same phase; those of the stages between them shift."""
    by = {n: (n == target) - (n == source) for n in stages}
    layers = _shifted({n: placement[n].layers for n in stages}, by)
    encoder_layers = _shifted({n: placement[n].encoder_layers for n in stages}, by)
    if layers is None or encoder_layers is None:
        return None
    return tuple(
        replace(stage, layers=layers[n], encoder_layers=encoder_layers[n]) if n in by else stage
        for n, stage in enumerate(placement)
    )


def _shifted(spans: Mapping[int, tuple[int, int]], by: Mapping[int, int]) -> dict[int, tuple[int, int]] | None:
    """The layers of each stage with so many more; none where there were none; None where a stage would have none."""
    if not any(end > start for start, end in spans.values()):
        return dict(spans)
    counts = [end - start + by[n] for n, (start, end) in spans.items()]
    if min(counts) < 1:
        return None
    ends = accumulate(counts, initial=min(start for start, _ in spans.values()))
    return dict(zip(spans, pairwise(ends), strict=True))


def placed(
    spec: ModelSpec,
    device_groups: Sequence[tuple[int, ...]],
    counts: Sequence[int],
    *,
    phase: str = "",
    layout: Layout | None = None,
) -> Placement:
    """The stages of these groups with `counts` decoder layers, and encoder layers in proportion; shared as in a layout,
    or tensor parallel."""
    ends = list(accumulate(counts, initial=0))
    encoder_ends = [round(end * spec.num_encoder_layers / ends[-1]) for end in ends]
    shardings = [layout.sharding(devices) if layout else Sharding(len(devices)) for devices in device_groups]
    return tuple(
        Stage(
            devices=devices,
            layers=layers,
            encoder_layers=encoder,
            phase=phase,
            data_parallel_size=sharding.data_parallel_size,
            expert_parallel_size=sharding.expert_parallel_size,
        )
        for devices, layers, encoder, sharding in zip(
            device_groups, pairwise(ends), pairwise(encoder_ends), shardings, strict=True
        )
    )


def _parallel_gpus(cluster: Cluster, size: int, wanted: int, across_nodes: bool) -> int:
    """How many of `wanted` GPUs can be in groups of this size."""
    if across_nodes:
        return wanted // size * size
    return cluster.num_nodes * (cluster.gpus_per_node // size * size)


def _groups(
    cluster: Cluster, gpus: tuple[int, ...], size: int, num_parallel: int, across_nodes: bool
) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    nodes = [gpus] if across_nodes else [tuple(n) for n in _by_node(cluster, gpus)]
    for node in nodes:
        here = min(num_parallel, len(node)) // size * size if size > 1 else 0
        found += [node[i : i + size] for i in range(0, here, size)]
        found += [(gpu,) for gpu in node[here:]]
        num_parallel -= here
    return found


def _by_node(cluster: Cluster, gpus: tuple[int, ...]) -> list[list[int]]:
    nodes: dict[int, list[int]] = {}
    for gpu in gpus:
        nodes.setdefault(cluster.node_of(gpu), []).append(gpu)
    return list(nodes.values())
