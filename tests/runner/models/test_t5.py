"""T5 gives the greedy tokens of transformers' `generate`: alone, in mixed batches, and when recomputed."""

import functools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration, T5Tokenizer

from exeplan.core.batch import Batch, SequenceState, num_blocks_for
from exeplan.core.models.model import load_model_spec, model_spec
from exeplan.core.schedule import Schedule
from exeplan.errors import InputError
from exeplan.kernels.select import REFERENCE
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.tokens.sampling import SamplingParams
from exeplan.runner.compute.weights.shard import ALONE, Group, Shard
from exeplan.runner.engine.async_executor import AsyncExecutor
from exeplan.runner.engine.engine import Engine, Request
from exeplan.runner.engine.executor import InProcessExecutor
from exeplan.runner.engine.tokenizer import Tokenizer
from exeplan.runner.ipc.collectives import SharedBuffer, SharedMemoryGroup, group_bytes

VOCAB = 199
SIZES = {"vocab_size": VOCAB, "d_model": 48, "d_kv": 16, "num_heads": 4, "d_ff": 80, "num_layers": 2}
SIZES |= {"decoder_start_token_id": 0, "eos_token_id": None, "relative_attention_num_buckets": 32}
CASES: dict[str, dict[str, object]] = {
    "v1.0": {**SIZES},
    "v1.1": {**SIZES, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "few-buckets": {**SIZES, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20},
    "deep-encoder": {**SIZES, "num_layers": 3, "num_decoder_layers": 1, "feed_forward_proj": "gated-silu"},
    "deep-decoder": {**SIZES, "num_layers": 1, "num_decoder_layers": 3, "d_kv": 12, "tie_word_embeddings": False},
}  # fmt: skip
every_case = pytest.mark.parametrize("case", CASES)
SCHEDULES = {
    "static": Schedule("static", {"batch_size": 5}),
    "orca": Schedule("orca", {"max_num_seqs": 6}),
    "rra": Schedule("rra", {"prefill_batch": 3, "decode_steps": 4}),
    "chunked": Schedule("chunked", {"max_num_seqs": 6, "max_num_batched_tokens": 24}),
}
every_policy = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)


HUB_CONFIG = {**CASES["v1.1"], "model_type": "t5", "is_encoder_decoder": True, "pad_token_id": 0}
"""As transformers 4 wrote it."""
Requests = list[tuple[list[int], int]]
"""Prompts and their numbers of output tokens."""
Cuts = list[tuple[tuple[int, int], tuple[int, int]]]
"""For each stage its encoder layers and its decoder layers, first to last exclusive."""
CUTS: dict[str, Cuts] = {
    "v1.0": [((0, 1), (0, 1)), ((1, 2), (1, 2))],
    "v1.1": [((0, 1), (0, 0)), ((1, 2), (0, 0)), ((2, 2), (0, 2))],
    "deep-encoder": [((0, 2), (0, 0)), ((2, 3), (0, 1))],
    "deep-decoder": [((0, 1), (0, 1)), ((1, 1), (1, 3))],
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Saves a random checkpoint of each case once; weights are large enough that no two logits are close."""

    @functools.cache
    def make(case: str) -> tuple[T5ForConditionalGeneration, Path]:
        torch.manual_seed(0)
        model = T5ForConditionalGeneration(T5Config(**CASES[case])).eval()
        if CASES[case].get("tie_word_embeddings") is False:
            model.lm_head.weight = torch.nn.Parameter(torch.randn(VOCAB, SIZES["d_model"]))
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.3)
        directory = tmp_path_factory.mktemp(case)
        model.save_pretrained(directory)
        return model, directory

    return make


def runner_of(directory: Path, *, num_blocks: int = 64, **options) -> ModelRunner:
    return ModelRunner(load_model_spec(str(directory)), device="cpu", num_blocks=num_blocks, **options)


class Stages:
    """The stages of a pipeline in sequence, in place of a runner of the whole model."""

    def __init__(self, directory: Path, cuts: Cuts, *, num_blocks: int = 64, group: Group = ALONE) -> None:
        self.runners = [
            runner_of(
                directory,
                num_blocks=num_blocks,
                shard=Shard(
                    encoder_layers=encoder,
                    layers=decoder,
                    first=number == 0,
                    last=number == len(cuts) - 1,
                    group=group,
                ),
            )
            for number, (encoder, decoder) in enumerate(cuts)
        ]
        self.spec = self.runners[0].spec
        self.prompt_parts: dict[str, Any] = {}  # Of encoder-decoder models there are none.

    def forward(self, batch: Batch, token_ids, *, reported) -> torch.Tensor:
        assert not reported
        hidden = None
        for runner in self.runners:
            assert hidden is None or len(hidden) == runner.num_tokens(batch)
            hidden = runner.forward(batch, token_ids, hidden)
        encoded = self.runners[-1].encoded_NE
        assert (encoded is None) == (not batch.prefill)
        for runner in self.runners if encoded is not None and len(self.runners) > 1 else ():
            runner.take_encoded(batch.prefill, encoded)
        return hidden

    def free(self, request_id: str) -> None:
        for runner in self.runners:
            runner.free(request_id)


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def generate(model: T5ForConditionalGeneration, token_ids: list[int], count: int) -> list[int]:
    """The oracle, which is asked once for what several tests want to know."""
    return _generated(model, tuple(token_ids), count)


@functools.cache
def _generated(model: T5ForConditionalGeneration, token_ids: tuple[int, ...], count: int) -> list[int]:
    """Its first token is the start token, which is no output.

    Without its cache, which has too few layers for a decoder that is deeper than the encoder (transformers 5.23).
    """
    inputs = torch.tensor([token_ids])
    outputs = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=count, do_sample=False, use_cache=False
    )
    return outputs[0, 1:].tolist()


def serve(
    runner: ModelRunner | Stages, schedule: Schedule, requests: list[tuple[list[int], int]], num_blocks: int = 64
):
    """Greedy outputs of requests, two of which arrive each step, and the engine."""
    engine = Engine(InProcessExecutor(runner), schedule, num_blocks=num_blocks)
    return play(engine, requests), engine


def play(engine: Engine, requests: list[tuple[list[int], int]]) -> list[list[int]]:
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
    return list(found.values())


def sixteen(model: T5ForConditionalGeneration) -> tuple[Requests, list[list[int]]]:
    """Requests of all lengths, and their expected tokens."""
    lengths = [(1 + (11 * n) % 41, 1 + (5 * n) % 23) for n in range(16)]
    requests = [(prompt(length, seed=n), count) for n, (length, count) in enumerate(lengths)]
    return requests, [generate(model, *request) for request in requests]


@every_case
def test_one_request_equals_generate(case, checkpoint):
    """Long enough for distances beyond the largest bucket, in one direction and in both."""
    model, directory = checkpoint(case)
    token_ids = prompt(150, seed=1)
    outputs, _ = serve(runner_of(directory), SCHEDULES["orca"], [(token_ids, 140)])
    assert outputs == [generate(model, token_ids, 140)]


@every_policy
@every_case
def test_sixteen_mixed_requests_equal_generate(case, schedule, checkpoint):
    model, directory = checkpoint(case)
    requests, expected = sixteen(model)
    runner = runner_of(directory)
    outputs, engine = serve(runner, schedule, requests)
    assert outputs == expected
    assert (engine.free_blocks, runner.cache.free_blocks) == (64, 64)


@pytest.mark.parametrize("num_blocks", [64, 9], ids=["roomy", "preempting"])
@every_policy
@pytest.mark.parametrize("case", ["v1.0", "deep-decoder"])
def test_paged_attention_and_async_scheduling_equal_generate(case, schedule, num_blocks, checkpoint):
    """As on a GPU: captured decode iterations, the next batch started before the tokens of the last are known."""
    model, directory = checkpoint(case)
    requests, expected = sixteen(model)
    runner = runner_of(directory, num_blocks=num_blocks, paged_with=REFERENCE)
    runner.capture(4)
    engine = Engine(AsyncExecutor(runner), schedule, num_blocks=num_blocks)
    assert play(engine, requests) == expected
    assert (engine.free_blocks, runner.cache.free_blocks) == (num_blocks, num_blocks)


@pytest.mark.parametrize("policy", ["rra", "chunked"])
@pytest.mark.parametrize("case", ["v1.0", "v1.1"])
def test_preempted_requests_are_recomputed(case, policy, checkpoint):
    """Those with output compute all of it in their first pass."""
    model, directory = checkpoint(case)
    requests = [(prompt(5 + 3 * n, seed=n), 40) for n in range(6)]
    runner = runner_of(directory, num_blocks=7)
    outputs, engine = serve(runner, SCHEDULES[policy], requests, num_blocks=7)
    assert outputs == [generate(model, *request) for request in requests]
    assert engine.num_preemptions > 0
    assert (engine.free_blocks, runner.cache.free_blocks) == (7, 7)


def test_text_is_tokenized_with_its_end_and_streamed(tmp_path):
    """By the tokenizer.json of transformers, whose words carry their leading space."""
    words = ["\u2581", "\u2581hello", "\u2581world", "s", ".", "\u2581the", "\u2581caf", "\u00e9"]
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((word, -float(n)) for n, word in enumerate(words))]
    reference = T5Tokenizer(vocab=vocabulary)
    reference.save_pretrained(tmp_path)
    tokenizer = Tokenizer.load(model_spec(HUB_CONFIG, name="tiny", directory=tmp_path))
    text = "hello worlds. the caf\u00e9"
    token_ids = tokenizer.encode(text)
    assert token_ids == reference(text).input_ids
    assert token_ids[-1:] == list(tokenizer.eos_token_ids)
    stream = tokenizer.stream([0])
    assert "".join([*map(stream.push, token_ids[:-1]), stream.finish()]) == text


# Shards


@pytest.mark.parametrize("policy", ["static", "orca"])
@pytest.mark.parametrize("case", CUTS)
def test_a_pipeline_equals_generate(case, policy, checkpoint):
    """Whose stages have encoder layers, decoder layers, or some of both."""
    model, directory = checkpoint(case)
    requests, expected = sixteen(model)
    assert serve(Stages(directory, CUTS[case]), SCHEDULES[policy], requests)[0] == expected


def test_a_pipeline_recomputes_preempted_requests(checkpoint):
    model, directory = checkpoint("v1.0")
    requests = [(prompt(5 + 3 * n, seed=n), 40) for n in range(6)]
    outputs, engine = serve(Stages(directory, CUTS["v1.0"], num_blocks=7), SCHEDULES["rra"], requests, num_blocks=7)
    assert outputs == [generate(model, *request) for request in requests]
    assert engine.num_preemptions > 0


@pytest.mark.parametrize("cuts", [[((0, 2), (0, 2))], CUTS["v1.0"]], ids=["one-stage", "two-stages"])
@pytest.mark.parametrize("case", ["v1.0", "v1.1"])
def test_two_ranks_equal_generate(case, cuts, checkpoint):
    model, directory = checkpoint(case)
    requests, expected = sixteen(model)
    buffer = SharedBuffer(group_bytes(2))

    def rank(number: int) -> list[list[int]]:
        group = SharedMemoryGroup(buffer.path, number, 2, timeout=120.0)
        return serve(Stages(directory, cuts, group=group), SCHEDULES["orca"], requests)[0]

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(rank, range(2))) == [expected, expected]
    buffer.close()


def test_a_decoder_takes_prompts_from_another_devices_encoder(checkpoint):
    """Sequences without blocks are skipped; one that returns is recomputed."""
    model, directory = checkpoint("v1.1")
    encoder = runner_of(directory, shard=Shard(layers=(0, 0), encoder_layers=(0, 2)))
    decoder = runner_of(directory, shard=Shard(layers=(0, 2)))
    assert encoder.cache.num_bytes == 0
    prompts = {name: prompt(length, seed=length) for name, length in (("a", 12), ("gone", 7), ("b", 30))}
    expected = {name: generate(model, token_ids, 5) for name, token_ids in prompts.items()}
    texts = {name: [*token_ids, 0] for name, token_ids in prompts.items()}
    rows = [
        SequenceState(request_id=name, num_prompt_tokens=len(text), max_output_tokens=5, num_blocks=2)
        for name, text in texts.items()
    ]
    assert encoder.forward(Batch(prefill=tuple(rows)), texts).shape == (0, VOCAB)
    rows[1].num_blocks = 0
    decoder.take_encoded(rows, encoder.encoded_NE)
    left = (rows[0], rows[2])
    for turn in range(5):
        if turn == 3:
            decoder.take_encoded(rows, encoder.encoded_NE)
        for row in left:
            row.num_blocks = num_blocks_for(row.num_tokens)
        for row, token in zip(left, decoder.forward(Batch(decode=left), texts).argmax(-1).tolist(), strict=True):
            texts[row.request_id].append(token)
            row.num_output_tokens += 1
    for row in left:
        assert texts[row.request_id][row.num_prompt_tokens :] == expected[row.request_id]
    assert decoder.cache.free_blocks == 64 - sum(row.num_blocks for row in left)


# What configs and checkpoints say


def test_a_head_that_is_not_scaled_is_the_table_where_there_is_no_other(tmp_path):
    """transformers 5 creates a v1.1 model so."""
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(**CASES["v1.1"])).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.3)
    model.save_pretrained(tmp_path)
    requests = [(prompt(9, seed=1), 20)]
    assert serve(runner_of(tmp_path), SCHEDULES["orca"], requests)[0] == [generate(model, *requests[0])]


def test_a_config_as_older_versions_wrote_it_means_the_same(checkpoint, tmp_path):
    model, directory = checkpoint("v1.1")
    (tmp_path / "model.safetensors").symlink_to(directory / "model.safetensors")
    config = {key: value for key, value in HUB_CONFIG.items() if key != "decoder_start_token_id"}
    (tmp_path / "config.json").write_text(json.dumps(config))  # The padding token then starts the output.
    requests = [(prompt(9, seed=1), 20)]
    assert serve(runner_of(tmp_path), SCHEDULES["orca"], requests)[0] == [generate(model, *requests[0])]


def test_the_end_of_sequence_ends_an_output(checkpoint, tmp_path):
    model, directory = checkpoint("v1.0")
    token_ids = prompt(9, seed=1)
    expected = generate(model, token_ids, 20)
    end = expected[7]
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(directory / name)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    outputs, _ = serve(runner_of(tmp_path), SCHEDULES["orca"], [(token_ids, 20)])
    assert outputs == [expected[: expected.index(end) + 1]]


def test_bfloat16_stays_close_to_float32():
    """Token by token, and all tokens of the output at once when recomputed."""
    spec = model_spec(HUB_CONFIG, name="tiny")
    texts, found = {"a": [*prompt(20, seed=3), 0, 5, 6]}, []
    for dtype in ("float32", "bfloat16"):
        runner = ModelRunner(spec, dtype=dtype, num_blocks=2)
        row = SequenceState(request_id="a", num_prompt_tokens=21, max_output_tokens=3, num_blocks=2)
        runner.forward(Batch(prefill=(row,)), texts)
        for row.num_output_tokens in (0, 1, 2):
            last = runner.forward(Batch(decode=(row,)), texts)
        runner.forward(Batch(prefill=(row,)), texts)
        found.append(torch.cat([last, runner.forward(Batch(decode=(row,)), texts)]))
    assert torch.nn.functional.cosine_similarity(*found).min() > 0.99
    torch.testing.assert_close(found[0][0], found[0][1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "change", "message"),
    [
        ("float16", {}, "'tiny' overflows in float16, as T5 models do; use bfloat16 or float32"),
        ("float32", {"feed_forward_proj": "gated-snake"}, "no activation 'snake'; there are gelu, "),
    ],
)
def test_what_is_not_supported_is_named(dtype, change, message):
    with pytest.raises(InputError, match=message):
        ModelRunner(model_spec({**HUB_CONFIG, **change}, name="tiny"), dtype=dtype, num_blocks=1)
