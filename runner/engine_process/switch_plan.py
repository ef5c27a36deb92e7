"""PlanSwitcher: switches the running engine to another plan.

With the same devices, layers and KV cache only the schedule changes, between two batches, unless GPUs have captured
too little for it, or its batches may take longer than workers were started for. Otherwise new workers are built. On
CPUs a thread builds them while the old ones go on serving; where a device has no memory for two generations, the old
ones end first, and are started again if the new ones fail. Weights come from host memory, where several devices may
have to load other layers (`host_memory.py`).

The KV cache of running requests moves to the new workers (`kv_migration.py`) if both plans keep keys and values in the
same dtype, computed from weights of the same dtype, and on this host. Otherwise the requests are computed again.

Not here: which plan, and why (`exeplan.drift.watch`, `exeplan.runner.replan`).
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from exeplan.core.schedule import Schedule
from exeplan.errors import InputError
from exeplan.runner.ipc.host_memory import keep_weights
from exeplan.runner.ipc.messages import EngineSetup, PlanRefused, PlanSwitched, SwitchPlan

if TYPE_CHECKING:
    from exeplan.runner.engine.engine import Engine, Output
    from exeplan.runner.engine.executor import Executor

log = logging.getLogger(__name__)
_DEADLINES = 2.0
"""Of those that workers were started with, that a plan may have which they run: a pass takes a fifth of one at most."""


@dataclass(frozen=True, slots=True)
class ExecutorBuilt:
    """What the thread that builds the workers of a plan reports to the thread that runs the engine."""

    command: SwitchPlan
    executor: "Executor | None"
    reason: str
    """Why there is no executor."""


class PlanSwitcher:
    """Carries out SwitchPlan, one at a time."""

    def __init__(
        self,
        engine: "Engine",
        setup: EngineSetup,
        *,
        build: "Callable[[EngineSetup], Executor]",
        put: Callable[[ExecutorBuilt], None],
    ) -> None:
        """`build` makes the executor of a setup; `put` passes its argument to the thread that calls `take`."""
        self._engine, self._setup, self._build, self._put = engine, setup, build, put
        self._built_for = setup
        """What the executor was made for; since then the schedule may have changed, and the deadline become shorter."""
        self._building = False
        """Workers of another plan are being built."""
        directory = setup.model.directory if _num_devices(setup) > 1 else None
        self._kept = keep_weights(Path(directory) if directory else None)
        """What workers of later plans load from."""

    @property
    def setup(self) -> EngineSetup:
        """That of the plan that is running."""
        return self._setup

    def take(self, command: SwitchPlan | ExecutorBuilt, outputs: "list[Output]") -> PlanSwitched | PlanRefused | None:
        """Begins or finishes a switch. Adds to `outputs` what requests got meanwhile.

        Returns the answer; None while workers are being built.
        """
        switch = command if isinstance(command, SwitchPlan) else command.command
        try:
            if isinstance(command, SwitchPlan):
                return self._begin(command, outputs)
            self._building = False
            return self._finish(command, outputs)
        except InputError as error:
            return PlanRefused(number=switch.number, message=str(error))

    def _begin(self, command: SwitchPlan, outputs: "list[Output]") -> PlanSwitched | None:
        old, new = self._setup, command.setup
        if self._building:
            raise InputError("another plan is being loaded; try again when it runs")
        if new.model != old.model:
            raise InputError(f"the plan is for {new.model.name}; this server has {old.model.name}")
        if self._only_schedule_changes(new):
            return self._switch(command, outputs)
        if new.engine.device != "cpu" or new.ray:
            return self._switch(command, outputs, lambda: self._start(new), self._restore)
        self._building = True
        threading.Thread(target=self._prepare, args=(command,), daemon=True).start()
        return None

    def _only_schedule_changes(self, new: EngineSetup) -> bool:
        """Whether the devices already hold what the plan needs of them."""
        old = self._setup
        return (
            new.placement == old.placement
            and new.engine == replace(old.engine, num_blocks=new.engine.num_blocks)
            and new.num_threads == old.num_threads
            and new.engine.num_blocks <= self._engine.num_blocks
            and self._engine.fits_kv_budget(new.schedule)
            and (new.engine.device == "cpu" or self._has_room_for(new.schedule))
            and (not _has_workers(new) or new.deadline_seconds <= _DEADLINES * self._built_for.deadline_seconds)
        )

    def _has_room_for(self, schedule: Schedule) -> bool:
        """Whether GPUs keep tokens of as many batches, and have captured decode iterations of as many sequences."""
        from exeplan.scheduling.largest_passes import captured_rows

        built_for = self._built_for.schedule
        same = schedule.num_micro_batches == built_for.num_micro_batches
        return same and captured_rows(schedule) <= captured_rows(built_for)

    def _prepare(self, command: SwitchPlan) -> None:
        executor, reason = None, ""
        try:
            executor = self._start(command.setup)
        except InputError as error:
            reason = str(error)
        self._put(ExecutorBuilt(command, executor, reason))

    def _start(self, setup: EngineSetup) -> "Executor":
        """The executor of another plan. Raises InputError for whatever it cannot be built."""
        try:
            return self._build(setup)
        except InputError:
            raise
        except Exception as error:
            log.exception("the workers of another plan could not be started")
            raise InputError(f"its workers could not be started: {error}") from error

    def _restore(self) -> "Executor":
        """The executor of the plan that is running."""
        executor = self._build(self._setup)
        self._built_for = self._setup
        return executor

    def _finish(self, built: ExecutorBuilt, outputs: "list[Output]") -> PlanSwitched:
        executor = built.executor
        if executor is None:
            raise InputError(built.reason)
        try:
            return self._switch(built.command, outputs, lambda: executor)
        except InputError:
            executor.close()
            raise

    def _switch(
        self,
        command: SwitchPlan,
        outputs: "list[Output]",
        executor: "Callable[[], Executor] | None" = None,
        restore: "Callable[[], Executor] | None" = None,
    ) -> PlanSwitched:
        setup, began = command.setup, time.perf_counter()
        switched = self._engine.switch_plan(
            setup.schedule,
            executor=executor,
            restore=restore,
            num_blocks=setup.engine.num_blocks if executor else None,
            kv_dtype=self._kv_dtype(setup),
        )
        outputs += switched.outputs
        if setup.num_threads != self._setup.num_threads:
            _compute_with(setup.num_threads)
        self._setup = setup
        if executor:
            self._built_for = setup
        return PlanSwitched(
            number=command.number,
            num_blocks=self._engine.num_blocks,
            request_tokens=self._engine.request_tokens,
            seconds=time.perf_counter() - began,
            num_recomputed=switched.num_recomputed,
            num_carried=switched.num_carried,
        )

    def _kv_dtype(self, new: EngineSetup) -> str | None:
        """That of keys and values; None where workers of that setup cannot use those of the old ones."""
        old = self._setup
        if new.ray:
            return None
        before, after = (
            (setup.engine.kv_dtype or setup.engine.dtype, setup.engine.dtype, setup.engine.dummy_weights)
            for setup in (old, new)
        )
        return after[0] if before == after else None


def _compute_with(num_threads: int) -> None:
    """In the thread that calls this, which is to be the engine's: torch has a number for each."""
    import torch

    torch.set_num_threads(num_threads)


def _num_devices(setup: EngineSetup) -> int:
    return sum(stage.tensor_parallel_size for stage in setup.placement)


def _has_workers(setup: EngineSetup) -> bool:
    """Whether a process of its own runs each device, which is given up after the deadline that it was started with."""
    return _num_devices(setup) > 1 or setup.ray is not None
