"""Parcels: keys and values of a request in host memory, where the devices of one plan leave them for those of another.

A parcel holds what all layers and heads of the model keep of its request. Every old device writes the part that is its
own, every new one reads its part: so layers are regrouped, and heads split anew, without either knowing the other's
placement. What is copied are bytes, as the caches keep them.

Not here: whose keys and values are carried, and how much host memory they may take (`carrying`).
Letters: L layers, K key/value heads, N tokens, B bytes of one head of one token.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from exeplan.core.model import ModelSpec
from exeplan.runner.compute.shard import Shard, head_parts
from exeplan.runner.engine.requests import Row
from exeplan.runner.ipc.collectives import attach

if TYPE_CHECKING:
    from exeplan.runner.compute.model_runner import ModelRunner


class Parcel(NamedTuple):
    """One request's region of the memory: room for so many tokens, from byte `start` on."""

    row: Row
    start: int
    num_tokens: int
    num_stored: int
    """Of them those that are there: fewer where an encoder-decoder model has yet to compute an output again."""


def part_of(memory: Tensor, parcel: Parcel, spec: ModelSpec, shard: Shard, head_bytes: int) -> Tensor:
    """What a shard has stored of a request, `[L, 2, K, N, B]`, as a view of the memory."""
    shape = (spec.num_layers, 2, spec.num_kv_heads, parcel.num_tokens, head_bytes)
    num_bytes = spec.num_layers * 2 * spec.num_kv_heads * parcel.num_tokens * head_bytes
    heads = head_parts(spec, shard.group)[1]
    whole = memory[parcel.start : parcel.start + num_bytes].view(shape)
    return whole[slice(*shard.layers), :, heads.start : heads.stop, : parcel.num_stored]


def save_parcels(runner: "ModelRunner", path: str, parcels: Sequence[Parcel]) -> list[int]:
    """Copies a shard's part of every parcel into the memory at that path. Returns how many tokens each has stored."""
    return [runner.save(parcel.row, part) for parcel, part in _parts(runner, path, parcels)]


def restore_parcels(runner: "ModelRunner", path: str, parcels: Sequence[Parcel]) -> None:
    """Gives the rows, which the cache does not know, their blocks and what the memory holds of them."""
    for parcel, part in _parts(runner, path, parcels):
        runner.restore(parcel.row, part)


def _parts(runner: "ModelRunner", path: str, parcels: Sequence[Parcel]) -> list[tuple[Parcel, Tensor]]:
    memory = torch.frombuffer(attach(path), dtype=torch.uint8)
    head_bytes = runner.spec.head_dim * runner.cache.itemsize
    return [(parcel, part_of(memory, parcel, runner.spec, runner.shard, head_bytes)) for parcel in parcels]
