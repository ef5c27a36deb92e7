"""Watches how fast the machine is while an engine serves: the profile's reference passes between its iterations.

Not here: what is done about it. The server shows it (`server/metrics.py`), `exeplan bench` corrects a run by it.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from exeplan.core.schedule import num_devices
from exeplan.runner.ipc.messages import EngineSetup

if TYPE_CHECKING:
    from exeplan.runner.compute.reference_passes import RepeatedPasses
    from exeplan.runner.engine.engine import Engine

T = TypeVar("T")


class SpeedWatch:
    """Repeats the passes of a setup while the engine works; without any it does nothing."""

    def __init__(self, engine: "Engine", setup: EngineSetup) -> None:
        self._engine = engine
        self._reference: RepeatedPasses | None = None
        self._wall = self._cpu = 0.0
        """What iterations took since the last reference pass."""
        self.renew(setup)

    def renew(self, setup: EngineSetup) -> None:
        """The engine runs this setup, and may have another executor, which has to load what the passes need."""
        alone = num_devices(setup.placement) == 1 and setup.ray is None
        self._one_thread = alone and setup.num_threads == 1
        """The engine computes in the thread that calls this, so that its CPU clock tells what other processes took;
        elsewhere the reference passes tell it."""
        self._reference = self._engine.reference_passes(setup.reference_passes)

    def timed(self, step: Callable[[], T]) -> T:
        """Runs an iteration."""
        if self._reference is None:
            return step()
        wall, cpu = time.perf_counter(), time.thread_time()
        result = step()
        self._wall += time.perf_counter() - wall
        self._cpu += time.thread_time() - cpu
        return result

    def look(self) -> dict[str, float]:
        """Runs the next pass if it is due. Returns what has been found since the last look, as fields of `Stats`."""
        if self._reference is None:
            return {}
        self._reference.repeat_if_due()
        speed = self._reference.take()
        if not speed.samples:
            return {}
        others = max(self._wall / self._cpu, 1.0) if self._one_thread and self._cpu else speed.others
        self._wall = self._cpu = 0.0
        return {"slowness": speed.mean * others, "reference_seconds": speed.cost}
