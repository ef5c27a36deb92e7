"""GroupWatch: whether a plan whose replicas are not equal is still the right one, group by group.

All groups serve the same requests, by the router's law, so that they share the lengths that were seen; each has a Watch
of its own, with the problem of one of its replicas. A proposal changes the replicas of one group, and of those whose
proposals are neither adopted nor vetoed yet; what another group gains is proposed at a later look. Figures are of all
replicas together.

Not here: how many replicas there are, and on which GPUs: a running service keeps these.
"""

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from exeplan.core.plan import Plan, group_plans, with_group
from exeplan.core.schedule import Estimate
from exeplan.drift.length_monitor import LengthMonitor
from exeplan.drift.served import served
from exeplan.drift.state import DriftState, RequestLengths, Rules
from exeplan.drift.watch import Proposal, Watch
from exeplan.errors import Infeasible
from exeplan.planner.problems.headroom import with_headroom
from exeplan.planner.problems.problem import Problem
from exeplan.planner.problems.replicas import together
from exeplan.workload.workload import Workload


class GroupWatch:
    """A Watch of a plan with several groups of replicas; its members are those of Watch."""

    def __init__(
        self,
        plan: Plan,
        problems: Sequence[Problem],
        *,
        rules: Rules | None = None,
        policies: tuple[str, ...] | None = None,
    ) -> None:
        """`problems` are those of one replica of each group, on its placement."""
        self.plan, self.monitor = plan, LengthMonitor()
        pairs = zip(group_plans(plan), problems, strict=True)
        self._watches = [
            Watch(own, problem, rules=rules, policies=policies, monitor=self.monitor) for own, problem in pairs
        ]
        self._pending: dict[int, Proposal] = {}
        """Own proposals of groups, by number, that are neither adopted nor vetoed."""
        self.none_better = False
        """See `Watch.none_better`: of no group."""

    @property
    def problem(self) -> Problem:
        """Of one replica of the first group."""
        return self._watches[0].problem

    @property
    def policies(self) -> tuple[str, ...]:
        return self._watches[0].policies

    @property
    def planned(self) -> Workload:
        """See `Watch.planned`: of the first group."""
        return self._watches[0].planned

    @property
    def observed(self) -> Workload | None:
        return self._watches[0].observed

    def note(self, ended: Iterable[RequestLengths], running: Sequence[RequestLengths]) -> None:
        """See `LengthMonitor.note`."""
        self.monitor.note(ended, running)

    def note_blocks(self, num_blocks: Sequence[int | None]) -> None:
        """`Watch.num_blocks` of each group; nothing where that is not known."""
        for watch, blocks in itertools.zip_longest(self._watches, num_blocks[: len(self._watches)]):
            watch.num_blocks = blocks

    def adopted(self, proposal_or_plan: Proposal | Plan, *, now: float, problems: Sequence[Problem] = ()) -> None:
        """The service runs this plan now; `problems` as at the start, of a plan that is no proposal."""
        self._pending.clear()
        if isinstance(proposal_or_plan, Plan):
            self.plan = proposal_or_plan
            for watch, own, problem in zip(self._watches, group_plans(self.plan), problems, strict=True):
                watch.adopted(own, now=now, problems=[problem])
            return
        self.dwell(now=now)
        for number, proposal in proposal_or_plan.own.items():
            self._watches[number].adopted(proposal, now=now)
        self.plan = proposal_or_plan.plan

    def resumed(self) -> None:
        """See `Watch.resumed`: of all groups, as what one serves late others may have served."""
        for watch in self._watches:
            watch.resumed()

    def dwell(self, *, now: float) -> None:
        """See `Watch.dwell`: for no group."""
        for watch in self._watches:
            watch.dwell(now=now)

    def is_no_better(self, proposal: Proposal, earlier: Plan) -> bool:
        """Whether the groups are the same; what others serve under these lengths is not compared."""
        both = proposal.plan.groups, earlier.groups
        new, old = ([(one.schedule, one.placement, one.first_devices) for one in groups] for groups in both)
        return new == old

    def vetoed(self, *, now: float) -> None:
        """See `Watch.vetoed`: for no group."""
        self._pending.clear()
        for watch in self._watches:
            watch.vetoed(now=now)

    def look(self, now: float, *, predict: bool = True) -> tuple[DriftState, Proposal | None]:
        """See `Watch.look`: the first group's state without a proposal, else that of the group which it is for, but for
        the prediction, which is of all replicas."""
        states, withdrawn, self.none_better = [], False, False
        for number, watch in enumerate(self._watches):
            state, proposal = watch.look(now, predict=predict)
            if proposal:
                return self._propose(number, state, proposal)
            if watch.none_better:
                withdrawn |= self._pending.pop(number, None) is not None
            states.append(state)
        if withdrawn:
            self._pending = {n: one for n, one in self._pending.items() if self._served(n, one.plan)}
            if self._pending:  # What is left of the last proposal is one.
                number, own = next(iter(self._pending.items()))
                return self._propose(number, states[number], own)
        self.none_better = not self._pending and any(watch.none_better for watch in self._watches)
        first = states[0]
        return replace(first, predicted=first.predicted and self._estimate(self.plan)), None

    def _propose(self, number: int, state: DriftState, proposal: Proposal) -> tuple[DriftState, Proposal]:
        whole = self._of_all(number, proposal)
        self._pending = {**whole.own}
        return replace(state, predicted=whole.old), whole

    def _of_all(self, number: int, proposal: Proposal) -> Proposal:
        """The proposal of a group, with those that are pending and that these lengths leave possible, as one of the
        whole plan."""
        others = {n: one for n, one in self._pending.items() if n != number and self._served(n, one.plan)}
        own, plan = {**others, number: proposal}, self.plan
        for changed, one in own.items():
            plan = with_group(plan, changed, one.plan)
        plan = replace(plan, workload=None, workload_fingerprint=proposal.plan.workload_fingerprint, replay=None)
        alone = [watch.problem.at(group.placement) for watch, group in zip(self._watches, plan.groups, strict=True)]
        new = self._estimate(plan, changed=own)
        assert new is not None
        counts = {n: f"{len(plan.groups[n].first_devices)} of {plan.num_replicas} replicas" for n in own}
        return replace(
            proposal,
            own=own,
            plan=with_headroom(replace(plan, estimate=new), alone),
            old=self._estimate(self.plan),
            new=new,
            reason="; ".join(f"{one.reason} (for {counts[n]})" for n, one in own.items()),
        )

    def _estimate(self, plan: Plan, *, changed: Collection[int] = ()) -> Estimate | None:
        """All replicas of a plan under the observed lengths; None where one of them cannot keep up. The engines of the
        groups `changed` are not as it says yet."""
        found = []
        for number, own in enumerate(group_plans(plan)):
            one = self._served(number, own, None if number in changed else self._watches[number].num_blocks)
            if one is None:
                return None
            found.append(one)
        return together(found, [group.num_replicas for group in plan.groups])

    def _served(self, number: int, own: Plan, num_blocks: int | None = None) -> Estimate | None:
        """One replica of a group with a plan of its own; None where it cannot keep up."""
        try:
            return served(self._watches[number].problem.at(own.placement), own, num_blocks)
        except Infeasible:
            return None
