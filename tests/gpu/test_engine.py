"""The engine on a GPU gives the CPU engine's tokens in float32, with and without CUDA graphs; bfloat16 is close."""

import itertools
from collections.abc import Callable

import pytest
import torch

from exeplan.core.batch import Batch, SequenceState, num_blocks_for
from exeplan.core.models.model import ModelSpec
from exeplan.core.schedule import Schedule
from exeplan.kernels.select import kernels_for
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.tokens.sampling import SamplingParams
from exeplan.runner.engine.async_executor import AsyncExecutor
from exeplan.runner.engine.engine import Engine, Output, Request
from exeplan.runner.engine.executor import InProcessExecutor

from .checkpoints import checkpoint
from .conftest import DEVICE, skip_without_fp8

BASE = {"vocab_size": 199, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "eos_token_id": None}
ROTARY = {**BASE, "intermediate_size": 96, "num_key_value_heads": 2, "max_position_embeddings": 256}
WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
OPT = {**BASE, "ffn_dim": 96, "max_position_embeddings": 256, "word_embed_proj_dim": 64}
T5 = {"is_encoder_decoder": True, "vocab_size": 199, "d_model": 64, "d_kv": 16, "num_heads": 4, "d_ff": 96}
T5 |= {"num_layers": 2, "num_decoder_layers": 2, "decoder_start_token_id": 0, "relative_attention_num_buckets": 8}
CASES = {
    "llama": {**ROTARY, "model_type": "llama"},
    "mistral": {**ROTARY, "model_type": "mistral", "sliding_window": 9},
    "qwen2": {**ROTARY, **WINDOW, "model_type": "qwen2"},
    "qwen3": {**ROTARY, "model_type": "qwen3", "head_dim": 32},
    "opt": {**OPT, "model_type": "opt"},
    "gpt2": {"model_type": "gpt2", "vocab_size": 199, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "t5": {**T5, "model_type": "t5", "feed_forward_proj": "gated-gelu"},
}
SCHEDULES = {
    "orca": Schedule("orca", {"max_num_seqs": 5}),
    "chunked": Schedule("chunked", {"max_num_seqs": 5, "max_num_batched_tokens": 24}),
    "rra": Schedule("rra", {"prefill_batch": 3, "decode_steps": 4}),
}


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelSpec]:
    return {name: checkpoint(config, tmp_path_factory.mktemp(name)) for name, config in CASES.items()}


def on_gpu(spec: ModelSpec, *, num_blocks: int = 64, **precision: str) -> ModelRunner:
    kernels = kernels_for(DEVICE, torch.float32)
    return ModelRunner(spec, device=str(DEVICE), num_blocks=num_blocks, paged_with=kernels, **precision)


def outputs(engine: Engine, before: Callable[[int], list[Output]] = lambda step: []) -> dict[str, list[int]]:
    """All tokens by request; `before` may act before a step, and returns the outputs of that."""
    drawing = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=5, max_tokens=9, ignore_eos=True)
    for number, length in enumerate((40, 3, 17, 64, 1, 25)):
        greedy = SamplingParams(temperature=0.0, max_tokens=6 + number, ignore_eos=True)
        prompt = [(7 * number + 5 * place) % 199 for place in range(length)]
        sampling = drawing if number == 2 else greedy
        engine.add(Request(request_id=str(number), prompt_token_ids=prompt, sampling=sampling))
    found: dict[str, list[int]] = {str(number): [] for number in range(6)}
    for step in itertools.count():
        if not engine.has_work:
            return found
        for output in before(step) + engine.step():
            found[output.request_id] += output.token_ids


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_the_cpu(specs, case, captured):
    assert not torch.backends.cuda.matmul.allow_tf32
    schedules = SCHEDULES.values() if case != "t5" else [SCHEDULES["orca"], SCHEDULES["rra"]]
    for schedule in schedules:
        expected = outputs(Engine(InProcessExecutor(ModelRunner(specs[case], num_blocks=64)), schedule, num_blocks=64))
        runner = on_gpu(specs[case])
        if captured:
            runner.capture(5)
        assert outputs(Engine(AsyncExecutor(runner), schedule, num_blocks=64)) == expected
        assert runner.cache.free_blocks == 64


@pytest.mark.parametrize("case", ["llama", "t5"])
def test_keys_and_values_migrate_to_another_cache_and_from_there_to_a_cpu(specs, case):
    expected = outputs(
        Engine(InProcessExecutor(ModelRunner(specs[case], num_blocks=64)), SCHEDULES["orca"], num_blocks=64)
    )
    captured = on_gpu(specs[case])
    captured.capture(6)
    engine = Engine(AsyncExecutor(on_gpu(specs[case])), SCHEDULES["rra"], num_blocks=64)
    others = {4: AsyncExecutor(captured), 7: InProcessExecutor(ModelRunner(specs[case], num_blocks=64))}
    carried = []

    def adopt(step: int) -> list[Output]:
        if step not in others:
            return []
        switched = engine.switch_plan(SCHEDULES["orca"], executor=lambda: others[step], kv_dtype="float32")
        carried.append((switched.num_carried > 1, switched.num_recomputed))
        return switched.outputs

    assert outputs(engine, adopt) == expected
    assert carried == [(True, 0), (True, 0)]


def logits(runner: ModelRunner) -> torch.Tensor:
    """Logits of three prompts and then of one more token each."""
    sizes = (30, 47, 120)
    token_ids = {str(n): [(11 * n + 3 * place) % 199 for place in range(n + 1)] for n in sizes}
    rows = tuple(
        SequenceState(request_id=str(n), num_prompt_tokens=n, max_output_tokens=2, num_blocks=num_blocks_for(n + 1))
        for n in sizes
    )
    found = [runner.forward(Batch(prefill=rows), token_ids).clone()]
    for row in rows:
        row.num_output_tokens = 1
    found.append(runner.forward(Batch(decode=rows), token_ids).clone())
    return torch.cat(found).cpu()


@pytest.mark.parametrize("case", [case for case in CASES if case != "t5"])
def test_a_captured_iteration_has_the_logits_of_an_eager_one(specs, case):
    eager, captured = on_gpu(specs[case]), on_gpu(specs[case])
    captured.capture(4)
    torch.testing.assert_close(logits(captured), logits(eager), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", [case for case in CASES if case != "t5"])
@pytest.mark.parametrize(
    ("precision", "limit"),
    [
        ({"dtype": "float32"}, 1e-4),
        ({"dtype": "bfloat16"}, 2e-2),
        ({"dtype": "float16"}, 5e-3),
        ({"dtype": "bfloat16", "kv_dtype": "fp8"}, 5e-2),
        ({"dtype": "fp8"}, 0.25),
    ],
    ids=["float32", "bfloat16", "float16", "fp8-keys", "fp8"],
)
def test_logits_are_near_the_cpus_in_float32(specs, case, precision, limit):
    """fp8 with random weights."""
    if "fp8" in precision.values():
        skip_without_fp8()
    exact = logits(ModelRunner(specs[case], num_blocks=64))
    error = (logits(on_gpu(specs[case], **precision)) - exact).norm() / exact.norm()
    assert error < limit
