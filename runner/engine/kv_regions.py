"""KV regions: a request's keys and values in host memory, through which the devices of two plans exchange them.

A region holds the keys and values of all layers and heads of the model. Each old device writes its part, each new one
reads its part: layers are regrouped and heads split anew without either side knowing the other's placement. Bytes are
copied as the caches store them.

Not here: which requests migrate, and how much host memory they may take (`kv_migration`).
Letters: L layers, K key/value heads, N tokens, B bytes of one head of one token.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from exeplan.core.models.model import ModelSpec
from exeplan.runner.compute.weights.shard import Shard, kv_range
from exeplan.runner.engine.requests import RequestState
from exeplan.runner.ipc.collectives import attach

if TYPE_CHECKING:
    from exeplan.runner.compute.model_runner import ModelRunner


class KVRegion(NamedTuple):
    """One request's region of the memory: `num_tokens` tokens from byte `start` on."""

    request: RequestState
    start: int
    num_tokens: int
    num_stored: int
    """Tokens that are present: fewer where an encoder-decoder model still has to recompute output tokens."""


def shard_view(memory: Tensor, region: KVRegion, spec: ModelSpec, shard: Shard, head_bytes: int) -> Tensor:
    """A shard's keys and values of a request, `[L, 2, K, N, B]` (1 for latent vectors), as a view of the memory."""
    shape = (spec.num_layers, spec.num_kv_tables, spec.num_kv_shares, region.num_tokens, head_bytes)
    num_bytes = math.prod(shape)
    heads = kv_range(spec, shard.group)
    whole = memory[region.start : region.start + num_bytes].view(shape)
    return whole[slice(*shard.layers), :, heads.start : heads.stop, : region.num_stored]


def save_regions(runner: "ModelRunner", path: str, regions: Sequence[KVRegion]) -> list[int]:
    """Copies a shard's part of every region into the memory at `path`. Returns how many tokens each region holds."""
    return [runner.residents.save(region.request, part) for region, part in _parts(runner, path, regions)]


def restore_regions(runner: "ModelRunner", path: str, regions: Sequence[KVRegion]) -> None:
    """Gives requests that are new to the cache their blocks, and reads their keys and values from the memory."""
    for region, part in _parts(runner, path, regions):
        runner.residents.restore(region.request, part)


def _parts(runner: "ModelRunner", path: str, regions: Sequence[KVRegion]) -> list[tuple[KVRegion, Tensor]]:
    memory = torch.frombuffer(attach(path), dtype=torch.uint8)
    spec = runner.spec
    head_bytes = spec.kv_width // spec.num_kv_tables // spec.num_kv_shares * runner.cache.itemsize
    return [(region, shard_view(memory, region, spec, runner.shard, head_bytes)) for region in regions]
