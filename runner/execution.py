"""Execution: what an engine asks of whatever computes its batches, and the model in this very process that does.

The other one is `runner/workers.py`: processes, a device each. An executor knows devices and tensors; which batch comes
next is the engine's business, and what a token means as well.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from exeplan.model import ModelSpec
from exeplan.runner.model_runner import ModelRunner
from exeplan.runner.requests import Row, as_rows
from exeplan.runner.room import Room
from exeplan.runner.sampling import SampledToken, sample
from exeplan.runner.timeline import TimelineFile
from exeplan.scheduling import Batch

log = logging.getLogger(__name__)


class WorkerError(RuntimeError):
    """A worker died or hangs: what was under way is lost, and `restart` may help."""


class Done(NamedTuple):
    """A batch has left its last stage."""

    batch: Batch
    tokens: Mapping[str, SampledToken | None]
    """By request id; None for a row that cannot have one. A row that is not in here has no token to get."""


class Arrived(NamedTuple):
    """The keys and values of a prefilled batch have reached the stages that decode."""

    batch: Batch


class Executor(Protocol):
    """Computes batches, several at once where there are several stages."""

    spec: ModelSpec
    phases: tuple[str, ...]
    """The kinds of stages there are, as in `Stage.phase`; those that decode come first."""
    num_prefill_stages: int
    room: Room | None
    """What every device found room for; None where nothing was measured."""

    @property
    def pending(self) -> bool:
        """Whether there are results, or will be."""

    def accepts(self, phase: str) -> bool:
        """Whether the first stage of that phase is free."""

    def start(self, batch: Batch) -> None:
        """Begins a batch, whose rows are `Row`s. Call it only when its phase is accepted."""

    def results(self) -> Sequence[Done | Arrived]:
        """Waits for something to happen, and returns what is there: maybe only that a stage came free, so nothing.

        Raises WorkerError when a worker died or hangs.
        """

    def wake(self) -> None:
        """Makes a waiting `results` return; any thread may call it."""

    def release(self, request_id: str) -> None:
        """Frees what is kept for a request that left; one that never ran is fine."""

    def restart(self) -> None:
        """Begins again with nothing under way and nothing kept. Raises WorkerError when that is not possible."""

    def close(self) -> None:
        """Ends all processes that belong to it, and its timeline."""


class Local:
    """One model on one device, in this process."""

    phases: tuple[str, ...] = ("",)
    num_prefill_stages = 1

    def __init__(self, runner: ModelRunner, timeline: TimelineFile | None = None, room: Room | None = None) -> None:
        self.room = room
        self.spec, self.runner, self._timeline = runner.spec, runner, timeline
        self._batch: Batch | None = None

    @property
    def pending(self) -> bool:
        return self._batch is not None

    def accepts(self, phase: str) -> bool:
        return self._batch is None

    def start(self, batch: Batch) -> None:
        self._batch = batch

    def results(self) -> Sequence[Done]:
        batch, self._batch = self._batch, None
        assert batch is not None
        start = time.perf_counter()
        tokens = compute(self.runner, batch)
        if self._timeline:
            self._timeline.add(batch, 0, start, time.perf_counter())
        return (Done(batch, tokens),)

    def wake(self) -> None:
        """Nothing ever waits here."""

    def release(self, request_id: str) -> None:
        self.runner.free(request_id)

    def restart(self) -> None:
        raise WorkerError("the model runs in the engine's own process, which cannot begin again")

    def close(self) -> None:
        if self._timeline:
            self._timeline.close()


def producing_rows(batch: Batch, spec: ModelSpec) -> tuple[Row, ...]:
    """Those that get a token from a batch, in the order of its logits."""
    return as_rows(batch.whole_prefills + batch.decode if spec.first_token_from_prefill else batch.decode)


def compute(runner: ModelRunner, batch: Batch) -> dict[str, SampledToken | None]:
    """A token for each row that produces one; None for any row that fails, whoever is to blame runs alone.

    Raises what the runner raised when every single row fails: then it is no request's fault.
    """
    rows = as_rows(batch.prefill + batch.decode)
    try:
        logits_RV = runner.forward(batch, {row.request_id: row.token_ids for row in rows})
        producing = producing_rows(batch, runner.spec)
        return dict(zip((row.request_id for row in producing), sample(logits_RV, producing), strict=True))
    except Exception:
        log.exception("a batch failed: %s", ", ".join(row.request_id for row in rows))
        if len(rows) == 1:
            return {rows[0].request_id: None}
        found = [compute(runner, single) for single in _singles(batch)]
        if all(list(tokens.values()) == [None] for tokens in found):
            raise
        return {request_id: token for tokens in found for request_id, token in tokens.items()}


def _singles(batch: Batch) -> list[Batch]:
    chunks = batch.chunks or (None,) * len(batch.prefill)
    prefills = [
        Batch(prefill=(row,), pad_to=batch.pad_to, chunks=(chunk,) if chunk else ())
        for row, chunk in zip(batch.prefill, chunks, strict=True)
    ]
    return prefills + [Batch(decode=(row,)) for row in batch.decode]
