"""Job: the sequences of one HTTP request, what the engine said of them, and what another engine must know to go on.

Not here: the engine process, and which jobs it has (`client.py`).
"""

import asyncio
import itertools
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from exeplan.errors import InputError
from exeplan.runner.engine.requests import MAX_CRASHES
from exeplan.runner.ipc.messages import Event, Prompt, Resumed, Sampling, Submit

_FAULTS = {
    "error": "the model gave no usable numbers for this request; the server's log says more",
    "lost": "the engine or its workers died more than once while this request was running, so it is not tried again",
}
_UNFOLLOWED = (
    "no token could be found for this output: its grammar is too costly to follow at this point, or the model's "
    "vocabulary lacks a character that it needs, or its logits are not finite; a simpler grammar is followed further"
)
_EXPIRED = "the request had not begun by its deadline, so nothing of it was computed"
MAX_UNREAD = 16384
"""Tokens and log-probabilities that wait for one streaming client; the request of a slower reader is aborted. Those of
prompts, of which a request has a limited number, are arrays: `_PROMPT_BYTES` of them count as one."""
MAX_UNREAD_ITERATIONS = 4
"""As much may wait where it is more: however fast a client reads, it gets a wide request's tokens an iteration at a
time."""
_PROMPT_BYTES = 256


class EngineError(Exception):
    """The engine did not do what was asked: the message says why, `status` is the HTTP status that fits."""

    def __init__(self, message: str, *, status: int = 503, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(eq=False, slots=True)
class _Sequence:
    """What another engine must know of a sequence to go on with it."""

    token_ids: list[int] = field(default_factory=list)
    start: float | None = None
    crashes: int = 0
    running: bool = False
    """Whether this engine has begun to compute it."""


@dataclass(eq=False, slots=True)
class Job:
    """The sequences of one HTTP request, and the events that the engine sent of them."""

    job_id: str
    request_ids: tuple[str, ...]
    open: set[str]
    """Sequences that have not finished."""
    waiting: set[str]
    """Those whose prefill has not begun."""
    events: list[Event | Exception] = field(default_factory=list)
    """Those that `next_events` has not given."""
    submission: Submit | None = None
    """What the engine was sent; None until then."""
    client: str = ""
    client_weight: float = 1.0
    """Which client it is from, and its share of the engine relative to others."""
    _sequences: dict[str, _Sequence] = field(default_factory=dict)
    """By request id, once submitted."""
    _num_unread: int = 0
    """Tokens and log-probabilities of the events that wait."""
    _max_unread: int = MAX_UNREAD
    _waiter: asyncio.Future[None] | None = None
    """Of a call of `next_events` that waits."""

    def submit(self, prompts: Sequence[Prompt], *, stream: bool) -> Submit:
        """What the engine gets; the sequences of the prompts are in the order of `request_ids`."""
        assert sum(prompt.n for prompt in prompts) == len(self.request_ids)
        self._sequences = {request_id: _Sequence() for request_id in self.request_ids}
        an_iteration = sum(prompt.n * _num_unread_of_a_token(prompt.sampling) for prompt in prompts)
        self._max_unread = max(MAX_UNREAD, MAX_UNREAD_ITERATIONS * an_iteration)
        self.submission = Submit(
            job=self.job_id,
            stream=stream,
            prompts=[_seeded(prompt) for prompt in prompts],
            request_ids=self.request_ids,
            client=self.client,
            client_weight=self.client_weight,
            arrival=time.perf_counter(),
        )
        return self.submission

    def resubmit(self) -> Submit | None:
        """What another engine gets; None where there is nothing to go on with."""
        if self.submission is None or not self.open:
            return None
        resumed = {
            request_id: Resumed(token_ids=sequence.token_ids, start=sequence.start, crashes=sequence.crashes)
            for request_id, sequence in self._sequences.items()
            if request_id in self.open
        }
        begun = any(sequence.start is not None for sequence in self._sequences.values())
        return replace(self.submission, resumed=resumed, begun=begun)

    def note_begun(self, request_id: str, start: float) -> None:
        """Its first prefill begins in this engine."""
        sequence = self._sequences[request_id]
        sequence.running = True
        sequence.start = start if sequence.start is None else sequence.start

    def count_crash(self, *, adding: "Job | None" = None) -> None:
        """The engine has ended. It may be for what was running, or else for the job that it was just adding: that was
        so at one crash more."""
        for sequence in self._sequences.values():
            sequence.crashes += sequence.running if adding is None else adding is self
            sequence.running = False

    def leave(self) -> None:
        """Another engine is to go on with it, though this one works: nothing of it runs here any more."""
        for sequence in self._sequences.values():
            sequence.running = False

    def lost(self, now: float) -> list[Event]:
        """Those that were running at too many crashes, as an engine would report them at time `now`."""
        lost = [one for one in sorted(self.open & set(self._sequences)) if self._sequences[one].crashes >= MAX_CRASHES]
        return [self._lost(request_id, now) for request_id in lost]

    def _lost(self, request_id: str, now: float) -> Event:
        assert self.submission
        sequence = self._sequences[request_id]
        every = (prompt for prompt in self.submission.prompts for _ in range(prompt.n))
        prompt = next(itertools.islice(every, self.request_ids.index(request_id), None))
        return Event(
            request_id=request_id,
            token_ids=(),
            text="",
            finish_reason="lost",
            first=False,
            arrival=self.submission.arrival,
            start=now if sequence.start is None else sequence.start,
            time=now,
            num_prompt_tokens=len(prompt.prompt_token_ids),
        )

    def take(self, event: Event) -> None:
        """One more event of a job that has been submitted; one that ends it with a fault becomes an error."""
        self.waiting.discard(event.request_id)
        self._sequences[event.request_id].token_ids += event.token_ids
        if event.finish_reason:
            self.open.discard(event.request_id)
        if event.finish_reason == "expired":
            return self.fail(EngineError(_EXPIRED, status=408, code="deadline_exceeded"))
        if event.finish_reason == "structure":
            return self.fail(EngineError(_UNFOLLOWED, status=400, code="structure"))
        fault = _FAULTS.get(event.finish_reason or "")
        self._put(EngineError(fault, status=500) if fault else event)
        self._num_unread += len(event.token_ids)
        if event.logprobs:
            self._num_unread += sum(1 + len(entry.top) for entry in event.logprobs)
        self._num_unread += event.prompt.num_bytes // _PROMPT_BYTES if event.prompt else 0

    @property
    def is_unread(self) -> bool:
        """Whether more waits for a streaming client than it may leave unread, and there is more to come."""
        streams = self.submission is not None and self.submission.stream
        return streams and self._num_unread > self._max_unread and bool(self.open)

    def refuse(self, message: str, *, internal: bool = False) -> None:
        """The engine runs none of it, for a reason that its client can correct, unless it is an `internal` one."""
        self.open.clear()
        self.fail(EngineError(message, status=500) if internal else InputError(message))

    def fail(self, error: Exception) -> None:
        """The reader of the events gets this error after those that are there."""
        self._put(error)

    def _put(self, found: Event | Exception) -> None:
        self.events.append(found)
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)

    async def next_events(self) -> list[Event]:
        """All events so far, waiting for the first. Raises InputError or EngineError where that comes first."""
        if not self.events:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        found, self.events, self._num_unread = self.events, [], 0
        events: list[Event] = []
        for place, one in enumerate(found):
            if not isinstance(one, Event):
                self.events = found[place + (not events) :]  # For the next call.
                if not events:
                    raise one
                break
            events.append(one)
        return events


def job_of(request_id: str) -> str:
    """The number of the job that a sequence belongs to."""
    return request_id.partition("-")[0]


def _num_unread_of_a_token(sampling: Sampling) -> int:
    """The token and its log-probabilities."""
    return 1 if sampling.logprobs is None else 2 + sampling.logprobs


def _seeded(prompt: Prompt) -> Prompt:
    """With a seed drawn here where the request has none: another engine goes on with the same draws."""
    if prompt.sampling.seed is not None:
        return prompt
    return replace(prompt, sampling=replace(prompt.sampling, seed=secrets.randbits(62)))
