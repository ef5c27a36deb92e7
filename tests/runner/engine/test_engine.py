"""An Engine gives every request the tokens that it gets alone, under every schedule, and frees every block."""

import itertools
import json
import logging
import math
import shutil
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from exeplan.core.models.model import load_model_spec
from exeplan.core.schedule import Schedule
from exeplan.errors import InputError
from exeplan.runner.compute.kv_budget import KVBudget
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.tokens.sampling import SamplingParams
from exeplan.runner.engine.engine import Engine, Request, StepRecord
from exeplan.runner.engine.executor import InProcessExecutor
from exeplan.runner.engine.tokenizer import ByteCodec, Tokenizer

VOCAB, CONTEXT = 300, 128
SCHEDULES = {
    "static": Schedule("static", {"batch_size": 4}),
    "orca": Schedule("orca", {"max_num_seqs": 5}),
    "rra": Schedule("rra", {"prefill_batch": 3, "decode_steps": 4}),
    "das": Schedule("orca", {"max_num_seqs": 5}, "das"),
}
CHUNKED = Schedule("chunked", {"max_num_seqs": 5, "max_num_batched_tokens": 32})
every_policy = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
BYTES = Tokenizer(ByteCodec())
ONLY_LETTERS = {token_id: -100.0 for token_id in range(VOCAB) if not ord("a") <= token_id <= ord("z")}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny random Llama of transformers, and the directory it is saved in."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.4,
    )
    llama = LlamaForCausalLM(config).eval()
    directory = tmp_path_factory.mktemp("llama")
    llama.save_pretrained(directory)
    return llama, directory


@pytest.fixture(scope="module")
def shared_runner(model):
    return ModelRunner(load_model_spec(str(model[1])), dtype="float32", device="cpu", num_blocks=64)


@pytest.fixture
def runner(shared_runner):
    yield shared_runner
    assert shared_runner.cache.free_blocks == 64


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 40, (count,), generator=generator).tolist()
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def greedy(**fields) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **fields})


def request(request_id: str, prompt: list[int], sampling: SamplingParams) -> Request:
    return Request(request_id=request_id, prompt_token_ids=prompt, sampling=sampling)


def drain(engine: Engine) -> dict[str, list]:
    """All outputs until no work is left, by request."""
    outputs: dict[str, list] = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def tokens(outputs: list) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def run(runner, prompt, sampling, *, schedule=SCHEDULES["orca"], tokenizer=None, num_blocks=64) -> list:
    """The outputs of one request alone."""
    engine = Engine(InProcessExecutor(runner), schedule, tokenizer=tokenizer, num_blocks=num_blocks)
    engine.add(request("only", prompt, sampling))
    return drain(engine)["only"]


def text(outputs: list) -> str:
    return "".join(output.text for output in outputs)


# The same tokens


@every_policy
@given(data=st.data())
@settings(max_examples=8)
def test_another_engine_goes_on_where_one_has_ended(shared_runner, schedule, data):
    """Greedily and by a seed; with penalties, of which the output is a part; up to the same stop string."""
    stop = data.draw(st.sampled_from([(), ("e",), ("th", "xy")]))
    bias = ONLY_LETTERS if stop else {}
    fields = {"stop": stop, "logit_bias": bias, "max_tokens": 40, "min_tokens": 5, "presence_penalty": 0.3}
    params = [greedy(**fields), SamplingParams(**fields, temperature=1.0, seed=3)]
    whole = [run(shared_runner, prompt, one, tokenizer=BYTES) for prompt, one in zip(prompts(2), params, strict=True)]
    cuts = [data.draw(st.integers(0, len(outputs) - 1)) for outputs in whole]
    engine = Engine(InProcessExecutor(shared_runner), schedule, tokenizer=BYTES, num_blocks=64)
    for number, (prompt, one, cut) in enumerate(zip(prompts(2), params, cuts, strict=True)):
        so_far = tokens(whole[number][:cut])
        engine.add(replace(request(str(number), prompt, one), output_token_ids=so_far, start=1.5 if cut else None))
    rest = drain(engine)
    for number, cut in enumerate(cuts):
        wanted, found = whole[number][cut:], rest[str(number)]
        assert tokens(found) == tokens(wanted)
        assert text(found) == text(wanted)
        assert [(output.first, output.finish_reason) for output in found] == [
            (output.first, output.finish_reason) for output in wanted
        ]
        assert (found[0].start == 1.5) == bool(cut)


@every_policy
def test_a_mixed_batch_gets_what_transformers_generates(model, runner, schedule):
    llama, _ = model
    lengths = [1 + (7 * index) % 23 for index in range(16)]
    expected = {}
    for index, prompt in enumerate(prompts(16)):
        ids = llama.generate(torch.tensor([prompt]), max_new_tokens=lengths[index], do_sample=False)
        expected[str(index)] = ids[0, len(prompt) :].tolist()

    engine, found = Engine(InProcessExecutor(runner), schedule, num_blocks=64), {}
    for index, prompt in enumerate(prompts(16)):
        engine.add(request(str(index), prompt, greedy(max_tokens=lengths[index])))
        for output in engine.step() if index % 3 else []:  # Some join while others are at work.
            found.setdefault(output.request_id, []).append(output)
    for request_id, outputs in drain(engine).items():
        found.setdefault(request_id, []).extend(outputs)

    assert {request_id: tokens(outputs) for request_id, outputs in found.items()} == expected
    for outputs in found.values():
        assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + ["length"]
        assert [output.first for output in outputs] == [True] + [False] * (len(outputs) - 1)
    assert engine.free_blocks == engine.num_blocks


@every_policy
def test_a_seeded_request_draws_the_same_in_any_batch(runner, schedule):
    drawing = SamplingParams(temperature=0.9, top_p=0.95, presence_penalty=0.3, seed=5, max_tokens=20)
    prompt = prompts(1, seed=8)[0]
    alone = tokens(run(runner, prompt, drawing))
    engine = Engine(InProcessExecutor(runner), schedule, num_blocks=64)
    for index, other in enumerate(prompts(7)):
        engine.add(request(str(index), other, SamplingParams(temperature=1.2, max_tokens=3 + index)))
    engine.add(request("mine", prompt, drawing))
    assert tokens(drain(engine)["mine"]) == alone
    assert tokens(run(runner, prompt, SamplingParams(temperature=0.9, seed=6, max_tokens=20))) != alone


def test_without_a_seed_two_runs_differ(runner):
    drawing, prompt = SamplingParams(max_tokens=20), prompts(1)[0]
    assert tokens(run(runner, prompt, drawing)) != tokens(run(runner, prompt, drawing))


def test_preemption_changes_no_token_and_repeats_none(runner):
    sampling = [greedy(max_tokens=60), SamplingParams(temperature=0.8, seed=3, max_tokens=60)] * 3
    alone = [tokens(run(runner, prompt, params)) for prompt, params in zip(prompts(6), sampling, strict=True)]
    engine = Engine(InProcessExecutor(runner), SCHEDULES["rra"], num_blocks=12)
    for index, (prompt, params) in enumerate(zip(prompts(6), sampling, strict=True)):
        engine.add(request(str(index), prompt, params))
    found = drain(engine)
    assert engine.num_preemptions > 0
    assert [tokens(found[str(index)]) for index in range(6)] == alone
    assert [found[str(index)][-1].num_output_tokens for index in range(6)] == [60] * 6
    assert engine.free_blocks == 12


def test_preemptions_are_counted_on_when_workers_start_again(runner):
    class Restarted(InProcessExecutor):
        def restart(self) -> None:
            self.runner.use_blocks(self.runner.cache.num_blocks)

    engine = Engine(Restarted(runner), SCHEDULES["rra"], num_blocks=12)
    for index, prompt in enumerate(prompts(6)):
        engine.add(request(str(index), prompt, greedy(max_tokens=60)))
    while not engine.num_preemptions:
        engine.step()
    before = engine.num_preemptions
    engine.restart()
    assert engine.num_preemptions == before
    drain(engine)
    assert engine.num_preemptions > before


def test_static_batches_deliver_at_once_and_leave_together(runner):
    engine = Engine(InProcessExecutor(runner), SCHEDULES["static"], num_blocks=64)
    for index, length in enumerate([2, 5]):
        engine.add(request(str(index), [1, 2, 3], greedy(max_tokens=length)))
    seen = [[(output.request_id, output.finish_reason) for output in engine.step()] for _ in range(5)]
    assert seen == [
        [("0", None), ("1", None)],
        [("0", "length"), ("1", None)],
        [("1", None)],
        [("1", None)],
        [("1", "length")],
    ]
    assert (engine.last_steps[-1].num_decode, engine.num_running, engine.free_blocks) == (2, 0, 64)


# The end of a request


def test_a_stop_string_cuts_the_text(runner):
    params = {"logit_bias": ONLY_LETTERS, "max_tokens": 30, "temperature": 1.0, "seed": 1}
    whole = text(run(runner, [65, 66], SamplingParams(**params), tokenizer=BYTES))
    assert len(whole) == 30
    stop = whole[10:13]
    outputs = run(runner, [65, 66], SamplingParams(**params, stop=["NEVER", stop]), tokenizer=BYTES)
    assert text(outputs) == whole[: whole.index(stop)]
    assert outputs[-1].finish_reason == "stop"
    assert len(tokens(outputs)) == whole.index(stop) + 3


def test_a_stop_token_ends_the_text_before_it(runner):
    whole = run(runner, [65], greedy(logit_bias=ONLY_LETTERS), tokenizer=BYTES)
    last = tokens(whole)[4]
    outputs = run(runner, [65], greedy(logit_bias=ONLY_LETTERS, stop_token_ids=[last]), tokenizer=BYTES)
    first_place = tokens(whole).index(last)
    assert tokens(outputs) == tokens(whole)[: first_place + 1]
    assert (text(outputs), outputs[-1].finish_reason) == (text(whole)[:first_place], "stop")


def test_end_of_sequence_is_obeyed_ignored_or_put_off(model, tmp_path):
    llama, directory = model
    prompt = [5, 6, 7]
    whole = llama.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, 3:].tolist()
    end = whole[4]
    copy = shutil.copytree(directory, tmp_path / "copy")
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    runner = ModelRunner(load_model_spec(str(copy)), dtype="float32", device="cpu", num_blocks=64)
    put_off = llama.generate(
        torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=8, eos_token_id=end, pad_token_id=0, do_sample=False
    )
    assert tokens(run(runner, prompt, greedy())) == whole[: whole.index(end) + 1]
    assert run(runner, prompt, greedy())[-1].finish_reason == "stop"
    assert tokens(run(runner, prompt, greedy(ignore_eos=True))) == whole
    assert tokens(run(runner, prompt, greedy(min_tokens=8))) == put_off[0, 3:].tolist()


def test_without_max_tokens_the_context_is_filled(runner):
    assert len(tokens(run(runner, [1] * 100, greedy(max_tokens=None)))) == CONTEXT - 100
    assert len(tokens(run(runner, [1] * 10, greedy(max_tokens=None), num_blocks=2))) == 32 - 10


@pytest.mark.parametrize(("schedule", "most"), [(SCHEDULES["orca"], 48), (SCHEDULES["rra"], 48), (CHUNKED, CONTEXT)])
def test_without_max_tokens_no_more_is_generated_than_one_pass_can_prefill(runner, schedule, most):
    """Preempted, a request is prefilled with its output; a policy that cuts prompts has no such limit."""
    executor = InProcessExecutor(runner, kv_budget=KVBudget(num_blocks=64, pass_tokens=48))
    engine = Engine(executor, schedule, num_blocks=64)
    engine.add(request("0", [5, 7], greedy(max_tokens=None)))
    assert len(tokens(drain(engine)["0"])) == most - 2


def test_logprobs_come_with_each_token(model, runner):
    llama, _ = model
    outputs = run(runner, [9, 8], greedy(logprobs=2, max_tokens=3))
    with torch.no_grad():
        expected = llama(torch.tensor([[9, 8, *tokens(outputs)[:2]]])).logits[0, 1:].log_softmax(-1)
    for output, row in zip(outputs, expected, strict=True):
        (entry,) = output.logprobs
        assert entry.logprob == pytest.approx(row.max().item(), abs=1e-4)
        assert [token_id for token_id, _ in entry.top_logprobs] == row.topk(2).indices.tolist()


def test_an_unfinished_character_waits_and_shows_at_the_end(runner):
    only = {token_id: -100.0 for token_id in range(VOCAB) if token_id != 0xC3}
    outputs = run(runner, [65], greedy(max_tokens=1, logit_bias=only), tokenizer=BYTES)
    assert [output.text for output in outputs] == ["\ufffd"]


def test_a_stop_string_that_only_the_end_shows_is_the_reason(runner):
    only = {token_id: -100.0 for token_id in range(VOCAB) if token_id != 0xC3}
    (output,) = run(runner, [65], greedy(max_tokens=1, logit_bias=only, stop=["\ufffd"]), tokenizer=BYTES)
    assert (output.text, output.finish_reason) == ("", "stop")


# Leaving early


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_every_block_comes_back(model, data):
    runner = ModelRunner(load_model_spec(str(model[1])), dtype="float32", device="cpu", num_blocks=14)
    schedule = data.draw(st.sampled_from(list(SCHEDULES.values())))
    engine = Engine(InProcessExecutor(runner), schedule, num_blocks=14)
    alive: set[str] = set()
    for number in range(data.draw(st.integers(1, 30))):
        what = data.draw(st.sampled_from(["add", "add", "step", "step", "abort"]))
        if what == "add":
            prompt, length = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
            engine.add(request(str(number), [number + 1] * prompt, greedy(max_tokens=length)))
            alive.add(str(number))
        elif what == "step":
            alive -= {output.request_id for output in engine.step() if output.finish_reason}
        elif alive:
            gone = data.draw(st.sampled_from(sorted(alive)))
            engine.abort(gone)
            alive.remove(gone)
    finished = {request_id for request_id, outputs in drain(engine).items() if outputs[-1].finish_reason == "length"}
    assert finished == alive
    assert (engine.free_blocks, engine.num_running, engine.num_waiting) == (14, 0, 0)
    assert runner.cache.free_blocks == 14


@every_policy
def test_an_abort_frees_blocks_at_once(runner, schedule):
    engine = Engine(InProcessExecutor(runner), schedule, num_blocks=64)
    for name in ("short", "long"):
        engine.add(request(name, [1] * 20, greedy(max_tokens=1 if name == "short" else 60)))
    engine.step()
    engine.abort("long")
    engine.abort("never heard of")
    assert (engine.free_blocks, engine.has_work, engine.step()) == (64, False, [])


# Faults


def test_a_request_whose_logits_are_not_numbers_fails_alone(model):
    broken = ModelRunner(load_model_spec(str(model[1])), dtype="float32", device="cpu", num_blocks=64)
    with torch.inference_mode():
        broken.model.vocabulary.table_VE[13] = math.nan
    for schedule in SCHEDULES.values():
        engine = Engine(InProcessExecutor(broken), schedule, num_blocks=64)
        engine.add(request("bad", [1, 13, 2], greedy()))
        engine.add(request("good", [1, 2], greedy(logit_bias={13: -100})))
        found = drain(engine)
        assert [output.finish_reason for output in found["bad"]] == ["error"]
        assert found["good"][-1].finish_reason == "length"
        assert engine.free_blocks == 64


class FailingRunner(ModelRunner):
    """Fails on prompts that begin with 13."""

    def forward(self, batch, token_ids, hidden_NE=None, **options):
        if any(token_ids[row.request_id][0] == 13 for row in batch.prefill + batch.decode):
            raise RuntimeError("unlucky")
        return super().forward(batch, token_ids, hidden_NE, **options)


@every_policy
def test_a_request_that_breaks_the_forward_pass_fails_alone(model, runner, schedule, caplog):
    failing = FailingRunner(load_model_spec(str(model[1])), dtype="float32", device="cpu", num_blocks=64)
    engine = Engine(InProcessExecutor(failing), schedule, num_blocks=64)
    for index, prompt in enumerate(prompts(3)):
        engine.add(request(str(index), prompt, greedy()))
    engine.add(request("bad", [13, 2], greedy()))
    with caplog.at_level(logging.ERROR):
        found = drain(engine)
    assert "unlucky" in caplog.text
    assert [output.finish_reason for output in found["bad"]] == ["error"]
    for index, prompt in enumerate(prompts(3)):
        assert tokens(found[str(index)]) == tokens(run(runner, prompt, greedy()))
    assert engine.free_blocks == 64


def test_a_fault_of_all_requests_is_raised(model):
    failing = FailingRunner(load_model_spec(str(model[1])), dtype="float32", device="cpu", num_blocks=64)
    engine = Engine(InProcessExecutor(failing), SCHEDULES["orca"], num_blocks=64)
    for index in range(2):
        engine.add(request(str(index), [13], greedy()))
    with pytest.raises(RuntimeError, match="unlucky"):
        engine.step()


# Checks


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], greedy(), "the prompt is empty"),
        ([1] * 128, greedy(), "the prompt has 128 tokens; the context of 128 takes at most 127"),
        ([1] * 100, greedy(max_tokens=29), "max_tokens 29 after a prompt of 100 tokens .* 128; at most 28 fit"),
        ([1, 300], greedy(), "the prompt: token id 300 is not in the vocabulary, whose ids are 0 to 299"),
        ([-1], greedy(), "token id -1 is not in the vocabulary"),
        (["1"], greedy(), "token id '1' is not in the vocabulary"),
        ([1], greedy(stop_token_ids=[300]), "stop_token_ids: token id 300 is not in the vocabulary"),
        ([1], greedy(logit_bias={300: 1}), "logit_bias: token id 300 is not in the vocabulary"),
        ([1], greedy(stop=["x"]), "stop strings need a tokenizer"),
        ([1] * 60, greedy(max_tokens=None, min_tokens=9), "min_tokens 9 is more than the 4 tokens that fit"),
        ([1] * 60, greedy(max_tokens=10), "60 prompt and 10 output tokens need 5 KV blocks, the cache has 4"),
        ([1] * 64, greedy(max_tokens=None), "64 prompt and 1 output tokens need 5 KV blocks, the cache has 4"),
    ],
)
def test_a_request_that_cannot_run_is_refused_and_changes_no_other(runner, prompt, sampling, message):
    engine = Engine(InProcessExecutor(runner), SCHEDULES["orca"], num_blocks=4)
    engine.add(request("other", [1, 2], greedy()))
    with pytest.raises(InputError, match=message):
        engine.add(request("bad", prompt, sampling))
    assert engine.num_waiting == 1
    engine.add(request("bad", [1, 2], greedy()))  # Its name is free.
    found = drain(engine)
    assert tokens(found["other"]) == tokens(found["bad"]) == tokens(run(runner, [1, 2], greedy()))


def test_a_name_in_use_is_refused(runner):
    engine = Engine(InProcessExecutor(runner), SCHEDULES["orca"], num_blocks=64)
    engine.add(request("same", [1], greedy()))
    with pytest.raises(InputError, match="request 'same' is running already"):
        engine.add(request("same", [1], greedy()))


def test_a_step_is_recorded(runner):
    times = itertools.count()
    engine = Engine(InProcessExecutor(runner), SCHEDULES["orca"], num_blocks=64, clock=lambda: float(next(times)))
    engine.add(request("a", [1, 2, 3], greedy()))
    (first,) = engine.step()
    assert engine.last_steps == (StepRecord(0.0, 1.0, 1, 0, 3, 0),)
    engine.add(request("b", [1, 2], greedy()))
    second = engine.step()
    assert engine.last_steps == (StepRecord(2.0, 3.0, 1, 1, 3, 4),)
    assert [(o.request_id, o.start, o.time, o.first) for o in (first, *second)] == [
        ("a", 0.0, 1.0, True),
        ("b", 2.0, 3.0, True),
        ("a", 0.0, 3.0, False),
    ]
    drain(engine)


def test_a_request_that_has_not_started_by_its_deadline_expires_and_is_never_computed(runner):
    """Two may run: the third waits past its deadline. The second started in time and continues."""
    now = itertools.count()
    engine = Engine(
        InProcessExecutor(runner), Schedule("orca", {"max_num_seqs": 2}), num_blocks=64, clock=lambda: float(next(now))
    )
    deadlines = {"0": None, "1": 5.0, "2": 5.0}
    for (name, deadline), prompt in zip(deadlines.items(), prompts(3), strict=True):
        engine.add(Request(request_id=name, prompt_token_ids=prompt, sampling=greedy(), deadline=deadline))
    outputs = list(itertools.chain.from_iterable(iter(engine.step, [])))
    ends = {output.request_id: output for output in outputs if output.finish_reason}
    assert {name: end.finish_reason for name, end in ends.items()} == {"0": "length", "1": "length", "2": "expired"}
    assert (ends["2"].token_ids, ends["2"].start) == ((), ends["2"].time)
    assert sum(output.request_id == "2" for output in outputs) == 1
    assert not engine.has_work


def test_when_all_have_expired_nothing_is_computed(runner):
    engine = Engine(InProcessExecutor(runner), Schedule("rra", {"prefill_batch": 3, "decode_steps": 4}), num_blocks=64)
    for name, prompt in zip("abc", prompts(3), strict=True):
        engine.add(Request(request_id=name, prompt_token_ids=prompt, sampling=greedy(), deadline=0.0))
    assert [output.finish_reason for output in engine.step()] == ["expired"] * 3
    assert engine.last_steps == ()
    assert not engine.has_work


def test_a_request_that_began_in_time_in_another_engine_goes_on(runner):
    """That one ended before the first token."""
    engine = Engine(InProcessExecutor(runner), Schedule("orca", {"max_num_seqs": 2}), num_blocks=64)
    for start in (None, 1.5):
        engine.add(replace(request(str(start), [1, 2], greedy()), deadline=0.0, start=start))
    ends = {output.request_id: output.finish_reason for output in itertools.chain(*iter(engine.step, []))}
    assert ends == {"None": "expired", "1.5": "length"}


# Clients


@pytest.mark.parametrize(
    "schedule",
    [*SCHEDULES.values(), Schedule("chunked", {"max_num_seqs": 5, "max_num_batched_tokens": 16})],
    ids=[*SCHEDULES, "chunked"],
)
@pytest.mark.parametrize("num_blocks", [64, 12])
def test_clients_that_share_an_engine_get_the_same_tokens(runner, schedule, num_blocks):
    """Also in express passes, which are due before every other pass here, and where blocks run out."""
    names, given = [f"{'polite' if number in (9, 17) else 'flood'}{number}" for number in range(20)], prompts(20)
    expected = {name: tokens(run(runner, prompt, greedy())) for name, prompt in zip(names, given, strict=True)}
    engine, found, sizes = Engine(InProcessExecutor(runner), schedule, num_blocks=num_blocks), {}, set()
    for name, prompt in zip(names, given, strict=True):
        client = "polite" if name.startswith("polite") else "flood"
        engine.add(replace(request(name, prompt, greedy()), client=client))
        for _ in range(2):
            engine._scheduler._credit = 1.0
            for output in engine.step():
                found.setdefault(output.request_id, []).append(output)
            sizes |= {(step.num_prefill + step.num_decode, engine.num_running) for step in engine.last_steps}
    for name, outputs in drain(engine).items():
        found.setdefault(name, []).extend(outputs)
    assert {name: tokens(outputs) for name, outputs in found.items()} == expected
    assert engine.free_blocks == num_blocks
    if schedule.policy != "static":
        assert any(rows == 1 and running > 2 for rows, running in sizes)
