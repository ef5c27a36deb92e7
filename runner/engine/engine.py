"""Engine: requests in, tokens out, one iteration at a time, in the order that a schedule wants.

One step: where the first stage of a phase is free, the scheduler chooses a batch and the executor computes it. The
tokens that come back are appended and delivered, and finished requests leave with their blocks. With async scheduling a
batch counts as run before its tokens are known, and the next one is scheduled meanwhile: a request that ends by its
number of tokens is known beforehand, one that ends otherwise is computed once more, for nothing. Batches count as run
in the order in which they were started, so that one fewer than there are stages are in flight when the next is
scheduled, as on a pipeline whose stages take equally long: policies see what they see in the replay.
A request that is preempted, or whose workers died, is recomputed from its tokens so far, none of which is delivered
twice; a request that fails does not affect others.
Not here: threads, queues and HTTP (`runner/engine_process`, `runner/server`), which request comes next
(`exeplan.policies`), and the devices (`executor`).
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from exeplan.core.batch import BLOCK_SIZE, Batch, SequenceState
from exeplan.core.profile import ReferencePass
from exeplan.core.schedule import Schedule
from exeplan.drift.length_monitor import MOST_KEPT
from exeplan.drift.state import RequestLengths
from exeplan.errors import InputError
from exeplan.policies import pass_limits
from exeplan.runner.compute.kv_budget import pass_limit
from exeplan.runner.compute.reference_passes import RepeatedPasses
from exeplan.runner.compute.tokens.device_sampling import needs_tokens
from exeplan.runner.compute.tokens.sampling import GREEDY, SampledToken
from exeplan.runner.engine.admit_request import admit_request
from exeplan.runner.engine.executor import (
    BatchDone,
    Executor,
    KVArrived,
    WorkerError,
    free_half_built,
    sampled_requests,
)
from exeplan.runner.engine.kv_migration import KVMigration
from exeplan.runner.engine.requests import MAX_CRASHES, Output, Request, RequestState, as_requests, output_of
from exeplan.runner.engine.text_stream import TextStream
from exeplan.runner.engine.tokenizer import Tokenizer, eos_token_ids
from exeplan.scheduling.fair_queue import VirtualTokenCounters
from exeplan.scheduling.fair_scheduler import FairScheduler
from exeplan.scheduling.takeover import can_keep_blocks, take_over

__all__ = ["Engine", "Output", "Request", "StepRecord"]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step as it ran: seconds on the engine's clock, requests and tokens (as in `Batch`)."""

    start: float
    end: float
    num_prefill: int
    num_decode: int
    num_new_tokens: int
    context_tokens: int
    """Tokens that the decoding requests attend to."""

    @property
    def kind(self) -> str:
        """Of pass: `prefill`, `decode` or `mixed`."""
        return "decode" if not self.num_prefill else "mixed" if self.num_decode else "prefill"


@dataclass(frozen=True, slots=True)
class LengthStats:
    """Lengths of the requests that left since the last call, and of all that have started and still run."""

    now: float
    left: tuple[RequestLengths, ...]
    running: tuple[RequestLengths, ...]


@dataclass(frozen=True, slots=True)
class PlanSwitch:
    """The result of switching to another schedule."""

    outputs: list[Output]
    seconds: float
    """During which no batch was started."""
    num_recomputed: int
    """Requests that continue from their tokens, but whose keys and values are recomputed."""
    num_carried: int
    """Requests that continue with their keys and values on another executor."""


class Engine:
    """Runs one schedule on one executor. `last_steps` describes the batches that the latest call of `step` finished."""

    def __init__(
        self,
        executor: Executor,
        schedule: Schedule,
        *,
        tokenizer: Tokenizer | None = None,
        num_blocks: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.num_blocks = num_blocks
        self.last_steps: tuple[StepRecord, ...] = ()
        self.on_begin: Callable[[Sequence[str], float], None] = lambda request_ids, start: None
        """Called before the first prefill of requests is computed, also when it is computed again."""
        self._executor, self._schedule, self._clock = executor, schedule, clock
        self._spec = executor.spec
        self._tokenizer = tokenizer or Tokenizer(None)
        self._eos_token_ids = eos_token_ids(self._spec) or self._tokenizer.eos_token_ids
        self._requests: dict[str, RequestState] = {}
        self._counters = VirtualTokenCounters()
        self._scheduler = self._same_scheduler()
        self._begun: dict[int, tuple[Batch, StepRecord]] = {}
        """Running batches by identity, the oldest first."""
        self._uncounted: dict[str, deque[Batch]] = {}
        """With async scheduling, by phase: running batches that do not count as run yet, the oldest first."""
        self._queued: deque[Batch] = deque()
        """With async scheduling: started batches that wait for their first stage."""
        self._left: deque[RequestLengths] = deque(maxlen=MOST_KEPT)
        self._due: list[Output] = []
        """Outputs not returned yet: they survive a worker crash and a refused schedule."""

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._begun or self._due)

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)

    @property
    def num_running(self) -> int:
        """Sequences in the KV cache, finished ones that the policy keeps included."""
        return len(self._scheduler.running)

    @property
    def free_blocks(self) -> int:
        return self._scheduler.free_blocks

    @property
    def request_tokens(self) -> int:
        """Tokens of the longest request, with its output: the KV cache holds them, and one pass prefills them."""
        slots, pass_tokens = self.num_blocks * BLOCK_SIZE, self._scheduler.pass_tokens
        return slots if pass_tokens is None else min(slots, pass_tokens)

    @property
    def num_preemptions(self) -> int:
        """Since the beginning."""
        return self._scheduler.num_preemptions

    def add(self, request: Request) -> None:
        """Queues a request. Raises InputError, and changes nothing, when it cannot be run; AdmissionError, and changes
        nothing either, for a defect."""
        if request.request_id in self._requests:
            raise InputError(f"request '{request.request_id}' is running already")
        state = admit_request(
            request,
            spec=self._spec,
            tokenizer=self._tokenizer,
            eos_token_ids=self._eos_token_ids,
            most_tokens=self.request_tokens,
        )
        self._scheduler.add(state)
        self._requests[request.request_id] = state

    def abort(self, request_id: str) -> None:
        """Drops a request and frees its blocks at once, without an output; a finished or unknown one is accepted."""
        request = self._requests.get(request_id)
        if request is None or request.ended:
            return
        if request.start is not None:
            self._left.append(self._seen(request, self._clock()))
        self._drop(request)
        self._dismiss_kept()

    def keep(self, request_ids: Iterable[str]) -> None:
        """These do not expire any more; unknown ones are accepted."""
        for request_id in request_ids:
            if request := self._requests.get(request_id):
                request.may_begin_late = True

    def step(self) -> list[Output]:
        """Starts all batches that can run, and waits for the next result.

        Returns one output for each request that got a token, failed or expired; none where nothing can run, or where a
        stage only became free. Raises WorkerError where workers died: `restart` continues from there.
        """
        self.last_steps = ()
        self._due += self._expire()
        for phase in self._executor.phases:
            while self._executor.accepts(phase) and (batch := self._next_batch(phase)):
                self._start(batch)
        if self._executor.pending:
            self._due += self._results()
        return self._take_due()

    def switch_plan(
        self,
        schedule: Schedule,
        *,
        executor: Callable[[], Executor] | None = None,
        restore: Callable[[], Executor] | None = None,
        num_blocks: int | None = None,
        kv_dtype: str | None = None,
    ) -> PlanSwitch:
        """Continues with another schedule once the running batches are done. No request is lost and no token repeated.

        Keys and values are kept as far as the schedule allows (`exeplan.scheduling.takeover`). `executor` makes another
        executor of `num_blocks` blocks, which replaces this one. This one is closed first where `restore` can make it
        again, else afterwards, in the background. If both executors store keys and values in `kv_dtype`, these migrate
        as far as host memory and blocks allow; the other requests are recomputed.
        Raises InputError where a request does not fit, and whatever the executor raises. The engine then continues as
        before, and the outputs of the running batches come with the next step.
        """
        began = self._clock()
        self._due += self._drain()
        before = self._scheduler
        after = self._fitting_scheduler(schedule, num_blocks or self.num_blocks)
        kept: Sequence[RequestState] = as_requests(can_keep_blocks(after, before))
        if executor is not None:
            with contextlib.closing(KVMigration()) as migration:
                if kv_dtype:
                    token_bytes = self._spec.kv_bytes_per_token(kv_dtype)
                    migration.save(self._executor, kept, token_bytes=token_bytes)
                after = self._replace_executor(executor, restore, migration, planned=after)
                kept = migration.restore(self._executor, as_requests(can_keep_blocks(after, before)))
        self._schedule, self.num_blocks, self._scheduler = schedule, after.num_blocks, after
        left = take_over(after, before, keep=kept)
        self._dismiss(left)
        num_carried = 0 if executor is None else len(kept)
        seconds = self._clock() - began
        return PlanSwitch(self._take_due(), seconds, sum(not request.finished for request in left), num_carried)

    def fits_kv_budget(self, schedule: Schedule) -> bool:
        """Whether a pass of as many tokens as the schedule allows fits into the memory that the devices measured."""
        budget = self._executor.kv_budget
        return budget is None or (pass_limits(schedule).tokens or 0) <= budget.pass_tokens

    def length_stats(self) -> LengthStats:
        """Request lengths so far; a request that left is reported once."""
        now, left = self._clock(), tuple(self._left)
        self._left.clear()
        here = (request for request in self._requests.values() if request.start is not None and not request.ended)
        return LengthStats(now, left, tuple(self._seen(request, now) for request in here))

    def _take_due(self) -> list[Output]:
        due, self._due = self._due, []
        return due

    def _expire(self) -> list[Output]:
        """Drops requests that have not started by their deadline, and may not start later."""
        outputs: list[Output] = []
        if not self._scheduler.has_deadlines:
            return outputs
        now = self._clock()
        for request in as_requests(self._scheduler.expire(now)):
            del self._requests[request.request_id]
            request.start = now if request.start is None else request.start
            outputs.append(output_of(request, now, reason="expired"))
        return outputs

    def restart(self) -> list[Output]:
        """Starts over after workers died: running requests are recomputed from their tokens so far.

        Returns an output with reason `lost` for each request that was running at `MAX_CRASHES` crashes.
        Raises WorkerError when no new workers can be started.
        """
        self._executor.restart()
        before, self._scheduler = self._scheduler, self._same_scheduler()
        self._scheduler.num_preemptions = before.num_preemptions
        self._begun.clear()
        self._uncounted.clear()
        self._queued.clear()
        outputs = []
        queued = {id(request) for request in (*before.running, *before.waiting)}
        # A request whose last token is launched has left the scheduler, and has to produce it again.
        launched = [one for one in self._requests.values() if id(one) not in queued]
        for request in (*launched, *as_requests(before.running)):
            request.crashes += 1
            request.preemptions += 1  # It has begun: a deadline to begin by is of the past.
            request.num_output_tokens, request.finished = request.num_delivered, request.ended
            if request.ended:
                del self._requests[request.request_id]
            elif request.crashes >= MAX_CRASHES:
                del self._requests[request.request_id]
                outputs.append(output_of(request, self._clock(), reason="lost"))
        for request in as_requests([*launched, *before.running, *before.waiting]):
            if request.request_id in self._requests:
                request.num_blocks = request.num_computed_tokens = request.group = 0
                request.in_flight = False
                self._scheduler.add_again(request)
        return outputs

    def reference_passes(self, passes: Sequence[ReferencePass]) -> RepeatedPasses | None:
        """To be repeated between steps; None without any, or where an executor cannot tell what they took."""
        return self._executor.reference_passes(passes) if passes else None

    def wake(self) -> None:
        """Makes a waiting `step` return; any thread may call it."""
        self._executor.wake()

    def close(self) -> None:
        """Ends the executor's processes."""
        self._executor.close()

    def _new_scheduler(self, schedule: Schedule, num_blocks: int) -> FairScheduler:
        return FairScheduler(
            schedule,
            num_blocks,
            counters=self._counters,
            clock=self._clock,
            num_prefill_stages=self._executor.num_prefill_stages,
            num_decode_stages=self._executor.num_decode_stages,
            whole_prompts=self._spec.is_encoder_decoder,
            pass_tokens=pass_limit(schedule, self._executor.kv_budget),
        )

    def _fitting_scheduler(self, schedule: Schedule, num_blocks: int) -> FairScheduler:
        """Raises InputError where a request does not fit."""
        scheduler = self._new_scheduler(schedule, num_blocks)
        for request in (*self._scheduler.running, *self._scheduler.waiting):
            scheduler.check(request)
        return scheduler

    def _same_scheduler(self) -> FairScheduler:
        return self._new_scheduler(self._schedule, self.num_blocks)

    def _results(self) -> list[Output]:
        outputs: list[Output] = []
        for result in self._executor.results():
            if isinstance(result, KVArrived):
                self._scheduler.kv_arrived(result.batch)
            else:
                outputs += self._finish(result)
        return outputs

    def _drain(self) -> list[Output]:
        """Waits for all running batches; workers that die meanwhile are restarted, with nothing cached."""
        outputs: list[Output] = []
        try:
            while self._executor.pending:
                outputs += self._results()
        except WorkerError:
            outputs += self.restart()
        return outputs

    def _replace_executor(
        self,
        executor: Callable[[], Executor],
        restore: Callable[[], Executor] | None,
        migration: KVMigration,
        *,
        planned: FairScheduler,
    ) -> FairScheduler:
        """Returns a scheduler like the planned one, of the blocks that the new devices measured."""
        old = self._executor
        if restore:
            old.close()
        try:
            self._executor = executor()
            budget = self._executor.kv_budget
            after = self._fitting_scheduler(planned.schedule, budget.num_blocks if budget else planned.num_blocks)
        except BaseException as error:
            if self._executor is not old:
                self._executor.close()
            self._executor = old
            if restore:
                free_half_built(error)
                self._executor = restore()
                before, self._scheduler = self._scheduler, self._same_scheduler()
                kept = migration.restore(self._executor, as_requests(can_keep_blocks(self._scheduler, before)))
                self._dismiss(take_over(self._scheduler, before, keep=kept))
            raise
        if restore is None:
            threading.Thread(target=old.close).start()  # Its processes may take seconds to end.
        return after

    def _seen(self, request: RequestState, now: float) -> RequestLengths:
        assert request.start is not None
        num_prompt_tokens = request.num_prompt_tokens - request.num_begin_tokens
        return RequestLengths(
            request.start, num_prompt_tokens, request.num_delivered, request.ended, now - request.start
        )

    def _next_batch(self, phase: str) -> Batch | None:
        """What is scheduled next; where nothing else can run, the oldest running batches count as run for it."""
        uncounted = self._uncounted.setdefault(phase, deque())
        while not self._lacks_tokens:
            if (batch := self._scheduler.next_batch(phase)) or not uncounted:
                return batch
            self._count_as_run(uncounted.popleft())
        return None

    @property
    def _lacks_tokens(self) -> bool:
        """Whether tokens are unknown that the next batch may need: to recompute a preempted request, or to penalise
        tokens of the output. Nor does a request go two tokens ahead of those that are known."""
        if not (self._executor.async_scheduling and self._begun):
            return False
        idle = [one for one in as_requests(self._scheduler.running) if not one.in_flight and one.num_unknown]
        if not idle:
            return False
        return self._scheduler.is_short or needs_tokens(idle) or any(one.num_unknown > 1 for one in idle)

    def _start(self, batch: Batch) -> None:
        start = self._clock()
        running = sum(other.phase == batch.phase for other, _ in self._begun.values())
        if self._executor.async_scheduling and running >= self._num_stages(batch.phase):
            self._queued.append(batch)
        else:
            _note_start(batch, start)
        context_tokens = sum(request.num_tokens for request in batch.decode)
        counts = (len(batch.prefill), len(batch.decode), batch.num_new_tokens, context_tokens)
        self._begun[id(batch)] = batch, StepRecord(start, start, *counts)
        if begun := [request.request_id for request in batch.prefill if not request.num_computed_tokens]:
            self.on_begin(begun, start)
        self._executor.start(batch)
        if self._executor.async_scheduling:
            uncounted = self._uncounted[batch.phase]
            uncounted.append(batch)
            while len(uncounted) >= self._num_stages(batch.phase):
                self._count_as_run(uncounted.popleft())

    def _num_stages(self, phase: str) -> int:
        return self._executor.num_prefill_stages if phase == "prefill" else self._executor.num_decode_stages

    def _count_as_run(self, batch: Batch) -> None:
        self._count(batch)
        self._dismiss(self._scheduler.complete(batch))

    def _finish(self, done: BatchDone) -> list[Output]:
        """Delivers the tokens of a batch that has run. A request that was dropped meanwhile gets none."""
        batch, end = done.batch, self._clock()
        requests = {request.request_id: request for request in as_requests(batch.prefill + batch.decode)}
        self.last_steps += (replace(self._begun.pop(id(batch))[1], end=end),)
        self._scheduler.took(batch, end - self.last_steps[-1].start)
        if self._executor.async_scheduling:
            uncounted = self._uncounted[batch.phase]
            while any(other is batch for other in uncounted):
                self._count_as_run(uncounted.popleft())
            self._begin_queued(batch.phase, end)
        else:
            self._count(batch)
        outputs = [
            self._book(request, token, end)
            for request_id, token in done.tokens.items()
            if self._requests.get(request_id) is (request := requests[request_id]) and not request.ended
        ]
        if not self._executor.async_scheduling:
            self._dismiss(self._scheduler.complete(batch))
        return outputs

    def _begin_queued(self, phase: str, now: float) -> None:
        """The oldest batch that waited for its first stage begins now."""
        if batch := next((one for one in self._queued if one.phase == phase), None):
            self._queued.remove(batch)
            _note_start(batch, now)
            self._begun[id(batch)] = batch, replace(self._begun[id(batch)][1], start=now)

    def _count(self, batch: Batch) -> None:
        """Counts one more token for each request that a batch samples; a request is finished with its last."""
        for request in sampled_requests(batch, self._spec):
            if not request.finished:
                request.num_output_tokens += 1
                request.finished = request.num_output_tokens >= request.max_output_tokens

    def _dismiss(self, left: Iterable[SequenceState]) -> None:
        """Releases requests that have left the cache, and forgets them once their last token has been delivered."""
        for request in as_requests(left):
            self._executor.release(request.request_id)
            if request.ended:
                del self._requests[request.request_id]

    def _dismiss_kept(self) -> None:
        """Finished requests that the policy keeps leave when no unfinished one is left."""
        kept = tuple(self._scheduler.running)
        if all(request.finished for request in kept):
            for request in kept:
                self._scheduler.remove(request)
            self._dismiss(kept)

    def _book(self, request: RequestState, token: SampledToken | None, now: float) -> Output:
        if token is None:
            self._drop(request)
            if self._executor.async_scheduling:  # Its batch is complete already: those that are kept leave now.
                self._dismiss_kept()
            return output_of(request, now, reason="error" if request.sampling.structure is None else "structure")
        request.token_ids.append(token.token_id)
        ended = token.token_id in request.end_token_ids
        text = "" if ended or request.stream is None else self._text(request.stream, request, token.token_id)
        reason = None
        if ended or (request.stream and request.stream.stopped):
            reason = "stop"
        elif request.num_delivered >= request.max_output_tokens:
            reason = "length"
        if reason:
            if request.stream:
                text += request.stream.finish()
                reason = "stop" if request.stream.stopped else reason
            self._end(request)
            self._left.append(self._seen(request, now))
        return output_of(request, now, token=token, text=text, reason=reason)

    def _end(self, request: RequestState) -> None:
        """The last token of a request, of which one more token may have been launched."""
        request.ended = request.finished = True
        request.sampling, request.plain = GREEDY, True  # A request that is kept samples greedily.
        if not self._executor.async_scheduling:
            return
        request.num_output_tokens = request.num_delivered
        if self._scheduler.policy.KEEPS_FINISHED_ROWS and request.num_blocks:
            self._dismiss_kept()
        else:
            self._drop(request)

    def _text(self, stream: TextStream, request: RequestState, token_id: int) -> str:
        return stream.push(token_id, may_stop=request.num_delivered >= request.sampling.min_tokens)

    def _drop(self, request: RequestState) -> None:
        self._scheduler.remove(request)
        self._executor.release(request.request_id)
        del self._requests[request.request_id]


def _note_start(batch: Batch, now: float) -> None:
    for request in as_requests(batch.prefill):
        if request.start is None:
            request.start = now
