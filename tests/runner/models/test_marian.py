"""Marian gives the greedy tokens of transformers' `generate`, on one device, on shards, and under every policy."""

import functools
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import MarianConfig, MarianMTModel
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

from exeplan.core.models.model import load_model_spec, model_spec
from exeplan.core.schedule import Schedule
from exeplan.errors import InputError
from exeplan.kernels.select import REFERENCE
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.tokens.sampling import SamplingParams
from exeplan.runner.compute.weights.shard import Shard
from exeplan.runner.engine.engine import Engine, Request
from exeplan.runner.engine.executor import InProcessExecutor
from exeplan.runner.ipc.collectives import SharedBuffer, SharedMemoryGroup, group_bytes
from exeplan.runner.models.marian import sinusoids

VOCAB = 199
SIZES = {"vocab_size": VOCAB, "d_model": 48, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 64}
SIZES |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 80, "decoder_ffn_dim": 80}
SIZES |= {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": None, "forced_eos_token_id": None}
CASES: dict[str, dict[str, object]] = {
    "plain": {**SIZES},
    "scaled-relu": {**SIZES, "scale_embedding": True, "activation_function": "relu", "encoder_ffn_dim": 64},
    "untied-swish": {**SIZES, "tie_word_embeddings": False, "activation_function": "swish"},
    "deep-encoder": {**SIZES, "encoder_layers": 3, "decoder_layers": 1},
}
SCHEDULES = {
    "static": Schedule("static", {"batch_size": 5}),
    "orca": Schedule("orca", {"max_num_seqs": 6}),
    "rra": Schedule("rra", {"prefill_batch": 3, "decode_steps": 4}),
}
every_case = pytest.mark.parametrize("case", CASES)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Saves a random checkpoint of each case once; weights are large enough that no two logits are close."""

    @functools.cache
    def make(case: str) -> tuple[MarianMTModel, Path]:
        torch.manual_seed(0)
        model = MarianMTModel(MarianConfig(**CASES[case])).eval()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data.add_(torch.randn_like(parameter), alpha=0.3)
        model.final_logits_bias.normal_()
        directory = tmp_path_factory.mktemp(case)
        model.save_pretrained(directory)
        return model, directory

    return make


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def generate(model: MarianMTModel, token_ids: list[int], count: int) -> list[int]:
    """The oracle, which is asked once for what several tests want to know."""
    return _generated(model, tuple(token_ids), count)


@functools.cache
def _generated(model: MarianMTModel, token_ids: tuple[int, ...], count: int) -> list[int]:
    """Its first token is the start token, which is no output."""
    inputs = torch.tensor([token_ids])
    outputs = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=count, do_sample=False, use_cache=False
    )
    return outputs[0, 1:].tolist()


def serve(runner: ModelRunner, schedule: Schedule, requests: list[tuple[list[int], int]], num_blocks: int = 64):
    """Greedy outputs of requests, two of which arrive each step, and the engine."""
    engine = Engine(InProcessExecutor(runner), schedule, num_blocks=num_blocks)
    arrivals = [
        Request(request_id=str(n), prompt_token_ids=ids, sampling=SamplingParams(temperature=0.0, max_tokens=count))
        for n, (ids, count) in enumerate(requests)
    ]
    found: dict[str, list[int]] = {request.request_id: [] for request in arrivals}
    while arrivals or engine.has_work:
        for request in arrivals[:2]:
            engine.add(request)
        del arrivals[:2]
        for output in engine.step():
            found[output.request_id] += output.token_ids
    return list(found.values()), engine


def requests_of(model: MarianMTModel) -> tuple[list[tuple[list[int], int]], list[list[int]]]:
    """Requests of many lengths, and their expected tokens."""
    lengths = [(1 + (11 * n) % 41, 1 + (5 * n) % 23) for n in range(10)]
    requests = [(prompt(length, seed=n), count) for n, (length, count) in enumerate(lengths)]
    return requests, [generate(model, *request) for request in requests]


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@every_case
def test_mixed_requests_equal_generate(case, schedule, checkpoint):
    model, directory = checkpoint(case)
    requests, expected = requests_of(model)
    runner = ModelRunner(load_model_spec(str(directory)), num_blocks=64)
    outputs, engine = serve(runner, schedule, requests)
    assert outputs == expected
    assert (engine.free_blocks, runner.cache.free_blocks) == (64, 64)


def test_the_kernels_of_a_gpu_give_the_same_by_their_references(checkpoint):
    model, directory = checkpoint("scaled-relu")
    requests, expected = requests_of(model)
    runner = ModelRunner(load_model_spec(str(directory)), num_blocks=12, paged_with=REFERENCE)
    outputs, engine = serve(runner, SCHEDULES["rra"], requests, num_blocks=12)
    assert outputs == expected
    assert engine.num_preemptions > 0


def test_the_whole_context_may_be_prompt_and_as_much_output(checkpoint):
    model, directory = checkpoint("plain")
    request = (prompt(64, seed=1), 64)
    runner = ModelRunner(load_model_spec(str(directory)), num_blocks=9)
    assert serve(runner, SCHEDULES["orca"], [request], num_blocks=9)[0] == [generate(model, *request)]


def test_preempted_requests_are_recomputed(checkpoint):
    """Those with output compute all of it in their first pass, at its positions."""
    model, directory = checkpoint("scaled-relu")
    requests = [(prompt(5 + 3 * n, seed=n), 40) for n in range(6)]
    runner = ModelRunner(load_model_spec(str(directory)), num_blocks=7)
    outputs, engine = serve(runner, SCHEDULES["rra"], requests, num_blocks=7)
    assert outputs == [generate(model, *request) for request in requests]
    assert engine.num_preemptions > 0


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_bad_words_of_one_token_are_in_no_output(file, checkpoint, tmp_path, caplog):
    """But for the end of a sequence, which transformers does not take for one."""
    model, directory = checkpoint("plain")
    requests, plain = requests_of(model)
    bad = plain[1][0]
    end = next(token for token in plain[9] if token != bad)
    assert sum(bad in output for output in plain) > 1
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    stated = json.loads((tmp_path / file).read_text()) | {"eos_token_id": end}
    (tmp_path / file).write_text(json.dumps(stated | {"bad_words_ids": [[bad], [end], [VOCAB], [1, 2]]}))
    settings = {"do_sample": False, "use_cache": False, "bad_words_ids": [[bad], [end]], "eos_token_id": end}
    expected = [
        model.generate(torch.tensor([ids]), max_new_tokens=count, **settings)[0, 1:].tolist() for ids, count in requests
    ]
    runner = ModelRunner(load_model_spec(str(tmp_path)), num_blocks=64)
    assert serve(runner, SCHEDULES["orca"], requests)[0] == expected
    assert not any(bad in output for output in expected)
    assert "bad_words_ids of several tokens are not kept out of outputs" in caplog.text


def test_two_ranks_equal_generate(checkpoint):
    model, directory = checkpoint("untied-swish")
    requests, expected = requests_of(model)
    buffer = SharedBuffer(group_bytes(2))

    def rank(number: int) -> list[list[int]]:
        group = SharedMemoryGroup(buffer.path, number, 2, timeout=120.0)
        shard = Shard(layers=(0, 2), encoder_layers=(0, 2), first=True, last=True, group=group)
        runner = ModelRunner(load_model_spec(str(directory)), num_blocks=64, shard=shard)
        return serve(runner, SCHEDULES["orca"], requests)[0]

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(rank, range(2))) == [expected, expected]
    buffer.close()


@pytest.mark.parametrize("size", [48, 7])
def test_positions_are_those_of_transformers(size):
    expected = MarianSinusoidalPositionalEmbedding(40, size).create_weight()
    torch.testing.assert_close(sinusoids(40, size), expected)


def test_shipped_shapes_are_the_papers():
    paper, small = (load_model_spec(name) for name in ("tcb-transformer", "tcb-small"))
    for spec in (paper, small):
        assert (spec.num_encoder_layers, spec.num_layers, spec.num_heads, spec.max_context) == (3, 3, 8, 400)
        assert spec.intermediate_size == 4 * spec.hidden_size
    assert paper.hidden_size == 3072


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"share_encoder_decoder_embeddings": False}, "'tiny' has two vocabularies"),
        ({"normalize_before": True}, "'tiny' sets normalize_before, which is not supported"),
        ({"bad_words_ids": 3}, "'tiny': bad_words_ids must be lists of token ids in a list, found 3"),
        ({"encoder_attention_heads": 2}, "'tiny' has 2 heads in its encoder and 4 in its decoder"),
    ],
)
def test_what_is_not_supported_is_named(change, message):
    config = {**SIZES, "model_type": "marian", "is_encoder_decoder": True, **change}
    with pytest.raises(InputError, match=message):
        ModelRunner(model_spec(config, name="tiny"), num_blocks=1)
