"""The log-probabilities of a prompt are those of transformers, under every schedule, and change no request's tokens."""

import contextlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from exeplan.core.models.model import load_model_spec, model_spec
from exeplan.core.plan import Plan
from exeplan.core.schedule import Schedule, Stage
from exeplan.errors import InputError
from exeplan.kernels.select import REFERENCE
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.tokens import prompt_logprobs
from exeplan.runner.compute.tokens.sampling import SamplingParams
from exeplan.runner.engine.async_executor import AsyncExecutor
from exeplan.runner.engine.engine import Engine, Output, Request
from exeplan.runner.engine.executor import Executor, InProcessExecutor
from exeplan.runner.engine_process.build import build_engine, engine_setup
from exeplan.runner.ipc.messages import PromptLogprobs

VOCAB, CONTEXT = 199, 128
SCHEDULES = {
    "orca": Schedule("orca", {"max_num_seqs": 4}),
    "chunked": Schedule("chunked", {"max_num_seqs": 4, "max_num_batched_tokens": 16}),
    "rra": Schedule("rra", {"prefill_batch": 3, "decode_steps": 4}),
    "static": Schedule("static", {"batch_size": 4}),
    "concat": Schedule("concat", {"max_num_seqs": 8, "rows": 2, "row_tokens": 128, "slot_tokens": 64}),
}
PLACEMENTS = {
    "tensor parallel": (Stage(devices=(0, 1), layers=(0, 2)),),
    "pipeline": (Stage(devices=(0,), layers=(0, 1)), Stage(devices=(1,), layers=(1, 2))),
    "apart": (Stage(devices=(0,), layers=(0, 2), phase="prefill"), Stage(devices=(1,), layers=(0, 2), phase="decode")),
}
COUNTS = [2, None, 0, 20, 1, 3]
"""Of most likely tokens that the requests ask for."""


class Found(NamedTuple):
    """Of a prompt: what the model says of its tokens but the first."""

    logprobs: np.ndarray
    ranks: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[LlamaForCausalLM, Path]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"bos_token_id": None, "eos_token_id": None}
    config = LlamaConfig(
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
        num_key_value_heads=2,
        initializer_range=0.4,
        **sizes,
        **special,
    )
    llama = LlamaForCausalLM(config).eval()
    directory = tmp_path_factory.mktemp("llama")
    llama.save_pretrained(directory)
    return llama, directory


def prompts() -> list[list[int]]:
    lengths = [40, 7, 1, 17, 16, 33]
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]


@torch.inference_mode()
def expected(llama: LlamaForCausalLM, prompt: list[int]) -> torch.Tensor:
    """Log-probabilities `[tokens - 1, V]` of everything that may follow each token."""
    return llama(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)


def arrays(prompt: PromptLogprobs) -> Found:
    def read(data: bytes, kind: str) -> np.ndarray:
        return np.frombuffer(data, kind)

    ranks = read(prompt.ranks, "<i4")
    shape = len(ranks), prompt.num_top
    top = (read(prompt.top_token_ids, "<i4").reshape(shape), read(prompt.top_logprobs, "<f4").reshape(shape))
    return Found(read(prompt.logprobs, "<f4"), ranks, *top)


def check(llama: LlamaForCausalLM, prompt: list[int], count: int, found: PromptLogprobs | None) -> None:
    """Equal to transformers, and in itself."""
    assert found is not None
    logprobs, ranks, top_ids, top_logprobs = arrays(found)
    reference = expected(llama, prompt)
    own = reference.gather(1, torch.tensor(prompt[1:], dtype=torch.int64)[:, None])[:, 0]
    assert logprobs == pytest.approx(own.numpy(), abs=1e-4)
    assert ranks.tolist() == [(row > value).sum().item() + 1 for row, value in zip(reference, own, strict=True)]
    assert top_ids.shape == top_logprobs.shape == (len(prompt) - 1, count)
    assert top_logprobs == pytest.approx(reference.topk(count).values.numpy(), abs=1e-4)
    for token, value, ids, values in zip(prompt[1:], logprobs, top_ids, top_logprobs, strict=True):
        assert token not in ids or values[ids.tolist().index(token)] == value


def run(engine: Engine, counts: list[int | None] = COUNTS, max_tokens: int = 6) -> dict[str, list[Output]]:
    outputs: dict[str, list[Output]] = {}
    for number, (prompt, count) in enumerate(zip(prompts(), counts, strict=True)):
        sampling = SamplingParams(max_tokens=max_tokens, seed=number, prompt_logprobs=count)
        engine.add(Request(request_id=str(number), prompt_token_ids=prompt, sampling=sampling))
        outputs[str(number)] = []
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
    assert engine.free_blocks == engine.num_blocks
    return outputs


def tokens(outputs: dict[str, list[Output]]) -> dict[str, list[int]]:
    return {name: [token for one in each for token in one.token_ids] for name, each in outputs.items()}


def check_all(llama: LlamaForCausalLM, outputs: dict[str, list[Output]]) -> None:
    for (first, *rest), prompt, count in zip(outputs.values(), prompts(), COUNTS, strict=True):
        assert rest
        assert not any(one.prompt_logprobs for one in rest)
        if count is None:
            assert first.prompt_logprobs is None
        else:
            check(llama, prompt, count, first.prompt_logprobs)


def executor(directory: Path, kind: str, num_blocks: int) -> Executor:
    spec = load_model_spec(str(directory))
    if kind == "async":
        return AsyncExecutor(ModelRunner(spec, num_blocks=num_blocks, paged_with=REFERENCE))
    return InProcessExecutor(ModelRunner(spec, num_blocks=num_blocks))


@pytest.mark.parametrize("kind", ["in process", "async"])
@pytest.mark.parametrize("policy", SCHEDULES)
def test_equals_transformers_and_leaves_all_tokens_as_they_are(
    model: tuple[LlamaForCausalLM, Path], policy: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of three positions, which no prompt's length is a multiple of, and no chunk's."""
    llama, directory = model
    monkeypatch.setattr(prompt_logprobs, "_BLOCK_ROWS", 3)
    device = executor(directory, kind, 64)
    outputs = run(Engine(device, SCHEDULES[policy], num_blocks=64))
    check_all(llama, outputs)
    assert tokens(run(Engine(device, SCHEDULES[policy], num_blocks=64), [None] * 6)) == tokens(outputs)


def test_a_request_that_is_computed_again_reports_its_prompt_once(model: tuple[LlamaForCausalLM, Path]) -> None:
    """The last one is preempted after 9 tokens of its prompt, others in the middle of their outputs."""
    llama, directory = model
    engine = Engine(executor(directory, "in process", 8), SCHEDULES["chunked"], num_blocks=8)
    outputs = run(engine, max_tokens=40)
    assert engine.num_preemptions > 0
    check_all(llama, outputs)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_equals_transformers_on_two_workers(model: tuple[LlamaForCausalLM, Path], name: str) -> None:
    """Also of a prompt that the workers began before they were lost."""
    llama, directory = model
    schedule = Schedule("waa-c", {"prefill_batch": 3, "decode_batch": 8}) if name == "apart" else SCHEDULES["chunked"]
    plan = Plan(model=str(directory), schedule=schedule, placement=PLACEMENTS[name], kv_cache_tokens=1024)
    with contextlib.closing(build_engine(engine_setup(plan, load_model_spec(str(directory))))) as engine:
        check_all(llama, run(engine))
        if name != "pipeline":
            return
        sampling = SamplingParams(max_tokens=2, prompt_logprobs=3)
        engine.add(Request(request_id="again", prompt_token_ids=prompts()[0], sampling=sampling))
        assert engine.step() == []
        engine.restart()
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        check(llama, prompts()[0], 3, outputs[0].prompt_logprobs)


def test_an_output_that_another_engine_has_begun_reports_no_prompt(model: tuple[LlamaForCausalLM, Path]) -> None:
    engine = Engine(executor(model[1], "in process", 64), SCHEDULES["orca"], num_blocks=64)
    sampling = SamplingParams(max_tokens=3, prompt_logprobs=1)
    begun = {"output_token_ids": [5], "start": 0.0}
    engine.add(Request(request_id="a", prompt_token_ids=[1, 2, 3], sampling=sampling, **begun))
    outputs = [output for _ in range(2) for output in engine.step()]
    assert [output.prompt_logprobs for output in outputs] == [None, None]


def test_a_prompt_of_which_the_model_says_nothing_usable_fails_alone(model: tuple[LlamaForCausalLM, Path]) -> None:
    """The log-probability after its first token is not a number; after its last one all are sound."""
    device = executor(model[1], "in process", 64)
    assert isinstance(device, InProcessExecutor)
    sound = device.runner.model.head

    def head(hidden: torch.Tensor) -> torch.Tensor:
        """Two rows are those that are sampled."""
        logits = sound(hidden)
        return logits if len(hidden) == 2 else logits.index_fill(0, torch.tensor([0]), torch.nan)

    device.runner.model.head = head  # type: ignore[method-assign]
    engine = Engine(device, SCHEDULES["orca"], num_blocks=64)
    for name, count in (("scored", 1), ("other", None)):
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=count)
        engine.add(Request(request_id=name, prompt_token_ids=[7, 8, 9, 10], sampling=sampling))
    assert {output.request_id: output.finish_reason for output in engine.step()} == {
        "scored": "error",
        "other": "length",
    }


def test_encoder_decoder_models_are_refused() -> None:
    spec = load_model_spec("t5-11b")
    small = {"d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 64, "vocab_size": 64}
    spec = model_spec({**spec.config, **small, "num_layers": 1, "num_decoder_layers": 1}, name="small")
    runner = ModelRunner(spec, num_blocks=4, dummy_weights=True)
    engine = Engine(InProcessExecutor(runner), SCHEDULES["orca"], num_blocks=4)
    with pytest.raises(InputError, match="an encoder-decoder model gives its prompt no log-probabilities"):
        engine.add(Request(request_id="a", prompt_token_ids=[1], sampling=SamplingParams(prompt_logprobs=0)))
