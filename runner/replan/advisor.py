"""Advisor: watches the lengths of a service's requests and looks for better plans, in a process that yields to others.

`python -m exeplan.runner.replan.advisor` answers every AdvisorRequest of its input with an AdvisorReply on its output
(`exeplan.runner.ipc.messages`), and ends with its input. Unless it is urgent, it runs at the lowest priority, so that a
search costs the engine little. Linux may share processors out by session first (autogroups, sched(7)): then a nice
value counts within the session only, so this process has a session of its own, whose value it lowers, too.
Not here: what asks, and what a proposal leads to (`replanner.py`).
"""

import contextlib
import itertools
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import assert_never

from exeplan.core.plan import Plan, as_json
from exeplan.drift.devices_left import plan_for_left
from exeplan.drift.group_watch import GroupWatch
from exeplan.drift.histograms import lengths_of
from exeplan.drift.save_proposal import remove_lengths, same_lengths, save_proposal
from exeplan.drift.state import Rules
from exeplan.drift.watch import Proposal, Watch
from exeplan.errors import InputError
from exeplan.planner.load_problem import plan_from, plan_problems
from exeplan.planner.problems.problem import Problem
from exeplan.runner import logs
from exeplan.runner.ipc.frames import MessageError, frame
from exeplan.runner.ipc.messages import (
    ADVISOR_REQUESTS,
    AdvisorReady,
    AdvisorRefused,
    AdvisorReply,
    AdvisorRequest,
    FrontierRows,
    GetFrontier,
    LeftPlanned,
    Look,
    Looked,
    PlanAdopted,
    PlanForLeft,
    ProposedPlan,
    WatchPlan,
)
from exeplan.runner.replan.advisor_process import URGENT

log = logging.getLogger("exeplan.replan")
_NICENESS = 19
_AUTOGROUP, _SESSION_NICENESS = Path("/proc/self/autogroup"), 10
"""A tenth of what another session gets of a processor that both want: with less a search would not end in time."""

_KEPT = 8
"""Proposals that may yet be adopted: a search may find another while the service decides about the last one."""


class Advisor:
    """The watch of one service."""

    def __init__(self, start: WatchPlan) -> None:
        """Raises InputError where profile or workload of the plan cannot be read."""
        self._file = Path(start.file) if start.file else None
        plan = plan_from(start.plan, folder=Path("/"))
        self._rules = start.rules
        self._watch = _watch(plan, plan_problems(plan), start.rules)
        self._numbers = itertools.count(1)
        self._proposals: dict[int, Proposal] = {}
        """By number: what was last proposed in place of the active plan."""
        self._saved: list[Plan] = []
        """Proposals that were written and not adopted, while their lengths are there."""

    def take(self, request: WatchPlan | Look | PlanAdopted | GetFrontier) -> AdvisorReply:
        """Carries a request out. Raises InputError where it cannot."""
        match request:
            case Look():
                return self._look(request)
            case PlanAdopted():
                return self._adopted(request)
            case GetFrontier():
                return self._frontier()
            case WatchPlan():
                raise MessageError("the first request, and no other, must be WatchPlan")
            case _:
                assert_never(request)

    def _look(self, look: Look) -> Looked:
        watch = self._watch
        if look.vetoed:
            watch.vetoed(now=look.now)
        if look.resumed:
            watch.resumed()
        if isinstance(watch, Watch):
            watch.num_blocks = next(iter(look.num_blocks), None)
        else:
            watch.note_blocks(look.num_blocks)
        watch.note(look.left, look.running)
        state, proposal = watch.look(look.now)
        planned, observed = lengths_of(watch.planned, watch.observed)
        proposed = self._propose(proposal) if proposal else None
        return Looked(state=state, planned=planned, observed=observed, proposal=proposed, none_better=watch.none_better)

    def _propose(self, proposal: Proposal) -> ProposedPlan:
        if self._file:
            proposal = replace(proposal, plan=save_proposal(proposal, self._file))
            self._saved.append(proposal.plan)
        number = next(self._numbers)
        self._proposals = dict([*self._proposals.items(), (number, proposal)][-_KEPT:])
        self._remove_lengths()
        return ProposedPlan(
            number=number,
            plan=as_json(proposal.plan),
            reason=proposal.reason,
            old=proposal.old,
            new=proposal.new,
            file=str(self._file) if self._file else None,
        )

    def _adopted(self, adopted: PlanAdopted) -> AdvisorReady:
        if isinstance(adopted.plan, int):
            self._watch.adopted(self._proposals[adopted.plan], now=adopted.now)
        else:
            plan = plan_from(adopted.plan, folder=Path("/"))
            problems = plan_problems(plan)
            if len(plan.groups) != len(self._watch.plan.groups):
                self._watch = _watch(plan, problems, self._rules)
            self._watch.adopted(plan, now=adopted.now, problems=problems)
        self._proposals.clear()
        self._saved = [one for one in self._saved if not same_lengths(one, self._watch.plan)]
        self._remove_lengths()
        return AdvisorReady()

    def _remove_lengths(self) -> None:
        """Of proposals that can no longer be adopted, by their number or by a plan's file."""
        if self._file:
            kept = [self._watch.plan, *(one.plan for one in self._proposals.values())]
            cleared = remove_lengths(self._saved, kept, self._file)
            self._saved = [*cleared.left]
            for file in cleared.removed:
                log.info("removed %s, the lengths of a proposal that was replaced and not adopted", file)

    def _frontier(self) -> FrontierRows:
        from exeplan.planner.choice.optimize import optimize, with_frontier
        from exeplan.planner.reports.frontier_plot import frontier_rows

        problem = self._watch.problem
        found = optimize(problem, policies=self._watch.policies, advise=False).candidates
        results = {c.policy: with_frontier(problem, c, num_bounds=8) for c in found if c.search and c.placement}
        return FrontierRows(rows=[asdict(row) for row in frontier_rows(results)])


def _watch(plan: Plan, problems: Sequence[Problem], rules: Rules) -> Watch | GroupWatch:
    """`problems` are those of each group of replicas."""
    if len(problems) == 1:
        return Watch(plan, problems[0], rules=rules)
    return GroupWatch(plan, problems, rules=rules)


def plan_left(request: PlanForLeft) -> LeftPlanned:
    """Raises InputError where nothing can be planned for these devices."""
    found = plan_for_left(plan_from(request.plan, folder=Path("/")), request.replica, request.by_node)
    return LeftPlanned(plan=as_json(found.plan), missed=found.missed, verdict=found.verdict)


def yield_to_others() -> None:
    """Lowers the priority of this process, and of its session where processors are shared out by session."""
    os.nice(_NICENESS)
    with contextlib.suppress(OSError):  # No autogroups here: the nice value is all it takes.
        _AUTOGROUP.write_text(str(_SESSION_NICENESS))


def main() -> int:
    """Answers until its input ends. Returns 1 where that is no AdvisorRequest."""
    logs.configure_child()
    if URGENT not in sys.argv[1:]:
        yield_to_others()
    output, sys.stdout = sys.stdout.buffer, sys.stderr  # What anything prints is no reply.
    advisor: Advisor | None = None
    reply: AdvisorReply
    try:
        while (request := ADVISOR_REQUESTS.read(sys.stdin.buffer.read)) is not None:
            try:
                if isinstance(request, PlanForLeft):
                    reply = plan_left(request)
                elif advisor is None:
                    advisor, reply = _started(request)
                else:
                    reply = advisor.take(request)
            except InputError as error:  # Of the plan's files; or no plan keeps the bounds.
                reply = AdvisorRefused(message=str(error))
            output.write(frame(reply))
            output.flush()
    except MessageError as error:
        print(f"exeplan.replan: {error}", file=sys.stderr)
        return 1
    return 0


def _started(request: AdvisorRequest) -> tuple[Advisor, AdvisorReply]:
    if not isinstance(request, WatchPlan):
        raise MessageError(f"the first request must be WatchPlan, found {type(request).__name__}")
    return Advisor(request), AdvisorReady()


if __name__ == "__main__":
    sys.exit(main())
