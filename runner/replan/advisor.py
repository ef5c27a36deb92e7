"""Advisor: watches the lengths of a service and looks for better plans, in a process of its own that yields to others.

`python -m exeplan.runner.replan.advisor` reads messages from its input and answers on its output, one JSON object a
line:

    start     {plan, rules, fixed, file}       ready
    look      {now, left, running, vetoed}     looked {state, planned, observed, proposal}
    adopted   {now, plan}                      ready; the plan is None where it is the last proposal
    frontier  {}                               frontier {rows}

Each may be answered by refused {message} instead. The process runs at the lowest priority, so that a search costs the
engine little, and ends with its input. Linux may share processors out by session first (autogroups, sched(7)): then a
nice value counts within this session only, and the session has one of its own.
Not here: who asks, and what a proposal leads to (`replan.py`).
"""

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from exeplan.core.plan import Plan, as_json
from exeplan.drift.histograms import lengths_of
from exeplan.drift.length_monitor import Seen
from exeplan.drift.save_proposal import save_proposal
from exeplan.drift.state import Rules
from exeplan.drift.watch import Proposal, Watch
from exeplan.errors import InputError
from exeplan.planner.load_problem import plan_from, plan_problem
from exeplan.planner.problem import Problem

_NICENESS = 19
_AUTOGROUP, _SESSION_NICENESS = Path("/proc/self/autogroup"), 10
"""A tenth of what another session gets of a processor that both want: with less a search would not end in time."""
_READY: dict[str, Any] = {"kind": "ready"}


class Advisor:
    """One service's watch."""

    def __init__(self, start: Mapping[str, Any]) -> None:
        """Raises InputError where profile or workload of the plan are not at hand."""
        self._fixed, self._file = start["fixed"], start["file"] and Path(start["file"])
        plan = plan_from(start["plan"], folder=Path("/"))
        self._watch = Watch(plan, self._problem(plan), rules=Rules(**start["rules"]))
        self._last: Proposal | None = None

    def take(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Carries a message out and returns the answer."""
        kinds = {"look": self._look, "adopted": self._adopted, "frontier": self._frontier}
        return kinds[message["kind"]](message)

    def _problem(self, plan: Plan) -> Problem:
        problem = plan_problem(plan)
        return replace(problem, cluster=None) if self._fixed else problem

    def _look(self, message: Mapping[str, Any]) -> dict[str, Any]:
        watch = self._watch
        if message["vetoed"]:
            watch.vetoed(now=message["now"])
        watch.note([Seen(*row) for row in message["left"]], [Seen(*row) for row in message["running"]])
        state, proposal = watch.look(message["now"])
        planned, observed = lengths_of(watch.planned, watch.observed)
        found = {"kind": "looked", "state": asdict(state), "planned": asdict(planned), "proposal": None}
        if proposal:
            found["proposal"] = self._propose(proposal)
        return {**found, "observed": asdict(observed) if observed else None}

    def _propose(self, proposal: Proposal) -> dict[str, Any]:
        if self._file:
            proposal = replace(proposal, plan=save_proposal(proposal.plan, proposal.workload, self._file))
        self._last = proposal
        return {
            "plan": as_json(proposal.plan),
            "reason": proposal.reason,
            "old": asdict(proposal.old) if proposal.old else None,
            "new": asdict(proposal.new),
            "file": str(self._file) if self._file else None,
        }

    def _adopted(self, message: Mapping[str, Any]) -> dict[str, Any]:
        if message["plan"] is None:
            assert self._last is not None
            self._watch.adopted(self._last, now=message["now"])
        else:
            plan = plan_from(message["plan"], folder=Path("/"))
            self._watch.adopted(plan, now=message["now"], problem=self._problem(plan))
        return _READY

    def _frontier(self, message: Mapping[str, Any]) -> dict[str, Any]:
        from exeplan.planner.frontier_plot import frontier_rows
        from exeplan.planner.optimize import optimize, with_frontier

        problem = self._watch.problem
        found = optimize(problem, policies=self._watch.policies, advise=False).candidates
        results = {c.policy: with_frontier(problem, c, num_bounds=8) for c in found if c.search and c.placement}
        return {"kind": "frontier", "rows": [asdict(row) for row in frontier_rows(results)]}


def yield_to_others() -> None:
    """Puts this process last, and its session where processors are shared out by session."""
    os.nice(_NICENESS)
    with contextlib.suppress(OSError):  # No autogroups here: the nice value is all it takes.
        _AUTOGROUP.write_text(str(_SESSION_NICENESS))


def main() -> int:
    """Answers until its input ends."""
    yield_to_others()
    advisor: Advisor | None = None
    for line in sys.stdin:
        message, answer = json.loads(line), _READY
        try:
            if advisor is None:
                advisor = Advisor(message)
            else:
                answer = advisor.take(message)
        except InputError as error:  # Of the plan's files; or no plan keeps the bounds.
            answer = {"kind": "refused", "message": str(error)}
        print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
