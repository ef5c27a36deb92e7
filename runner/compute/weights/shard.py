"""Shard: the part of a model that one device holds, and its tensor-parallel group.

Source: Shoeybi et al. 2019 (Megatron-LM), section 3. Heads and the feed-forward block's inner width are split by
outputs in the first product and by inputs in the second, whose partial results are all-reduced: two sums a layer.
The vocabulary is split by tokens, in embedding table and output head. Norms and position tables are replicated. The
routed experts of a mixture are split like any feed-forward block, or whole ones are divided among the ranks
(`whole_experts`), whose outputs are partial results of the same sum.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from exeplan.core.models.model import ModelSpec
from exeplan.errors import InputError


class Group(Protocol):
    """The ranks of one stage, 0 .. size - 1, as seen by one of them. All make the same calls in the same order."""

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the group, bitwise equal on all ranks; `x` may be overwritten."""

    def all_gather(self, x: Tensor) -> Tensor:
        """The tensors of all ranks, of equal shape, concatenated along the last dimension in rank order."""

    def muted(self) -> AbstractContextManager[None]:
        """Within it this rank calls no other, and waits for none: sums and gathers take the same memory, and have the
        same shapes, as those of all ranks, and their values mean nothing."""


class Alone:
    """The group of a single rank."""

    size = 1
    rank = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def muted(self) -> AbstractContextManager[None]:
        return nullcontext()


ALONE = Alone()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One rank's part of a model: layers, first to last exclusive, and the group that they are split over."""

    layers: tuple[int, int]
    """Decoder layers."""
    encoder_layers: tuple[int, int] = (0, 0)
    first: bool = True
    """Holds the embedding."""
    last: bool = True
    """Holds the final norm and the output head."""
    group: Group = ALONE
    whole_experts: bool = False
    """Each rank has some of a mixture's routed experts whole (expert parallelism), not a part of the inner width of
    all."""

    @property
    def num_layers(self) -> int:
        """Decoder layers, which are the layers of its KV cache."""
        return self.layers[1] - self.layers[0]


def whole(spec: ModelSpec) -> Shard:
    """All of a model on one device."""
    return Shard(layers=(0, spec.num_layers), encoder_layers=(0, spec.num_encoder_layers))


@dataclass(frozen=True, slots=True)
class ShardRange:
    """The part of one dimension that a rank holds: `start` to `stop` exclusive of `size`."""

    size: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        return len(self) == self.size

    def times(self, width: int) -> "ShardRange":
        """The range in a dimension in which each element of this one is `width` wide."""
        return ShardRange(self.size * width, self.start * width, self.stop * width)


def head_ranges(spec: ModelSpec, group: Group) -> tuple[ShardRange, ShardRange]:
    """This rank's query heads, and the key/value heads that they read; a head that several ranks read is replicated.

    Raises InputError when the heads cannot be split evenly.
    """
    heads, kv_heads, size = spec.num_heads, spec.num_kv_heads, group.size
    fitting = [n for n in range(1, size + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    _check(size, f"the {heads} attention and {kv_heads} key/value heads of '{spec.name}'", fitting)
    first = group.rank * kv_heads // size
    last = max(first + 1, (group.rank + 1) * kv_heads // size)
    return _share(heads, group), ShardRange(kv_heads, first, last)


def kv_range(spec: ModelSpec, group: Group) -> ShardRange:
    """What this rank caches of a token: its key/value heads, or the latent vector, which every rank has whole."""
    return ShardRange(1, 0, 1) if spec.latent else head_ranges(spec, group)[1]


def inner_range(spec: ModelSpec, group: Group, width: int) -> ShardRange:
    """This rank's part of the inner width of a feed-forward block. Raises InputError when it does not divide evenly."""
    fitting = [n for n in range(1, group.size + 1) if width % n == 0]
    _check(group.size, f"the feed-forward width {width} of '{spec.name}'", fitting)
    return _share(width, group)


def expert_range(spec: ModelSpec, shard: Shard) -> ShardRange:
    """The routed experts of a layer that this rank holds, whole or a part of their inner width.

    Raises InputError where whole ones cannot be divided evenly.
    """
    assert spec.experts is not None
    count, size = spec.experts.count, shard.group.size if shard.whole_experts else 1
    _check(size, f"the {count} experts of '{spec.name}'", [n for n in range(1, size + 1) if count % n == 0])
    return _share(count, shard.group) if size > 1 else ShardRange(count, 0, count)


def expert_group(shard: Shard) -> Group:
    """The ranks over which the inner width of a routed expert is split."""
    return ALONE if shard.whole_experts else shard.group


def inner_widths(spec: ModelSpec) -> list[int]:
    """Of all feed-forward blocks that a model's layers have."""
    dense = spec.experts is None or spec.experts.num_layers < spec.num_layers
    sparse = (spec.experts.width, spec.experts.shared_width) if spec.experts else ()
    return [*([spec.intermediate_size] if dense else []), *filter(None, sparse)]


def _share(count: int, group: Group) -> ShardRange:
    return ShardRange(count, group.rank * count // group.size, (group.rank + 1) * count // group.size)


def _check(size: int, what: str, fitting: list[int]) -> None:
    """Raises InputError unless `size` is the last of the fitting sizes, which include 1."""
    if fitting[-1] != size:
        raise InputError(f"{what} cannot be split evenly over {size} devices, but over {', '.join(map(str, fitting))}")
