"""A stream may leave the largest answer to its prompts unread, or a few tokens of each sequence, and little more."""

import asyncio
from dataclasses import asdict

from msgspec.structs import replace

from exeplan.runner.compute.tokens.sampling import SamplingParams
from exeplan.runner.engine_process.job import MAX_UNREAD, MAX_UNREAD_ITERATIONS, Job
from exeplan.runner.ipc.messages import Event, Logprob, Prompt, PromptLogprobs, Sampling
from exeplan.runner.server.openai.generation_request import MAX_PROMPT_LOGPROBS


def event(num_tokens: int, prompt: PromptLogprobs | None = None) -> Event:
    times = {"arrival": 0.0, "start": 0.0, "time": 0.0, "num_prompt_tokens": 1}
    return Event(
        request_id="0-0", token_ids=[1] * num_tokens, text="", finish_reason=None, first=False, **times, prompt=prompt
    )


def largest_scores() -> PromptLogprobs:
    """A token and one in its place, for as many tokens as an answer has at most."""
    array = bytes(4 * (MAX_PROMPT_LOGPROBS // 2))
    return PromptLogprobs(num_top=1, logprobs=array, ranks=array, top_token_ids=array, top_logprobs=array)


def streamed() -> Job:
    job = Job("0", ("0-0",), {"0-0"}, set())
    job.submit([Prompt(prompt_token_ids=[1], sampling=Sampling(**asdict(SamplingParams())))], stream=True)
    return job


def test_the_scores_of_prompts_count_by_their_bytes() -> None:
    async def run() -> None:
        job = streamed()
        job.take(event(1, largest_scores()))
        assert not job.is_unread
        job.take(event(MAX_UNREAD // 2 - 1))
        assert not job.is_unread
        job.take(event(1))
        assert job.is_unread
        await job.next_events()
        job.take(event(MAX_UNREAD))
        assert not job.is_unread

    asyncio.run(run())


def test_a_stream_of_many_sequences_may_leave_a_few_iterations_unread() -> None:
    ids = tuple(f"0-{index}" for index in range(1000))
    top = [(token, -1.0) for token in range(20)]
    scored = [replace(event(1), request_id=one, logprobs=[Logprob(token_id=1, logprob=-1.0, top=top)]) for one in ids]
    job = Job("0", ids, set(ids), set())
    sampling = Sampling(**asdict(SamplingParams(logprobs=20)))
    job.submit([Prompt(prompt_token_ids=[1], sampling=sampling, n=500)] * 2, stream=True)
    for one in scored * MAX_UNREAD_ITERATIONS:
        job.take(one)
        assert not job.is_unread
    job.take(scored[0])
    assert job.is_unread
