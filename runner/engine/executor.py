"""Execution: what an engine asks of whatever computes its batches, and the model in this very process that does.

The other one is `runner/distributed/multiprocess_executor.py`: processes, a device each. An executor knows devices and
tensors; which batch comes next is the engine's business, and what a token means as well.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from exeplan.core.batch import Batch
from exeplan.core.model import ModelSpec
from exeplan.runner.compute.kv_budget import Room
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.sampling import SampledToken, sample
from exeplan.runner.engine.kv_regions import Parcel, restore_parcels, save_parcels
from exeplan.runner.engine.requests import Row, as_rows
from exeplan.runner.engine.timeline import TimelineFile

log = logging.getLogger(__name__)
Choose = Callable[[Tensor, Sequence[Row]], list[SampledToken | None]]
"""From logits `[R, V]` to a token for each of R rows; None where the logits allow none."""


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
    foresees: bool
    """Whether it takes the next batch before the tokens of the last one are known."""

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

    def save(self, path: str, parcels: Sequence[Parcel]) -> Sequence[int]:
        """Copies keys and values into the memory at that path; nothing may be under way.

        Returns for each parcel how many tokens are stored. Raises WorkerError when a worker died or hangs.
        """

    def restore(self, path: str, parcels: Sequence[Parcel]) -> None:
        """Takes in rows that another executor has saved, to be decoded next. Raises WorkerError as `save` does."""

    def restart(self) -> None:
        """Begins again with nothing under way and nothing kept. Raises WorkerError when that is not possible."""

    def close(self) -> None:
        """Ends all processes that belong to it, and its timeline."""


class Local:
    """One model on one device, in this process."""

    phases: tuple[str, ...] = ("",)
    num_prefill_stages = 1
    foresees = False

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

    def save(self, path: str, parcels: Sequence[Parcel]) -> Sequence[int]:
        return save_parcels(self.runner, path, parcels)

    def restore(self, path: str, parcels: Sequence[Parcel]) -> None:
        restore_parcels(self.runner, path, parcels)

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
        return _tokens(runner, batch, {row.request_id: row.token_ids for row in rows}, sample)
    except Exception:
        log.exception("a batch failed: %s", ", ".join(row.request_id for row in rows))
        return compute_each(runner, batch, {row.request_id: row.token_ids for row in rows})


def compute_each(
    runner: ModelRunner, batch: Batch, token_ids: Mapping[str, Sequence[int]], choose: Choose = sample
) -> dict[str, SampledToken | None]:
    """The tokens of a batch that has just failed, row by row; None for a row that fails alone, too.

    Call it while that exception is handled: where every row fails, it is raised.
    """
    found: dict[str, SampledToken | None] = {}
    num_failed = 0
    for single in _singles(batch):
        (row,) = as_rows(single.prefill + single.decode)
        try:
            found |= _tokens(runner, single, token_ids, choose)
        except Exception:
            log.exception("request %s failed", row.request_id)
            found[row.request_id] = None
            num_failed += 1
    if num_failed == len(batch.prefill + batch.decode) > 1:
        raise
    return found


def _tokens(
    runner: ModelRunner, batch: Batch, token_ids: Mapping[str, Sequence[int]], choose: Choose
) -> dict[str, SampledToken | None]:
    producing = producing_rows(batch, runner.spec)
    chosen = choose(runner.forward(batch, token_ids), producing)
    return dict(zip((row.request_id for row in producing), chosen, strict=True))


def _singles(batch: Batch) -> list[Batch]:
    chunks = batch.chunks or (None,) * len(batch.prefill)
    prefills = [
        Batch(prefill=(row,), pad_to=batch.pad_to, chunks=(chunk,) if chunk else ())
        for row, chunk in zip(batch.prefill, chunks, strict=True)
    ]
    return prefills + [Batch(decode=(row,)) for row in batch.decode]
