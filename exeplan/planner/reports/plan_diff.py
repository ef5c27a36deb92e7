"""The difference of two plans for one model: what changes, what it gains, and what moving costs.

Weights that a GPU does not hold yet are loaded, on all GPUs at once; a tensor-parallel shard counts as its part of the
layer. Keys and values follow the shards of their layers, over host memory, as far as the new cache has room; with other
weights, dtypes or machines the running requests are prefilled again or finished first.

Not here: how it is shown (`plan_diff_text.py`), and how a running server swaps plans.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from exeplan.core.models.layer_costs import embedding_parameters, expert_parameters, layer_parameters
from exeplan.core.models.model import DTYPE_BYTES, ModelSpec
from exeplan.core.plan import Plan
from exeplan.core.schedule import Estimate, Placement, ReplicaGroup, Stage
from exeplan.errors import InputError
from exeplan.planner.reports.placement_text import show_group, show_placement

DRAM_BYTES_PER_SECOND = 5e9
"""Of one GPU, from its host's memory. ExeGPT (ASPLOS 2024), Table 4, half precision: 39B on 16 GPUs in 0.9 s, 101B on
32 in 1.3 s, 175B on 32 in 2.1 s, 341B on 48 in 3.5 s, that is 5.4, 4.9, 5.2 and 4.1 GB/s a GPU."""
SSD_BYTES_PER_SECOND = 0.93e9
"""The same from disk: 2.1, 7.1, 11.9 and 15.1 s, that is 2.3, 0.89, 0.92 and 0.94 GB/s a GPU."""
_DTYPE = "float32"
"""What the engine uses where a plan names no dtype."""

_FINGERPRINTS = {"workload lengths", "profile rows"}
_OTHER_FIELDS = (
    "fit_context",
    "gpus",
    "dtype",
    "kv_dtype",
    "quantization",
    "routing",
    "device",
    "num_threads",
    "kv_cache_tokens",
    "gpu_memory_utilization",
    "max_seqs",
)
"""Fields that are shown as a plan has them."""
_GAINS = ("throughput", "token_throughput", "ttft", "tpot", "latency", "latency_p99", "memory_bytes_per_gpu")
"""Figures of an estimate that are compared."""

Share = tuple[str, int]
"""A part of the model: `decoder`, `encoder`, `embedding` or `head`, and which layer."""
Held = dict[Share, tuple[float, float]]
"""What a GPU holds: of each part the slice from one fraction to another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A field that differs; empty text where a plan lacks it."""

    what: str
    old: str
    new: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Moving:
    """What it costs to move from one plan to the other. Bytes, seconds."""

    loaded_bytes: Mapping[int, float]
    """Weights that each GPU must load."""
    load_seconds: Mapping[str, float]
    """Until the last GPU has loaded, by source."""
    kv_share_kept: float
    """Share of the keys and values in use that the new plan needs where they are."""
    kv_carried: bool
    """Whether the others can be moved."""
    kv_bytes_moved: float | None
    """Bytes of the others under the old plan's load; None where it has no estimate."""
    recomputed_tokens: float | None
    """Tokens of running requests that are prefilled again, unless those finish first; None as above."""
    finish_seconds: float | None
    """Time in which 99 % of the running requests finish, by the old plan's estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDiff:
    """The difference of two plans."""

    changes: tuple[Change, ...]
    old: Estimate | None
    new: Estimate | None
    same_load: bool
    """Both estimates are for one workload and one profile, and so comparable."""
    moving: Moving


def diff_plans(
    old: Plan, new: Plan, old_spec: ModelSpec, new_spec: ModelSpec, *, bytes_per_second: Mapping[str, float]
) -> PlanDiff:
    """The difference of two plans; `bytes_per_second` is how fast one GPU loads weights, by source.

    Raises InputError for two models of different shape.
    """
    if old_spec.fingerprint != new_spec.fingerprint:
        raise InputError(
            f"the plans are for different models, {old_spec.name} and {new_spec.name}: none of the weights can stay; "
            f"see the two side by side with `exeplan compare`"
        )
    return PlanDiff(
        changes=tuple(_changes(old, new)),
        old=old.estimate,
        new=new.estimate,
        same_load=_same(old, new, "workload") and _same(old, new, "profile"),
        moving=_moving(old, new, new_spec, bytes_per_second),
    )


def _same(old: Plan, new: Plan, what: str) -> bool:
    """Whether both plans have the same input: by its fingerprint, or by its name where a fingerprint is missing."""
    prints = getattr(old, f"{what}_fingerprint"), getattr(new, f"{what}_fingerprint")
    return prints[0] == prints[1] if all(prints) else getattr(old, what) == getattr(new, what)


def _changes(old: Plan, new: Plan) -> Iterable[Change]:
    """Fields that differ, the most important first."""
    before, after = _fields(old), _fields(new)
    # A single fingerprint tells nothing.
    alone = _FINGERPRINTS - (before.keys() & after.keys())
    for what in {**before, **after}:
        if what not in alone and before.get(what, "") != after.get(what, ""):
            yield Change(what=what, old=before.get(what, ""), new=after.get(what, ""))


def _fields(plan: Plan) -> dict[str, str]:
    bounds = [str(bound) for bound in (plan.bound, *plan.more_bounds) if bound and math.isfinite(bound.seconds)]
    found: dict[str, object] = {
        "model": plan.model,
        "policy": plan.schedule.policy,
        "order": plan.schedule.order,
        **plan.schedule.variables,
        "placement": show_placement(plan.placement),
        "first devices": ", ".join(map(str, plan.replicas)) if plan.num_replicas > 1 else None,
        **{f"group {number}": _group(group) for number, group in enumerate(plan.more_replicas, 2)},
        "replicas": plan.num_replicas if plan.num_replicas > 1 else None,
        "router": plan.router,
        "cluster": plan.cluster,
        "bounds": ", ".join(bounds) or None,
        "arrivals": "as in the trace" if plan.trace_arrivals else plan.arrival_rate,
        "deadline": plan.deadline,
        "workload": plan.workload,
        "workload lengths": plan.workload_fingerprint,
        "profile": plan.profile,
        "engine": plan.engine,
        "profile rows": plan.profile_fingerprint,
        **{what: getattr(plan, what) for what in _OTHER_FIELDS},
    }
    return {what: str(value) for what, value in found.items() if value is not None}


def _group(group: ReplicaGroup) -> str:
    tokens = f", {group.kv_cache_tokens} kv_cache_tokens" if group.kv_cache_tokens is not None else ""
    return f"{show_group(group)}; first devices {', '.join(map(str, group.first_devices))}{tokens}"


def _moving(old: Plan, new: Plan, spec: ModelSpec, bytes_per_second: Mapping[str, float]) -> Moving:
    # With other weights, another dtype or other machines nothing can stay. A plan by hand may leave them out.
    given = [(getattr(old, what), getattr(new, what)) for what in ("model", "dtype", "cluster")]
    afresh = any(a and b and a != b for a, b in given)
    before, after = () if afresh else _all_placements(old), _all_placements(new)
    held, sizes = _held_by_all(before, spec), _bytes(spec, new.dtype or old.dtype or _DTYPE)
    needed = _held_by_all(after, spec)
    loaded = {gpu: _missing(held.get(gpu, {}), parts, sizes) for gpu, parts in sorted(needed.items())}
    kept, carried = _kv_kept(before, after, spec), not afresh and old.kv_dtype == new.kv_dtype
    used = old.estimate.kv_tokens if old.estimate else None
    per_token = spec.kv_bytes_per_token(old.kv_dtype or old.dtype or new.kv_dtype or new.dtype or _DTYPE)
    return Moving(
        loaded_bytes=loaded,
        load_seconds={where: max(loaded.values()) / speed for where, speed in bytes_per_second.items()},
        kv_share_kept=kept,
        kv_carried=carried,
        kv_bytes_moved=None if used is None else (1 - kept) * used * per_token,
        recomputed_tokens=None if used is None else _excess(used, new) if carried or kept == 1 else used,
        finish_seconds=old.estimate.latency_p99 if old.estimate else None,
    )


def _excess(used: float, new: Plan) -> float:
    """Tokens for which the new plan's KV cache has no room."""
    room = [(group.num_replicas, group.kv_cache_tokens) for group in new.groups]
    if not all(tokens for _, tokens in room):
        return 0.0
    return max(0.0, used - sum(number * (tokens or 0) for number, tokens in room))


def _all_placements(plan: Plan) -> tuple[Placement, ...]:
    """Of every replica of every group, by the cluster's device numbers."""
    return tuple(placement for group in plan.groups for placement in group.placements)


def _held_by_all(placements: Sequence[Placement], spec: ModelSpec) -> dict[int, Held]:
    """What each GPU holds for its replica."""
    return {gpu: held for placement in placements for gpu, held in _held(placement, spec).items()}


def _held(placement: Sequence[Stage], spec: ModelSpec) -> dict[int, Held]:
    """What each GPU holds."""
    found: dict[int, Held] = {}
    for number, stage in enumerate(placement):
        same = [i for i, s in enumerate(placement) if s.phase == stage.phase]
        parts: list[Share] = [("decoder", layer) for layer in range(*stage.layers)]
        parts += [("encoder", layer) for layer in range(*stage.encoder_layers)]
        if number == same[0]:
            parts.append(("embedding", 0))
        if number == same[-1]:
            parts.append(("embedding" if spec.tied_head else "head", 0))
        experts = [("experts", layer) for layer in range(*stage.layers)] if spec.experts else []
        size, whole = stage.tensor_parallel_size, stage.num_devices
        for number_in_stage, gpu in enumerate(stage.devices):
            rank = number_in_stage % size
            found[gpu] = dict.fromkeys(parts, (rank / size, (rank + 1) / size))
            found[gpu] |= dict.fromkeys(experts, (number_in_stage / whole, (number_in_stage + 1) / whole))
    return found


def _bytes(spec: ModelSpec, dtype: str) -> dict[str, float]:
    """Of a whole part."""
    around = embedding_parameters(spec)
    counts = {
        "decoder": layer_parameters(spec) - expert_parameters(spec),
        "experts": expert_parameters(spec),
        "encoder": layer_parameters(spec, encoder=True),
        "embedding": around,
        "head": around,
    }
    return {part: float(DTYPE_BYTES[dtype] * count) for part, count in counts.items()}


def _missing(before: Held, after: Held, sizes: Mapping[str, float]) -> float:
    """Bytes of what a GPU is to hold and does not."""
    return sum(
        sizes[part[0]] * (end - first - _overlap(before, part, first, end)) for part, (first, end) in after.items()
    )


def _overlap(held: Held, part: Share, first: float, end: float) -> float:
    """How much of that slice of the part is held."""
    here = held.get(part, (0.0, 0.0))
    return max(0.0, min(end, here[1]) - max(first, here[0]))


def _kv_kept(before: Sequence[Placement], after: Sequence[Placement], spec: ModelSpec) -> float:
    """The share of keys and values, alike in every layer and replica, that GPUs which decode hold for both plans."""
    here, there = (_held_by_all([_decoding(one) for one in placements], spec) for placements in (before, after))
    kept = sum(
        _overlap(here.get(gpu, {}), part, first, end)
        for gpu, parts in there.items()
        for part, (first, end) in parts.items()
        if part[0] == "decoder"
    )
    return min(1.0, kept / (spec.num_layers * max(1, len(before))))


def _decoding(placement: Placement) -> Placement:
    return tuple(stage for stage in placement if stage.phase != "prefill")


def gains(diff: PlanDiff) -> dict[str, float]:
    """The relative change of each figure of the estimates; nothing where a plan has none."""
    if diff.old is None or diff.new is None:
        return {}
    pairs = {name: (getattr(diff.old, name), getattr(diff.new, name)) for name in _GAINS}
    return {name: new / old - 1 for name, (old, new) in pairs.items() if old and new is not None}
