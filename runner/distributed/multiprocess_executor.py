"""MultiprocessExecutor: an executor of several devices, a worker process each.

Every batch goes to all workers of its phase in one message, so that none waits for another's kernels to learn what is
next (ORCA, section 4.1); hidden states go from worker to worker without passing here. A stage reports when it has run a
batch: the first one is free then, the last one has tokens. On GPUs a batch may be sent while the first stage runs
another and before the tokens that it continues are known (`fed_tokens.py`).
A worker that dies is noticed by its closed channel, one that hangs by a batch that takes longer than the deadline.
"""

import contextlib
import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from msgspec.structs import replace

from exeplan.core.batch import Batch
from exeplan.core.models.model import ModelSpec
from exeplan.core.profile import ReferencePass
from exeplan.progress import OnProgress, no_progress
from exeplan.runner.compute.kv_budget import KVBudget
from exeplan.runner.compute.reference_passes import RepeatedPasses
from exeplan.runner.compute.weights.loading_bar import LoadingBar
from exeplan.runner.distributed.batch_messages import (
    batch_message,
    beginning,
    new_sequence,
    region_message,
    tokens_from,
)
from exeplan.runner.distributed.fed_tokens import most_fed, most_in_flight
from exeplan.runner.distributed.launcher import Launcher, LocalLauncher
from exeplan.runner.distributed.links import stage_ranks
from exeplan.runner.distributed.worker_group import Report, WorkerGroup, WorkerLoadError
from exeplan.runner.distributed.worker_reference import WorkerReferencePasses
from exeplan.runner.engine.executor import BatchDone, DeviceLostError, KVArrived, WorkerError, sampled_requests
from exeplan.runner.engine.kv_regions import KVRegion
from exeplan.runner.engine.requests import RequestState
from exeplan.runner.engine.timeline import TimelineFile
from exeplan.runner.ipc.messages import (
    BatchRan,
    EngineSetup,
    ExpectKV,
    KVReceived,
    KVRestored,
    KVSaved,
    ReferenceRan,
    RepeatReference,
    RestoreKV,
    SaveKV,
    WorkerCommand,
    WorkerEvent,
    WorkerFailed,
)

log = logging.getLogger(__name__)
_MAX_FAILED_STARTS = 3
"""Generations in a row that died early and without having finished a batch; after that no other is started."""
_LONG_LIFE_SECONDS = 10.0
_LATE_SECONDS = 5.0
_COPY_SECONDS = 60.0
"""At least, for keys and values of all requests to or from host memory."""
_DEPTH = 2
"""Batches that may be sent to a first stage of GPUs: one runs, one is queued behind it."""
_Done = TypeVar("_Done", KVSaved, KVRestored, ReferenceRan)


@dataclass(slots=True)
class _InFlight:
    """A batch on its way through the stages, and then to those that decode."""

    batch: Batch
    deadline: float
    stages: set[int]
    """Those that have not reported it; the last one may do so before the others."""
    awaiting: set[int]
    """Decoding ranks that have not received the batch's keys and values."""
    may_be_followed: bool
    """Whether its tokens are kept on the devices, so that another batch can continue them."""
    done: bool = False
    """Whether its last stage has reported it."""


class MultiprocessExecutor:
    """Runs batches on the workers of one generation, until one of them is lost."""

    def __init__(
        self,
        spec: ModelSpec,
        setup: EngineSetup,
        *,
        timeline: TimelineFile | None = None,
        on_loss: Callable[[], None] = lambda: None,
        on_progress: OnProgress = no_progress,
        launcher: Launcher | None = None,
    ) -> None:
        """`on_loss` is called, in some thread, when a worker has died: `results` raises then.

        `launcher` starts the workers, by default on this host.
        """
        self._launcher, self._on_progress = launcher or LocalLauncher(), on_progress
        self.spec, self._setup = spec, setup
        self._deadline, self._timeline, self._on_loss = setup.deadline_seconds, timeline, on_loss
        self.async_scheduling = setup.engine.device == "cuda"
        """A CPU computes when it is asked to, and its worker has the tokens as soon as the engine."""
        self._most_fed = most_fed(setup.schedule)
        placement = setup.placement
        self.phases = tuple(sorted({stage.phase for stage in placement}))
        ranks = stage_ranks(placement)
        self._stages = {
            phase: [number for number, stage in enumerate(placement) if stage.phase == phase] for phase in self.phases
        }
        self._ranks = {phase: [rank for n in stages for rank in ranks[n]] for phase, stages in self._stages.items()}
        self._all_ranks = [rank for group in ranks for rank in group]
        self._leaders = {group[0]: number for number, group in enumerate(ranks)}
        self.num_prefill_stages = len(self._stages[self.phases[-1]])
        self.num_decode_stages = len(self._stages[self.phases[0]])
        self.num_generations = 0
        self.on_reference: Callable[[ReferenceRan], None] = lambda ran: None
        self._failed_starts, self._began = 0, time.monotonic()
        self.kv_budget: KVBudget | None = None
        self._group: WorkerGroup | None = None
        self._encoded: dict[int, Batch] = {}
        """Prefills whose encoder output all stages have to take before they decode these rows, by number."""
        self._reset()
        self._begin()

    @property
    def pids(self) -> list[int]:
        return self._group.pids if self._group else []

    @property
    def num_workers(self) -> int:
        return len(self._all_ranks)

    @property
    def pending(self) -> bool:
        return bool(self._in_flight) or not self._reports.empty()

    def accepts(self, phase: str) -> bool:
        queued = self._queued.get(phase, ())
        if not (self.async_scheduling and queued):
            return not queued
        running = [entry for entry in self._in_flight.values() if entry.batch.phase == phase and not entry.done]
        most = most_in_flight(len(self._stages[phase]), self._setup.schedule.num_micro_batches)
        return len(queued) < _DEPTH and len(running) < most and all(entry.may_be_followed for entry in running)

    def start(self, batch: Batch) -> None:
        assert self._group is not None
        self._number += 1
        receiving = "decode" if batch.phase == "prefill" else None
        self._note_preempted()
        encoded = self._due_encoded(batch)
        message = batch_message(
            self._number, batch, freed=self._flush(batch.phase), encoded=encoded, news=self._told_now
        )
        self._group.send(self._ranks[batch.phase], message)
        awaiting: set[int] = set()
        if receiving:
            awaiting = set(self._ranks[receiving])
            new = [new_sequence(row) for row in beginning(batch)]
            expect = ExpectKV(number=self._number, freed=self._flush(receiving), new=new)
            self._group.send(self._ranks[receiving], expect)
        stages = set(self._stages[batch.phase])
        few = len(sampled_requests(batch, self.spec)) <= self._most_fed
        self._in_flight[self._number] = _InFlight(batch, time.monotonic() + self._deadline, stages, awaiting, few)
        self._queued.setdefault(batch.phase, deque()).append(self._number)
        self._hold(beginning(batch))
        if batch.prefill and self.spec.is_encoder_decoder and not batch.phase:
            self._encoded[self._number] = batch

    def results(self) -> Sequence[BatchDone | KVArrived]:
        found: list[BatchDone | KVArrived] = []
        self._take(self._next_report(), found)
        while not self._reports.empty():
            self._take(self._reports.get(), found)
        return found

    def wake(self) -> None:
        """Makes a waiting `results` return; any thread may call it."""
        self._reports.put(None)

    def release(self, request_id: str) -> None:
        if self._resident.pop(request_id, None):
            del self._told[request_id]
            for freed in self._freed.values():
                freed.append(request_id)

    def save(self, path: str, regions: Sequence[KVRegion]) -> Sequence[int]:
        self._note_preempted()
        encoded, self._encoded = list(self._encoded), {}
        placed = [region_message(region) for region in regions]
        command = SaveKV(freed=self._flush(self.phases[0]), path=path, regions=placed, encoded=encoded)
        saved = self._gather(self._ranks[self.phases[0]], command, KVSaved)
        return [min(stored) for stored in zip(*(one.stored for one in saved), strict=True)]

    def restore(self, path: str, regions: Sequence[KVRegion]) -> None:
        rows = [region.request for region in regions]
        self._hold(rows)
        new = [new_sequence(row) for row in rows]
        placed = [region_message(region) for region in regions]
        command = RestoreKV(freed=self._flush(self.phases[0]), path=path, regions=placed, new=new)
        self._gather(self._ranks[self.phases[0]], command, KVRestored)

    def reference_passes(self, passes: Sequence[ReferencePass]) -> RepeatedPasses | None:
        return WorkerReferencePasses(self, passes) if self._setup.engine.device == "cpu" else None

    def prepare_reference(self, passes: Sequence[ReferencePass]) -> None:
        """Has all workers make what they need for these passes, while no batch is in flight."""
        self._gather(self._all_ranks, RepeatReference(passes=passes), ReferenceRan)

    def repeat_reference(self, passes: Sequence[ReferencePass]) -> None:
        """Asks all workers for the next one of these; `on_reference` is called with what each of them reports."""
        assert self._group is not None
        self._group.send(self._all_ranks, RepeatReference(passes=passes))

    def restart(self) -> None:
        self._reset()
        self._begin()

    def close(self) -> None:
        if self._timeline and self._group:
            self._take_late()
        self._kill()
        if self._timeline:
            self._timeline.close()

    def _take_late(self) -> None:
        """Waits for reports that the timeline still lacks: other stages may report later than the last one."""
        due = time.monotonic() + _LATE_SECONDS
        with contextlib.suppress(queue.Empty, WorkerError):
            while self._in_flight:
                self._take(self._reports.get(timeout=max(due - time.monotonic(), 0.0)), [])

    def _kill(self) -> None:
        if self._group:
            self._group.kill()
            self._group = None

    def _reset(self) -> None:
        self._number = 0
        self._in_flight: dict[int, _InFlight] = {}
        self._queued: dict[str, deque[int]] = {}
        """By phase: batches that its first stage runs, or that wait for it."""
        self._resident: dict[str, RequestState] = {}
        self._told: dict[str, int] = {}
        """By request: tokens that its workers know."""
        self._freed: dict[str, list[str]] = {phase: [] for phase in self.phases}
        """By phase: requests that its workers are to forget with the next message."""
        self._encoded.clear()

    def _begin(self) -> None:
        """Starts a generation. Raises WorkerError when the last few did not live long enough to finish a batch,
        DeviceLostError where those that could not even load ended on the same device of this host."""
        self._kill()
        if time.monotonic() - self._began > _LONG_LIFE_SECONDS:
            self._failed_starts = 0
        not_loaded: list[int] = []
        while self._group is None:
            if self._failed_starts >= _MAX_FAILED_STARTS:
                self._check_device(not_loaded)
                raise WorkerError(f"{self._failed_starts} generations of workers in a row died before they ran a batch")
            self._failed_starts += 1
            self.num_generations += 1
            try:
                placement, dtype = self._setup.placement, self._setup.engine.dtype
                with LoadingBar(self.spec, placement, dtype, on_progress=self._on_progress) as bar:
                    self._group = WorkerGroup(
                        self._setup,
                        generation=self.num_generations,
                        on_loss=self._on_loss,
                        on_loading=bar.show,
                        launcher=self._launcher,
                    )
            except ChildProcessError as error:
                log.error("%s", error)
                not_loaded += [error.rank] if isinstance(error, WorkerLoadError) else []
        self._reports, self._began = self._group.reports, time.monotonic()
        if self.kv_budget is None and (budget := self._group.kv_budget):
            # Later generations take as much: running requests rely on it.
            engine = replace(self._setup.engine, num_blocks=budget.num_blocks)
            self.kv_budget, self._setup = budget, replace(self._setup, engine=engine, gpu_memory_utilization=None)

    def _check_device(self, not_loaded: Sequence[int]) -> None:
        """Raises DeviceLostError where several starts failed at the same rank; nodes of a cluster Ray watches."""
        if len(not_loaded) > 1 and len(set(not_loaded)) == 1 and self._setup.ray is None:
            devices = [device for stage in self._setup.placement for device in stage.devices]
            lost = devices[not_loaded[0]]
            raise DeviceLostError(lost, [device for device in devices if device != lost])

    def _next_report(self) -> Report | None:
        """None where `wake` was called."""
        now = time.monotonic()
        due = min((entry.deadline for entry in self._in_flight.values()), default=now + self._deadline)
        try:
            return self._reports.get(timeout=max(due - now, 0.0))
        except queue.Empty:
            if not self._in_flight:
                return None
            raise WorkerError(f"a batch took longer than {self._deadline:g} s: a worker hangs") from None

    def _gather(self, ranks: Sequence[int], command: WorkerCommand, done: type[_Done]) -> list[_Done]:
        """Has these ranks carry a command out, while no batch is in flight. Returns what they report."""
        assert self._group is not None
        self._group.send(ranks, command)
        waiting, found = set(ranks), []
        deadline = time.monotonic() + max(self._deadline, _COPY_SECONDS)
        while waiting:
            try:
                report = self._reports.get(timeout=max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                raise WorkerError(
                    f"workers {sorted(waiting)} did not finish {type(command).__name__} in time: they hang"
                ) from None
            if report and isinstance(report.event, done):
                waiting.discard(report.rank)
                found.append(report.event)
            else:  # Of a first stage, whose batch has left the last one.
                self._take(report, [])
        return found

    def _take(self, report: Report | None, found: list[BatchDone | KVArrived]) -> None:
        if report is None:
            return
        event = _sound(report)
        if isinstance(event, KVReceived):
            self._take_arrival(event.number, report.rank, found)
        elif isinstance(event, ReferenceRan):
            self.on_reference(event)
        elif isinstance(event, BatchRan):
            self._take_run(event, self._leaders[report.rank], found)

    def _take_run(self, ran: BatchRan, stage: int, found: list[BatchDone | KVArrived]) -> None:
        number = ran.number
        entry = self._in_flight[number]
        batch = entry.batch
        entry.deadline = time.monotonic() + self._deadline
        if self._timeline:
            self._timeline.add(batch, stage, ran.start, ran.end)
        stages = self._stages[batch.phase]
        entry.stages.discard(stage)
        if stage == stages[0]:
            self._queued[batch.phase].remove(number)
            for waiting in self._queued[batch.phase]:
                self._in_flight[waiting].deadline = entry.deadline
        if stage == stages[-1]:
            self._failed_starts = 0
            entry.done = True
            found.append(BatchDone(batch, tokens_from(ran.tokens)))
        self._settle(number, entry, found)

    def _take_arrival(self, number: int, rank: int, found: list[BatchDone | KVArrived]) -> None:
        entry = self._in_flight[number]
        entry.awaiting.discard(rank)
        self._settle(number, entry, found)

    def _settle(self, number: int, entry: _InFlight, found: list[BatchDone | KVArrived]) -> None:
        if not (entry.stages or entry.awaiting):
            del self._in_flight[number]
            if entry.batch.phase == "prefill":
                found.append(KVArrived(entry.batch))

    def _note_preempted(self) -> None:
        for request_id in [name for name, row in self._resident.items() if not row.num_blocks]:
            self.release(request_id)

    def _hold(self, rows: Sequence[RequestState]) -> None:
        """Rows that are sent whole."""
        for row in rows:
            self._resident[row.request_id], self._told[row.request_id] = row, len(row.token_ids)

    def _told_now(self, row: RequestState) -> Sequence[int]:
        """The tokens of a row that its workers have not been told, and are told with the next message."""
        news = row.token_ids[self._told[row.request_id] :]
        self._told[row.request_id] = len(row.token_ids)
        return news

    def _due_encoded(self, batch: Batch) -> list[int]:
        """Prefills whose encoder output is taken before this batch: of rows that it decodes, and what the last stage
        has made already; in their order, as it sends them."""
        decoded = {id(row) for row in batch.decode}
        made = [number for number in self._encoded if number not in self._in_flight or self._in_flight[number].done]
        needed = [n for n, other in self._encoded.items() if any(id(row) in decoded for row in other.prefill)]
        due = [number for number in self._encoded if number <= max([0, *made, *needed])]
        for number in due:
            del self._encoded[number]
        return due

    def _flush(self, phase: str) -> list[str]:
        freed, self._freed[phase] = self._freed[phase], []
        return freed


def _sound(report: Report) -> WorkerEvent:
    """The event of a worker that lives. Raises WorkerError for one that does not."""
    if report.event is None or isinstance(report.event, WorkerFailed):
        reason = "died" if report.event is None else f"failed: {report.event.message}"
        raise WorkerError(f"worker {report.rank} {reason}")
    return report.event
