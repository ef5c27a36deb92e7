"""The KV cache takes the free memory, and 10,000 requests at that limit never run out of it."""

import random
from dataclasses import replace

import pytest
import torch

from exeplan.core.models.model import model_spec
from exeplan.core.plan import Plan
from exeplan.core.schedule import Schedule, single_stage
from exeplan.runner.compute.tokens.sampling import SamplingParams
from exeplan.runner.engine.engine import Request
from exeplan.runner.engine_process.build import build_engine, engine_setup

from .conftest import TRIED

SHARE = 0.95
LARGEST_PASSES = 5e9
"""Bytes, at most, that are kept free for them on a GPU of any size."""
CONFIG = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 128_256,
    "max_position_embeddings": 8192,
    "eos_token_id": None,
}


@pytest.mark.skipif(TRIED, reason="fills a GPU's memory")
def test_ten_thousand_requests_run_at_the_limit():
    spec = model_spec(CONFIG, name="wide")
    schedule = Schedule("orca", {"max_num_seqs": 256})
    plan = Plan(model="wide", schedule=schedule, placement=single_stage(spec), device="cuda", dtype="bfloat16")
    plan = replace(plan, kv_cache_tokens=1 << 16, gpu_memory_utilization=SHARE)
    engine = build_engine(engine_setup(plan, spec, dummy_weights=True))
    free, total = torch.cuda.mem_get_info()
    assert 0.01 * total < free < 0.15 * total + LARGEST_PASSES
    draw, kinds = random.Random(0), {"length": 0}
    for number in range(10_000):
        long = number % 1000 == 0
        length = 8000 if long else draw.randint(1, 64)
        sampling = SamplingParams(
            temperature=draw.choice([0.0, 1.0]), top_p=0.9, max_tokens=draw.randint(1, 8), seed=number, ignore_eos=True
        )
        engine.add(Request(request_id=str(number), prompt_token_ids=[7] * length, sampling=sampling))
    while engine.has_work:
        for output in engine.step():
            if output.finish_reason:
                kinds[output.finish_reason] = kinds.get(output.finish_reason, 0) + 1
    assert kinds == {"length": 10_000}
    assert torch.cuda.mem_get_info()[0] > 0
    engine.close()
