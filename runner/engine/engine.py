"""Engine: requests in, tokens out, one iteration at a time, in the order that a schedule wants.

One step: whoever finds its first stage free gets the batch that the scheduler wants next; the executor computes; the
tokens that come back are booked and delivered, and whoever is finished leaves with its blocks. Where the executor
foresees, a batch counts as run once it is started, and the next one is scheduled meanwhile: who ends by number of
tokens is known beforehand, who ends otherwise is computed once more for nothing. A request that is
preempted, or whose workers died, is computed again from its tokens so far, none of which is delivered twice; a request
that fails, fails alone.
Not here: threads, queues and HTTP (`process`, `server`), which request comes next (`exeplan.policies`), and what a
batch runs on (`execution`).
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import cast

from exeplan.core.batch import BLOCK_SIZE, Batch, SequenceState
from exeplan.core.schedule import Schedule
from exeplan.drift.length_monitor import MOST_KEPT, Seen
from exeplan.errors import InputError
from exeplan.policies import pass_limits
from exeplan.runner.compute.device_sampling import needs_tokens
from exeplan.runner.compute.kv_budget import pass_limit
from exeplan.runner.compute.sampling import GREEDY, SampledToken
from exeplan.runner.engine.admit_request import row_of
from exeplan.runner.engine.executor import Arrived, Done, Executor, WorkerError, producing_rows
from exeplan.runner.engine.kv_migration import Carried
from exeplan.runner.engine.requests import Output, Request, Row, as_rows
from exeplan.runner.engine.text_stream import TextStream
from exeplan.runner.engine.tokenizer import Tokenizer, eos_token_ids
from exeplan.scheduling.scheduler import Scheduler
from exeplan.scheduling.takeover import can_keep_blocks, take_over

MAX_CRASHES = 2
"""A request that was running when workers died so often is not tried again: it may be the reason."""

__all__ = ["Engine", "Output", "Request", "StepRecord"]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step as it ran: seconds on the engine's clock, rows and tokens (as in `Batch`)."""

    start: float
    end: float
    num_prefill: int
    num_decode: int
    num_new_tokens: int
    context_tokens: int
    """Tokens that the decode rows attend to."""


@dataclass(frozen=True, slots=True)
class Census:
    """Lengths of the requests that left since the last census, and of all that have begun and are still here."""

    now: float
    left: tuple[Seen, ...]
    running: tuple[Seen, ...]


@dataclass(frozen=True, slots=True)
class Switched:
    """What adopting another schedule brought."""

    outputs: list[Output]
    seconds: float
    """In which nothing new was begun."""
    num_recomputed: int
    """Requests that go on from their tokens, but without their keys and values."""
    num_carried: int
    """Requests that go on with their keys and values on another executor."""


class Engine:
    """Runs one schedule on one executor. `last_step` tells about the latest batch that was finished."""

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
        self.last_step: StepRecord | None = None
        self._executor, self._schedule, self._clock = executor, schedule, clock
        self._spec = executor.spec
        self._tokenizer = tokenizer or Tokenizer(None)
        self._eos_token_ids = eos_token_ids(self._spec) or self._tokenizer.eos_token_ids
        self._rows: dict[str, Row] = {}
        self._scheduler = self._same_scheduler()
        self._begun: dict[int, tuple[Batch, StepRecord]] = {}
        """What is under way, by the identity of the batch, the first one first."""
        self._left: deque[Seen] = deque(maxlen=MOST_KEPT)
        self._due: list[Output] = []
        """What has not been returned yet: it is not lost when workers die, or another schedule is refused."""

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
    def num_preemptions(self) -> int:
        return self._scheduler.num_preemptions

    def add(self, request: Request) -> None:
        """Queues a request. Raises InputError, and changes nothing, when it cannot be run."""
        if request.request_id in self._rows:
            raise InputError(f"request '{request.request_id}' is running already")
        row = row_of(
            request,
            spec=self._spec,
            tokenizer=self._tokenizer,
            eos_token_ids=self._eos_token_ids,
            num_slots=self.num_blocks * BLOCK_SIZE,
        )
        self._scheduler.add(row)
        self._rows[request.request_id] = row

    def abort(self, request_id: str) -> None:
        """Drops a request and frees its blocks at once, without an output; one that is finished or unknown is fine."""
        row = self._rows.get(request_id)
        if row is None or row.ended:
            return
        if row.start is not None:
            self._left.append(self._seen(row, self._clock()))
        self._drop(row)
        self._dismiss_kept()

    def step(self) -> list[Output]:
        """Starts whatever can run, and waits until something is done. Returns what that brought.

        One output for each request that got a token, failed or expired; none where nothing can run, or where a stage
        only came free. Raises WorkerError where workers died: `restart` goes on from there.
        """
        self._due += self._expire()
        for phase in self._executor.phases:
            while self._executor.accepts(phase) and self._may_schedule and (batch := self._scheduler.next_batch(phase)):
                self._start(batch)
        if self._executor.pending:
            self._due += self._results()
        return self._take_due()

    def adopt(
        self,
        schedule: Schedule,
        *,
        executor: Callable[[], Executor] | None = None,
        restore: Callable[[], Executor] | None = None,
        num_blocks: int | None = None,
        kv_dtype: str | None = None,
    ) -> Switched:
        """Goes on with another schedule when what is under way is done; no request is lost, none gets a token twice.

        Keys and values stay as far as the schedule lets them (`exeplan.scheduling.takeover`). Another `executor`,
        which has as
        many blocks as said, takes the place of this one, which is closed first where `restore` could make it again,
        and otherwise afterwards, beside what goes on. Where both keep keys and values in `kv_dtype` they are carried
        over, as far as host memory and blocks go; everybody else's are computed again.
        Raises InputError where a request does not fit, and whatever the executor raises, and then goes on as before;
        what was under way comes with the next step then.
        """
        began = self._clock()
        self._due += self._come_to_rest()
        before = self._scheduler
        after = self._new_scheduler(schedule, num_blocks or self.num_blocks)
        for row in (*before.running, *before.waiting):
            after.check(row)
        kept = _rows(can_keep_blocks(after, before))
        if executor is not None:
            with contextlib.closing(Carried()) as carried:
                if kv_dtype:
                    token_bytes = self._spec.kv_bytes_per_token(kv_dtype)
                    carried.save(self._executor, kept, token_bytes=token_bytes)
                self._exchange(executor, restore, carried)
                room = self._executor.room
                after = self._new_scheduler(schedule, room.num_blocks if room else after.num_blocks)
                kept = carried.restore(self._executor, _rows(can_keep_blocks(after, before)))
        self._schedule, self.num_blocks, self._scheduler = schedule, after.num_blocks, after
        left = take_over(after, before, keep=kept)
        self._dismiss(left)
        num_carried = 0 if executor is None else len(kept)
        seconds = self._clock() - began
        return Switched(self._take_due(), seconds, sum(not row.finished for row in left), num_carried)

    def has_room_for(self, schedule: Schedule) -> bool:
        """Whether the devices that are there have memory for the passes of a schedule that limits them itself."""
        room = self._executor.room
        return room is None or (pass_limits(schedule).tokens or 0) <= room.pass_tokens

    def census(self) -> Census:
        """What is known of lengths; who left is told once."""
        now, left = self._clock(), tuple(self._left)
        self._left.clear()
        here = (row for row in self._rows.values() if row.start is not None and not row.ended)
        return Census(now, left, tuple(self._seen(row, now) for row in here))

    def _take_due(self) -> list[Output]:
        due, self._due = self._due, []
        return due

    def _expire(self) -> list[Output]:
        """Drops whoever has not begun by its deadline."""
        outputs: list[Output] = []
        if not self._scheduler.has_deadlines:
            return outputs
        now = self._clock()
        for row in cast(list[Row], self._scheduler.expire(now)):
            del self._rows[row.request_id]
            row.start = now if row.start is None else row.start
            outputs.append(_output(row, now, reason="expired"))
        return outputs

    def restart(self) -> list[Output]:
        """Begins again after workers died: what was running is computed again, from its tokens so far.

        Returns an output that says `lost` for each request that was running for the second time when that happened.
        Raises WorkerError when no new workers can be had.
        """
        self._executor.restart()
        before, self._scheduler = self._scheduler, self._same_scheduler()
        self._begun.clear()
        outputs = []
        for row in cast(list[Row], before.running):
            row.crashes += 1
            if row.finished:
                del self._rows[row.request_id]
            elif row.crashes >= MAX_CRASHES:
                del self._rows[row.request_id]
                outputs.append(_output(row, self._clock(), reason="lost"))
        for row in cast(list[Row], [*before.running, *before.waiting]):
            if row.request_id in self._rows:
                row.num_blocks = row.num_computed_tokens = row.group = 0
                row.in_flight = False
                self._scheduler.add(row)
        return outputs

    def wake(self) -> None:
        """Makes a waiting `step` return; any thread may call it."""
        self._executor.wake()

    def close(self) -> None:
        """Ends the processes that belong to the engine."""
        self._executor.close()

    def _new_scheduler(self, schedule: Schedule, num_blocks: int) -> Scheduler:
        return Scheduler(
            schedule,
            num_blocks,
            num_prefill_stages=self._executor.num_prefill_stages,
            whole_prompts=self._spec.is_encoder_decoder,
            pass_tokens=pass_limit(schedule, self._executor.room),
        )

    def _same_scheduler(self) -> Scheduler:
        return self._new_scheduler(self._schedule, self.num_blocks)

    def _results(self) -> list[Output]:
        outputs: list[Output] = []
        for result in self._executor.results():
            if isinstance(result, Arrived):
                self._scheduler.kv_arrived(result.batch)
            else:
                outputs += self._finish(result)
        return outputs

    def _come_to_rest(self) -> list[Output]:
        """Waits for all that is under way; where workers die meanwhile, they begin again with nothing."""
        outputs: list[Output] = []
        try:
            while self._executor.pending:
                outputs += self._results()
        except WorkerError:
            outputs += self.restart()
        return outputs

    def _exchange(
        self, executor: Callable[[], Executor], restore: Callable[[], Executor] | None, carried: Carried
    ) -> None:
        if restore is None:
            old, self._executor = self._executor, executor()
            threading.Thread(target=old.close).start()  # Its processes take their time to end.
            return
        self._executor.close()
        try:
            self._executor = executor()
        except BaseException:
            self._executor = restore()
            before, self._scheduler = self._scheduler, self._same_scheduler()
            kept = carried.restore(self._executor, _rows(can_keep_blocks(self._scheduler, before)))
            self._dismiss(take_over(self._scheduler, before, keep=kept))
            raise

    def _seen(self, row: Row, now: float) -> Seen:
        assert row.start is not None
        num_prompt_tokens = row.num_prompt_tokens - row.num_begin_tokens
        return Seen(row.start, num_prompt_tokens, row.num_delivered, row.ended, now - row.start)

    @property
    def _may_schedule(self) -> bool:
        """Not while tokens are unknown that the next batch may need: to compute a preempted row again, or to penalise
        what a row has had."""
        if not (self._executor.foresees and self._begun):
            return True
        return not (self._scheduler.is_short or needs_tokens(cast(list[Row], self._scheduler.running)))

    def _start(self, batch: Batch) -> None:
        start = self._clock()
        if not (self._executor.foresees and self._begun):
            _note_start(batch, start)
        context_tokens = sum(row.num_tokens for row in batch.decode)
        counts = (len(batch.prefill), len(batch.decode), batch.num_new_tokens, context_tokens)
        self._begun[id(batch)] = batch, StepRecord(start, start, *counts)
        self._executor.start(batch)
        if self._executor.foresees:
            self._count(batch)
            self._dismiss(self._scheduler.complete(batch))

    def _finish(self, done: Done) -> list[Output]:
        """Books a batch that has run. Whoever was dropped meanwhile gets nothing."""
        batch, end = done.batch, self._clock()
        rows = {row.request_id: row for row in as_rows(batch.prefill + batch.decode)}
        self.last_step = replace(self._begun.pop(id(batch))[1], end=end)
        if self._executor.foresees:
            self._begin_next(end)
        else:
            self._count(batch)
        outputs = [
            self._book(row, token, end)
            for request_id, token in done.tokens.items()
            if self._rows.get(request_id) is (row := rows[request_id]) and not row.ended
        ]
        if not self._executor.foresees:
            self._dismiss(self._scheduler.complete(batch))
        return outputs

    def _begin_next(self, now: float) -> None:
        """A batch that was started behind the one that has come back begins only now."""
        for key, (batch, record) in list(self._begun.items())[:1]:
            _note_start(batch, now)
            self._begun[key] = batch, replace(record, start=now)

    def _count(self, batch: Batch) -> None:
        """Whoever gets a token from a batch has one more, and is finished with the last."""
        for row in producing_rows(batch, self._spec):
            if not row.finished:
                row.num_output_tokens += 1
                row.finished = row.num_output_tokens >= row.max_output_tokens

    def _dismiss(self, left: Iterable[SequenceState]) -> None:
        """Those that have left the cache are forgotten, as soon as their last token has been delivered."""
        for row in cast(Iterable[Row], left):
            self._executor.release(row.request_id)
            if row.ended:
                del self._rows[row.request_id]

    def _dismiss_kept(self) -> None:
        """Finished rows leave when nobody is left for whom they would be kept."""
        kept = tuple(self._scheduler.running)
        if all(row.finished for row in kept):
            for row in kept:
                self._scheduler.remove(row)
            self._dismiss(kept)

    def _book(self, row: Row, token: SampledToken | None, now: float) -> Output:
        if token is None:
            self._drop(row)
            return _output(row, now, reason="error")
        row.token_ids.append(token.token_id)
        ended = token.token_id in row.end_token_ids
        text = "" if ended or row.stream is None else self._text(row.stream, row, token.token_id)
        reason = None
        if ended or (row.stream and row.stream.stopped):
            reason = "stop"
        elif row.num_delivered >= row.max_output_tokens:
            reason = "length"
        if reason:
            text += row.stream.finish() if row.stream else ""
            self._end(row)
            self._left.append(self._seen(row, now))
        return _output(row, now, token=token, text=text, reason=reason)

    def _end(self, row: Row) -> None:
        """The last token of a row; one that counts on may have been foreseen."""
        row.ended = row.finished = True
        row.sampling, row.plain = GREEDY, True  # Kept rows draw nothing.
        if not self._executor.foresees:
            return
        row.num_output_tokens = row.num_delivered
        if self._scheduler.policy.KEEPS_FINISHED_ROWS and row.num_blocks:
            self._dismiss_kept()
        else:
            self._drop(row)

    def _text(self, stream: TextStream, row: Row, token_id: int) -> str:
        return stream.push(token_id, may_stop=row.num_delivered >= row.sampling.min_tokens)

    def _drop(self, row: Row) -> None:
        self._scheduler.remove(row)
        self._executor.release(row.request_id)
        del self._rows[row.request_id]


def _rows(sequences: list[SequenceState]) -> list[Row]:
    return cast(list[Row], sequences)


def _note_start(batch: Batch, now: float) -> None:
    for row in as_rows(batch.prefill):
        if row.start is None:
            row.start = now


def _output(
    row: Row, now: float, *, token: SampledToken | None = None, text: str = "", reason: str | None = None
) -> Output:
    assert row.start is not None
    return Output(
        request_id=row.request_id,
        token_ids=(token.token_id,) if token else (),
        text=text,
        logprobs=(token,) if token and token.logprob is not None else (),
        finish_reason=reason,
        first=token is not None and row.num_delivered == 1,
        start=row.start,
        time=now,
        num_prompt_tokens=row.num_prompt_tokens - row.num_begin_tokens,
        num_output_tokens=row.num_delivered,
    )
