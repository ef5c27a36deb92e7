"""Python's openai client works against the server unchanged, and gets what the engine generates."""

import concurrent.futures

import openai
import pytest

from exeplan.runner.server.network.connection import error_response
from exeplan.runner.server.openai.errors import RequestError

from .conftest import CONTEXT

PROMPT = "the quick brown"
USER = [{"role": "user", "content": "a schedule"}]


def greedy(client, prompt=PROMPT, *, max_tokens=8, ignore_eos=True, **options):
    extra = {"ignore_eos": ignore_eos, **options.pop("extra_body", {})}
    return client.completions.create(
        model="tiny", prompt=prompt, temperature=0, max_tokens=max_tokens, extra_body=extra, **options
    )


@pytest.mark.parametrize(
    ("status", "code", "again"),
    [
        (408, "deadline_exceeded", "false"),
        (500, None, "false"),
        (504, "timeout", "false"),
        (408, None, None),
        (429, "queue_full", None),
        (503, "unavailable", None),
    ],
)
def test_the_client_is_told_not_to_repeat_what_would_be_computed_anew(status, code, again):
    """It sends again what is answered 408, 429 or 500 and above, unless the answer says otherwise."""
    response = error_response(RequestError("why", status=status, code=code))
    assert response.headers.get("x-should-retry") == again


def test_a_request_that_has_expired_is_not_sent_again(server):
    reply = server.complete({"prompt": "a", "max_tokens": 4, "deadline": 1e-9})
    assert (reply.status, reply.headers["x-should-retry"]) == (408, "false")


def test_lists_the_model_it_serves(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_completion_reports_usage_and_timing(client):
    answer = greedy(client)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8
    timing = answer.model_extra["timing"]
    assert 0 <= timing["queue_s"] <= timing["ttft_s"] <= timing["e2e_s"]


def test_greedy_is_repeatable(client):
    assert greedy(client).choices[0].text == greedy(client).choices[0].text


def test_stream_delivers_the_same_text_in_pieces(client):
    chunks = list(greedy(client, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == greedy(client).choices[0].text
    assert len(chunks) == 8
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 7 + ["length"]
    assert all(chunk.usage is None for chunk in chunks)
    assert set(chunks[-1].model_extra["timing"]) == {"queue_s", "ttft_s", "e2e_s"}


def test_stream_ends_with_usage_when_asked(client):
    *chunks, last = greedy(client, stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage.completion_tokens == 8
    assert "timing" in last.model_extra
    assert all(chunk.usage is None for chunk in chunks)


def test_a_default_of_max_tokens_is_lowered_to_what_fits(client):
    prompts = [[5] * (CONTEXT - 7), [5]]
    answer = client.completions.create(model="tiny", prompt=prompts, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 7 + 16
    with pytest.raises(openai.BadRequestError, match="max_tokens 16 after a prompt of 4089 tokens exceeds the context"):
        client.completions.create(model="tiny", prompt=prompts, max_tokens=16)
    with pytest.raises(openai.BadRequestError, match="min_tokens 8 is more than the 7 tokens that fit"):
        client.completions.create(model="tiny", prompt=prompts, extra_body={"min_tokens": 8})


def test_raw_stream_is_server_sent_events_closed_by_done(server):
    reply = server.complete({"prompt": PROMPT, "max_tokens": 2, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = reply.text.split("\n\n")
    assert all(event.startswith("data: {") for event in events[:-2])
    assert events[-2:] == ["data: [DONE]", ""]


def test_chat_follows_the_template_of_the_checkpoint(client):
    chat = client.chat.completions.create(
        model="tiny", messages=USER, temperature=0, max_tokens=8, extra_body={"ignore_eos": True}
    )
    completion = greedy(client, "<|user|>a schedule\n<|assistant|>")
    assert chat.choices[0].message.content == completion.choices[0].text
    assert chat.choices[0].message.role == "assistant"
    assert chat.usage.prompt_tokens == completion.usage.prompt_tokens


def test_chat_takes_content_parts_and_the_newer_names(client):
    parts = [{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    plain = [{"role": "system", "content": "a\nb"}]
    texts = [
        client.chat.completions.create(model="tiny", messages=m, temperature=0, max_completion_tokens=5)
        for m in (parts, plain)
    ]
    assert texts[0].choices[0].message.content == texts[1].choices[0].message.content


def test_role_comes_with_the_first_token(client):
    chunks = list(client.chat.completions.create(model="tiny", messages=USER, stream=True, max_tokens=4, seed=1))
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    assert len(chunks) == 4


def test_chat_without_a_limit_may_use_the_whole_context(client):
    stream = client.chat.completions.create(model="tiny", messages=USER, stream=True, extra_body={"ignore_eos": True})
    with stream:
        assert next(iter(stream)).choices[0].finish_reason is None


def test_token_ids_are_prompts_too(client, server):
    text = greedy(client, PROMPT, echo=True)
    ids = [5, 17, 200]
    one, batch = greedy(client, ids), greedy(client, [ids, ids])
    assert text.choices[0].text.startswith(PROMPT)
    assert one.usage.prompt_tokens == 3
    assert [c.text for c in batch.choices] == [one.choices[0].text] * 2


def test_batch_times_n_comes_in_order(client):
    alone = [greedy(client, prompt).choices[0].text for prompt in ("a", "the quick")]
    answer = greedy(client, ["a", "the quick"], n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [alone[0], alone[0], alone[1], alone[1]]
    assert answer.usage.completion_tokens == 32


def test_a_seed_repeats_all_choices_and_tells_them_apart(client):
    def texts():
        answer = client.completions.create(model="tiny", prompt=PROMPT, n=3, seed=7, max_tokens=12)
        return [choice.text for choice in answer.choices]

    first = texts()
    assert texts() == first
    assert len(set(first)) == 3


def test_stop_string_ends_the_text_before_it(client):
    whole = greedy(client).choices[0].text
    stop = whole[3:5]
    answer = greedy(client, stop=stop)
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_completion_logprobs_are_aligned_with_their_tokens(client):
    found = greedy(client, logprobs=2).choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset) == 8
    assert all(
        top[token] == pytest.approx(value)
        for token, value, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True)
    )


def test_chat_logprobs_list_the_chosen_token_first_when_greedy(client):
    answer = client.chat.completions.create(
        model="tiny", messages=USER, temperature=0, max_tokens=3, logprobs=True, top_logprobs=2
    )
    for entry in answer.choices[0].logprobs.content:
        assert entry.token == entry.top_logprobs[0].token
        assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob


def test_logit_bias_forces_a_token(client):
    found = greedy(client, logit_bias={"70": 100}, logprobs=0, max_tokens=3).choices[0].logprobs.tokens
    assert len(set(found)) == 1


def test_echo_comes_with_the_first_chunk(client):
    chunks = list(greedy(client, echo=True, stream=True))
    assert chunks[0].choices[0].text.startswith(PROMPT)
    assert "".join(chunk.choices[0].text for chunk in chunks) == greedy(client, echo=True).choices[0].text


def test_vllms_extensions_go_through_extra_body(client):
    extra = {"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 5, "stop_token_ids": list(range(50))}
    answer = greedy(client, max_tokens=6, extra_body=extra)
    assert 5 <= answer.usage.completion_tokens <= 6


def test_requests_together_get_what_each_gets_alone(client):
    prompts = [PROMPT[: 1 + i % len(PROMPT)] for i in range(24)]
    alone = [greedy(client, prompt, max_tokens=4 + i).choices[0].text for i, prompt in enumerate(prompts)]
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        answers = pool.map(lambda pair: greedy(client, pair[1], max_tokens=4 + pair[0]), enumerate(prompts))
        assert [answer.choices[0].text for answer in answers] == alone


def test_an_answer_goes_back_as_it_came(client):
    messages = [*USER]
    for _ in range(3):
        answer = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=4)
        messages += [answer.choices[0].message, USER[0]]
    assert answer.usage.prompt_tokens > 3 * 4
    dumped = [one if isinstance(one, dict) else one.model_dump() for one in messages[:-2]]
    again = client.chat.completions.create(model="tiny", messages=dumped, temperature=0, max_tokens=4)
    assert again.choices[0].message.content == answer.choices[0].message.content


@pytest.mark.parametrize("n", [1, 2])
def test_every_chunk_has_the_usage_so_far_when_asked(client, n):
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = greedy(client, stream=True, stream_options=options, max_tokens=5, n=n)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last.usage.completion_tokens == 5 * n
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {last.usage.prompt_tokens}
    alone = {"continuous_usage_stats": True}
    assert all(chunk.usage is None for chunk in greedy(client, stream=True, stream_options=alone))


def test_a_template_gets_the_clients_variables(client):
    def tokens(**variables):
        extra = {"chat_template_kwargs": variables}
        answer = client.chat.completions.create(model="tiny", messages=USER, max_tokens=1, extra_body=extra)
        return answer.usage.prompt_tokens

    assert tokens(enable_thinking=False) > tokens(enable_thinking=True) == tokens()
    with pytest.raises(openai.BadRequestError, match="chat_template_kwargs must not set 'messages'"):
        tokens(messages=[])


def test_no_reasoning_effort_turns_thinking_off(client):
    def tokens(**fields):
        answer = client.chat.completions.create(model="tiny", messages=USER, max_tokens=1, **fields)
        return answer.usage.prompt_tokens

    off = tokens(extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert tokens(reasoning_effort="none") == off > tokens()
    with pytest.raises(openai.BadRequestError, match="reasoning_effort='high' has no place"):
        tokens(reasoning_effort="high")
