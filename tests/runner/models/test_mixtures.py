"""Mixtures of experts and latent attention give the tokens and the prompt log-probabilities of transformers."""

import functools
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from exeplan.core.batch import Batch, SequenceState, num_blocks_for
from exeplan.core.models.model import load_model_spec, model_spec
from exeplan.core.models.sparse_layers import RUN_DENSE, RUN_SPARSE
from exeplan.core.schedule import Schedule
from exeplan.kernels.select import REFERENCE
from exeplan.runner.compute.blocks import experts
from exeplan.runner.compute.families import CPU_ONLY, family_names
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.tokens.sampling import SamplingParams
from exeplan.runner.compute.weights.shard import Shard
from exeplan.runner.engine.async_executor import AsyncExecutor
from exeplan.runner.engine.engine import Engine, Request
from exeplan.runner.engine.executor import Executor, InProcessExecutor
from exeplan.runner.engine.kv_regions import KVRegion, shard_view
from exeplan.runner.engine.requests import RequestState

from .test_models import CASES, VOCAB, generate, prompt

MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")
SPARSE = ("deepseek_v2", "gpt_oss", *MIXTURES)
SCHEDULES = {
    "chunked": Schedule("chunked", {"max_num_seqs": 4, "max_num_batched_tokens": 16}),
    "concat": Schedule("concat", {"max_num_seqs": 8, "rows": 2, "row_tokens": 128, "slot_tokens": 64}),
    "orca": Schedule("orca", {"max_num_seqs": 4}),
    "rra": Schedule("rra", {"prefill_batch": 3, "decode_steps": 4}),
    "static": Schedule("static", {"batch_size": 4}),
    "turbo": Schedule("turbo", {"batch_size": 3}),
}
LENGTHS, COUNT = (33, 7, 1, 17, 16), 6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory):
    @functools.cache
    def make(family: str) -> tuple[PreTrainedModel, Path]:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**CASES[family])).eval()
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.15)
        directory = tmp_path_factory.mktemp(family)
        model.save_pretrained(directory)
        return model, directory

    return make


def test_families_that_run_are_those_of_the_engine():
    assert set(RUN_SPARSE) == set(SPARSE)
    assert sorted(RUN_DENSE + RUN_SPARSE) == family_names()
    assert set(CPU_ONLY) <= set(RUN_SPARSE)


@pytest.mark.parametrize("policy", SCHEDULES)
@pytest.mark.parametrize("family", SPARSE)
def test_equals_transformers_in_a_mixed_load(family, policy, checkpoint):
    model, directory = checkpoint(family)
    check(model, InProcessExecutor(ModelRunner(load_model_spec(str(directory)), num_blocks=32)), policy)


@pytest.mark.parametrize("family", MIXTURES)
def test_equals_transformers_with_captured_decodes(family, checkpoint):
    """On the kernels' references, as a GPU runs them."""
    model, directory = checkpoint(family)
    runner = ModelRunner(load_model_spec(str(directory)), num_blocks=32, paged_with=REFERENCE)
    runner.capture(4)
    check(model, AsyncExecutor(runner), "orca")


def check(model: PreTrainedModel, executor: Executor, policy: str) -> None:
    """Greedy tokens, and the log-probabilities of all prompts with their two most likely tokens."""
    engine = Engine(executor, SCHEDULES[policy], num_blocks=32)
    prompts = {f"{length}": prompt(length, seed=length) for length in LENGTHS}
    found: dict[str, list[int]] = {name: [] for name in prompts}
    likelihoods: dict[str, np.ndarray] = {}
    for name, ids in prompts.items():
        sampling = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, prompt_logprobs=2)
        engine.add(Request(request_id=name, prompt_token_ids=ids, sampling=sampling))
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] += output.token_ids
            if output.prompt_logprobs is not None:
                likelihoods[output.request_id] = np.frombuffer(output.prompt_logprobs.logprobs, "<f4")
    assert found == {name: generate(model, ids, COUNT) for name, ids in prompts.items()}
    for name, ids in prompts.items():
        assert likelihoods[name] == pytest.approx(expected(model, ids).numpy(), abs=1e-4)


@torch.inference_mode()
def expected(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Log-probabilities of all tokens of a prompt but the first."""
    rows = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return rows.gather(1, torch.tensor(ids[1:], dtype=torch.int64)[:, None])[:, 0]


@pytest.mark.parametrize("family", SPARSE)
def test_bfloat16_stays_close_to_float32(family):
    """With all experts chosen: otherwise rounding may send a token to another expert, as in any implementation."""
    count = next(
        CASES[family][name]
        for name in ("num_local_experts", "num_experts", "n_routed_experts")
        if name in CASES[family]
    )
    config = {**CASES[family], "model_type": family, "num_experts_per_tok": count}
    spec = model_spec(config, name="tiny")
    runners = [ModelRunner(spec, dtype=kind, num_blocks=4, dummy_weights=True) for kind in ("float32", "bfloat16")]
    ids = {"a": prompt(20, seed=3)}
    for done in range(3):
        row = SequenceState(request_id="a", num_prompt_tokens=17, max_output_tokens=3, num_output_tokens=done)
        row.num_blocks = num_blocks_for(row.num_tokens)
        batch = Batch(decode=(row,)) if done else Batch(prefill=(row,))
        expected, logits = (runner.forward(batch, ids) for runner in runners)
        assert torch.nn.functional.cosine_similarity(logits, expected).min() > 0.99


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("rows", [1, 33])
def test_padding_to_a_row_bucket_touches_no_expert_of_its_own(family, rows, checkpoint, monkeypatch):
    """One row is padded to four and 33 to 34: the experts of a pass are those of its real rows, of the last layer of
    the last token alone."""
    monkeypatch.setattr("exeplan.runner.compute.model_runner.compiles_by_rows", lambda *_: True)
    runner = ModelRunner(load_model_spec(str(checkpoint(family)[1])), num_blocks=8)
    groups: list[experts.Grouped] = []
    grouped = experts.grouped

    def recorded(expert_Nk, *args, **named):
        routes.append(expert_Nk)
        groups.append(grouped(expert_Nk, *args, **named))
        return groups[-1]

    routes: list[torch.Tensor] = []
    monkeypatch.setattr(experts, "grouped", recorded)
    row = SequenceState(request_id="a", num_prompt_tokens=rows, max_output_tokens=1, num_blocks=num_blocks_for(rows))
    runner.forward(Batch(prefill=(row,)), {"a": [token % VOCAB for token in range(rows)]})
    assert len(groups) == runner.spec.num_layers
    for group, expert_Nk, real in zip(groups, routes, [rows] * (len(groups) - 1) + [1], strict=True):
        assert len(expert_Nk) > real
        assert group.experts == expert_Nk[:real].unique().tolist()


def test_latent_vectors_of_a_request_move_to_another_cache_by_layers(checkpoint):
    """As regions of host memory, which each shard reads and writes in part: the next logits stay the same."""
    spec = load_model_spec(str(checkpoint("deepseek_v2")[1]))
    old, new = (ModelRunner(spec, num_blocks=8) for _ in range(2))
    ids = {"a": prompt(21, seed=1)}
    row = SequenceState(request_id="a", num_prompt_tokens=20, max_output_tokens=2, num_blocks=2)
    old.forward(Batch(prefill=(row,)), ids)
    region = KVRegion(cast(RequestState, row), 0, 20, 20)
    memory = torch.zeros(20 * spec.kv_bytes_per_token("float32"), dtype=torch.uint8)
    new.residents.place(Batch(decode=(row,)))
    for layers in ((0, 1), (1, 2)):
        view = shard_view(memory, region, spec, Shard(layers=layers), 4 * spec.kv_width)
        view.copy_(read(old, spec.num_layers)[slice(*layers)])
    new.cache.write("a", shard_view(memory, region, spec, Shard(layers=(0, 2)), 4 * spec.kv_width))
    row.num_output_tokens = 1
    for runner in (old, new):
        runner.assume_cached((row,))
    assert torch.equal(*(runner.forward(Batch(decode=(row,)), ids) for runner in (old, new)))


def read(runner: ModelRunner, num_layers: int) -> torch.Tensor:
    tokens = torch.empty((num_layers, 1, 1, 20, 4 * runner.spec.kv_width), dtype=torch.uint8)
    runner.cache.read("a", tokens)
    return tokens
