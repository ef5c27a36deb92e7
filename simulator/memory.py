"""Memory of a placement on each GPU: weights, KV cache, workspace.

Not here: the blocks of a running engine (`exeplan/runner/compute/kv_budget.py`).
"""

from exeplan.core.layer_costs import (
    embedding_parameters,
    expert_parameters,
    layer_kv_bytes_per_token,
    layer_parameters,
    model_parameters,
)
from exeplan.core.model import DTYPE_BYTES
from exeplan.core.profile import Profile
from exeplan.core.schedule import Placement, servers


def memory_bytes(profile: Profile, placement: Placement, kv_tokens: float, prefill_kv_tokens: float = 0.0) -> float:
    """Bytes on the GPU that holds the most, with `kv_tokens` tokens in the KV cache.

    Stages that only prefill hold `prefill_kv_tokens` instead.
    """
    return PlacementMemory(profile, placement).max_bytes(kv_tokens, prefill_kv_tokens)


class PlacementMemory:
    """The memory of one placement, its fixed part computed once."""

    def __init__(self, profile: Profile, placement: Placement) -> None:
        stages = range(len(placement))
        self._fixed = [_fixed_bytes(profile, placement, number) for number in stages]
        self._per_token = [kv_bytes_per_token(profile, placement, number) for number in stages]
        self._prefills = [stage.phase == "prefill" for stage in placement]

    def max_bytes(self, kv_tokens: float, prefill_kv_tokens: float = 0.0) -> float:
        """Bytes on the GPU that holds the most."""
        return max(
            fixed + (prefill_kv_tokens if prefills else kv_tokens) * per_token
            for fixed, per_token, prefills in zip(self._fixed, self._per_token, self._prefills, strict=True)
        )


def kv_capacity_tokens(profile: Profile, placement: Placement, memory: float) -> float:
    """Tokens of KV cache that fit on every GPU that decodes; negative where the weights alone do not fit."""
    return min(
        (memory - _fixed_bytes(profile, placement, number)) / kv_bytes_per_token(profile, placement, number)
        for number, stage in enumerate(placement)
        if stage.phase != "prefill" and stage.layers[1] > stage.layers[0]
    )


def kv_bytes_per_token(profile: Profile, placement: Placement, number: int) -> float:
    """On one GPU of a stage, of all requests' tokens. Where there are fewer key and value heads than GPUs, heads are
    replicated; ranks of attention data parallelism, and servers of one phase, each hold the tokens of their own
    requests."""
    stage = placement[number]
    caches = stage.data_parallel_size * len(servers(placement, stage.phase))
    layers = stage.layers[1] - stage.layers[0]
    spread = min(stage.tensor_parallel_size, profile.model.num_kv_shares)
    return layers * layer_kv_bytes_per_token(profile.model, profile.cache_dtype) / spread / caches


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


def _fixed_bytes(profile: Profile, placement: Placement, number: int) -> float:
    return weight_bytes(profile, placement, number) + profile.workspace_bytes
