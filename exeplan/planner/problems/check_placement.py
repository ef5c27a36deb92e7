"""Whether the placement of a plan from a file is complete and consistent for its model and cluster.

Every phase has all layers, in order, each once, or once in each of several equal servers; every device exists and is in
one stage only. Not here: whether the memory suffices (`problem.py`), and whether the profile has the tensor-parallel
sizes (`simulator/cost.py`).
"""

from collections.abc import Sequence

from exeplan.core.cluster import Cluster
from exeplan.core.models.model import ModelSpec
from exeplan.core.schedule import Placement, Schedule, Stage, servers
from exeplan.errors import InputError
from exeplan.policies import load_policy

_BOTH = ["decode", "prefill"]


def check_placement(placement: Placement, spec: ModelSpec, schedule: Schedule) -> None:
    """Raises InputError naming the stage, layer or device that is wrong."""
    phases = sorted({stage.phase for stage in placement})
    _check_shardings(placement, spec, separate=len(phases) > 1)
    separate = load_policy(schedule.policy).SEPARATE_STAGES
    if separate and phases != _BOTH:
        raise InputError(
            f"{schedule.policy} prefills on some stages and decodes on others; give each the phase prefill or decode"
        )
    if not separate and phases != [""]:
        raise InputError(f"{schedule.policy} prefills and decodes on every stage; leave the stages' phases out")
    if separate and spec.is_encoder_decoder:
        prefill, decode = ([s for s in placement if s.phase == phase] for phase in ("prefill", "decode"))
        _check_layers([s.encoder_layers for s in prefill], spec.num_encoder_layers, spec, "encoder layers")
        _check_layers([s.layers for s in prefill], 0, spec, "decoder layers on stages that prefill")
        _check_layers([s.layers for s in decode], spec.num_layers, spec, "layers")
        _check_layers([s.encoder_layers for s in decode], 0, spec, "encoder layers on stages that decode")
        return
    if separate:
        for phase in phases:
            own = [[placement[number] for number in stages] for stages in servers(placement, phase)]
            _check_servers(own, spec, phase)
        return
    for phase in phases:
        stages, of_phase = [s for s in placement if s.phase == phase], f" on stages that {phase}" if phase else ""
        _check_layers([s.layers for s in stages], spec.num_layers, spec, f"layers{of_phase}")
        _check_layers([s.encoder_layers for s in stages], spec.num_encoder_layers, spec, f"encoder layers{of_phase}")


def _check_servers(own: Sequence[Sequence[Stage]], spec: ModelSpec, phase: str) -> None:
    """Each has all layers; several of them are alike."""
    for stages in own:
        _check_layers([stage.layers for stage in stages], spec.num_layers, spec, f"layers on stages that {phase}")
        _check_layers([stage.encoder_layers for stage in stages], 0, spec, f"encoder layers on stages that {phase}")
    if len({tuple((stage.layers, stage.sharding) for stage in stages) for stages in own}) > 1:
        raise InputError(
            f"the {len(own)} servers that {phase} have different shapes; give all of them the same stages on as many "
            "devices, or make replicas of them"
        )


def check_devices(placement: Placement, cluster: Cluster | None = None) -> None:
    """Raises InputError for a device in two stages, or one that the cluster does not have."""
    seen: dict[int, int] = {}
    for number, stage in enumerate(placement):
        for device in stage.devices:
            if device in seen:
                raise InputError(f"device {device} is in stage {seen[device]} and again in stage {number}")
            if cluster is not None and device >= cluster.num_gpus:
                raise InputError(
                    f"stage {number} is on device {device}, cluster {cluster.name} has {cluster.num_gpus} GPUs, "
                    f"0 to {cluster.num_gpus - 1}"
                )
            seen[device] = number


def _check_shardings(placement: Placement, spec: ModelSpec, *, separate: bool) -> None:
    """Raises InputError for degrees of a mixture of experts that the model or the stages cannot have."""
    ranks = {stage.data_parallel_size for stage in placement}
    parts = {stage.expert_parallel_size for stage in placement}
    if spec.experts is None and ranks | parts != {1}:
        raise InputError(
            f"data_parallel_size and expert_parallel_size are of stages of a mixture of experts, and {spec.name} is "
            "none; list replicas instead"
        )
    if spec.experts and (wrong := sorted(size for size in parts if spec.experts.count % size)):
        raise InputError(
            f"expert_parallel_size {wrong[0]} does not divide the {spec.experts.count} experts of {spec.name}"
        )
    if len(ranks) > 1 or (separate and ranks != {1}):
        raise InputError(
            "all stages must have the same data_parallel_size, and 1 where some only prefill; found "
            f"{', '.join(map(str, sorted(ranks)))}"
        )


def _check_layers(spans: Sequence[tuple[int, int]], total: int, spec: ModelSpec, what: str) -> None:
    """Layers 0 to `total` in order, each once; a stage may have none."""
    held = [span for span in spans if span[0] < span[1]]
    ends = [0, *(end for _, end in held)]
    if ends[-1] == total and all(first == end for (first, _), end in zip(held, ends, strict=False)):
        return
    found = ", ".join(f"[{first}, {end}]" for first, end in held) or "nowhere"
    wanted = f"0 to {total} in order" if total else "none there"
    raise InputError(f"the plan places {what} {found}; {spec.name} needs {wanted}")
