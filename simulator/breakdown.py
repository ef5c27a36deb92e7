"""Where the time of a placement goes: a replay with every pass split by kind of work, and set against the roofline.

The split is exact: curves are linear in their measurements, so a pass timed with only one kind of row above zero takes
that kind's time. Roofline: the minimal operations and bytes of a pass (weights read once, keys and values once) over
the rates of the profile's device.

Not here: what follows from it (`exeplan.planner.reports.explain`).
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from exeplan.arrays import Floats
from exeplan.core.batch import Batch
from exeplan.core.cluster import Link
from exeplan.core.models.layer_costs import (
    embedding_parameters,
    expert_parameters_read,
    layer_kv_bytes_per_token,
    layer_parameters_read,
    layer_parameters_used,
)
from exeplan.core.models.model import DTYPE_BYTES
from exeplan.core.profile import LINK_OPS, LINKS, Measurement, Profile
from exeplan.core.runs.metrics import window
from exeplan.simulator.cost import CostModel
from exeplan.simulator.run import Run
from exeplan.simulator.timeline import phase
from exeplan.simulator.timings import Timings

KINDS: Mapping[str, tuple[str, ...]] = {
    "products": ("rest", "dense", "experts", "embed", "head"),
    "attention": ("attention",),
    "all_reduce": ("all_reduce", "all_to_all"),
    "send": ("send",),
    "overhead": ("overhead", "control"),
}
"""Kinds of work, and the operations of a profile that each is made of; exchanges with experts count as all-reduces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTime:
    """Passes of one phase on all GPUs together."""

    share: float
    """Of the GPUs' time."""
    flops_share: float
    """Of the device's operations a second, while products and attention run."""
    bandwidth_share: float
    """The same of its memory bandwidth."""

    @property
    def compute_bound(self) -> bool:
        return self.flops_share >= self.bandwidth_share


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Shares of the steady window of a replay."""

    stages: tuple[Mapping[str, float], ...]
    """Of each stage's time: each of KINDS, and `idle`."""
    mean: Mapping[str, float]
    """The same of all GPUs' time."""
    phases: Mapping[str, PhaseTime]
    """`prefill`, `decode` and `mixed`, where they occur."""


def break_down(cost: CostModel, run: Callable[[CostModel], Run], *, backlog: bool = True) -> Breakdown:
    """Splits the time of `run`, a replay on the cost model that it is given; `backlog` as for `summarize`.

    `cost` is that of the policy which is replayed (`CostModel.for_policy`).
    """
    meter = _Meter(cost)
    done = run(meter)
    opens, closes = window(done.requests, backlog)
    starts = done.passes.starts
    inside = np.flatnonzero((opens <= starts) & (starts < closes)).tolist()
    kinds = np.zeros((len(cost.placement), len(KINDS)))
    phases: dict[str, Floats] = defaultdict(lambda: np.zeros(4))
    gpus = np.array([stage.num_devices for stage in cost.placement])
    for i in inside:
        kinds += meter.split[i]
        computing = meter.split[i][:, :2].sum(axis=1)
        phases[phase(done.passes[i])] += gpus @ np.column_stack([meter.split[i].sum(axis=1), computing, meter.work[i]])
    # A pass belongs to the window in which it starts; what it does beyond the end cannot count as more than all of it.
    shares = kinds / np.maximum(closes - opens, kinds.sum(axis=1, keepdims=True))
    device, seconds = cost.profile.device, (closes - opens) * gpus.sum()
    return Breakdown(
        stages=tuple(_named(row) for row in shares),
        mean=_named(gpus @ shares / gpus.sum()),
        phases={
            name: PhaseTime(
                share=float(busy / seconds),
                flops_share=float(flops / computing / device.flops_per_second),
                bandwidth_share=float(size / computing / device.copy_bytes_per_second),
            )
            for name, (busy, computing, flops, size) in sorted(phases.items())
        },
    )


def _named(shares: Floats) -> dict[str, float]:
    return {**dict(zip(KINDS, shares.tolist(), strict=True)), "idle": max(0.0, 1.0 - float(shares.sum()))}


class _Meter(CostModel):
    """Times passes as the cost model does and records the parts of each; arrays over the stages of the placement."""

    def __init__(self, cost: CostModel) -> None:
        super().__init__(cost.timings, cost.placement, cost.cluster)
        self.times_repeats = False
        self.parts = [_only(cost, kind) for kind in KINDS]
        self.split: list[Floats] = []
        """Seconds of each pass, [stages, kinds]."""
        self.work: list[Floats] = []
        """Operations and bytes of each pass on one GPU, [stages, 2]."""

    def stage_seconds(
        self, batch: Batch, num_tokens: int | None = None, decoding: Sequence[tuple[int, int]] | None = None
    ) -> list[float]:
        of_phase = self.servers[batch.phase]
        own = list(of_phase[0])
        tokens = _Tokens(batch)
        split, work = np.zeros((len(self.placement), len(KINDS))), np.zeros((len(self.placement), 2))
        for kind, part in enumerate(self.parts):
            split[own, kind] = part.stage_seconds(batch, decoding=decoding)
        work[own] = [_device_work(self, number, tokens, last=number == own[-1]) for number in own]
        seconds = super().stage_seconds(batch, num_tokens, decoding)
        if self.num_ranks > 1:  # Each kind of work may be most on a rank of its own.
            split[own] *= (np.array(seconds) / np.maximum(split[own].sum(axis=1), 1e-30))[:, None]
        if len(of_phase) > 1:  # Which of the servers takes the pass is chance: each has its share of it.
            for number, stage in enumerate(own):
                alike = [stages[number] for stages in of_phase]
                split[alike], work[alike] = split[stage] / len(of_phase), work[stage] / len(of_phase)
        self.split.append(split)
        self.work.append(work)
        return seconds


class _Tokens:
    """Work of a batch: rows that decode, their context, prompt tokens, and pairs of tokens that attend."""

    def __init__(self, batch: Batch) -> None:
        spans = batch.spans
        self.rows, self.prefills = len(batch.decode), len(batch.prefill)
        self.context = sum(s.num_tokens for s in batch.decode)
        self.prompts = sum(end - start for start, end in spans)
        self.squares = sum(end**2 - start**2 for start, end in spans)
        self.pairs = self.context + self.squares / 2
        """A causal prompt's token attends to those before it."""


def _device_work(cost: CostModel, number: int, tokens: _Tokens, *, last: bool) -> tuple[float, float]:
    """Operations, two for each multiplication and addition, and bytes, of one GPU of the stage."""
    spec, stage, width = cost.spec, cost.placement[number], cost.spec.num_heads * cost.spec.head_dim
    apart, bytes_each = spec.is_encoder_decoder, DTYPE_BYTES[cost.profile.dtype]
    layers, encoders = stage.layers[1] - stage.layers[0], stage.encoder_layers[1] - stage.encoder_layers[0]
    new, pairs = (tokens.rows, tokens.context) if apart else (tokens.rows + tokens.prompts, tokens.pairs)
    copies = stage.tensor_parallel_size / min(stage.tensor_parallel_size, spec.num_kv_shares)
    kept = copies * (tokens.context + new) * layer_kv_bytes_per_token(spec, cost.profile.cache_dtype)
    attention: float = 4 * width * pairs
    if spec.latent:
        prompts = 2 * spec.num_heads * (spec.head_dim + spec.latent.value_dim) * tokens.squares / 2
        attention = 2 * spec.num_heads * spec.latent.absorbed * tokens.context + prompts
    flops = layers * (2 * layer_parameters_used(spec) * new + attention)
    routed = expert_parameters_read(spec, new)
    weights_read = routed + stage.data_parallel_size * (layer_parameters_read(spec, new) - routed)
    size = layers * (weights_read * bytes_each + kept) if new else 0.0
    if encoders and tokens.prompts:
        weights = layer_parameters_used(spec, encoder=True)
        flops += encoders * (2 * weights * tokens.prompts + 4 * width * tokens.squares)
        size += encoders * weights * bytes_each
    if last and cost.profile.last_layer_saving and not apart:
        inside = tokens.prompts - tokens.prefills
        flops -= 2 * cost.profile.last_layer_saving * layer_parameters_used(spec) * inside
    if last and tokens.rows:
        flops += 2 * embedding_parameters(spec) * tokens.rows
        size += stage.data_parallel_size * embedding_parameters(spec) * bytes_each
    return flops / stage.num_devices, size / stage.num_devices


def _only(cost: CostModel, kind: str) -> CostModel:
    """The cost model of the operations of one kind alone."""
    profile, cluster, ops = cost.profile, cost.cluster, KINDS[kind]
    kept = (*ops, "pass")  # The ratio of its two rows slows every kind down where several devices compute.
    rows = [m if m.op in kept else replace(m, seconds=0.0) for m in profile.measurements]
    if cluster is not None:
        free = Link(bytes_per_second=float("inf"), latency=0.0)
        if kind not in ("all_reduce", "send"):
            cluster = replace(cluster, intra=free, inter=free)
        rows += _silent(profile, [op for op in LINK_OPS if op not in ops])
    return CostModel(Timings(replace(profile, measurements=tuple(rows))), cost.placement, cluster)


def _silent(profile: Profile, ops: list[str]) -> list[Measurement]:
    """Rows of zero seconds for these operations, so that no link stands in for them."""
    sizes = {
        "all_reduce": profile.tensor_parallel_sizes,
        "send": (1,),
        "all_to_all": tuple({one.num_devices for one in profile.expert_shardings}),
    }
    return [
        Measurement(op=op, phase=link, bytes=1, tensor_parallel_size=size, seconds=0.0)
        for op in ops
        for link in LINKS
        for size in sizes[op]
    ]
