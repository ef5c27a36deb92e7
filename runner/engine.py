"""Engine: requests in, tokens out, one iteration at a time, in the order that a schedule wants.

One step: the scheduler says which rows run, the model runner computes their logits, sampling picks a token for each,
the tokens are booked and delivered, and whoever is finished leaves with its blocks. A request that is preempted is
computed again from its tokens so far, none of which is delivered twice; a request that fails, fails alone.
Not here: threads, queues and HTTP (`process`, `server`), and which request comes next (`exeplan.policies`).
"""

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from exeplan.errors import InputError
from exeplan.plan import Schedule
from exeplan.runner.model_runner import ModelRunner
from exeplan.runner.sampling import GREEDY, SampledToken, SamplingParams, sample
from exeplan.runner.text_stream import TextStream
from exeplan.runner.tokenizer import Tokenizer, eos_token_ids
from exeplan.scheduling import BLOCK_SIZE, Batch, Scheduler
from exeplan.scheduling import Sequence as SequenceState

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to continue, and how. `arrival` is in seconds on the engine's clock."""

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    arrival: float = 0.0


class Output(NamedTuple):
    """What one step brought a request; times in seconds on the engine's clock."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    """Lags behind the tokens while a character is incomplete or a stop string possible; empty without a tokenizer."""
    logprobs: tuple[SampledToken, ...]
    """One entry a token where the request asked for log-probabilities."""
    finish_reason: str | None
    """'stop', 'length', 'error', or None while it goes on."""
    first: bool
    """Whether this holds the first token."""
    start: float
    """When its first prefill began."""
    time: float
    num_prompt_tokens: int
    num_output_tokens: int
    """Tokens of the output so far, these included."""


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


@dataclass(eq=False, slots=True, kw_only=True)
class _Row(SequenceState):
    """A request in the engine; what `sampling.Row` asks for."""

    sampling: SamplingParams
    plain: bool
    seed: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    """Prompt and output."""
    banned_token_ids: tuple[int, ...]
    end_token_ids: frozenset[int]
    stream: TextStream | None
    arrival: float
    start: float | None = None

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]


class Engine:
    """Runs one schedule on one model runner. `last_step` tells about the latest step that ran anything."""

    def __init__(
        self,
        runner: ModelRunner,
        schedule: Schedule,
        *,
        tokenizer: Tokenizer | None = None,
        num_blocks: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.num_blocks = num_blocks
        self.last_step: StepRecord | None = None
        self._runner, self._clock = runner, clock
        self._tokenizer = tokenizer or Tokenizer(None)
        self._scheduler = Scheduler(schedule, num_blocks)
        self._eos_token_ids = eos_token_ids(runner.spec) or self._tokenizer.eos_token_ids
        self._rows: dict[str, _Row] = {}
        self._token_ids: dict[str, list[int]] = {}

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

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
        row = self._row(request)
        self._scheduler.add(row)
        self._rows[request.request_id] = row
        self._token_ids[request.request_id] = row.token_ids

    def abort(self, request_id: str) -> None:
        """Drops a request and frees its blocks at once, without an output; one that is finished or unknown is fine."""
        row = self._rows.get(request_id)
        if row is None or row.finished:
            return
        self._drop(row)
        running = cast(list[_Row], self._scheduler.running)
        if all(other.finished for other in running):  # Nobody is left for whom finished rows would be kept.
            for other in tuple(running):
                self._drop(other)

    def step(self) -> list[Output]:
        """Runs the next batch. Returns what it brought, one output for each request that got a token or failed."""
        start = self._clock()
        batch = self._scheduler.next_batch()
        if batch is None:
            return []
        rows = cast(tuple[_Row, ...], batch.prefill + batch.decode)
        for row in rows[: len(batch.prefill)]:
            if row.start is None:
                row.start = start
        num_new_tokens, context_tokens = batch.num_new_tokens, sum(row.num_tokens for row in batch.decode)
        tokens = self._compute(batch, rows)
        end = self._clock()
        outputs = [self._book(row, token, end) for row, token in zip(rows, tokens, strict=True) if not row.finished]
        for row in cast(list[_Row], self._scheduler.complete(batch)):
            self._drop(row)
        self.last_step = StepRecord(start, end, len(batch.prefill), len(batch.decode), num_new_tokens, context_tokens)
        return outputs

    def _compute(self, batch: Batch, rows: Sequence[_Row]) -> list[SampledToken | None]:
        """A token for each row, None for a row that cannot have one."""
        try:
            return sample(self._runner.forward(batch, self._token_ids), rows)
        except Exception:
            log.exception("a batch failed: %s", ", ".join(row.request_id for row in rows))
            if len(rows) == 1:
                return [None]
            # Whoever is to blame shows when each runs alone. If all do, it is no request's fault.
            tokens = [self._compute(part, row) for part, row in _singles(batch, rows)]
            if all(token == [None] for token in tokens):
                raise
            return [token for (token,) in tokens]

    def _book(self, row: _Row, token: SampledToken | None, now: float) -> Output:
        if token is None:
            self._drop(row)
            return _output(row, now, reason="error")
        row.token_ids.append(token.token_id)
        row.num_output_tokens += 1
        ended = token.token_id in row.end_token_ids
        text = "" if ended or row.stream is None else self._text(row.stream, row, token.token_id)
        reason = None
        if ended or (row.stream and row.stream.stopped):
            reason = "stop"
        elif row.num_output_tokens >= row.max_output_tokens:
            reason = "length"
        if reason:
            text += row.stream.finish() if row.stream else ""
            row.finished = True
            row.sampling, row.plain = GREEDY, True  # Kept rows draw nothing.
        return _output(row, now, token=token, text=text, reason=reason)

    def _text(self, stream: TextStream, row: _Row, token_id: int) -> str:
        return stream.push(token_id, may_stop=row.num_output_tokens >= row.sampling.min_tokens)

    def _drop(self, row: _Row) -> None:
        self._scheduler.remove(row)
        self._runner.free(row.request_id)
        del self._rows[row.request_id], self._token_ids[row.request_id]

    def _row(self, request: Request) -> _Row:
        params, prompt = request.sampling, list(request.prompt_token_ids)
        self._check_token_ids("the prompt", prompt)
        self._check_token_ids("stop_token_ids", params.stop_token_ids)
        self._check_token_ids("logit_bias", list(params.logit_bias))
        max_output_tokens = self._max_output_tokens(len(prompt), params.max_tokens)
        if params.min_tokens > max_output_tokens:
            raise InputError(f"min_tokens {params.min_tokens} is more than the {max_output_tokens} tokens that fit")
        ends = (*params.stop_token_ids, *self._eos_token_ids)
        return _Row(
            request_id=request.request_id,
            num_prompt_tokens=len(prompt),
            max_output_tokens=max_output_tokens,
            sampling=params,
            plain=params.plain,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            prompt_token_ids=prompt,
            token_ids=list(prompt),
            banned_token_ids=ends,
            end_token_ids=frozenset(params.stop_token_ids if params.ignore_eos else ends),
            stream=self._tokenizer.stream(prompt, params.stop),
            arrival=request.arrival,
        )

    def _check_token_ids(self, name: str, token_ids: Sequence[int]) -> None:
        vocab_size = self._runner.spec.vocab_size
        for token_id in token_ids:
            if not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise InputError(
                    f"{name}: token id {token_id!r} is not in the vocabulary, whose ids are 0 to {vocab_size - 1}"
                )

    def _max_output_tokens(self, num_prompt_tokens: int, max_tokens: int | None) -> int:
        context = self._runner.spec.max_context
        if num_prompt_tokens == 0:
            raise InputError("the prompt is empty; it needs at least one token")
        if num_prompt_tokens >= context:
            raise InputError(
                f"the prompt has {num_prompt_tokens} tokens; the context of {context} takes at most {context - 1}"
            )
        room = context - num_prompt_tokens
        if max_tokens is None:
            return max(min(room, self.num_blocks * BLOCK_SIZE - num_prompt_tokens), 1)
        if max_tokens > room:
            raise InputError(
                f"max_tokens {max_tokens} after a prompt of {num_prompt_tokens} tokens exceeds the context "
                f"of {context}; at most {room} fit"
            )
        return max_tokens


def _singles(batch: Batch, rows: Sequence[_Row]) -> list[tuple[Batch, tuple[_Row]]]:
    prefills = len(batch.prefill)
    return [
        (Batch(prefill=(row,), pad_to=batch.pad_to) if index < prefills else Batch(decode=(row,)), (row,))
        for index, row in enumerate(rows)
    ]


def _output(
    row: _Row, now: float, *, token: SampledToken | None = None, text: str = "", reason: str | None = None
) -> Output:
    assert row.start is not None
    return Output(
        request_id=row.request_id,
        token_ids=(token.token_id,) if token else (),
        text=text,
        logprobs=(token,) if token and token.logprob is not None else (),
        finish_reason=reason,
        first=token is not None and row.num_output_tokens == 1,
        start=row.start,
        time=now,
        num_prompt_tokens=row.num_prompt_tokens,
        num_output_tokens=row.num_output_tokens,
    )
