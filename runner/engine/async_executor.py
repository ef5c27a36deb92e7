"""Ahead: the model in this process, whose next batch is launched before the tokens of the running one are known.

A GPU that waits for Python between two passes stands still as long as scheduling takes. So two batches may be under
way: the second takes its input tokens on the device, where the first leaves them, and the host reads them while the
second runs (asynchronous output processing, as in vLLM). On a CPU a batch is computed when it is started and told of
when the next one has been: the same order of events, so that tests see what a GPU sees.

Not here: whose tokens may be unknown when a batch is scheduled, which is the engine's business.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from exeplan.core.batch import Batch
from exeplan.runner.compute.device_sampling import Picked, pick
from exeplan.runner.compute.kv_budget import Room
from exeplan.runner.compute.model_runner import ModelRunner
from exeplan.runner.compute.sampling import SampledToken
from exeplan.runner.engine.executor import Done, WorkerError, compute_each, producing_rows
from exeplan.runner.engine.kv_regions import Parcel, restore_parcels, save_parcels
from exeplan.runner.engine.requests import Row, as_rows
from exeplan.runner.engine.timeline import TimelineFile

log = logging.getLogger(__name__)
_DEPTH = 2
"""Batches under way: one runs, one is queued behind it."""

Tokens = Mapping[str, SampledToken | None]


class _Launched(NamedTuple):
    batch: Batch
    start: float
    places: Mapping[str, int]
    """Where each row's token is among those that the pass leaves on the device."""
    may_be_followed: bool
    """Whether it leaves them there."""
    read: Callable[[], Tokens]
    """Waits for its tokens; again and again they are the same."""


class Ahead:
    """One model on one device, in this process; its runner must attend over blocks (`ModelRunner.kernels`)."""

    phases: tuple[str, ...] = ("",)
    num_prefill_stages = 1
    foresees = True

    def __init__(self, runner: ModelRunner, timeline: TimelineFile | None = None, room: Room | None = None) -> None:
        assert runner.kernels is not None
        self.room = room
        self.spec, self.runner, self._timeline = runner.spec, runner, timeline
        self._kernels = runner.kernels
        self._launched: deque[_Launched] = deque()
        self._last_end = 0.0

    @property
    def pending(self) -> bool:
        return bool(self._launched)

    def accepts(self, phase: str) -> bool:
        return len(self._launched) < _DEPTH and all(launched.may_be_followed for launched in self._launched)

    @torch.inference_mode()
    def start(self, batch: Batch) -> None:
        try:
            self._launched.append(self._launch(batch))
        except Exception:
            log.exception("a batch failed: %s", ", ".join(row.request_id for row in batch.prefill + batch.decode))
            self._launched.append(self._compute_each(batch))

    def results(self) -> Sequence[Done]:
        launched = self._launched.popleft()
        tokens = launched.read()
        start, self._last_end = max(launched.start, self._last_end), time.perf_counter()
        if self._timeline:
            self._timeline.add(launched.batch, 0, start, self._last_end)
        return (Done(launched.batch, tokens),)

    def wake(self) -> None:
        """What `results` waits for comes by itself."""

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

    def _launch(self, batch: Batch) -> _Launched:
        start = time.perf_counter()
        everyone, producing = as_rows(batch.prefill + batch.decode), producing_rows(batch, self.spec)
        places = self._launched[-1].places if self._launched else {}
        sources = {row.request_id: places[row.request_id] for row in everyone if not _is_known(row)}
        token_ids = {row.request_id: row.token_ids for row in everyone}
        logits_RV = self.runner.forward(batch, token_ids, sources=sources)
        picked = self._pick(logits_RV, producing)
        names = [row.request_id for row in producing]
        return _Launched(
            batch,
            start,
            places={name: place for place, name in enumerate(names)},
            may_be_followed=self.runner.leave(picked.token_R),
            read=lambda: dict(zip(names, picked.sampled(), strict=True)),
        )

    def _pick(self, logits_RV: Tensor, rows: Sequence[Row]) -> Picked:
        if self.runner.chosen is not None and all(row.plain for row in rows):
            return Picked(*self.runner.chosen, None)
        return pick(logits_RV, rows, self._kernels, positions=[row.num_output_tokens for row in rows])

    def _compute_each(self, batch: Batch) -> _Launched:
        """Row by row, after all tokens before it have come: whoever is to blame fails alone."""
        start = time.perf_counter()
        under_way = {name: token for launched in self._launched for name, token in launched.read().items()}
        token_ids = {}
        for row in as_rows(batch.prefill + batch.decode):
            last = None if _is_known(row) else under_way[row.request_id]
            token_ids[row.request_id] = [*row.token_ids, last.token_id] if last else row.token_ids

        def choose(logits_RV: Tensor, rows: Sequence[Row]) -> list[SampledToken | None]:
            return self._pick(logits_RV, rows).sampled()

        tokens = compute_each(self.runner, batch, token_ids, choose)
        return _Launched(batch, start, places={}, may_be_followed=False, read=lambda: tokens)


def _is_known(row: Row) -> bool:
    """Whether the host has all tokens of a row that is going to be started."""
    return len(row.token_ids) >= row.num_tokens
