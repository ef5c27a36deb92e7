"""A stream may leave the largest answer to its prompts unread, and little more."""

import asyncio
from dataclasses import asdict

from exeplan.runner.compute.tokens.sampling import SamplingParams
from exeplan.runner.engine_process.job import MAX_UNREAD, Job
from exeplan.runner.ipc.messages import Event, Prompt, PromptLogprobs, Sampling
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
