"""Memory of a placement on each GPU: weights, KV cache, workspace.

The workspace depends on the largest passes of a schedule where the profile says `runtime_bytes`: exeplan's engine on a
GPU, whose own measurement it comes near (`core/pass_memory.py`). Other profiles have one workspace for all.

Not here: the blocks of a running engine (`exeplan/runner/compute/kv_budget.py`).
"""

from exeplan.core.models.layer_costs import (
    embedding_parameters,
    expert_parameters,
    layer_kv_bytes_per_token,
    layer_parameters,
    model_parameters,
)
from exeplan.core.models.model import DTYPE_BYTES, ModelSpec
from exeplan.core.pass_memory import DEFAULT_PASSES, GRAPHS_SHARE, LEAST_PASSES, LargestPasses, passes_bytes
from exeplan.core.profile import Profile
from exeplan.core.schedule import Placement, Schedule, Sharding, servers
from exeplan.scheduling.largest_passes import captured_rows, most_rows, pass_sizes, with_finite_context


def memory_bytes(
    profile: Profile,
    placement: Placement,
    kv_tokens: float,
    prefill_kv_tokens: float = 0.0,
    *,
    passes: LargestPasses = LEAST_PASSES,
) -> float:
    """Bytes on the GPU that holds the most, with `kv_tokens` tokens in the KV cache; by default those that are needed
    whatever the passes.

    Stages that only prefill hold `prefill_kv_tokens` instead.
    """
    return PlacementMemory(profile, placement).max_bytes(kv_tokens, prefill_kv_tokens, passes=passes)


def workspace_bytes(
    profile: Profile, sharding: Sharding, passes: LargestPasses = LEAST_PASSES, *, last: bool = True
) -> float:
    """Kept free on each GPU of a stage besides weights, keys and values; `last` has the output head."""
    if profile.runtime_bytes is None:
        return profile.workspace_bytes
    graphs = GRAPHS_SHARE * profile.device.memory_bytes
    return profile.runtime_bytes + graphs + passes_bytes(profile.model, profile.dtype, passes, sharding, last=last)


class PlacementMemory:
    """The memory of one placement, its fixed part computed once."""

    def __init__(self, profile: Profile, placement: Placement) -> None:
        self.profile = profile
        stages = range(len(placement))
        self._weights = [weight_bytes(profile, placement, number) for number in stages]
        self._per_token = [kv_bytes_per_token(profile, placement, number) for number in stages]
        self._prefills = [stage.phase == "prefill" for stage in placement]
        self._decodes = [s.phase != "prefill" and s.layers[1] > s.layers[0] for s in placement]
        ends = {own[-1] for phase in {stage.phase for stage in placement} for own in servers(placement, phase)}
        self._kinds = [(stage.sharding, number in ends) for number, stage in enumerate(placement)]
        self._workspaces: dict[LargestPasses, list[float]] = {}
        self._found: dict[tuple[object, ...], LargestPasses] = {}

    def max_bytes(self, kv_tokens: float, prefill_kv_tokens: float = 0.0, *, passes: LargestPasses) -> float:
        """Bytes on the GPU that holds the most."""
        return max(
            weights + workspace + (prefill_kv_tokens if prefills else kv_tokens) * per_token
            for weights, workspace, per_token, prefills in zip(
                self._weights, self._workspace(passes), self._per_token, self._prefills, strict=True
            )
        )

    def bytes_held(self, schedule: Schedule, memory: float, kv_tokens: float, prefill_kv_tokens: float = 0.0) -> float:
        """The same while a schedule runs that may take `memory` bytes of each GPU."""
        return float(self.max_bytes(kv_tokens, prefill_kv_tokens, passes=self.passes(schedule, memory)))

    def kv_capacity_tokens(self, memory: float, *, passes: LargestPasses) -> float:
        """Tokens of KV cache that fit on every GPU that decodes; negative where the weights alone do not fit."""
        return min(
            (memory - weights - workspace) / per_token
            for weights, workspace, per_token, decodes in zip(
                self._weights, self._workspace(passes), self._per_token, self._decodes, strict=True
            )
            if decodes
        )

    def passes(self, schedule: Schedule, memory: float) -> LargestPasses:
        """The largest passes of a schedule: of the sizes that the engine tries, the first whose tokens the KV cache
        beside them holds, or the least."""
        if self.profile.runtime_bytes is None:
            return DEFAULT_PASSES
        sizes, rows = pass_sizes(with_finite_context(self.profile.model), schedule), most_rows(schedule)
        key = (sizes, rows, captured := captured_rows(schedule), memory)
        if key not in self._found:
            tried = [LargestPasses(tokens=tokens, rows=rows, captured_rows=captured) for tokens in sizes]
            fitting = (one for one in tried if self.kv_capacity_tokens(memory, passes=one) >= one.tokens)
            self._found[key] = next(fitting, tried[-1])
        return self._found[key]

    def _workspace(self, passes: LargestPasses) -> list[float]:
        """Of each stage."""
        if passes not in self._workspaces:
            of = {kind: workspace_bytes(self.profile, kind[0], passes, last=kind[1]) for kind in set(self._kinds)}
            self._workspaces[passes] = [of[kind] for kind in self._kinds]
        return self._workspaces[passes]


def kv_capacity_tokens(
    profile: Profile, placement: Placement, memory: float, schedule: Schedule | None = None
) -> float:
    """Tokens of KV cache that fit on every GPU that decodes, next to the passes of a schedule, or next to those of 8192
    tokens; negative where the weights alone do not fit."""
    placed = PlacementMemory(profile, placement)
    return placed.kv_capacity_tokens(memory, passes=placed.passes(schedule, memory) if schedule else DEFAULT_PASSES)


def kv_bytes_per_token(profile: Profile, placement: Placement, number: int) -> float:
    """On one GPU of a stage, of all requests' tokens. Where there are fewer key and value heads than GPUs, heads are
    replicated; ranks of attention data parallelism, and servers of one phase, each hold the tokens of their own
    requests."""
    return cache_bytes_per_token(profile.model, profile.cache_dtype, placement, number)


def cache_bytes_per_token(spec: ModelSpec, dtype: str, placement: Placement, number: int) -> float:
    """The same of a model whose keys and values are kept in this dtype."""
    stage = placement[number]
    caches = stage.data_parallel_size * len(servers(placement, stage.phase))
    layers = stage.layers[1] - stage.layers[0]
    spread = min(stage.tensor_parallel_size, spec.num_kv_shares)
    return layers * layer_kv_bytes_per_token(spec, dtype) / spread / caches


def weight_bytes(profile: Profile, placement: Placement, number: int) -> float:
    """On one GPU of a stage, as the engine holds them; the profile gives the ratio to the bare parameters.

    Routed experts are divided among all GPUs of a stage, the rest among those of a rank.
    """
    spec, stage = profile.model, placement[number]
    own = next(found for found in servers(placement, stage.phase) if number in found)
    first, last = number == own[0], number == own[-1]
    around = embedding_parameters(spec) * (first + (last and not (spec.tied_head and first)))
    layers = (stage.layers[1] - stage.layers[0]) * layer_parameters(spec)
    encoder = (stage.encoder_layers[1] - stage.encoder_layers[0]) * layer_parameters(spec, encoder=True)
    if profile.layer_weight_bytes is not None:
        routed = (stage.layers[1] - stage.layers[0]) * expert_parameters(spec)
        of_each = profile.layer_weight_bytes / layer_parameters(spec)
        rest = (layers + encoder - routed) * of_each + _around_bytes(profile, around)
        return rest / stage.tensor_parallel_size + routed * of_each / stage.num_devices
    held = profile.weight_bytes / (model_parameters(spec) * DTYPE_BYTES[profile.dtype])
    if stage.data_parallel_size == 1:
        return held * DTYPE_BYTES[profile.dtype] * (layers + encoder + around) / stage.num_devices
    experts = (stage.layers[1] - stage.layers[0]) * expert_parameters(spec)
    parameters = (layers + around - experts) / stage.tensor_parallel_size + experts / stage.num_devices
    return held * DTYPE_BYTES[profile.dtype] * parameters


def _around_bytes(profile: Profile, around: float) -> float:
    """Of so many parameters of embedding and output head, where layers have a dtype of their own."""
    spec = profile.model
    encoder = spec.num_encoder_layers * layer_parameters(spec, encoder=True) / layer_parameters(spec)
    rest = profile.weight_bytes - (spec.num_layers + encoder) * (profile.layer_weight_bytes or 0)
    return max(0.0, rest) * around / (embedding_parameters(spec) * (1 if spec.tied_head else 2))
