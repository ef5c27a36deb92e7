"""Reference passes of several workers: each repeats them between its batches, with weights of its own.

A command goes to all workers at once, and each carries it out where it stands in the order of its batches, so that
nothing is drained. Where all stages are busy this delays every batch by one such pass, which is what is subtracted;
where a stage waits anyway, its pass costs less than that. They are repeated half as often as on one device therefore.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import geometric_mean
from typing import Protocol

from exeplan.core.profile import ReferencePass
from exeplan.core.runs.machine_speed import MachineSpeed, Restlessness, SpeedSample
from exeplan.runner.compute.reference_passes import EVERY_SECONDS, MOST_COST
from exeplan.runner.ipc.messages import ReferenceRan

_EVERY = 2 * EVERY_SECONDS


@dataclass(slots=True)
class _Round:
    """One repetition on all workers, as they report it."""

    generation: int
    """Of workers: a later one knows nothing of it."""
    began: float
    ran: list[ReferenceRan] = field(default_factory=list)


class Workers(Protocol):
    """What is asked of the executor; `on_reference` is called with each worker's report."""

    num_generations: int
    on_reference: Callable[[ReferenceRan], None]

    @property
    def num_workers(self) -> int: ...

    def prepare_reference(self, passes: Sequence[ReferencePass]) -> None: ...

    def repeat_reference(self, passes: Sequence[ReferencePass]) -> None: ...


class WorkerReferencePasses:
    """As `ReferencePasses`, but asked of workers: a round is a sample once all of them have reported it."""

    at_once = False

    def __init__(self, executor: Workers, passes: Sequence[ReferencePass]) -> None:
        self.passes = tuple(passes)
        self.samples: list[SpeedSample] = []
        self._executor = executor
        executor.prepare_reference(self.passes)
        executor.on_reference = self._take
        self._round: _Round | None = None
        self._restlessness = Restlessness()
        self._last_cost = 0.0

    def repeat_if_due(self, every: float = _EVERY) -> bool:
        """Asks the workers for the next pass if the last was asked for these seconds ago, less on a restless machine
        and longer if it takes long, and is done."""
        every *= self._restlessness.share
        every = max(every, self._last_cost / MOST_COST)
        now, executor, before = time.perf_counter(), self._executor, self._round
        known = before is not None and before.generation == executor.num_generations
        if before and known and (now < before.began + every or len(before.ran) < executor.num_workers):
            return False
        self._round = _Round(executor.num_generations, now)
        executor.repeat_reference(self.passes)
        return True

    def speed_from(self, began: float) -> MachineSpeed:
        """Of the samples since then, their times from there."""
        found = (replace(one, time=one.time - began) for one in self.samples if one.time >= began)
        return MachineSpeed(passes=self.passes, samples=tuple(found))

    def take(self) -> MachineSpeed:
        """Of the samples since the last call, which are not kept."""
        found, self.samples = MachineSpeed(passes=self.passes, samples=tuple(self.samples)), []
        return found

    def _take(self, ran: ReferenceRan) -> None:
        """The geometric means of the workers'; its cost is that of the one that took longest."""
        current = self._round
        if current is None or current.generation != self._executor.num_generations:
            return
        current.ran.append(ran)
        if len(current.ran) < self._executor.num_workers:
            return
        self._last_cost = cost = max(one.cost for one in current.ran)
        seconds = geometric_mean([one.seconds for one in current.ran])
        self._restlessness.add(ran.number, seconds)
        self.samples.append(
            SpeedSample(
                number=ran.number,
                time=time.perf_counter() - cost,
                seconds=seconds,
                cost=cost,
                others=geometric_mean([one.others for one in current.ran]),
            )
        )
