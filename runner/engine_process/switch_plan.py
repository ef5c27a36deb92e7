"""Adoption: another plan carried out in the running engine's process, and what that process tells of lengths.

With the same devices, layers and room for keys and values only the schedule changes, between two batches. Otherwise new
workers are built: on CPUs beside the old ones, in a thread, so that these serve until the new ones have loaded; where
devices have no room for two, after them, and the old ones again where that fails. Weights come from host memory, where
several devices might have to load others (`host_memory`).

Keys and values of running requests are carried over (`carrying`) where both plans keep them in the same dtype, made by
weights of the same dtype, and on this host; otherwise they are computed again.

Not here: which plan, and why (`exeplan.drift.watch`, `replan`).
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exeplan.errors import InputError
from exeplan.runner.compute.kv_budget import schedule_of
from exeplan.runner.ipc.host_memory import keep_weights

if TYPE_CHECKING:
    from exeplan.runner.engine.engine import Engine, Output
    from exeplan.runner.engine.executor import Executor

log = logging.getLogger(__name__)


def _num_devices(setup: Mapping[str, Any]) -> int:
    return sum(len(stage["devices"]) for stage in setup["placement"])


class Adoption:
    """Takes the messages `census` and `adopt`, one plan at a time, and `built`, which comes from its own thread."""

    def __init__(
        self,
        engine: "Engine",
        setup: Mapping[str, Any],
        *,
        build: "Callable[[Mapping[str, Any]], Executor]",
        put: Callable[[dict[str, Any]], None],
    ) -> None:
        """`build` makes the executor of a setup; `put` passes a message to the thread that calls `take`."""
        self._engine, self._setup, self._build, self._put = engine, setup, build, put
        self._coming: Mapping[str, Any] | None = None
        """The message whose workers are being built."""
        directory = setup["model"]["directory"] if _num_devices(setup) > 1 else None
        self._kept = keep_weights(directory and Path(directory))
        """What workers of later plans load from."""

    def take(self, message: Mapping[str, Any], outputs: "list[Output]") -> dict[str, Any] | None:
        """Carries a message out; what requests got meanwhile is added to the outputs. Returns the answer, if any."""
        if message["kind"] == "census":
            return self._census()
        try:
            if message["kind"] == "built":
                coming, self._coming = self._coming, None
                assert coming is not None
                return self._finish(coming, message, outputs)
            return self._begin(message, outputs)
        except InputError as error:
            return {"kind": "not-adopted", "number": message["number"], "message": str(error)}

    def _census(self) -> dict[str, Any]:
        census = self._engine.census()
        return {"kind": "census", "now": census.now, "left": census.left, "running": census.running}

    def _begin(self, message: Mapping[str, Any], outputs: "list[Output]") -> dict[str, Any] | None:
        setup = message["setup"]
        if self._coming is not None:
            raise InputError("another plan is being loaded; try again when it runs")
        if setup["model"] != self._setup["model"]:
            raise InputError(
                f"the plan is for {setup['model']['name']}; this server has {self._setup['model']['name']}"
            )
        if self._stays(setup):
            return self._switch(message, outputs)
        if setup["engine"]["device"] != "cpu" or setup["hosts"]:
            old = self._setup
            return self._switch(message, outputs, lambda: self._build(setup), lambda: self._build(old))
        self._coming = message
        threading.Thread(target=self._prepare, args=(message,), daemon=True).start()
        return None

    def _stays(self, setup: Mapping[str, Any]) -> bool:
        """Whether the devices hold already what the plan needs of them."""
        old, new = ({**one["engine"], "num_blocks": 0} for one in (self._setup, setup))
        return (
            setup["placement"] == self._setup["placement"]
            and old == new
            and setup["num_threads"] == self._setup["num_threads"]
            and setup["engine"]["num_blocks"] <= self._engine.num_blocks
            and self._engine.has_room_for(schedule_of(setup))
        )

    def _prepare(self, message: Mapping[str, Any]) -> None:
        executor, reason = None, ""
        try:
            executor = self._build(message["setup"])
        except InputError as error:
            reason = str(error)
        except Exception as error:
            log.exception("the workers of another plan could not be started")
            reason = f"its workers could not be started: {error}"
        self._put({"kind": "built", "number": message["number"], "executor": executor, "reason": reason})

    def _finish(self, coming: Mapping[str, Any], built: Mapping[str, Any], outputs: "list[Output]") -> dict[str, Any]:
        executor = built["executor"]
        if executor is None:
            raise InputError(built["reason"])
        try:
            return self._switch(coming, outputs, lambda: executor)
        except InputError:
            executor.close()
            raise

    def _switch(
        self,
        message: Mapping[str, Any],
        outputs: "list[Output]",
        executor: "Callable[[], Executor] | None" = None,
        restore: "Callable[[], Executor] | None" = None,
    ) -> dict[str, Any]:
        setup, began = message["setup"], time.perf_counter()
        switched = self._engine.adopt(
            schedule_of(setup),
            executor=executor,
            restore=restore,
            num_blocks=setup["engine"]["num_blocks"] if executor else None,
            kv_dtype=self._kv_dtype(setup),
        )
        outputs += switched.outputs
        self._setup = setup
        return {
            "kind": "adopted",
            "number": message["number"],
            "num_blocks": self._engine.num_blocks,
            "seconds": time.perf_counter() - began,
            "num_recomputed": switched.num_recomputed,
            "num_carried": switched.num_carried,
        }

    def _kv_dtype(self, setup: Mapping[str, Any]) -> str | None:
        """That of keys and values; None where workers of that setup cannot use those that there are."""
        if self._setup["hosts"] or setup["hosts"]:
            return None
        old, new = (
            (engine["kv_dtype"] or engine["dtype"], engine["dtype"], engine["dummy_weights"])
            for engine in (self._setup["engine"], setup["engine"])
        )
        return new[0] if old == new else None
