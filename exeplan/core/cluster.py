"""Cluster: nodes of equal GPUs, and the links inside and between the nodes; a YAML file or a shipped name.

    device: a40-48gb          # what profiles and datasheets call it
    nodes: 6
    gpus_per_node: 8
    adapters_per_node: 1      # network adapters of a node, which its GPUs share evenly; 1 where it is left out
    memory: 48GB              # of one GPU
    intra: {bandwidth: 25GB, latency: 10us}    # one direction, a second, between two GPUs of a node
    inter: {bandwidth: 12.5GB, latency: 15us}  # between nodes, for one GPU

GPUs are numbered node by node from 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

from exeplan.errors import InputError
from exeplan.files import read_yaml, shipped, shipped_names
from exeplan.units import num_bytes, seconds


class ClusterFile(TypedDict):
    """What a cluster file holds; `source` says where its figures come from."""

    device: str
    nodes: int
    gpus_per_node: int
    adapters_per_node: NotRequired[int]
    memory: str | int
    intra: Mapping[str, Any]
    inter: Mapping[str, Any]
    source: NotRequired[str]


_OPTIONAL = ("adapters_per_node", "source")
_FIELDS = tuple(name for name in ClusterFile.__annotations__ if name not in _OPTIONAL)

HOST = "host"
"""The name of a cluster of the devices that a profile was made on, of which there is no file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction between two GPUs."""

    bytes_per_second: float
    latency: float
    """Seconds before the first byte arrives."""

    def seconds(self, size: float) -> float:
        """Seconds to send `size` bytes."""
        return self.latency + size / self.bytes_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`num_nodes` nodes of `gpus_per_node` equal GPUs."""

    name: str
    device: str
    """What profiles and datasheets call the GPU."""
    num_nodes: int
    gpus_per_node: int
    memory_bytes: int
    """Of one GPU."""
    intra: Link
    inter: Link
    """Of one adapter of a node to one of another."""
    adapters_per_node: int = 1
    """Network adapters of a node, which its GPUs share evenly."""
    reference: str | None = field(default=None, compare=False, repr=False)
    """What a plan names it by: a file or a shipped name; None for one that was made in memory."""

    @property
    def num_gpus(self) -> int:
        return self.num_nodes * self.gpus_per_node

    @property
    def of_profile(self) -> bool:
        """Whether they are the devices of a profile's host."""
        return self.name == HOST and self.reference is None

    def node_of(self, gpu: int) -> int:
        return gpu // self.gpus_per_node

    def same_node(self, gpus: tuple[int, ...]) -> bool:
        """Whether all of them are in one node."""
        return len({self.node_of(gpu) for gpu in gpus}) == 1

    def part(self, num_gpus: int) -> "Cluster":
        """`num_gpus` of its GPUs: whole nodes, or a part of one. Raises InputError where neither is possible."""
        if not 1 <= num_gpus <= self.num_gpus:
            raise InputError(f"cluster {self.name} has {self.num_gpus} GPUs, not {num_gpus}")
        if num_gpus <= self.gpus_per_node:
            return replace(
                self, num_nodes=1, gpus_per_node=num_gpus, adapters_per_node=min(self.adapters_per_node, num_gpus)
            )
        if num_gpus % self.gpus_per_node:
            raise InputError(
                f"{num_gpus} GPUs of cluster {self.name} are neither part of a node nor whole nodes of "
                f"{self.gpus_per_node}"
            )
        return replace(self, num_nodes=num_gpus // self.gpus_per_node)


def load_cluster(cluster: str) -> Cluster:
    """The cluster of a YAML file or a shipped name. Raises InputError naming the field that is missing or wrong."""
    path = Path(cluster).expanduser()
    if path.suffix in (".yaml", ".yml"):
        return replace(_cluster(read_yaml(path), path.stem), reference=cluster)
    if cluster not in shipped_names("clusters"):
        raise InputError(
            f"no cluster file or shipped cluster '{cluster}'; shipped are {', '.join(shipped_names('clusters'))}"
        )
    return replace(_cluster(read_yaml(shipped("clusters", cluster)), cluster), reference=cluster)


def _cluster(found: Mapping[str, Any], name: str) -> Cluster:
    if odd := sorted(map(str, (set(found) - set(_OPTIONAL)) ^ set(_FIELDS))):
        raise InputError(f"cluster '{name}' must have exactly {', '.join(_FIELDS)}; look at {', '.join(odd)}")
    body = cast(ClusterFile, found)
    if not isinstance(body["device"], str):
        raise InputError(f"cluster '{name}': device must be a name, found {body['device']!r}")
    counts = {count: found.get(count, 1) for count in ("nodes", "gpus_per_node", "adapters_per_node")}
    for count, value in counts.items():
        if type(value) is not int or not 1 <= value <= 100_000:
            raise InputError(f"cluster '{name}': {count} must be a whole number from 1 to 100000, found {value!r}")
    if counts["adapters_per_node"] > counts["gpus_per_node"]:
        raise InputError(
            f"cluster '{name}': adapters_per_node may be at most gpus_per_node, {counts['gpus_per_node']}, found "
            f"{counts['adapters_per_node']}: a GPU has one at most, whose speed is that of inter"
        )
    return Cluster(
        name=name,
        device=body["device"],
        num_nodes=body["nodes"],
        gpus_per_node=body["gpus_per_node"],
        adapters_per_node=counts["adapters_per_node"],
        memory_bytes=num_bytes(str(body["memory"]), f"cluster '{name}': memory"),
        intra=_link(body["intra"], f"cluster '{name}': intra"),
        inter=_link(body["inter"], f"cluster '{name}': inter"),
    )


def _link(body: Any, where: str) -> Link:
    if not isinstance(body, Mapping) or set(body) != {"bandwidth", "latency"}:
        raise InputError(f"{where} needs bandwidth (bytes a second) and latency, found {body!r}")
    latency = seconds(str(body["latency"]), f"{where} latency")
    if latency == inf:
        raise InputError(f"{where} latency must be finite, found '{body['latency']}'")
    return Link(
        bytes_per_second=float(num_bytes(str(body["bandwidth"]), f"{where} bandwidth")),
        latency=latency,
    )
