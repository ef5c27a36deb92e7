"""Workers: an executor of many devices, a process each.

Every batch goes to all workers of its phase in one message, so that none waits for another's kernels to learn what is
next (ORCA, section 4.1); what they compute on goes from one to the next without passing here. A stage tells when it has
run a batch: the first one is free then, the last one has tokens.
A worker that dies is noticed by its closed channel, one that hangs by a batch that takes longer than the deadline.
"""

import contextlib
import logging
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from exeplan.core.batch import Batch
from exeplan.core.model import ModelSpec
from exeplan.core.schedule import Placement
from exeplan.progress import OnProgress, no_progress
from exeplan.runner.compute.kv_budget import Room
from exeplan.runner.compute.loading_bar import LoadingBar
from exeplan.runner.distributed.batch_messages import batch_message, beginning, parcel_message, row_message, tokens_from
from exeplan.runner.distributed.launcher import Hosts, ThisHost
from exeplan.runner.distributed.links import stage_ranks
from exeplan.runner.distributed.worker_group import Report, WorkerGroup
from exeplan.runner.engine.executor import Arrived, Done, WorkerError
from exeplan.runner.engine.kv_regions import Parcel
from exeplan.runner.engine.requests import Row
from exeplan.runner.engine.timeline import TimelineFile

log = logging.getLogger(__name__)
_MAX_FAILED_STARTS = 3
"""Generations in a row that died young and without having finished a batch; after that there is no other."""
_LONG_LIFE_SECONDS = 10.0
_LATE_SECONDS = 5.0
_COPY_SECONDS = 60.0
"""At least, for keys and values of all requests to or from host memory."""


@dataclass(slots=True)
class _UnderWay:
    """A batch on its way through the stages, and then to those that decode."""

    batch: Batch
    deadline: float
    stages: set[int]
    """Those that have not said that they ran it; the last one may be heard before the others."""
    awaiting: set[int]
    """Decoding ranks that have not got what the batch hands over."""


class Workers:
    """Runs batches on the workers of one generation, until one of them is lost."""

    foresees = False

    def __init__(
        self,
        spec: ModelSpec,
        placement: Placement,
        setup: Mapping[str, Any],
        *,
        deadline_seconds: float,
        timeline: TimelineFile | None = None,
        on_loss: Callable[[], None] = lambda: None,
        on_progress: OnProgress = no_progress,
        hosts: Hosts | None = None,
    ) -> None:
        """`on_loss` is called, in some thread, when a worker has died: `results` raises then.

        `hosts` are where the devices are: here, unless it says otherwise.
        """
        self._hosts, self._on_progress = hosts or ThisHost(), on_progress
        self.spec, self._placement, self._setup = spec, placement, {**setup, "timeout": deadline_seconds}
        self._deadline, self._timeline, self._on_loss = deadline_seconds, timeline, on_loss
        self.phases = tuple(sorted({stage.phase for stage in placement}))
        ranks = stage_ranks(placement)
        self._stages = {
            phase: [number for number, stage in enumerate(placement) if stage.phase == phase] for phase in self.phases
        }
        self._ranks = {phase: [rank for n in stages for rank in ranks[n]] for phase, stages in self._stages.items()}
        self._leaders = {group[0]: number for number, group in enumerate(ranks)}
        self.num_prefill_stages = len(self._stages[self.phases[-1]])
        self.num_generations = 0
        self._failed_starts, self._began = 0, time.monotonic()
        self.room: Room | None = None
        self._group: WorkerGroup | None = None
        self._encoded: list[int] = []
        """Prefills whose encoder output all stages have to take before they decode."""
        self._reset()
        self._begin()

    @property
    def pids(self) -> list[int]:
        return self._group.pids if self._group else []

    @property
    def pending(self) -> bool:
        return bool(self._under_way) or not self._reports.empty()

    def accepts(self, phase: str) -> bool:
        return phase not in self._busy

    def start(self, batch: Batch) -> None:
        assert self._group is not None
        self._number += 1
        receiving = "decode" if batch.phase == "prefill" else None
        self._note_preempted()
        message = batch_message(self._number, batch, freed=self._flush(batch.phase))
        message["encoded"], self._encoded = self._encoded, []
        self._group.send(self._ranks[batch.phase], message)
        awaiting: set[int] = set()
        if receiving:
            awaiting = set(self._ranks[receiving])
            rows = [row_message(row) for row in beginning(batch)]
            expect = {"kind": "expect", "number": self._number, "new": rows, "freed": self._flush(receiving)}
            self._group.send(self._ranks[receiving], expect)
        stages = set(self._stages[batch.phase])
        self._under_way[self._number] = _UnderWay(batch, time.monotonic() + self._deadline, stages, awaiting)
        self._busy[batch.phase] = self._number
        self._resident.update((row.request_id, row) for row in beginning(batch))

    def results(self) -> Sequence[Done | Arrived]:
        found: list[Done | Arrived] = []
        self._take(self._next_report(), found)
        while not self._reports.empty():
            self._take(self._reports.get(), found)
        return found

    def wake(self) -> None:
        """Makes a waiting `results` return; any thread may call it."""
        self._reports.put(_NOTHING)

    def release(self, request_id: str) -> None:
        if self._resident.pop(request_id, None):
            for freed in self._freed.values():
                freed.append(request_id)

    def save(self, path: str, parcels: Sequence[Parcel]) -> Sequence[int]:
        self._note_preempted()
        encoded, self._encoded = self._encoded, []
        reports = self._tell("save", path, parcels, encoded=encoded)
        return [min(stored) for stored in zip(*(report["stored"] for report in reports), strict=True)]

    def restore(self, path: str, parcels: Sequence[Parcel]) -> None:
        rows = [parcel.row for parcel in parcels]
        self._resident.update((row.request_id, row) for row in rows)
        self._tell("restore", path, parcels, new=[row_message(row) for row in rows])

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
        """What stages have yet to say of batches, which may have left the last one before."""
        due = time.monotonic() + _LATE_SECONDS
        with contextlib.suppress(queue.Empty, WorkerError):
            while self._under_way:
                self._take(self._reports.get(timeout=max(due - time.monotonic(), 0.0)), [])

    def _kill(self) -> None:
        if self._group:
            self._group.kill()
            self._group = None

    def _reset(self) -> None:
        self._number = 0
        self._under_way: dict[int, _UnderWay] = {}
        self._busy: dict[str, int] = {}
        """The batch that the first stage of a phase runs."""
        self._resident: dict[str, Row] = {}
        self._freed: dict[str, list[str]] = {phase: [] for phase in self.phases}
        """By phase: requests that its workers have not been told to forget."""
        self._encoded.clear()

    def _begin(self) -> None:
        """A new generation. Raises WorkerError when the last few did not live long enough to finish a batch."""
        self._kill()
        if time.monotonic() - self._began > _LONG_LIFE_SECONDS:
            self._failed_starts = 0
        while self._group is None:
            if self._failed_starts >= _MAX_FAILED_STARTS:
                raise WorkerError(f"{self._failed_starts} generations of workers in a row died without doing anything")
            self._failed_starts += 1
            self.num_generations += 1
            try:
                dtype = self._setup["engine"]["dtype"]
                with LoadingBar(self.spec, self._placement, dtype, on_progress=self._on_progress) as bar:
                    self._group = WorkerGroup(
                        self._setup,
                        self._placement,
                        generation=self.num_generations,
                        on_loss=self._on_loss,
                        on_loading=bar.show,
                        hosts=self._hosts,
                    )
            except ChildProcessError as error:
                log.error("%s", error)
        self._reports, self._began = self._group.reports, time.monotonic()
        if self.room is None and (room := self._group.room):
            # Later generations take as much: what is running counts on it.
            fixed = {**self._setup["engine"], "num_blocks": room.num_blocks}
            self.room, self._setup = room, {**self._setup, "engine": fixed, "gpu_memory_utilization": None}

    def _next_report(self) -> Report:
        now = time.monotonic()
        due = min((entry.deadline for entry in self._under_way.values()), default=now + self._deadline)
        try:
            return self._reports.get(timeout=max(due - now, 0.0))
        except queue.Empty:
            if not self._under_way:
                return _NOTHING
            raise WorkerError(f"a batch took longer than {self._deadline:g} s: a worker hangs") from None

    def _tell(self, kind: str, path: str, parcels: Sequence[Parcel], **more: Any) -> list[Mapping[str, Any]]:
        """Has all who decode copy parcels, while nothing is under way. Returns what they report."""
        assert self._group is not None
        phase = self.phases[0]
        places = [parcel_message(parcel) for parcel in parcels]
        self._group.send(
            self._ranks[phase], {"kind": kind, "freed": self._flush(phase), "path": path, "parcels": places, **more}
        )
        waiting, found = set(self._ranks[phase]), []
        deadline = time.monotonic() + max(self._deadline, _COPY_SECONDS)
        while waiting:
            try:
                report = self._reports.get(timeout=max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                raise WorkerError(f"workers {sorted(waiting)} do not {kind} keys and values: they hang") from None
            message = _sound(*report)
            if message["kind"] == f"{kind}d":
                waiting.discard(report[0])
                found.append(message)
            else:  # Of a first stage, whose batch has left the last one.
                self._take(report, [])
        return found

    def _take(self, report: Report, found: list[Done | Arrived]) -> None:
        rank, message = report[0], _sound(*report)
        if message["kind"] == "arrived":
            self._take_arrival(message["number"], rank, found)
        elif message["kind"] == "ran":
            self._take_run(message, self._leaders[rank], found)

    def _take_run(self, message: Mapping[str, Any], stage: int, found: list[Done | Arrived]) -> None:
        number = message["number"]
        entry = self._under_way[number]
        batch = entry.batch
        entry.deadline = time.monotonic() + self._deadline
        if self._timeline:
            self._timeline.add(batch, stage, message["start"], message["end"])
        stages = self._stages[batch.phase]
        entry.stages.discard(stage)
        if stage == stages[0]:
            del self._busy[batch.phase]
        if stage == stages[-1]:
            self._failed_starts = 0
            found.append(Done(batch, tokens_from(message["tokens"])))
            if batch.prefill and self.spec.is_encoder_decoder and not batch.phase:
                self._encoded.append(number)
        self._settle(number, entry, found)

    def _take_arrival(self, number: int, rank: int, found: list[Done | Arrived]) -> None:
        entry = self._under_way[number]
        entry.awaiting.discard(rank)
        self._settle(number, entry, found)

    def _settle(self, number: int, entry: _UnderWay, found: list[Done | Arrived]) -> None:
        if not (entry.stages or entry.awaiting):
            del self._under_way[number]
            if entry.batch.phase == "prefill":
                found.append(Arrived(entry.batch))

    def _note_preempted(self) -> None:
        for request_id in [name for name, row in self._resident.items() if not row.num_blocks]:
            self.release(request_id)

    def _flush(self, phase: str) -> list[str]:
        freed, self._freed[phase] = self._freed[phase], []
        return freed


def _sound(rank: int, message: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if message is None or message["kind"] == "failed":
        reason = "died" if message is None else f"failed: {message['message']}"
        raise WorkerError(f"worker {rank} {reason}")
    return message


_NOTHING = Report(-1, {"kind": "nothing"})
