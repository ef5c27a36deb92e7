"""A prompt computed in chunks gives the tokens of one computed at once, in any batch."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from exeplan.core.batch import Batch, Chunk, SequenceState, num_blocks_for
from exeplan.core.models.model import load_model_spec
from exeplan.core.schedule import Schedule
from exeplan.kernels.select import REFERENCE
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.tokens.sampling import SamplingParams
from exeplan.runner.engine.engine import Engine, Request
from exeplan.runner.engine.executor import InProcessExecutor

VOCAB = 199
NO_SPECIAL = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
BASE = {**NO_SPECIAL, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
ROTARY = {**BASE, "intermediate_size": 96, "num_key_value_heads": 2, "max_position_embeddings": 128}
CASES: dict[str, dict[str, object]] = {
    "llama": ROTARY,
    "llama-dynamic": {
        **ROTARY,
        "max_position_embeddings": 32,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    },
    "mistral": {**ROTARY, "sliding_window": 9},
    "opt": {**BASE, "ffn_dim": 96, "max_position_embeddings": 128, "word_embed_proj_dim": 64},
    "gpt2": {**NO_SPECIAL, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
}
every_case = pytest.mark.parametrize("case", CASES)
every_path = pytest.mark.parametrize("paged_with", [None, REFERENCE], ids=["cpu", "paged"])
"""Attention by the CPU's fast path, and over blocks as on a GPU."""
every_family = pytest.mark.parametrize("case", ["llama", "mistral", "opt", "gpt2"])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Saves a random checkpoint of each case once; weights are large enough that no two logits are close."""

    @functools.cache
    def make(case: str) -> tuple[PreTrainedModel, Path]:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[case.split("-")[0]](**CASES[case])).eval()
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.15)
        directory = tmp_path_factory.mktemp(case)
        model.save_pretrained(directory)
        return model, directory

    return make


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def generate(model: PreTrainedModel, token_ids: list[int], count: int) -> list[int]:
    """The oracle, which is asked once for what several tests want to know."""
    return _generated(model, tuple(token_ids), count)


@functools.cache
def _generated(model: PreTrainedModel, token_ids: tuple[int, ...], count: int) -> list[int]:
    inputs = torch.tensor([token_ids])
    outputs = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return outputs[0, len(token_ids) :].tolist()


def runner_of(directory: Path, num_blocks: int = 64, **options) -> ModelRunner:
    return ModelRunner(load_model_spec(str(directory)), num_blocks=num_blocks, **options)


@every_path
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@every_case
def test_chunks_give_the_logits_of_the_whole_prompt(case, dtype, paged_with, checkpoint):
    """Also where a chunk has one token, and where another request decodes in the same batch."""
    runner = runner_of(checkpoint(case)[1], dtype=dtype, paged_with=paged_with)
    token_ids = {"cut": prompt(45, seed=1), "other": prompt(20, seed=2)}
    cut = SequenceState(request_id="cut", num_prompt_tokens=45, max_output_tokens=1, num_blocks=num_blocks_for(45))
    other = SequenceState(request_id="other", num_prompt_tokens=19, max_output_tokens=2, num_blocks=2)
    whole = runner.forward(Batch(prefill=(cut,)), token_ids)
    runner.forward(Batch(prefill=(other,)), token_ids)
    other.num_output_tokens = 1
    alone = runner.forward(Batch(decode=(other,)), token_ids)
    rows = []
    for start, end in [(0, 13), (13, 14), (14, 40), (40, 45)]:
        batch = Batch(prefill=(cut,), decode=(other,), chunks=(Chunk(start, end, end == 45),))
        rows.append(runner.forward(batch, token_ids))
    assert [len(logits) for logits in rows] == [1, 1, 1, 2]
    tolerance = 1e-4 if dtype == "float32" else 0.05 * whole.abs().max().item()
    torch.testing.assert_close(rows[-1][:1], whole, rtol=1e-4, atol=tolerance)
    for logits in rows:
        torch.testing.assert_close(logits[-1:], alone, rtol=1e-4, atol=tolerance)


class _Counting:
    """A layer that records with how many rows it ends."""

    def __init__(self, layer, ended: list[int]) -> None:
        self._layer, self._ended = layer, ended

    def __call__(self, *args):
        out = self._layer(*args)
        self._ended.append(len(out))
        return out


@every_path
@every_family
def test_the_last_layer_goes_on_with_rows_whose_next_token_is_wanted(case, paged_with, checkpoint):
    """The logits are those of a pass whose prompts' log-probabilities are wanted, which computes all rows."""
    runner = runner_of(checkpoint(case)[1], paged_with=paged_with)
    ended: list[int] = []
    runner.model.layers = [_Counting(layer, ended) for layer in runner.model.layers]
    token_ids = {"a": prompt(33, seed=1), "b": prompt(21, seed=2)}
    a = SequenceState(request_id="a", num_prompt_tokens=33, max_output_tokens=1, num_blocks=3)
    b = SequenceState(request_id="b", num_prompt_tokens=20, max_output_tokens=2, num_blocks=2)
    runner.forward(Batch(prefill=(b,)), token_ids)
    b.num_output_tokens = 1
    both, cut = Batch(prefill=(a,), decode=(b,)), Batch(prefill=(a,), chunks=(Chunk(0, 20, last=False),))
    ended.clear()
    logits = runner.forward(both, token_ids)
    assert ended == [34, 2]
    torch.testing.assert_close(runner.forward(both, token_ids, reported={"a": 0}), logits, rtol=1e-4, atol=1e-4)
    assert ended == [34, 2, 34, 34]
    assert runner.forward(cut, token_ids).shape == (0, VOCAB)
    assert ended[4:] == [20, 1]
    runner.forward(Batch(decode=(b,)), token_ids)
    assert ended[6:] == [1, 1]


def test_a_restarted_prefill_forgets_its_chunks(checkpoint):
    runner = runner_of(checkpoint("llama")[1], num_blocks=8)
    token_ids = {"a": prompt(40, seed=1)}
    row = SequenceState(request_id="a", num_prompt_tokens=40, max_output_tokens=1, num_blocks=3)
    expected = runner.forward(Batch(prefill=(row,)), token_ids)
    for start, end in [(0, 20), (20, 30), (0, 20), (20, 40)]:
        logits = runner.forward(Batch(prefill=(row,), chunks=(Chunk(start, end, end == 40),)), token_ids)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert runner.cache.free_blocks == 5


@pytest.mark.parametrize(
    ("variables", "num_blocks"),
    [
        ({"max_num_seqs": 16, "max_num_batched_tokens": 24}, 64),
        ({"max_num_seqs": 5, "max_num_batched_tokens": 7}, 64),
        ({"max_num_seqs": 16, "max_num_batched_tokens": 200}, 64),
        ({"max_num_seqs": 16, "max_num_batched_tokens": 24, "max_num_prefills": 1}, 64),
        ({"max_num_seqs": 16, "max_num_batched_tokens": 24}, 14),
    ],
    ids=["all-at-once", "few-slots", "few-cuts", "one-prompt-a-pass", "few-blocks"],
)
@every_family
def test_sixteen_mixed_requests_equal_generate(case, variables, num_blocks, checkpoint):
    model, directory = checkpoint(case)
    lengths = [(1 + (17 * n) % 61, 1 + (5 * n) % 23) for n in range(16)]
    runner = runner_of(directory, num_blocks)
    engine = Engine(InProcessExecutor(runner), Schedule("chunked", variables), num_blocks=num_blocks)
    expected = {}
    for number, (length, count) in enumerate(lengths):
        token_ids = prompt(length, seed=number)
        expected[str(number)] = generate(model, token_ids, count)
        sampling = SamplingParams(temperature=0.0, max_tokens=count)
        engine.add(Request(request_id=str(number), prompt_token_ids=token_ids, sampling=sampling))
    found: dict[str, list[int]] = {name: [] for name in expected}
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] += output.token_ids
    assert found == expected
    assert (engine.num_preemptions > 0) == (num_blocks == 14)
    assert (engine.free_blocks, runner.cache.free_blocks) == (num_blocks, num_blocks)


def test_a_step_takes_no_more_tokens_than_the_budget(checkpoint):
    runner = runner_of(checkpoint("llama")[1])
    schedule = Schedule("chunked", {"max_num_seqs": 4, "max_num_batched_tokens": 16})
    engine = Engine(InProcessExecutor(runner), schedule, num_blocks=64)
    for number in range(6):
        sampling = SamplingParams(temperature=0.0, max_tokens=5)
        engine.add(Request(request_id=str(number), prompt_token_ids=prompt(39, seed=number), sampling=sampling))
    steps = []
    while engine.has_work:
        engine.step()
        steps += [replace(step, start=0.0, end=0.0) for step in engine.last_steps]
    assert max(step.num_new_tokens for step in steps) == 16
    assert sum(step.num_new_tokens - step.num_decode for step in steps) == 6 * 39
