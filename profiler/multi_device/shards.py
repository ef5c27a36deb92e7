"""Shards: one rank's share of a layer, of the embedding and of the head, at each tensor-parallel degree.

Timed on one device in a group whose other ranks do not exist, so the times contain no communication (`links.py`). The
points where a shard's times bend are taken from the whole model. Not here: the host's part of an iteration, which is
the same on every rank.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exeplan.core.models.model import ModelSpec
from exeplan.core.profile import Measurement
from exeplan.errors import InputError
from exeplan.profiler.measuring.campaign import visit_seconds
from exeplan.profiler.measuring.measure import Rig
from exeplan.profiler.measuring.points import Point, Range, Work, first_rows, order
from exeplan.profiler.measuring.samples import Samples
from exeplan.runner.compute.blocks.experts import Experts
from exeplan.runner.compute.reference_passes import ReferencePasses
from exeplan.runner.compute.weights.shard import head_ranges, inner_range, inner_widths

_VISITS = 5
"""Visits of each point, if time allows."""
_GRID_SHARE = 0.5
"""Largest share of the remaining time for another row of points."""


@dataclass(frozen=True, slots=True)
class Silent:
    """A group with a single live rank: all-reduce returns its own input, all-gather repeats it for every rank."""

    size: int
    rank: int = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat([x] * self.size, -1)

    def muted(self) -> AbstractContextManager[None]:
        return nullcontext()


def shared_degrees(spec: ModelSpec, num_devices: int) -> tuple[int, ...]:
    """Tensor-parallel degrees from two to the number of devices that the heads and widths of a model allow."""
    return tuple(size for size in range(2, num_devices + 1) if _divides(spec, Silent(size)))


def _divides(spec: ModelSpec, group: Silent) -> bool:
    try:
        head_ranges(spec, group)
        for width in inner_widths(spec):
            inner_range(spec, group, width)
    except InputError:
        return False
    return True


def expert_degrees(spec: ModelSpec, degrees: Iterable[int]) -> tuple[int, ...]:
    """Of these tensor-parallel degrees those that divide a mixture's experts evenly; none of another model."""
    return tuple(size for size in degrees if spec.experts is not None and spec.experts.count % size == 0)


class BusiestFirst:
    """A router whose experts are so numbered that the busiest of `size` parts, of each batch, is the first rank's.

    All ranks wait for the busiest one. Only for weights that are all alike: the tokens go to other experts.
    """

    def __init__(self, router: Callable[[Tensor], tuple[Tensor, Tensor]], count: int, size: int) -> None:
        self._router, self._count, self._size = router, count, size

    def __call__(self, x_NE: Tensor) -> tuple[Tensor, Tensor]:
        weight_Nk, expert_Nk = self._router(x_NE)
        each = self._count // self._size
        part_X = expert_Nk.flatten() // each
        # Not `bincount`, which reads its largest number on the host: a graph may be captured.
        tokens_P = part_X.new_zeros(self._size).scatter_add_(0, part_X, torch.ones_like(part_X))
        return weight_Nk, (expert_Nk - tokens_P.argmax() * each) % self._count


def time_the_busiest(model: object, size: int) -> None:
    """Makes every mixture of a shard with whole experts that of the busiest of `size` ranks."""
    for block in mixtures_of(model):
        block.router = BusiestFirst(block.router, block.held.size, size)


def mixtures_of(model: object) -> Iterator[Experts]:
    """Of all layers."""
    return _mixtures(model, set())


def _mixtures(owner: object, seen: set[int]) -> Iterator[Experts]:
    if id(owner) in seen:
        return
    seen.add(id(owner))
    if isinstance(owner, Experts):
        yield owner
    elif isinstance(owner, list | tuple):
        for item in owner:
            yield from _mixtures(item, seen)
    elif type(owner).__module__.startswith("exeplan.") and hasattr(owner, "__dict__"):
        for value in vars(owner).values():
            yield from _mixtures(value, seen)


def shard_rows(
    rig: Rig,
    work: Work,
    reach: Range,
    *,
    more: Iterable[Point],
    size: int,
    seconds: float,
    reference: ReferencePasses | None,
) -> tuple[Measurement, ...]:
    """Rows of a rig's shard: the required ones, then as much of a coarse grid and of `more` points as time allows.

    `more` are the points where the whole model's times bend. With `reference` the rows are at the speed that its passes
    had in the profile, as the whole model's are.
    """
    samples, visits, costs = Samples(), dict[Point, int](), dict[Point, float]()
    ended = time.monotonic() + seconds

    def visit(points: Iterable[Point], number: int) -> None:
        for point in points:
            began = time.perf_counter()
            found = rig.visit(point, work)
            middle = (began + time.perf_counter()) / 2
            samples.add(found.values, number, time=middle if reference else None)
            if reference:
                reference.repeat_if_due()
            visits[point], costs[point] = visits.get(point, 0) + 1, found.seconds

    essential, *others = first_rows(reach)
    visit((point for point in essential if point.kind != "engine"), 0)
    for row in (*others, *([point] for point in more)):
        new = [point for point in row if point.kind != "engine" and point not in visits]
        if sum(visit_seconds(work, point, rig.copies) for point in new) < _GRID_SHARE * (ended - time.monotonic()):
            visit(new, 0)
    for number in range(1, _VISITS):
        visit((point for point in order(visits, number) if time.monotonic() + costs[point] < ended), number)
    if reference:
        samples.pair_with(reference.speed)
    return tuple(replace(row, tensor_parallel_size=size) for row in samples.measurements())


def shard_work(work: Work, size: int) -> Work:
    """The work of one rank: its share of the weights, and its heads, of which key/value heads may be on several."""
    spec = work.spec
    kv_heads = max(1, spec.num_kv_heads // size)
    own = replace(spec, num_heads=spec.num_heads // size, num_kv_heads=kv_heads)
    encoder = -(-work.encoder_layer_bytes // size)
    return replace(work, spec=own, layer_bytes=max(1, work.layer_bytes // size), encoder_layer_bytes=encoder)
