"""Captured decode iterations give the logits of eager passes, and read nothing on the host."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from exeplan.core.batch import Batch, Chunk, SequenceState, num_blocks_for
from exeplan.core.models.model import model_spec
from exeplan.kernels.select import REFERENCE, Kernels
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.passes.decode_graphs import ladder
from exeplan.runner.compute.weights.checkpoint import RandomWeights
from exeplan.runner.compute.weights.shard import Shard

VOCAB = 97
SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
ROTARY = {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
MARIAN = {"layers": 3, "attention_heads": 4, "ffn_dim": 48}
SPECS = {
    "llama": {**ROTARY, "rope_parameters": DYNAMIC, "max_position_embeddings": 16},
    "mistral": {**ROTARY, "sliding_window": 9},
    "qwen2": {**ROTARY, "rope_parameters": {**LONG, "original_max_position_embeddings": 16}},
    "qwen3": {**ROTARY, "head_dim": 16},
    "opt": {**SMALL, "ffn_dim": 48, "max_position_embeddings": 64, "word_embed_proj_dim": 16},
    "gpt2": {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "t5": {"is_encoder_decoder": True, "vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 48}
    | {"num_layers": 3, "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0, "n_positions": 64},
    "marian": {"is_encoder_decoder": True, "vocab_size": VOCAB, "d_model": 32, "max_position_embeddings": 64}
    | {f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in MARIAN.items()}
    | {"decoder_start_token_id": 0, "pad_token_id": 0},
}
every_family = pytest.mark.parametrize("family", SPECS)


def shaped(q_NHD, *_arguments, **_options):
    return torch.empty_like(q_NHD)


SHAPES = Kernels(
    **{
        **vars(REFERENCE),
        "mixed_attention": shaped,
        "paged_attention": shaped,
        "ragged_attention": shaped,
        "store_slots": lambda kv_NMD, slot_N, table_2RD: None,
    }
)
"""The references of attention and store read lengths on the host, unlike their kernels; these functions do not."""


def runner_of(family: str, kernels: Kernels = REFERENCE, num_blocks: int = 24, **options) -> ModelRunner:
    spec = model_spec({"model_type": family, **SPECS[family]}, name="tiny")
    return ModelRunner(spec, num_blocks=num_blocks, dummy_weights=True, paged_with=kernels, **options)


def prefilled(runner: ModelRunner, lengths: list[int]) -> tuple[list[SequenceState], dict[str, list[int]]]:
    """Cached sequences that decode next, and their tokens."""
    begin = 0 if runner.spec.first_token_from_prefill else 1
    rows, texts = [], {}
    for number, length in enumerate(lengths):
        row = SequenceState(request_id=str(number), num_prompt_tokens=length + begin, max_output_tokens=8)
        row.num_blocks = num_blocks_for(row.num_tokens + 1)
        rows.append(row)
        texts[row.request_id] = [(5 * number + 3 * place) % VOCAB for place in range(length)] + [0] * begin
    runner.forward(Batch(prefill=tuple(rows)), texts)
    for row in rows if not begin else ():
        texts[row.request_id].append(7)
        row.num_output_tokens = 1
    return rows, texts


@given(most=st.integers(1, 1000))
def test_the_ladder_rises_to_its_end_in_small_steps(most):
    sizes = ladder(most)
    assert sizes[-1] == most
    assert all(below < above <= max(2 * below, below + 64) for below, above in pairwise(sizes))


@every_family
def test_a_replay_equals_an_eager_pass(family):
    """With and without padding, with tokens that the host knows and tokens that only the device has."""
    eager, captured = runner_of(family), runner_of(family)
    captured.capture(4)
    lengths = [17, 1, 16, 5]
    (rows, texts), _ = prefilled(captured, lengths), prefilled(eager, lengths)
    for count in (1, 3, 4):
        batch = Batch(decode=tuple(rows[:count]))
        expected = eager.forward(batch, texts)
        torch.testing.assert_close(captured.forward(batch, texts), expected, rtol=1e-5, atol=1e-6)
        tokens, sound = captured.chosen
        assert (tokens.tolist(), sound.tolist()) == (expected.argmax(-1).tolist(), [True] * count)

    left = dict(zip([row.request_id for row in rows], tokens.tolist(), strict=True))
    assert captured.keep_tokens(tokens)
    for row in rows:
        row.num_output_tokens += 1
        row.num_blocks = max(row.num_blocks, num_blocks_for(row.num_tokens))
    known = {name: [*text, left[name]] for name, text in texts.items()}
    batch, prev_rows = Batch(decode=tuple(rows[::-1])), {str(number): number for number in range(4)}
    expected = eager.forward(batch, known)
    torch.testing.assert_close(captured.forward(batch, texts, prev_rows=prev_rows), expected, rtol=1e-5, atol=1e-6)


@every_family
def test_every_stage_of_a_pipeline_is_captured(family):
    whole = runner_of(family)
    encoder = whole.spec.num_encoder_layers
    cuts = [Shard(layers=(0, 1), encoder_layers=(0, encoder), last=False), Shard(layers=(1, 3), first=False)]
    stages = [runner_of(family, shard=shard) for shard in cuts]
    for stage in stages:
        stage.capture(3)
    rows, texts = prefilled(whole, [9, 20])
    copies = [replace(row, num_output_tokens=0) for row in rows]
    hidden = None
    for stage in stages:
        hidden = stage.forward(Batch(prefill=tuple(copies)), texts, hidden)
    for stage in stages if encoder else ():
        stage.take_encoded(copies, stages[-1].encoded_NE)
    expected = whole.forward(Batch(decode=tuple(rows)), texts)
    hidden = None
    for stage in stages:
        hidden = stage.forward(Batch(decode=tuple(rows)), texts, hidden)
    torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-6)


def test_padding_rows_write_nothing_and_read_nothing():
    runner = runner_of("llama")
    runner.capture(8)
    rows, texts = prefilled(runner, [17, 3, 5, 6, 2])
    used = [slot for row in rows for slot in runner.cache.slots(row.request_id, 0, row.num_tokens)]
    unused = [slot for slot in range(runner.cache.num_slots) if slot not in used]
    with torch.inference_mode():
        for layer in range(3):
            runner.cache.both_tables(layer).view(4, -1, 8)[:, unused] = torch.nan
    assert runner.forward(Batch(decode=tuple(rows)), texts).isfinite().all()
    for layer in range(3):
        assert runner.cache.both_tables(layer).view(4, -1, 8)[:, unused].isnan().all()


@every_family
def test_every_tensor_of_a_pass_is_on_the_device(family, monkeypatch):
    """Meta tensors, which have no values, stand for those of a GPU: torch refuses to mix them with others."""
    device = torch.device("meta")
    monkeypatch.setattr(RandomWeights, "_draw", lambda self, name, sizes: torch.zeros(sizes, device=self.device))
    runner = runner_of(family, device="meta", kernels=SHAPES)
    begin = 0 if runner.spec.first_token_from_prefill else 1
    rows = [
        SequenceState(request_id=str(n), num_prompt_tokens=9 + begin, max_output_tokens=4, num_blocks=2) for n in (0, 1)
    ]
    texts = {row.request_id: [1] * 12 for row in rows}
    logits = [runner.forward(Batch(prefill=tuple(rows)), texts)]
    if not begin:
        logits.append(runner.forward(Batch(prefill=(rows[0],), chunks=(Chunk(3, 9, last=True),)), texts))
    rows[0].num_output_tokens = rows[1].num_output_tokens = 1
    logits.append(runner.forward(Batch(decode=tuple(rows)), texts, prev_rows={"1": 0}))
    assert {tensor.device for tensor in (*logits, *runner.decode_graphs(4).iteration(3))} == {device}


@every_family
def test_a_captured_iteration_reads_no_value_on_the_host(family):
    """Under fake tensors, which have shapes and no values: reading one would raise."""
    runner = runner_of(family, kernels=SHAPES)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        logits, tokens, sound = runner.decode_graphs(4).iteration(3)
    assert (logits.shape, tokens.shape, sound.dtype) == ((3, VOCAB), (3,), torch.bool)
