"""Each GPU of a placement holds its layers, its heads' keys and values and the workspace, counted here one by one."""

from dataclasses import replace

import pytest

from exeplan.core.models.model import ModelSpec, load_model_spec
from exeplan.core.profile import Profile
from exeplan.core.schedule import Placement, Stage
from exeplan.simulator.memory import kv_capacity_tokens, memory_bytes

BYTES = 4  # float32
WHOLE = (Stage(layers=(0, 6)),)
PIPELINE = (Stage(devices=(0,), layers=(0, 2)), Stage(devices=(1,), layers=(2, 5)), Stage(devices=(2,), layers=(5, 6)))
WIDE = (Stage(devices=(0, 1), layers=(0, 1)), Stage(devices=tuple(range(2, 10)), layers=(1, 6)))
"""Of four key/value heads two GPUs hold two each, and eight GPUs hold one each: every head is there twice."""
APART = (
    Stage(devices=(0, 1), layers=(0, 6), phase="prefill"),
    Stage(devices=(2,), layers=(0, 3), phase="decode"),
    Stage(devices=(3,), layers=(3, 6), phase="decode"),
)


def heads_on_a_gpu(spec: ModelSpec, gpus: int) -> float:
    """A head is on one GPU or, where there are fewer heads than GPUs, on several."""
    return max(spec.num_kv_heads / gpus, 1.0)


def parameters(spec: ModelSpec, placement: Placement, number: int) -> float:
    """On one GPU of a stage: its layers, the embedding on the first stage of a phase, the output head on the last."""
    stage = placement[number]
    attention = spec.hidden_size * spec.head_dim * (2 * spec.num_heads + 2 * spec.num_kv_heads)
    mlp = 3 * spec.hidden_size * spec.intermediate_size
    total = (stage.layers[1] - stage.layers[0]) * (attention + mlp)
    peers = [i for i, other in enumerate(placement) if other.phase == stage.phase]
    table = spec.vocab_size * spec.hidden_size
    first, last = number == peers[0], number == peers[-1]
    total += table if first else 0
    total += table if last and not (first and spec.tied_head) else 0
    return total / len(stage.devices)


def expected(profile: Profile, placement: Placement, kv_tokens: float, prefill_kv_tokens: float) -> list[float]:
    """Bytes on one GPU of each stage."""
    spec, found = profile.model, []
    for number, stage in enumerate(placement):
        tokens = prefill_kv_tokens if stage.phase == "prefill" else kv_tokens
        heads = heads_on_a_gpu(spec, len(stage.devices))
        kept = tokens * (stage.layers[1] - stage.layers[0]) * 2 * heads * spec.head_dim * BYTES
        found.append(parameters(spec, placement, number) * BYTES + kept + profile.workspace_bytes)
    return found


def model(profile: Profile, *, tied: bool) -> Profile:
    """Weights held as they are counted: the demo's, with its output head tied or not."""
    spec = replace(load_model_spec("demo"), tied_head=tied)
    own = parameters(spec, WHOLE, 0)
    return replace(profile, model=spec, weight_bytes=int(own) * BYTES)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("placement", [WHOLE, PIPELINE, WIDE, APART], ids=["whole", "pipeline", "wide", "apart"])
@pytest.mark.parametrize("tokens", [0, 1000, 200_000])
def test_the_gpu_with_most_bytes_holds_the_counted_ones(
    placement: Placement, tokens: int, tied: bool, profile: Profile
) -> None:
    counted = expected(model(profile, tied=tied), placement, tokens, tokens / 10)
    assert memory_bytes(model(profile, tied=tied), placement, tokens, tokens / 10) == pytest.approx(max(counted))


@pytest.mark.parametrize("placement", [WHOLE, PIPELINE, WIDE, APART], ids=["whole", "pipeline", "wide", "apart"])
def test_the_room_for_tokens_fills_a_gpu_that_decodes(placement: Placement, profile: Profile) -> None:
    timed, memory = model(profile, tied=True), 1e9
    room = kv_capacity_tokens(timed, placement, memory)
    decoding = [
        size
        for size, stage in zip(expected(timed, placement, room, 0.0), placement, strict=True)
        if stage.phase != "prefill"
    ]
    assert max(decoding) == pytest.approx(memory)
