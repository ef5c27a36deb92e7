"""Shard: what one device holds of a model, and the group of devices that its layers are split over.

Source: Shoeybi et al. 2019 (Megatron-LM), section 3. Heads and the feed-forward block's inner width are split by
outputs in the first product and by inputs in the second, whose partial results the group adds up: two sums a layer.
The vocabulary is split by tokens, in embedding table and output head. Norms and position tables are whole everywhere.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from exeplan.core.model import ModelSpec
from exeplan.errors import InputError


class Group(Protocol):
    """The ranks of one stage, numbered 0 .. size - 1, seen from one of them. All call the same things in one order."""

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the group, equal to the last bit on all ranks; `x` may be overwritten."""

    def all_gather(self, x: Tensor) -> Tensor:
        """The tensors of all ranks, which have one shape, side by side along the last dimension in rank order."""


class Alone:
    """The group of a single rank."""

    size = 1
    rank = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x


ALONE = Alone()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One rank's part of a model: layers, first to last exclusive, and the group of its stage that shares them."""

    layers: tuple[int, int]
    """Decoder layers."""
    encoder_layers: tuple[int, int] = (0, 0)
    first: bool = True
    """Holds the embedding."""
    last: bool = True
    """Holds the final norm and the output head."""
    group: Group = ALONE

    @property
    def num_layers(self) -> int:
        """Decoder layers, and so layers of its KV cache."""
        return self.layers[1] - self.layers[0]


def whole(spec: ModelSpec) -> Shard:
    """All of a model on one device."""
    return Shard(layers=(0, spec.num_layers), encoder_layers=(0, spec.num_encoder_layers))


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank holds of one dimension: `start` to `stop` exclusive of `size`."""

    size: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        return len(self) == self.size

    def times(self, width: int) -> "Part":
        """Of a dimension in which each of these is `width` wide."""
        return Part(self.size * width, self.start * width, self.stop * width)


def head_parts(spec: ModelSpec, group: Group) -> tuple[Part, Part]:
    """This rank's query heads, and the key/value heads that they read: one that several ranks read is on each of them.

    Raises InputError when the heads cannot be shared evenly.
    """
    heads, kv_heads, size = spec.num_heads, spec.num_kv_heads, group.size
    fitting = [n for n in range(1, size + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    _check(size, f"the {heads} attention and {kv_heads} key/value heads of '{spec.name}'", fitting)
    first = group.rank * kv_heads // size
    last = max(first + 1, (group.rank + 1) * kv_heads // size)
    return _share(heads, group), Part(kv_heads, first, last)


def inner_part(spec: ModelSpec, group: Group, width: int) -> Part:
    """This rank's share of the inner width of a feed-forward block. Raises InputError when that does not divide."""
    fitting = [n for n in range(1, group.size + 1) if width % n == 0]
    _check(group.size, f"the feed-forward width {width} of '{spec.name}'", fitting)
    return _share(width, group)


def _share(count: int, group: Group) -> Part:
    return Part(count, group.rank * count // group.size, (group.rank + 1) * count // group.size)


def _check(size: int, what: str, fitting: list[int]) -> None:
    """Raises InputError unless the size is the last of those that fit, of which 1 is always one."""
    if fitting[-1] != size:
        raise InputError(f"{what} cannot be split evenly over {size} devices, but over {', '.join(map(str, fitting))}")
