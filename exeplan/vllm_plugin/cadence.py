"""Cadence: round-robin allocation as a plan states it, and the scheduler mixin that holds vLLM's scheduler to it.

A cycle is one pass in which `prefill_batch` requests are prefilled and nothing decodes, and `decode_steps` passes in
which nothing is prefilled (`policies/rra.py`). Where none waits at the end of a cycle decoding goes on, and where
nothing is left to decode the next prefill comes at once. The policy's own function chooses from exeplan's queue, which
vLLM does not have, so its rule stands here again: a test holds both to the same passes. vLLM differs where it must: a
prompt longer than the tokens of a pass is cut, its rest prefilled in further passes; what it preempts for want of KV
blocks waits for the next prefill; and no more requests run than its --max-num-seqs.

vLLM's interface for schedulers is not public. What is used of it, 0.31 to 0.33: `schedule(throttle_prefills)`,
`running`, `waiting`, `max_num_active_reqs`, and a request's `is_prefill_chunk`.
"""

import json
import logging
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exeplan.core.schedule import Schedule
from exeplan.errors import InputError

PLAN_VARIABLE, TRACE_VARIABLE = "EXEPLAN_PLAN", "EXEPLAN_TRACE"
_NEEDED = ("running", "waiting", "max_num_active_reqs")
log = logging.getLogger("vllm.exeplan")
"""Under vLLM's logger, whose handlers it has."""


@dataclass(slots=True)
class Cadence:
    """Where a cycle is."""

    prefill_batch: int
    decode_steps: int
    decodes_left: int = 0

    @classmethod
    def of_schedule(cls, schedule: Schedule) -> "Cadence":
        """Raises InputError for another policy, and for several micro-batches."""
        if schedule.policy != "rra":
            raise InputError(f"the plug-in keeps the cadence of rra plans; the plan's policy is {schedule.policy}")
        if schedule.num_micro_batches > 1:
            raise InputError("the plug-in runs one micro-batch, as a vLLM without pipeline stages does")
        for name in ("adjust_percent", "max_num_batched_tokens"):
            if name in schedule.variables:
                raise InputError(f"the plug-in does not keep the plan's {name}; plan without it")
        return cls(schedule["prefill_batch"], schedule["decode_steps"])

    def num_prefilled(self, *, waiting: int, running: int) -> int:
        """Requests to prefill in the next pass; 0 for a pass that decodes."""
        return 0 if running and self.decodes_left > 0 else min(waiting, self.prefill_batch)

    def passed(self, *, prefilled: bool) -> None:
        """A pass was scheduled."""
        self.decodes_left = self.decode_steps if prefilled else self.decodes_left - 1


@dataclass(slots=True)
class _PlanFile:
    """A plan's schedule, read again when the file has changed."""

    path: Path
    _seen: tuple[int, int] | None = field(default=None, init=False)

    def changed(self) -> Cadence | None:
        """The cadence of a file that is new; None of one that is as before, or gone.

        Raises InputError for a file that is no such plan."""
        try:
            stat = self.path.stat()
        except OSError:
            if self._seen is None:
                raise InputError(f"{PLAN_VARIABLE}: there is no plan {self.path}") from None
            return None
        if self._seen == (now := (stat.st_mtime_ns, stat.st_size)):
            return None
        self._seen = now
        from exeplan.planner.load_problem import load_plan

        return Cadence.of_schedule(load_plan(self.path).schedule)


class CadenceMixin:
    """Before one of vLLM's schedulers: admits requests as the cadence says, and hides those that decode meanwhile."""

    running: list[Any]
    waiting: Any
    max_num_active_reqs: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in _NEEDED:
            if not hasattr(self, name):
                raise InputError(f"this vLLM's scheduler has no '{name}'; the plug-in is for vLLM 0.31 to 0.33")
        if not (path := os.environ.get(PLAN_VARIABLE)):
            raise InputError(f"set {PLAN_VARIABLE} to the plan whose cadence vLLM is to keep")
        self._plan_file = _PlanFile(Path(path))
        cadence = self._plan_file.changed()
        assert cadence
        self._cadence, self._most = cadence, self.max_num_active_reqs
        self._trace = open(trace, "a", buffering=1) if (trace := os.environ.get(TRACE_VARIABLE)) else None  # noqa: SIM115
        self._deviations: Counter[str] = Counter()
        log.info("exeplan: %s", cadence)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """One pass: a prefill of so many requests, or one that decodes."""
        cut = [request for request in self.running if request.is_prefill_chunk]
        wanted = 0
        if not cut:
            due = self._cadence.num_prefilled(waiting=len(self.waiting), running=len(self.running))
            wanted = max(min(due, self._most - len(self.running)), 0)
            if wanted < due:
                self._deviate("fewer were prefilled than planned, as --max-num-seqs run already")
        output = self._prefill(cut, wanted) if cut or wanted else self._decode()
        self._account(output, cut=len(cut), wanted=wanted)
        return output

    def _prefill(self, cut: list[Any], wanted: int) -> Any:
        """Of prompts alone: the rest of one that was cut, or so many that wait."""
        decoding = [request for request in self.running if not request.is_prefill_chunk]
        self.running, self.max_num_active_reqs = cut.copy(), len(cut) + wanted
        try:
            return super().schedule()  # type: ignore[misc]
        finally:
            self.running, self.max_num_active_reqs = decoding + self.running, self._most

    def _decode(self) -> Any:
        self.max_num_active_reqs = 0
        try:
            return super().schedule()  # type: ignore[misc]
        finally:
            self.max_num_active_reqs = self._most

    def shutdown(self) -> None:
        """Says how often the cadence was not kept."""
        told = ", ".join(f"{number} times {what}" for what, number in self._deviations.items())
        log.info("exeplan: the cadence was kept%s", f" but {told}" if told else "")
        if self._trace:
            self._trace.close()
            self._trace = None
        super().shutdown()  # type: ignore[misc]

    def _account(self, output: Any, *, cut: int, wanted: int) -> None:
        """Of a pass that was scheduled: what is due next, what the trace says, and where it is not the plan's."""
        scheduled = len(output.num_scheduled_tokens)
        if not scheduled:
            if wanted:  # Decode, and try again.
                self._cadence.decodes_left = 1
                self._deviate("there was no room for a prefill")
            return
        prefilled = bool(cut or wanted)
        if prefilled and scheduled < cut + wanted:
            self._deviate("fewer were prefilled than planned, for want of tokens or KV blocks")
        if cut:
            self._deviate("a prompt took several passes")
        if not prefilled and output.preempted_req_ids:
            self._deviate("requests were preempted")
        self._cadence.passed(prefilled=prefilled)
        if self._trace:
            kind = "prefill" if prefilled else "decode"
            row = {"pass": kind, "num_seqs": scheduled, "tokens": output.total_num_scheduled_tokens}
            self._trace.write(json.dumps({**row, "running": len(self.running), "waiting": len(self.waiting)}) + "\n")
        if prefilled:
            self._follow_plan()

    def _deviate(self, what: str) -> None:
        if what not in self._deviations:
            log.warning("exeplan: %s", what)
        self._deviations[what] += 1

    def _follow_plan(self) -> None:
        """Takes the cadence of a plan whose file has changed."""
        try:
            cadence = self._plan_file.changed()
        except InputError as error:
            log.warning("exeplan: the changed plan is not taken: %s", error)
            return
        if cadence:
            cadence.decodes_left = min(self._cadence.decodes_left, cadence.decode_steps)
            log.info("exeplan: now %s", cadence)
            self._cadence = cadence
