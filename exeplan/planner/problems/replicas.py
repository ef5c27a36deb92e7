"""Replicas: how a cluster is divided into pipelines that each hold the whole model.

A pipeline has a part of one node, or whole nodes. Given the throughput of the best pipeline of every size, the division
with the most throughput is a knapsack problem, solved exactly: first the best use of one node, then of all nodes. GPUs
may stay idle, so that more GPUs are never worse.

Not here: the pipelines themselves (`optimize.py`), and to which replica a request goes (`core/schedule.py`).
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from exeplan.core.cluster import Cluster
from exeplan.core.plan import schedule_json
from exeplan.core.schedule import Estimate, ReplicaGroup

_NEARLY = 0.9
"""Share of the most throughput a GPU from which the sizes around a pipeline of several nodes are tried."""
_ADDED = ("throughput", "token_throughput", "kv_tokens", "utility", "goodput")
"""Figures of all replicas that are the sums of theirs."""
Division = Mapping[int, int]
"""Number of replicas by the number of GPUs of each."""


@dataclass(frozen=True, slots=True)
class _Use:
    """The most throughput of some GPUs or nodes, and by which pipelines."""

    throughput: float = 0.0
    sizes: tuple[int, ...] = ()

    def plus(self, throughput: float, sizes: tuple[int, ...]) -> "_Use":
        return _Use(self.throughput + throughput, self.sizes + sizes)


def pipeline_sizes(cluster: Cluster | None) -> tuple[int, ...]:
    """Numbers of GPUs of the pipelines that are tried first, rising: every part of a node, 2, 4, 8 ... nodes, and
    all."""
    if cluster is None:
        return (1,)
    nodes = {cluster.num_nodes, *(2**k for k in range(1, cluster.num_nodes.bit_length()))}
    return (
        *range(1, cluster.gpus_per_node + 1),
        *(n * cluster.gpus_per_node for n in sorted(nodes) if 1 < n <= cluster.num_nodes),
    )


def sizes_between(cluster: Cluster, throughputs: Mapping[int, float], tried: Collection[int]) -> list[int]:
    """Numbers of GPUs halfway, in nodes, from the best pipeline of several nodes to the next ones tried.

    None where it has far less throughput a GPU than the best pipeline of all.
    """
    per_node = cluster.gpus_per_node
    rates = {size: value / size for size, value in throughputs.items() if value}
    wide = {size: rate for size, rate in rates.items() if size > per_node}
    best = max(wide, key=lambda size: wide[size], default=0)
    if not best or rates[best] < _NEARLY * max(rates.values()):
        return []
    nodes = sorted({size // per_node for size in tried if size >= per_node})
    at = nodes.index(best // per_node)
    sides = [*nodes[max(0, at - 1) : at], *nodes[at + 1 : at + 2]]
    return [(side + nodes[at]) // 2 * per_node for side in sides if abs(side - nodes[at]) > 1]


def num_replicas(cluster: Cluster | None, size: int) -> int:
    """How many equal pipelines of that many GPUs the cluster has room for."""
    if cluster is None:
        return 1
    if size <= cluster.gpus_per_node:
        return cluster.num_nodes * (cluster.gpus_per_node // size)
    return cluster.num_gpus // size


def best_division(throughputs: Mapping[int, float], cluster: Cluster | None) -> Division:
    """The division with the most throughput, of pipelines with these throughputs by size; ties go to fewer replicas."""
    if cluster is None:
        return {1: 1} if throughputs.get(1) else {}
    in_node = _most({size: _Use(value, (size,)) for size, value in throughputs.items()}, cluster.gpus_per_node)
    by_nodes = {
        size // cluster.gpus_per_node: _Use(value, (size,))
        for size, value in throughputs.items()
        if size > cluster.gpus_per_node
    }
    best = _most({1: in_node, **by_nodes}, cluster.num_nodes)
    return dict(sorted(Counter(best.sizes).items(), reverse=True))


def division_throughput(throughputs: Mapping[int, float], division: Division) -> float:
    """Requests/s of all replicas."""
    return sum(count * throughputs[size] for size, count in division.items())


def first_devices(division: Division, cluster: Cluster | None) -> dict[int, tuple[int, ...]]:
    """The first device of each replica, by size: large ones first, none across the border of a node without need."""
    found: dict[int, list[int]] = {size: [] for size in division}
    per_node = cluster.gpus_per_node if cluster else 1
    free = dict.fromkeys(range(cluster.num_nodes if cluster else 1), per_node)
    for size in sorted(division, reverse=True):
        for _ in range(division[size]):
            node = next(node for node in free if free[node] >= min(size, per_node))
            found[size].append(node * per_node + per_node - free[node])
            for taken in range(node, node + max(1, size // per_node)):
                free[taken] -= min(size, per_node)
    return {size: tuple(devices) for size, devices in found.items()}


def _most(items: Mapping[int, _Use], capacity: int) -> _Use:
    """The best use of `capacity` places by any number of each item; the keys are the places that an item takes."""
    best = [_Use()] * (capacity + 1)
    for places in range(1, capacity + 1):
        # Large items come first, so that a tie goes to few replicas.
        options = [
            best[places - size].plus(item.throughput, item.sizes)
            for size, item in sorted(items.items(), reverse=True)
            if size <= places
        ]
        best[places] = max([*options, best[places - 1]], key=lambda use: use.throughput)
    return best[capacity]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFigures:
    """Equal replicas, and the figures of one of them."""

    group: ReplicaGroup
    estimate: Estimate
    """The closed form's."""
    replay: Estimate

    def to_dict(self) -> dict[str, Any]:
        """For programs, with the number of replicas."""
        return {
            "replicas": self.group.num_replicas,
            "schedule": schedule_json(self.group.schedule),
            "estimate": self.estimate.to_dict(),
            "replay": self.replay.to_dict(),
        }


def part_of(figures: Estimate, share: float) -> Estimate:
    """This share of what several replicas serve; times are as they are."""
    parts = {name: value * share for name in _ADDED if (value := getattr(figures, name)) is not None}
    return replace(figures, **parts)


def together(estimates: Sequence[Estimate], counts: Sequence[int]) -> Estimate:
    """Replicas of these estimates, so many of each, as one system.

    Throughputs and KV caches are added. Means over requests are weighted by throughput. Every bound holds for each
    replica, so latency, percentiles and the tail, and memory, are those of the worst.
    """
    if len(estimates) == 1 and counts[0] == 1:
        return estimates[0]
    weights = np.array([count * one.throughput for one, count in zip(estimates, counts, strict=True)])
    weights = weights / weights.sum()

    def added(name: str) -> float:
        return float(sum(count * getattr(one, name) for one, count in zip(estimates, counts, strict=True)))

    def mean(name: str) -> float:
        return float(weights @ [getattr(one, name) for one in estimates])

    def worst(name: str) -> Any:
        return max((v for one in estimates if (v := getattr(one, name)) is not None), default=None)

    def shared(name: str) -> float | None:
        return None if any(getattr(one, name) is None for one in estimates) else mean(name)

    return Estimate(
        throughput=added("throughput"),
        token_throughput=added("token_throughput"),
        ttft=mean("ttft"),
        tpot=mean("tpot"),
        latency=worst("latency"),
        latency_p50=mean("latency_p50"),
        latency_p99=worst("latency_p99"),
        kv_tokens=added("kv_tokens"),
        memory_bytes_per_gpu=worst("memory_bytes_per_gpu"),
        deadline_share=shared("deadline_share"),
        utility=None if any(one.utility is None for one in estimates) else added("utility"),
        attainment=shared("attainment"),
        goodput=None if any(one.goodput is None for one in estimates) else added("goodput"),
        percentiles={name: max(one.percentiles[name] for one in estimates) for name in estimates[0].percentiles},
    )
