"""Service: one plan being served. Which requests are admitted, and what the engine is asked to do.

In this order: is the server up, does the queue have room (`admission`); a process reads the request (`readers`); does
the queue have room for all of it; the engine checks the rest. A batch of prompts is admitted or refused as one.
Not here: HTTP (`views`), and the shapes of requests (`protocol`) and responses (`responses`).
"""

import asyncio
import contextlib
import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from msgspec.structs import replace as with_fields

from exeplan.core.batch import BLOCK_SIZE
from exeplan.core.models.model import ModelSpec
from exeplan.core.plan import Plan, single_plans
from exeplan.drift import state as drift_state
from exeplan.policies import pass_limits, reserves
from exeplan.runner.engine.admit_request import num_fitting
from exeplan.runner.engine.tokenizer import Tokenizer
from exeplan.runner.engine_process.build import model_source
from exeplan.runner.engine_process.client import EngineClient
from exeplan.runner.engine_process.job import Job
from exeplan.runner.engine_process.replicas import ReplicaSet
from exeplan.runner.ipc.messages import (
    Event,
    Generate,
    Prompt,
    ReadDetokenize,
    ReaderSetup,
    ReadGeneration,
    ReadTokenize,
    Sampling,
    Stats,
    TextRead,
    TokensRead,
)
from exeplan.runner.replan.replanner import Replanner
from exeplan.runner.server.admission import Admission
from exeplan.runner.server.front_ends.joined_engine import JoinedEngine
from exeplan.runner.server.network.clients import Client, Clients
from exeplan.runner.server.network.readers import Readers
from exeplan.runner.server.observation.metrics import Reading, ServeMetrics
from exeplan.runner.server.observation.observed import Observed, Snapshot
from exeplan.runner.server.openai.errors import RequestError
from exeplan.runner.server.openai.responses import ChatBuilder, CompletionBuilder, ResponseBuilder
from exeplan.runner.server.openai.text_offsets import TokenTexts
from exeplan.runner.server.scaler import Scaler

_NO_DEFAULTS: Mapping[str, float] = MappingProxyType({})
RETRY_LOADING = 5
"""Retry-After, in seconds, while workers load, and where an engine or the server has ended."""


class OtherFrontEnds(Protocol):
    """Those on other hosts that share the replicas (`front_ends/owner.py`)."""

    @property
    def num_pending(self) -> int:
        """That are not done yet, while the service drains."""

    @property
    def num_refused(self) -> int:
        """Sequences of requests that they have refused by themselves, 1 of each that they had not read."""

    def reading(self) -> Mapping[str, int]:
        """The requests of each that have not been answered."""


class Service:
    """What the views share; made within the running event loop."""

    def __init__(
        self,
        engine: EngineClient | ReplicaSet | JoinedEngine,
        tokenizer: Tokenizer,
        admission: Admission,
        *,
        plan: Plan,
        spec: ModelSpec,
        model_name: str,
        request_seconds: float,
        plan_file: Path | None = None,
        metrics_aliases: str | None = None,
        sampling_defaults: Mapping[str, float] = _NO_DEFAULTS,
    ) -> None:
        self.engine, self.tokenizer, self.admission = engine, tokenizer, admission
        self.plan, self.spec, self.model_name = plan, spec, model_name
        self.request_seconds, self.plan_file = request_seconds, plan_file
        self.sampling_defaults = sampling_defaults
        self.ended = False
        """Whether requests are refused that were read before a drain began."""
        self._draining = asyncio.Event()
        self._num_read = 0
        """Requests whose body is there, and that are not admitted yet."""
        self._num_refused = 0
        self.started = time.time()
        self.replanner: Replanner | None = None
        self.scaler: Scaler | None = None
        self.front_ends: OtherFrontEnds | None = None
        self.observed = Observed(plan, clock=time.monotonic)
        self.metrics = ServeMetrics(
            model_name=model_name, plan=plan, observed=self.observed, read=self._read, aliases=metrics_aliases
        )
        self.clients = Clients()
        engine.on_step = self._step
        if not isinstance(engine, EngineClient):
            admission.serving = lambda: engine.serving
        self.token_texts = TokenTexts(tokenizer)
        self.rendering = asyncio.Lock()
        """Held while a thread renders an answer: one at a time, as each takes turns with the event loop."""
        setup = ReaderSetup(model=model_source(spec), served_name=model_name, sampling_defaults=sampling_defaults)
        self._readers = Readers(setup)
        self._readers.start()

    @property
    def down(self) -> str | None:
        """Why nothing can run now; None when it can."""
        return self.closed or self.engine.pause

    @property
    def closed(self) -> str | None:
        """Why new requests are refused now; None where they are not: also while they wait for a short restart."""
        engine = self.engine
        return engine.failure or (
            "the server is shutting down" if self.draining else engine.long_pause or engine.unready
        )

    @property
    def not_ready(self) -> str | None:
        """Why no traffic should come here, None when it may: also when the engine has work and makes no progress."""
        return self.down or self.engine.stall

    async def until_ready(self) -> None:
        """Waits for the engine; from then on requests are admitted and observed, and drift is watched for.

        Raises InputError where the model cannot be loaded, EngineError where the engine failed.
        """
        gc.freeze()  # Modules and what they hold: walking through all of it, a collection takes a quarter of a second.
        await self.engine.until_ready()
        gc.collect()
        gc.freeze()
        self.observed.begin()
        if self.replanner:
            self.replanner.start()
        if self.scaler:
            self.scaler.start()

    async def close(self) -> None:
        """Ends everything that was started for it."""
        if self.scaler:
            await self.scaler.close()
        if self.replanner:
            await self.replanner.close()
        await self._readers.close()
        await self.engine.close()

    def drain(self) -> None:
        """From now on new requests are refused, and no answer to one that was refused waits."""
        self._draining.set()

    @property
    def draining(self) -> bool:
        return self._draining.is_set()

    async def pause(self, client: Client) -> None:
        """Before an answer with 429, as long as `Clients.pause` says."""
        if seconds := self.clients.pause(client):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._draining.wait()

    def switch_to(self, plan: Plan) -> None:
        """The engine runs another plan: predictions, bounds and admission follow it from now on.

        Raises as `Admission.check`, and nothing follows it then.
        """
        self.admission.adopt(plan)
        self.plan = plan
        self.observed.adopt(plan)
        self.metrics.adopt(plan)

    def snapshot(self) -> Snapshot:
        """What the last minutes show."""
        if self.replanner and (planned := self.replanner.state.planned):
            self.observed.p99_output = planned.outputs.p99
        return self.observed.snapshot()

    def _read(self) -> Reading:
        """For `/metrics`. The waiting ones are also those that have not reached the engine, or are being read."""
        replanning = drift_state.summary(self.replanner.state) if self.replanner else {}
        stats, waiting = self.engine.stats, self.engine.num_waiting + self._readers.num_reading
        return Reading(
            stats=stats,
            observed=self.snapshot(),
            num_waiting=waiting,
            replanning=replanning,
            clients=self.clients.reading_of_all(),
            scaling=self.scaler.reading() if self.scaler else {},
            front_ends=self.front_ends.reading() if self.front_ends else {},
        )

    def num_refused(self) -> int:
        """Sequences of requests that came and got no place for want of room, 1 of each that had not been read."""
        elsewhere = self.front_ends.num_refused if self.front_ends else 0
        return self._num_refused + elsewhere

    @property
    def max_context(self) -> int:
        """Tokens of a prompt and its output; not before the engine is ready."""
        return min(self.spec.max_context, self.engine.request_tokens)

    @property
    def retry_after(self) -> int:
        """Whole seconds, for an answer with 503."""
        return RETRY_LOADING if self.engine.loading else self.admission.retry_after(self.engine.num_waiting)

    def check_up(self) -> None:
        """Raises RequestError 503 while new requests are refused."""
        if self.closed:
            raise self._unavailable(self.closed)

    def check_loaded(self) -> None:
        """Raises RequestError 503 until the model has been loaded once."""
        if self.engine.unready:
            raise self._unavailable(self.engine.unready)

    def _unavailable(self, reason: str) -> RequestError:
        return RequestError(reason, status=503, code="unavailable", retry_after=self.retry_after)

    def _step(self, events: list[Event], stats: Stats) -> None:
        self.metrics.step(events, stats)
        self.clients.count(events)

    def refusal(self, client: Client) -> RequestError | None:
        """What `admit` would raise for any request, so that its body need not be read for that; None where it may not.

        Requests that are being read count as waiting. In a full queue a client below its share of it may go on.
        """
        if self.closed:
            return self._unavailable(self.closed)
        if refusal := self.clients.refusal(client):
            return self.counted(refusal, client)
        waiting, most = self.engine.num_waiting + self.clients.num_reading, self.admission.max_queue
        before = self._num_before(client, waiting, 1)
        refusal = self.admission.refusal(1, num_waiting=waiting, max_tokens=1, num_before=before)
        if refusal and refusal.code == "queue_full" and self.clients.is_below_share(client, most):
            return None
        return refusal and self.counted(refusal, client)

    def _num_before(self, client: Client, waiting: int, count: int) -> int | None:
        """Of the sequences that wait those that start before `count` more of the client, where that is of interest."""
        return self.clients.num_ahead(client, waiting, count) if self.admission.refuse_late else None

    @property
    def num_pending(self) -> int:
        """Requests that have been received and not answered."""
        elsewhere = self.front_ends.num_pending if self.front_ends else 0
        return self.engine.num_jobs + max(self._num_read, self._readers.num_reading) + elsewhere

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """While a body that is there is read and admitted: what the server was up for in the beginning is still served.

        Raises as `check_up`.
        """
        self.check_up()
        self._num_read += 1
        try:
            yield
        finally:
            self._num_read -= 1

    async def read_generation(self, body: bytes, *, chat: bool, client: Client) -> Generate:
        """The request in a body. Raises RequestError for one that is refused, or cannot be read in time."""
        answer = await self._readers.read(
            ReadGeneration(chat=chat, body=body, max_tokens=self.max_context), client.identity
        )
        assert isinstance(answer, Generate)
        return answer

    async def tokenize(self, body: bytes, client: Client) -> TokensRead:
        """The tokens of the text in a body. Raises RequestError as `read_generation`."""
        answer = await self._readers.read(ReadTokenize(body=body, max_tokens=self.max_context), client.identity)
        assert isinstance(answer, TokensRead)
        return answer

    async def detokenize(self, body: bytes, client: Client) -> TextRead:
        """The text of the tokens in a body. Raises RequestError as `read_generation`."""
        answer = await self._readers.read(ReadDetokenize(body=body), client.identity)
        assert isinstance(answer, TextRead)
        return answer

    def admit(self, request: Generate, client: Client) -> Job:
        """Places in the queue for all of a request's sequences, to be given back with `release`; raises as `place`."""
        count = request.n * len(request.prompts)
        return self.place(count, client, max_tokens=request.sampling.max_tokens, deadline=request.deadline)

    def place(self, count: int, client: Client, *, max_tokens: int | None, deadline: float | None) -> Job:
        """Places in the queue for so many sequences.

        In a full queue the newest requests of clients with more in it make room, and get 429.
        Raises RequestError 429 when it is not admitted, 503 when the server cannot serve it any more: a drain has begun
        after the request, or another engine is being started, are no reasons.
        """
        if gone := self.engine.failure or ("the server has shut down" if self.ended else None):
            raise self._unavailable(gone)
        if refusal := self.clients.refusal_to_wait(client, count):
            raise self.counted(refusal, client)
        leaving: list[tuple[Job, Client]] = []
        wanted = partial(self._refusal, count, client, max_tokens=max_tokens, deadline=deadline)
        refusal, waiting = wanted(), self.engine.num_waiting
        if refusal and refusal.code == "queue_full":
            leaving = self.clients.making_room(client, count, waiting + count - self.admission.max_queue)
            if leaving:
                refusal = wanted(num_leaving=sum(len(job.waiting) for job, _ in leaving))
        if refusal:
            raise self.counted(refusal, client, num_sequences=count)
        self._push_out(leaving)
        job = self.engine.reserve(count)
        self.clients.begin(client, job)
        return job

    def _refusal(
        self, count: int, client: Client, *, max_tokens: int | None, deadline: float | None, num_leaving: int = 0
    ) -> RequestError | None:
        """Why a request is not admitted, when `num_leaving` of the sequences that wait have left."""
        waiting = self.engine.num_waiting - num_leaving
        return self.admission.refusal(
            count,
            num_waiting=waiting,
            num_before=self._num_before(client, waiting, count),
            max_tokens=max_tokens,
            deadline=deadline,
        )

    def _push_out(self, jobs: Sequence[tuple[Job, Client]]) -> None:
        """Ends jobs of which nothing has begun, for one of a client with less in the queue."""
        message = "the queue is full, and this request made room for a client with fewer waiting; try again later"
        retry_after = self.admission.retry_after(self.engine.num_waiting)
        for job, client in jobs:
            error = RequestError(message, status=429, code="queue_full", retry_after=retry_after)
            job.fail(self.counted(error, client, num_sequences=0))  # It had its places.
            self.release(job)

    def counted(self, refusal: RequestError, client: Client, *, num_sequences: int = 1) -> RequestError:
        """A refusal that is about to be the answer, to a request with so many sequences that have had no place."""
        if refusal.status == 429:
            self._num_refused += num_sequences if refusal.code in ("queue_full", "late") else 0
            self.metrics.rejected[refusal.code or ""] += 1
            self.clients.total(client).rejections += 1
        return refusal

    def start(self, job: Job, request: Generate) -> None:
        """Submits the job to the engine, which checks it; a refusal is the job's first event."""
        prompts = [
            Prompt(
                prompt_token_ids=token_ids,
                sampling=self._sampling(request, len(token_ids)),
                n=request.n,
                deadline=request.deadline,
                weight=request.weight,
            )
            for token_ids in request.prompts
        ]
        self.engine.submit(job, prompts, stream=request.stream)

    def _sampling(self, request: Generate, num_prompt_tokens: int) -> Sampling:
        """Of one of its prompts: a max_tokens that is not the client's is lowered to what fits, and left out where
        min_tokens does not fit, which the engine refuses."""
        sampling, fitting = request.sampling, num_fitting(self.spec, num_prompt_tokens, self.engine.request_tokens)
        if not request.limit_is_default or sampling.max_tokens is None or sampling.max_tokens <= fitting:
            return sampling
        return with_fields(sampling, max_tokens=fitting if sampling.min_tokens <= fitting else None)

    def response_builder(self, request: Generate) -> ResponseBuilder:
        """An empty response to an admitted request."""
        builder = ChatBuilder if request.chat else CompletionBuilder
        return builder(self.token_texts, request, model=self.model_name)

    def release(self, job: Job) -> None:
        """Gives the places back; unfinished sequences are dropped."""
        for request_id in job.request_ids:
            self.metrics.dropped(request_id)
        self.clients.end(job)
        self.engine.release(job)


def few_at_once(plan: Plan, *, request_tokens: int, num_slots: int) -> str:
    """That requests without max_tokens, each of which may have `request_tokens`, leave seats of the plan empty, in KV
    caches of `num_slots` tokens; '' where they do not."""
    fitting = max(num_slots // request_tokens, 1)
    for one in single_plans(plan):
        seats = pass_limits(one.schedule).decode_rows
        if seats and seats > fitting and reserves(one.schedule):
            return (
                f"{one.schedule.policy} reserves KV cache for the longest output that a request may have: of those "
                f"without max_tokens {fitting} run at a time in place of {seats}; have clients send max_tokens, or "
                "plan a policy that does not reserve, such as rra or chunked"
            )
    return ""


def summary(service: Service, url: str) -> str:
    """What the server serves, in one line."""
    plan = service.plan
    parts = [f"{service.model_name} with {plan.schedule}"]
    if estimate := plan.replay or plan.estimate:
        latency = estimate.latency if estimate.latency is not None else estimate.latency_p99
        bound = f" (bound {plan.bound.seconds:g} s)" if plan.bound else ""
        parts.append(f"predicted {estimate.throughput:.3g} requests/s, latency {latency:.3g} s{bound}")
    parts.append(f"{service.engine.num_blocks * BLOCK_SIZE} KV tokens")
    return f"serving {', '.join(parts)} at {url}"
