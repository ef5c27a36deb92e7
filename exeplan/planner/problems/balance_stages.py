"""Distributes layers: stages balanced for the work of a workload's steady state.

Prefill and decode have a fixed ratio in any steady state: with `rows` requests decoding, rows / mean decode steps begin
in each iteration. At the number of rows that half of the memory allows, that ratio gives the time of a layer, and from
it the layers of stages of different width (`layouts.py`) and the number of GPUs that only prefill.
"""

import math
from dataclasses import dataclass, replace
from functools import cache

from exeplan.core.cluster import Cluster
from exeplan.core.models.layer_costs import (
    embedding_parameters,
    expert_parameters,
    layer_kv_bytes_per_token,
    layer_parameters,
    model_parameters,
)
from exeplan.core.schedule import Placement, Sharding, Stage
from exeplan.planner.problems.layouts import Layout, StageLoad, groups, placed, share_out, split_groups
from exeplan.simulator.memory import workspace_bytes
from exeplan.simulator.timings import Shard, Timings
from exeplan.workload.workload import Workload

SMALL, _AROUND = 8, (0.5, 0.75, 1.0, 1.25, 1.5)
"""GPUs up to which every split is tried; of larger clusters, splits around the proportion of the work."""
_ROOMY = 1.25
"""GPUs that are tried for prefills where few suffice, over the fewest that hold the weights."""
_FILL = 0.5
"""Share of the free memory that the KV cache takes when stages are balanced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Seconds of an iteration of the steady state, for one layer of each kind, at one tensor-parallel size."""

    prefill: float
    decode: float
    head: float
    embed: float


class Balance:
    """Balanced placements of one model and workload on one cluster."""

    def __init__(self, timings: Timings, cluster: Cluster, workload: Workload, memory: float) -> None:
        self.timings, self.cluster, self.workload, self.memory = timings, cluster, workload, memory
        self.spec, self.profile = timings.profile.model, timings.profile
        self.rows = self._rows()
        self._load = cache(self._load_of)
        self._stage_load = cache(self._stage_load_of)
        """Of a few kinds of stages, of which all layouts are made."""

    def placement(self, layout: Layout) -> Placement | None:
        """All stages prefill and decode; None when the memory cannot hold the layers."""
        devices = groups(self.cluster, layout)
        loads = [
            self._stage_load(layout.sharding(d), i == 0, i == len(devices) - 1, both=True)
            for i, d in enumerate(devices)
        ]
        counts = share_out(self.spec.num_layers, loads)
        return None if counts is None else placed(self.spec, devices, counts, layout=layout)

    def split_placement(self, layout: Layout) -> Placement | None:
        """Some stages prefill, the others decode; a decoder-only model's layers are on both."""
        parts: list[Placement] = []
        for phase, devices in zip(("prefill", "decode"), split_groups(self.cluster, layout), strict=True):
            part = self._part(phase, devices)
            if part is None:
                return None
            parts.append(part)
        return parts[0] + parts[1]

    def prefill_gpus(self, split_by: str) -> tuple[int, ...]:
        """Numbers of GPUs that prefill, of which the search tries others next to the best: in proportion to the work
        (`time`), or so that all GPUs use equally much of their memory (`memory`).

        Both depend on batches that are not known yet. Around the proportion of the work there are several, all of them
        on a small cluster. Memory is even on the fewest GPUs that hold the weights where caches fill all that the
        others have, and where caches are small on as many as decode, or for an encoder on its share of the weights.
        """
        total, least = self.cluster.num_gpus, self._least_gpus(encoder=self.spec.is_encoder_decoder)
        # Whole layers fill the memory of the fewest GPUs only by chance.
        roomy = math.ceil(_ROOMY * least)
        if split_by == "memory":
            return tuple(sorted({min(number, total - 1) for number in (least, roomy, self._even_gpus())}))
        load = self._load(self.timings.shard(Sharding(min(self.timings.profile.tensor_parallel_sizes))))
        prefill = load.prefill * (self.spec.num_encoder_layers or self.spec.num_layers)
        decode = load.decode * self.spec.num_layers
        if total <= SMALL:
            return tuple(range(1, total))
        most = max(least, total - self._least_gpus(encoder=False))
        around = [round(total * prefill / (prefill + decode) * factor) for factor in _AROUND]
        return tuple(sorted({min(max(least, number), most, total - 1) for number in (*around, roomy)}))

    def _even_gpus(self) -> int:
        """GPUs for prefills with as many bytes of weights on each as on the others."""
        if not self.spec.is_encoder_decoder:
            return math.ceil(self.cluster.num_gpus / 2)
        encoder = self.spec.num_encoder_layers * layer_parameters(self.spec, encoder=True)
        decoder = self.spec.num_layers * layer_parameters(self.spec)
        return max(1, round(self.cluster.num_gpus * encoder / (encoder + decoder)))

    def _least_gpus(self, *, encoder: bool) -> int:
        """GPUs that hold the weights of the decoder layers, or of the encoder layers."""
        layers = self.spec.num_encoder_layers if encoder else self.spec.num_layers
        weights = layers * layer_parameters(self.spec, encoder=encoder) + embedding_parameters(self.spec)
        room = self.memory - workspace_bytes(self.profile, Sharding(max(self.profile.tensor_parallel_sizes)))
        return max(1, -int(-weights * self._held_bytes() // room)) if room > 0 else self.cluster.num_gpus

    def _part(self, phase: str, devices: list[tuple[int, ...]]) -> Placement | None:
        encoder = phase == "prefill" and self.spec.is_encoder_decoder
        loads = [
            self._stage_load(Sharding(len(d)), i == 0, i == len(devices) - 1, both=False, prefill=phase == "prefill")
            for i, d in enumerate(devices)
        ]
        counts = share_out(self.spec.num_encoder_layers if encoder else self.spec.num_layers, loads)
        if counts is None:
            return None
        part = placed(self.spec, devices, counts, phase=phase)
        if not self.spec.is_encoder_decoder:
            return part
        return tuple(_only_encoder(stage) if encoder else _only_decoder(stage) for stage in part)

    def _stage_load_of(
        self, sharding: Sharding, first: bool, last: bool, *, both: bool, prefill: bool = True
    ) -> StageLoad:
        load = self._load(self.timings.shard(sharding))
        apart = self.spec.num_encoder_layers / self.spec.num_layers if self.spec.is_encoder_decoder else 1.0
        seconds = load.prefill * apart + load.decode if both else load.prefill if prefill else load.decode
        fixed = load.embed * first + load.head * last
        layer = layer_parameters(self.spec)
        if self.spec.is_encoder_decoder:
            encoder = layer_parameters(self.spec, encoder=True)
            layer = round(layer + apart * encoder) if both else encoder if prefill else layer
        size = sharding.tensor_parallel_size
        weights = layer * self._held_bytes() / size
        if sharding.data_parallel_size > 1:
            experts = expert_parameters(self.spec) * self._held_bytes()
            weights += experts / sharding.num_devices - experts / size
        around = embedding_parameters(self.spec) * (first + last) * self._held_bytes() / size
        room = self.memory - workspace_bytes(self.profile, sharding, last=last) - around
        return StageLoad(layer_seconds=seconds, fixed_seconds=fixed, most_layers=max(0, int(room / weights)))

    def _load_of(self, shard: Shard) -> Load:
        rows, steps = self.rows, self.workload.mean_output
        prompts = rows / steps
        mean, context = self.workload.mean_input, self.workload.mean_input + self.workload.mean_output / 2
        attention = float(shard.prefill_attention(1.0, mean))
        return Load(
            prefill=prompts * (float(shard.rest["prefill"](4 * mean)) / 4 + attention),
            decode=float(shard.rest["decode"](rows) + shard.decode_attention(rows, context)),
            head=float(shard.head(rows)),
            embed=float(shard.embed(rows)),
        )

    def _rows(self) -> float:
        """Decoding requests when the KV cache fills half of the memory that the weights leave."""
        spec, gpus = self.spec, self.cluster.num_gpus
        free = max(self.memory * gpus - model_parameters(spec) * self._held_bytes(), 0.1 * self.memory)
        per_request = (self.workload.mean_input + self.workload.mean_output / 2) * spec.num_layers
        rows = _FILL * free / (per_request * layer_kv_bytes_per_token(spec, self.profile.cache_dtype))
        largest = self.timings.shard(
            Sharding(min(self.timings.profile.tensor_parallel_sizes))
        ).decode_attention.num_seqs[-1]
        return float(min(max(rows / gpus, 1.0), largest))

    def _held_bytes(self) -> float:
        """Bytes of one parameter as the engine stores it."""
        profile = self.timings.profile
        return profile.weight_bytes / model_parameters(self.spec)


def _only_encoder(stage: Stage) -> Stage:
    return replace(stage, layers=(0, 0), encoder_layers=stage.layers)


def _only_decoder(stage: Stage) -> Stage:
    return replace(stage, encoder_layers=(0, 0))
