"""Packed rows give every request the tokens that it gets alone, for any packing of rows and slots.

Float32, exact tokens: rows and slots exactly full, empty slots, prompts of one token, rows of one prompt, and any
packing that hypothesis finds.
"""

import functools
import tempfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from exeplan.core.batch import Batch, PackedPrompt, Packing, SequenceState, num_blocks_for
from exeplan.core.models.model import load_model_spec
from exeplan.kernels.select import REFERENCE
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.passes.packed_step import PackedRows, one_a_row
from exeplan.runner.compute.tokens.sampling import GREEDY
from exeplan.runner.distributed.batch_messages import Mirror, batch_message
from exeplan.runner.engine.requests import RequestState

VOCAB, STEPS = 199, 3
ENCODER_DECODER = {"vocab_size": VOCAB, "d_model": 32, "decoder_start_token_id": 0, "eos_token_id": None}
MARIAN = ENCODER_DECODER | {"encoder_layers": 2, "decoder_layers": 1, "decoder_ffn_dim": 48, "encoder_ffn_dim": 48}
MARIAN |= {"decoder_attention_heads": 4, "encoder_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0}
T5 = ENCODER_DECODER | {"d_kv": 8, "num_heads": 4, "d_ff": 48, "num_layers": 2}
T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}
LLAMA = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA |= {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64, "eos_token_id": None}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
MODELS = {
    "marian": MARIAN,
    "t5": T5,
    "llama": {**LLAMA, "max_position_embeddings": 6, "rope_parameters": DYNAMIC},
    "mistral": {**LLAMA, "sliding_window": 5},
}
PAGED = "-on-kernels"
NAMES = [*MODELS, *(model + PAGED for model in MODELS)]
"""The CPU's attention, and the GPU's path by the references of its kernels."""
every_model = pytest.mark.parametrize("model", NAMES)


@functools.cache
def runner_of(model: str) -> ModelRunner:
    """A random model, whose weights are so large that the next token depends on what a token attends to."""
    torch.manual_seed(0)
    name = model.removesuffix(PAGED)
    config = CONFIG_MAPPING[name](**MODELS[name])
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    built = kind.from_config(config).eval()
    for parameter in built.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.3)
    with tempfile.TemporaryDirectory() as directory:
        built.save_pretrained(directory)
        paged_with = REFERENCE if model.endswith(PAGED) else None
        return ModelRunner(load_model_spec(directory), num_blocks=128, paged_with=paged_with)


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def sequences(model: str, lengths: list[int]) -> tuple[tuple[SequenceState, ...], dict[str, list[int]]]:
    """Requests and their tokens; an encoder-decoder model's have the start token after the prompt."""
    begin = [0] if runner_of(model).spec.is_encoder_decoder else []
    texts = {str(n): [*prompt(length, n), *begin] for n, length in enumerate(lengths)}
    rows = tuple(
        SequenceState(
            request_id=name,
            num_prompt_tokens=len(text),
            max_output_tokens=STEPS,
            num_begin_tokens=len(begin),
            num_blocks=num_blocks_for(len(text) + STEPS),
        )
        for name, text in texts.items()
    )
    return rows, texts


def outputs(model: str, lengths: list[int], *, batches) -> list[list[int]]:
    """Greedy tokens of requests that are prefilled in these batches and then decode together."""
    runner = runner_of(model)
    rows, texts = sequences(model, lengths)
    for batch in batches(rows):
        logits_RV = runner.forward(batch, texts)
        for row, token in zip(batch.prefill, logits_RV.argmax(-1).tolist()):  # noqa: B905 - an encoder gives none
            texts[row.request_id].append(token)
            row.num_output_tokens += 1
    for _ in range(STEPS - max(row.num_output_tokens for row in rows)):
        for row, token in zip(rows, runner.forward(Batch(decode=rows), texts).argmax(-1).tolist(), strict=True):
            texts[row.request_id].append(token)
            row.num_output_tokens += 1
    for row in rows:
        runner.free(row.request_id)
    return [texts[row.request_id][row.num_prompt_tokens :] for row in rows]


def alone(rows):
    return [Batch(prefill=(row,)) for row in rows]


def check(model: str, lengths: list[int], packing: Packing) -> None:
    together = outputs(model, lengths, batches=lambda rows: [Batch(prefill=rows, packing=packing)])
    assert together == outputs(model, lengths, batches=alone)


@every_model
@pytest.mark.parametrize(
    ("lengths", "packing"),
    [
        ([1, 1, 1], Packing(3, 3, (PackedPrompt(0, 0), PackedPrompt(0, 1), PackedPrompt(0, 2)))),
        (
            [8, 4, 4, 16],
            Packing(16, 16, (PackedPrompt(0, 0), PackedPrompt(0, 8), PackedPrompt(0, 12), PackedPrompt(1, 0))),
        ),
        (
            [4, 4, 3, 1, 2],
            Packing(
                8,
                4,
                (PackedPrompt(0, 0), PackedPrompt(1, 4), PackedPrompt(0, 4), PackedPrompt(0, 7), PackedPrompt(1, 0)),
            ),
        ),
        ([5, 2], Packing(30, 10, (PackedPrompt(2, 20), PackedPrompt(0, 3)))),
        ([40], Packing(40, 40, (PackedPrompt(0, 0),))),
        ([7, 12, 3], one_a_row(3, 12)),
    ],
    ids=["one-token", "full-rows", "full-slots", "empty-rows-and-slots", "row-of-one", "naive"],
)
def test_packed_prompts_give_what_they_give_alone(model, lengths, packing):
    check(model, lengths, packing)


@st.composite
def packings(draw) -> tuple[list[int], Packing]:
    """Prompts at any positions of slots of any size, not only from the front and in order."""
    slot_tokens, slots_a_row, rows = draw(st.integers(1, 12)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    lengths, places = [], []
    for slot in draw(st.permutations(range(rows * slots_a_row))):
        row, start = slot // slots_a_row, slot % slots_a_row * slot_tokens
        room = slot_tokens
        for gap, length in draw(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 12)), max_size=4)):
            if gap + length <= room:
                places.append(PackedPrompt(row, start + slot_tokens - room + gap))
                lengths.append(length)
                room -= gap + length
    if not lengths:
        lengths, places = [slot_tokens], [PackedPrompt(0, 0)]
    return lengths, Packing(slots_a_row * slot_tokens, slot_tokens, tuple(places))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(packed=packings(), model=st.sampled_from(NAMES))
def test_any_packing_gives_what_its_prompts_give_alone(packed, model):
    check(model, *packed)


@pytest.mark.parametrize("model", ["marian", "t5"])
def test_padded_prompts_are_rows_of_one(model):
    padded = outputs(model, [9, 2, 30], batches=lambda rows: [Batch(prefill=rows, pad_to=31)])
    assert padded == outputs(model, [9, 2, 30], batches=alone)


@every_model
def test_packed_prompts_may_be_prefilled_while_others_decode(model):
    """Preempted requests with output are recomputed in a packed row like any other."""
    first = outputs(model, [9], batches=alone)[0]
    runner = runner_of(model)
    (old, new, again), texts = sequences(model, [9, 5, 9])
    texts[again.request_id] = [*texts[old.request_id], *first[:2]]
    again.num_output_tokens = 2
    begun = runner.forward(Batch(prefill=(old,)), texts).argmax(-1).tolist()
    texts[old.request_id] += begun
    old.num_output_tokens = len(begun)
    packing = Packing(24, 24, (PackedPrompt(0, 1), PackedPrompt(0, 10)))
    logits_RV = runner.forward(Batch(prefill=(new, again), decode=(old,), packing=packing), texts)
    if runner.spec.is_encoder_decoder:
        logits_RV = torch.cat([runner.forward(Batch(decode=(new, again)), texts), logits_RV])
    assert logits_RV.argmax(-1).tolist() == [
        outputs(model, [9, 5], batches=alone)[1][0], first[2], first[old.num_output_tokens],
    ]  # fmt: skip
    for row in (old, new, again):
        runner.free(row.request_id)


def test_rows_are_computed_as_they_are_packed():
    """Padding and empty slots are computed, and positions begin with every prompt."""
    packing = Packing(6, 3, (PackedPrompt(1, 3), PackedPrompt(0, 0), PackedPrompt(0, 2)))
    rows = PackedRows([[7, 8], [5, 6], [9]], packing, device=torch.device("cpu"))
    assert rows.token_N.tolist() == [5, 6, 9, 0, 0, 0, 0, 0, 0, 7, 8, 0]
    assert rows.position_N.tolist() == [0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]
    assert rows.last_B.tolist() == [10, 1, 2]
    sequences = tuple(SequenceState(request_id=str(n), num_prompt_tokens=3, max_output_tokens=1) for n in range(3))
    assert runner_of("t5").num_tokens(Batch(prefill=sequences, packing=packing)) == 12


def test_a_packing_is_sent_to_workers():
    packing = Packing(8, 4, (PackedPrompt(0, 0), PackedPrompt(1, 4)))
    rows = tuple(
        RequestState(
            request_id=name,
            num_prompt_tokens=2,
            max_output_tokens=1,
            sampling=GREEDY,
            plain=True,
            seed=0,
            prompt_token_ids=[1, 2],
            token_ids=[1, 2],
            banned_token_ids=(),
            end_token_ids=frozenset(),
            stream=None,
            arrival=0.0,
        )
        for name in "ab"
    )
    for sent in (packing, None):
        message = batch_message(0, Batch(prefill=rows, packing=sent), freed=())
        assert Mirror().batch(message).packing == sent
