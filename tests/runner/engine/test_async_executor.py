"""An engine with async scheduling delivers the tokens of one without, in order, and frees every block."""

import itertools
import logging
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exeplan.core.models.model import model_spec
from exeplan.core.schedule import Schedule
from exeplan.kernels.select import REFERENCE
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.tokens.sampling import SamplingParams
from exeplan.runner.engine.async_executor import AsyncExecutor
from exeplan.runner.engine.engine import Engine, Request
from exeplan.runner.engine.executor import InProcessExecutor
from exeplan.runner.engine.timeline import TimelineFile, read_events
from exeplan.runner.engine.tokenizer import ByteCodec, Tokenizer

VOCAB, NUM_BLOCKS = 300, 14
SPEC = model_spec(
    {"model_type": "llama", "vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    | {"num_key_value_heads": 1, "intermediate_size": 24, "max_position_embeddings": 96, "eos_token_id": None},
    name="tiny",
)
SCHEDULES = {
    "static": Schedule("static", {"batch_size": 4}),
    "orca": Schedule("orca", {"max_num_seqs": 5}),
    "rra": Schedule("rra", {"prefill_batch": 3, "decode_steps": 4}),
    "chunked": Schedule("chunked", {"max_num_seqs": 5, "max_num_batched_tokens": 12}),
    "concat": Schedule("concat", {"rows": 3, "row_tokens": 96, "slot_tokens": 48}, "fcfs"),
    "groups": Schedule("orca", {"max_num_seqs": 5, "micro_batches": 2}),
}
every_policy = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
BYTES = Tokenizer(ByteCodec())


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return ModelRunner(SPEC, num_blocks=NUM_BLOCKS, dummy_weights=True)


@pytest.fixture(scope="module")
def paged() -> ModelRunner:
    made = ModelRunner(SPEC, num_blocks=NUM_BLOCKS, dummy_weights=True, paged_with=REFERENCE)
    made.capture(4)
    return made


def requests(seed: int, count: int = 9) -> list[Request]:
    """Requests of all kinds, which end by a token, a string, or their length, and need more blocks than exist."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 40, (count, 2), generator=generator).tolist()
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.5, "seed": 3, "top_p": 0.9},
        {"temperature": 1.0, "seed": 4, "stop_token_ids": tuple(range(0, 200, 9))},
        {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.3, "logprobs": 2},
        {"temperature": 1.0, "seed": 6, "stop": ("a", "b", "c"), "min_tokens": 1},
        {"temperature": 1.0, "seed": 7, "structure": "start: /[ab]+c{1,9}/", "min_tokens": 1, "logprobs": 1},
    ]
    return [
        Request(
            request_id=str(number),
            prompt_token_ids=torch.randint(VOCAB, (prompt,), generator=generator).tolist(),
            sampling=SamplingParams(max_tokens=tokens, **kinds[(number + seed) % len(kinds)]),
        )
        for number, (prompt, tokens) in enumerate(lengths)
    ]


def play(engine: Engine, coming: list[Request], aborts: dict[int, str] | None = None) -> dict[str, list]:
    """All outputs of requests, two of which arrive every other step; `aborts` are requests by the step before which."""
    found, step = {request.request_id: [] for request in coming}, 0
    while coming or engine.has_work:
        for request in coming[:2] if step % 2 == 0 else ():
            engine.add(request)
            coming = coming[1:]
        if aborts and step in aborts:
            engine.abort(aborts[step])
        for output in engine.step():
            found[output.request_id].append(output)
        step += 1
    return found


def delivered(outputs: list) -> tuple:
    """The part of the outputs that a client sees."""
    tokens = [(output.token_ids, output.text, output.first, output.num_output_tokens) for output in outputs]
    return tokens, [output.finish_reason for output in outputs]


def is_clean(engine: Engine, runner: ModelRunner) -> bool:
    counts = engine.free_blocks, engine.num_running, engine.num_waiting, runner.cache.free_blocks
    return counts == (NUM_BLOCKS, 0, 0, NUM_BLOCKS)


@every_policy
@settings(max_examples=4, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1000), aborts=st.dictionaries(st.integers(0, 40), st.integers(0, 8), max_size=6))
def test_outputs_equal_those_without_async_scheduling_and_aborts_do_not_change_other_requests(
    runner, paged, schedule, seed, aborts
):
    waiting = Engine(InProcessExecutor(runner), schedule, tokenizer=BYTES, num_blocks=NUM_BLOCKS)
    ahead = Engine(AsyncExecutor(paged), schedule, tokenizer=BYTES, num_blocks=NUM_BLOCKS)
    expected, found = (play(engine, requests(seed)) for engine in (waiting, ahead))
    assert {name: delivered(outputs) for name, outputs in found.items()} == {
        name: delivered(outputs) for name, outputs in expected.items()
    }
    assert is_clean(ahead, paged)
    structured = [request.request_id for request in requests(seed) if request.sampling.structure]
    for tokens in (delivered(found[name])[0] for name in structured):
        assert re.fullmatch("[ab]*c{0,9}", bytes(token for (token,), *_ in tokens if token < 256).decode())
    for name, outputs in found.items():
        for output, reference in zip(outputs, expected[name], strict=True):
            assert [t.logprob for t in output.logprobs] == pytest.approx(
                [t.logprob for t in reference.logprobs], abs=1e-4
            )

    left = play(ahead, requests(seed), {step: str(number) for step, number in aborts.items()})
    for name, outputs in left.items():
        (tokens, reasons), (all_tokens, all_reasons) = delivered(outputs), delivered(expected[name])
        if int(name) in aborts.values():
            assert tokens == all_tokens[: len(tokens)]
        else:
            assert (tokens, reasons) == (all_tokens, all_reasons)
    assert is_clean(ahead, paged)


def test_the_next_batch_is_started_before_the_tokens_of_the_running_one_are_read(paged):
    executor = AsyncExecutor(paged)
    engine = Engine(executor, SCHEDULES["orca"], num_blocks=NUM_BLOCKS)
    engine.add(Request(request_id="a", prompt_token_ids=[1, 2], sampling=SamplingParams(temperature=0.0, max_tokens=4)))
    outputs, under_way = [], []
    while engine.has_work:
        outputs += engine.step()
        under_way.append(executor.pending)
    assert [output.num_output_tokens for output in outputs] == [1, 2, 3, 4]
    assert under_way == [True, True, True, False]
    (last,) = engine.last_steps
    times = [last.start <= last.end, *(output.start <= output.time for output in outputs)]
    assert all(times)


def test_preempted_requests_are_recomputed_from_known_tokens(runner, paged):
    schedule, greedy = SCHEDULES["rra"], SamplingParams(temperature=0.0, max_tokens=60)
    coming = [Request(request_id=str(n), prompt_token_ids=[n + 1] * 9, sampling=greedy) for n in range(6)]
    expected = play(Engine(InProcessExecutor(runner), schedule, num_blocks=NUM_BLOCKS), list(coming))
    engine = Engine(AsyncExecutor(paged), schedule, num_blocks=NUM_BLOCKS)
    found = play(engine, list(coming))
    assert engine.num_preemptions > 0
    assert {name: delivered(outputs) for name, outputs in found.items()} == {
        n: delivered(outputs) for n, outputs in expected.items()
    }


class FailingRunner(ModelRunner):
    """Fails when it decodes token 13."""

    def forward(self, batch, token_ids, hidden_NE=None, **options):
        if any(len(token_ids[row.request_id]) > 4 and token_ids[row.request_id][0] == 13 for row in batch.decode):
            raise RuntimeError("unlucky")
        return super().forward(batch, token_ids, hidden_NE, **options)


@every_policy
def test_a_request_that_breaks_a_pass_fails_alone_while_others_run(runner, schedule, caplog):
    failing = FailingRunner(SPEC, num_blocks=NUM_BLOCKS, dummy_weights=True, paged_with=REFERENCE)
    sampling = SamplingParams(temperature=1.0, seed=1, max_tokens=8)
    coming = [Request(request_id=str(n), prompt_token_ids=[12 + n, 2], sampling=sampling) for n in range(3)]
    expected = play(Engine(InProcessExecutor(runner), schedule, num_blocks=NUM_BLOCKS), list(coming))
    engine = Engine(AsyncExecutor(failing), schedule, num_blocks=NUM_BLOCKS)
    with caplog.at_level(logging.ERROR):
        found = play(engine, list(coming))
    assert "unlucky" in caplog.text
    assert found["1"][-1].finish_reason == "error"
    assert delivered(found["1"])[0][:-1] == delivered(expected["1"])[0][: len(found["1"]) - 1]
    assert all(delivered(found[name]) == delivered(expected[name]) for name in "02")
    assert is_clean(engine, failing)


def test_a_batch_whose_last_unfinished_request_fails_makes_room_for_those_that_wait():
    failing = FailingRunner(SPEC, num_blocks=NUM_BLOCKS, dummy_weights=True, paged_with=REFERENCE)
    engine, reasons = Engine(AsyncExecutor(failing), SCHEDULES["static"], num_blocks=NUM_BLOCKS), {}
    for number in range(9):
        sampling = SamplingParams(temperature=0.0, max_tokens=8 if number == 1 else 2)
        engine.add(Request(request_id=str(number), prompt_token_ids=[12 + number, 2], sampling=sampling))
    for _ in range(60):
        reasons |= {output.request_id: output.finish_reason for output in engine.step()}
    assert reasons == {str(number): "error" if number == 1 else "length" for number in range(9)}
    assert is_clean(engine, failing)


def test_the_timeline_shows_consecutive_batches(paged, tmp_path):
    path = tmp_path / "timeline.json"
    engine = Engine(AsyncExecutor(paged, TimelineFile(path, num_stages=1)), SCHEDULES["rra"], num_blocks=NUM_BLOCKS)
    play(engine, requests(1)[:2])
    engine.close()
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in read_events(path) if event["ph"] == "X"]
    assert spans
    assert all(end <= start + 0.2 for (_, end), (start, _) in itertools.pairwise(spans))
