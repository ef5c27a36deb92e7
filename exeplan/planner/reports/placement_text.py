"""A placement in a few words: `4 stages: GPUs 0-3, layers 10/10/10/10`.

Not here: the placement as data (`exeplan.core.plan`), which is what programs get.
"""

from collections.abc import Sequence
from itertools import groupby

from exeplan.core.plan import Plan
from exeplan.core.schedule import Placement, ReplicaGroup, Sharding, Stage, num_devices, num_servers, servers
from exeplan.planner.problems.layouts import show_sharding

_LISTED = 8
"""Most stages whose layers are listed one by one; of more, equal neighbours are counted."""


def show_placement(placement: Placement) -> str:
    """Stages, their GPUs with tensor-parallel degrees, and the layers of each."""
    if len(placement) == 1 and placement[0].num_devices == 1:
        return f"all layers on GPU {placement[0].devices[0]}"
    if (counts := num_servers(placement)) and max(counts) > 1:
        sides = (
            f"{phase} on {_server_gpus(placement, phase)}, layers {_layers(placement, phase)} each"
            for phase in ("prefill", "decode")
        )
        return f"{counts[0]}P{counts[1]}D servers: {'; '.join(sides)}"
    parts = {phase: [s for s in placement if s.phase == phase] for phase in dict.fromkeys(s.phase for s in placement)}
    counted = " + ".join(f"{len(stages)} {phase}".strip() for phase, stages in parts.items())
    what = "; ".join(f"{phase} on {_one(stages)}" if phase else _one(stages) for phase, stages in parts.items())
    return f"{counted} stage{'s' if len(placement) > 1 else ''}: {what}"


def _server_gpus(placement: Placement, phase: str) -> str:
    """`GPU 0 and GPU 1`, or `GPUs 0-3 and GPUs 4-7 (tensor parallel 4)`: of each server its own."""
    own = [[d for number in stages for d in placement[number].devices] for stages in servers(placement, phase)]
    first = placement[servers(placement, phase)[0][0]]
    return f"{' and '.join(map(show_gpus, own))}{_degrees(first.sharding)}"


def _layers(placement: Placement, phase: str) -> str:
    stages = [placement[number] for number in servers(placement, phase)[0]]
    return _counts([stage.layers[1] - stage.layers[0] for stage in stages])


def show_group(group: ReplicaGroup) -> str:
    """`4 x 2 GPUs: orca(...) on 2 stages: GPUs 0-1, layers 20/20`: where the first replica is."""
    return f"{show_equal(group)} on {show_placement(group.placements[0])}"


def show_copies(plan: Plan) -> str:
    """The schedule of a plan; of replicas `4 x 2 GPUs: orca(...)`, group by group."""
    if plan.num_replicas == 1:
        return str(plan.schedule)
    return " and ".join(map(show_equal, plan.groups))


def show_equal(group: ReplicaGroup) -> str:
    """`4 x 2 GPUs: orca(...)`."""
    return f"{_copies(group)}: {group.schedule}"


def _copies(group: ReplicaGroup) -> str:
    size = num_devices(group.placement)
    return f"{group.num_replicas} x {size} GPU{'s' if size > 1 else ''}"


def _one(stages: Sequence[Stage]) -> str:
    """The stages of one phase."""
    runs = [(sharding, list(run)) for sharding, run in groupby(stages, key=lambda stage: stage.sharding)]
    gpus = ", ".join(
        show_gpus([d for stage in run for d in stage.devices]) + _degrees(sharding) for sharding, run in runs
    )
    decoder = [stage.layers[1] - stage.layers[0] for stage in stages]
    encoder = [stage.encoder_layers[1] - stage.encoder_layers[0] for stage in stages]
    layers = [f"layers {_counts(decoder)}"] if any(decoder) else []
    layers += [f"encoder layers {_counts(encoder)}"] if any(encoder) else []
    return ", ".join([gpus, *layers])


def _degrees(sharding: Sharding) -> str:
    return f" ({show_sharding(sharding)})" if sharding.num_devices > 1 else ""


def show_gpus(gpus: Sequence[int]) -> str:
    """`GPU 3`, `GPUs 0-3`, `GPUs 0-1+4`: neighbours as a range."""
    runs: list[list[int]] = []
    for gpu in gpus:
        if runs and gpu == runs[-1][-1] + 1:
            runs[-1].append(gpu)
        else:
            runs.append([gpu])
    text = "+".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"GPU{'s' if len(gpus) > 1 else ''} {text}"


def _counts(layers: Sequence[int]) -> str:
    if len(layers) <= _LISTED:
        return "/".join(map(str, layers))
    runs = [(count, len(list(run))) for count, run in groupby(layers)]
    return "/".join(str(count) if times == 1 else f"{times}x{count}" for count, times in runs)
