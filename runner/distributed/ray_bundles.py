"""Bundles: what a pipeline asks of a Ray cluster, as pure functions.

A bundle lies on one node. A stage is one, so that its tensor-parallel ranks are next to each other; one that no node
has room for, with the other stages on the nodes as well, is divided into few.
Not here: Ray itself (`ray_launcher.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from exeplan.core.schedule import Placement
from exeplan.errors import InputError

Resources = Mapping[str, float]
"""Amounts by Ray's names: CPU, GPU."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Devices of the plan that are to be on one node, and what they take together."""

    devices: tuple[int, ...]
    resources: dict[str, float]


def worker_resources(device: str, num_threads: int) -> dict[str, float]:
    """What the worker of one device takes: a GPU, or the cores of its threads."""
    return {"GPU": 1.0} if device == "cuda" else {"CPU": float(num_threads)}


def bundles(placement: Placement, worker: Resources, nodes: Sequence[Resources]) -> tuple[Bundle, ...]:
    """The bundles of all stages on a cluster of nodes with these resources.

    All of them fit the nodes at once. Large stages are given a node first; what finds none is divided over the room
    that is left.

    Raises InputError where the whole cluster, with nothing else on it, has no room for all workers.
    """
    room = [_room(node, worker) for node in nodes]
    num_workers = sum(stage.tensor_parallel_size for stage in placement)
    if sum(room) < num_workers:
        raise InputError(
            f"the plan needs {_amount(worker, num_workers)}, the Ray cluster's nodes have room for {sum(room)} of its "
            f"{num_workers} workers: {'; '.join(_shown(node, worker) for node in nodes)}"
        )
    sizes = [stage.tensor_parallel_size for stage in placement]
    largest_first = sorted(range(len(placement)), key=lambda number: -sizes[number])
    parts: dict[int, list[tuple[int, ...]]] = {}
    for number in largest_first:
        if sizes[number] <= max(room):
            parts[number] = _parts(placement[number].devices, room)
    for number in largest_first:
        if number not in parts:
            parts[number] = _parts(placement[number].devices, room)
    return tuple(
        Bundle(part, {name: amount * len(part) for name, amount in worker.items()})
        for number in range(len(placement))
        for part in parts[number]
    )


def devices_left(placement: Placement, worker: Resources, nodes: Sequence[Resources]) -> tuple[tuple[int, ...], ...]:
    """Devices of the placement that nodes have room for which have this much left, by node, the roomiest first.

    Any device is as good as another: they are taken in the placement's order.
    """
    devices = [device for stage in placement for device in stage.devices]
    rooms = sorted((_room(node, worker) for node in nodes), reverse=True)
    ends = [min(end, len(devices)) for end in accumulate(rooms)]
    return tuple(tuple(devices[at:end]) for at, end in pairwise([0, *ends]) if end > at)


def _parts(devices: Sequence[int], room: list[int]) -> list[tuple[int, ...]]:
    """One where a node has room for it, the node with the least such room; each takes its room away."""
    parts = []
    while devices:
        wanted = len(devices)
        node = min(range(len(room)), key=lambda node: (room[node] < wanted, abs(room[node] - wanted)))
        count = min(wanted, room[node])
        room[node] -= count
        parts.append(tuple(devices[:count]))
        devices = devices[count:]
    return parts


def _room(node: Resources, worker: Resources) -> int:
    return min(int(node.get(name, 0.0) // amount) for name, amount in worker.items())


def _amount(worker: Resources, count: int) -> str:
    return ", ".join(f"{count} x {amount:g} {name}" for name, amount in worker.items())


def _shown(node: Resources, worker: Resources) -> str:
    return ", ".join(f"{node.get(name, 0.0):g} {name}" for name in worker)
