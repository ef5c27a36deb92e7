"""An engine on these kernels gives the tokens of the CPU's path: every launch of a model, end to end."""

import pytest

from exeplan.core.models.model import model_spec
from exeplan.core.schedule import Schedule
from exeplan.kernels.select import REFERENCE, TRITON
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.tokens.sampling import SamplingParams
from exeplan.runner.engine.async_executor import AsyncExecutor
from exeplan.runner.engine.engine import Engine, Request
from exeplan.runner.engine.executor import InProcessExecutor

from .conftest import DEVICE

SMALL = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "eos_token_id": None}
ROTARY = {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}
CASES = {
    "qwen3-window": {**ROTARY, "model_type": "qwen3", "head_dim": 16, "use_sliding_window": True, "sliding_window": 5},
    "qwen3_moe": {**ROTARY, "model_type": "qwen3_moe", "head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 24},
    "opt": {**SMALL, "model_type": "opt", "ffn_dim": 48, "max_position_embeddings": 64, "word_embed_proj_dim": 32},
    "t5": {"model_type": "t5", "is_encoder_decoder": True, "vocab_size": 61, "d_model": 32, "d_kv": 8, "num_heads": 4}
    | {"d_ff": 48, "num_layers": 2, "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0, "n_positions": 64},
}
CHUNKED = Schedule("chunked", {"max_num_seqs": 3, "max_num_batched_tokens": 12})


def outputs(executor, sampling):
    engine = Engine(executor, CHUNKED, num_blocks=executor.runner.cache.num_blocks)
    for number, length in enumerate((19, 3, 9)):
        prompt = [(7 * number + 5 * place) % 61 for place in range(length)]
        engine.add(Request(request_id=str(number), prompt_token_ids=prompt, sampling=sampling[number]))
    found = {str(number): [] for number in range(3)}
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] += output.token_ids
    return found


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_the_cpu(case, device):
    spec = model_spec(CASES[case], name="tiny")
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    sampling = [
        greedy,
        SamplingParams(temperature=0.8, top_k=9, top_p=0.9, seed=1, max_tokens=3, ignore_eos=True),
        greedy,
    ]
    # A GPU draws other random weights than a CPU: there the references on the same device are the oracle.
    same = {"device": str(DEVICE), "num_blocks": 8, "dummy_weights": True}
    oracle = ModelRunner(spec, **same, paged_with=REFERENCE if DEVICE.type == "cuda" else None)
    expected = outputs(InProcessExecutor(oracle), sampling)
    runner = ModelRunner(spec, **same, paged_with=TRITON)
    runner.capture(4)
    assert outputs(AsyncExecutor(runner), sampling) == expected
    assert runner.cache.free_blocks == 8
