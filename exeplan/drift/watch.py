"""Watch: whether the active plan is still the right one for the traffic, judged by its consequences.

Every few seconds the active plan is re-simulated on the law of recent requests: in closed form, or by a replay where
the engine's KV cache is too small for full batches of them (`served.py`). Another plan is searched for when, at two
consecutive looks, the law differs from the one of the last decision by more than chance explains
(`evidence.py`), or when that decision rested on a sample half as large as today's. It is proposed when

    bound     the observed law breaks it, another plan keeps it, and moving takes less time than the law may last
    missed    no plan keeps the bound, and the lowest-latency one (`best_plan.py`) misses it by clearly less
    gain      the throughput rises by more than the threshold, and over that time by more requests than moving costs

A law is expected to last as long again as it has lasted, at least a dwell time; within a dwell time after a re-plan
there is no other. Moving costs the load of weights that a device lacks and the prefill of requests whose keys and
values cannot stay (ExeGPT, ASPLOS 2024, Table 4).
The new plan is made for a law whose tail is as heavy as the sample allows, so that chance does not make it look better
than it is. Where requests took longer than predicted, both plans are judged with that slowdown; it alone does not start
a search, because the traffic has not changed. What more traffic than planned takes is no slowdown: the verdict says it.

Pure: times are arguments. Not here: carrying a plan out (`runner/replan/replanner.py`), and traces (`trace.py`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from exeplan.core.batch import BLOCK_SIZE
from exeplan.core.bounds import binding, scaled, targets_of
from exeplan.core.plan import Plan
from exeplan.core.schedule import Estimate
from exeplan.drift.best_plan import STEP, best_plan
from exeplan.drift.evidence import Known, come_faster, evidence
from exeplan.drift.length_monitor import LengthMonitor, Observed
from exeplan.drift.moving_cost import moving_seconds
from exeplan.drift.served import cache_tokens, served
from exeplan.drift.state import DriftState, RequestLengths, Rules
from exeplan.errors import Infeasible, InputError
from exeplan.planner.choice.optimize import resolve_policies
from exeplan.planner.load_problem import engine_blocks
from exeplan.planner.problems.headroom import with_headroom
from exeplan.planner.problems.problem import Problem
from exeplan.planner.problems.replicas import together
from exeplan.policies import engine_of, load_policy, policy_names
from exeplan.simulator.closed_form import steady_state
from exeplan.workload.workload import Workload

_SLOWDOWN_REQUESTS, _MOST_TIMED, _MOST_SLOWDOWN = 50, 200, 1.5
_MOST_STARTS = 1000
"""The last requests, by which more come than planned or not."""
_LONGEST = 10
"""The longest tenth of the requests gives the slowdown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A better plan for the observed law, which both estimates are of; these are of all replicas together."""

    plan: Plan
    workload: Workload
    """The lengths that it was made for."""
    size: float
    """Independent requests that these are known from."""
    old: Estimate | None
    new: Estimate
    reason: str
    moving_seconds: float
    basis: "_Basis"
    """The law that it was decided on."""
    missed: float | None
    """As `DriftState.missed`."""
    own: "Mapping[int, Proposal]" = field(default_factory=dict)
    """Of a plan of several groups: the own proposals of those that it changes, by number."""


@dataclass(frozen=True, slots=True)
class _Basis:
    """The law that the last decision was made on."""

    known: Known
    size: float
    """Requests behind its tail."""
    planned: bool
    """It is the plan's own, not a growing sample."""

    @classmethod
    def of(cls, workload: Workload) -> "_Basis":
        """The planned lengths: as certain as their trace is long, entirely certain for a law."""
        size = float(len(workload.trace.inputs)) if workload.trace else math.inf
        return cls(Known(workload, size), size, planned=True)


class Watch:
    """Watches one service: `note` requests, `look` at intervals, `adopted` when the plan changes."""

    def __init__(
        self,
        plan: Plan,
        problem: Problem,
        *,
        rules: Rules | None = None,
        policies: tuple[str, ...] | None = None,
        monitor: LengthMonitor | None = None,
    ) -> None:
        """`problem` is the one that the plan answers, on its placement; its workload is the planned one."""
        self.rules = rules or Rules()
        self.plan, self.monitor = plan, monitor or LengthMonitor()
        self._problem = _without_trace(problem)
        self.policies = policies or _policies(problem, plan)
        self._basis = _Basis.of(problem.workload)
        self._planned = self._basis
        self._agreeing, self._dwells_from = 0, -math.inf
        self._active_from: float | None = -math.inf
        """From when on requests start under the active plan for certain: a look after its adoption; None before that
        look."""
        self._told: Observed | None = None
        self._best_gain: float | None = None
        self._missed: float | None = None
        self.none_better = False
        """The last look searched, and proposed nothing: what was proposed before is of no use under these lengths."""
        self._slow = 1.0
        """The slowdown that the last search has judged by."""
        self._verdict = ""
        self.observed: Workload | None = None
        """The law at the last look."""
        self._trace_times = plan.trace_arrivals
        """The plan was made for the times of a trace, its busy minutes included; so were those adopted in its place,
        though they name a rate."""
        self._faster_looks = 0
        self._rate: float | None = None
        """Requests/s of each replica, where at the last looks more came than planned."""
        self.num_blocks: int | None = None
        """KV blocks that the engine of each replica has; None where only the plan says."""

    @property
    def problem(self) -> Problem:
        """The problem of the active plan under the observed law, on its placement."""
        workload = _in_context(self.observed or self.planned, self._problem)
        # Deadlines are part of the request, not of the observation.
        return replace(self._problem, workload=replace(workload, deadlines=self._problem.workload.deadlines))

    @property
    def planned(self) -> Workload:
        """The workload that the active plan was made for."""
        return self._planned.known.workload

    def note(self, ended: Iterable[RequestLengths], running: Sequence[RequestLengths]) -> None:
        """See `LengthMonitor.note`."""
        self.monitor.note(ended, running)

    def adopted(self, proposal_or_plan: "Proposal | Plan", *, now: float, problems: Sequence[Problem] = ()) -> None:
        """The service runs this plan now; `problems`, just one, is required for a plan that is no proposal."""
        if isinstance(proposal_or_plan, Plan):
            (problem,) = problems
            self.plan, self._problem = proposal_or_plan, _without_trace(problem)
            self._trace_times = self.plan.trace_arrivals
            self._basis = self._planned = _Basis.of(problem.workload)
            self._missed, self._verdict = None, ""
        else:
            self.plan = proposal_or_plan.plan
            self._problem = self._problem.at(self.plan.placement)
            self._planned = self._basis = proposal_or_plan.basis
            self._missed = proposal_or_plan.missed
            self._verdict = self._unkept(self.problem)  # The reason to move was about the plan that is gone.
        self._active_from, self._agreeing, self._best_gain = None, 0, None
        self.dwell(now=now)

    def resumed(self) -> None:
        """The service runs the active plan again after another one: times from before the next look tell nothing."""
        self._active_from = None

    def dwell(self, *, now: float) -> None:
        """There is no proposal for a dwell time."""
        self._dwells_from = now

    def is_no_better(self, proposal: Proposal, earlier: Plan) -> bool:
        """Whether the last proposal is an earlier one, or that keeps the bounds under these lengths, too, with the
        slowdown that was seen, and serves as much to within the least gain."""
        if (earlier.schedule, earlier.placement) == (proposal.plan.schedule, proposal.plan.placement):
            return True
        found, share = _consequence(self.problem.at(earlier.placement), earlier)
        if found is None or share is None or share * self._slow > 1:
            return False
        return proposal.new.throughput <= (1 + self.rules.gain) * found.throughput

    def vetoed(self, *, now: float) -> None:
        """The last proposal was vetoed: there is no other for a dwell time."""
        self._agreeing = 0
        self.dwell(now=now)

    def look(self, now: float, *, predict: bool = True) -> tuple[DriftState, Proposal | None]:
        """The state now, and a better plan where a search is due and finds one.

        The state lacks `predicted` and `bound_share` while the longest outputs are not known, and without `predict` at
        every look that does not search.
        """
        if self._active_from is None:
            self._active_from = now
        self.none_better = False
        observed = self.monitor.observe()
        if observed is None or observed.known.size < self.rules.least_requests:
            size = observed.known.size if observed else 0.0
            return DriftState(seconds=now, num_requests=size, verdict="too few requests are known"), None
        self.observed = observed.workload
        far = self._far(observed, self._planned)
        kept, share, proposal = None, None, None
        fresh, self._told = observed is not self._told, observed
        self._rate = self._more_than_planned(fresh, self._active_from)
        asks = self._asks(observed, far, fresh, now)
        if asks or (predict and observed.size >= self.rules.least_requests):
            problem = self.problem
            kept, share = _consequence(problem, self.plan, self.num_blocks)
            proposal = self._search(observed, problem, kept, share, now) if asks else None
            self.none_better = asks and proposal is None
        state = DriftState(
            seconds=now,
            num_requests=observed.known.size,
            measure=far,
            bound_share=share,
            predicted=kept,
            best_gain=self._best_gain,
            missed=self._missed,
            verdict=self._said(observed, far),
        )
        return state, proposal

    def _said(self, observed: Observed, far: float) -> str:
        """The verdict, whether there is more traffic than planned, and where the tail is not known that it is not."""
        said = self._verdict or ("as planned" if far <= 1 else "the law has changed")
        arrivals = self._problem.arrivals
        if arrivals and self._rate:
            rate = arrivals.rate * self.plan.num_replicas
            said = f"{said}; more traffic comes than the {rate:.3g} requests/s planned for"
        least = self.rules.least_for_search
        if observed.size >= least or observed.known.size < least:
            return said
        return f"{said}; no other plan is looked for: too few of the longest requests have ended to know their lengths"

    def _far(self, observed: Observed, basis: _Basis) -> float:
        return evidence(observed.known, basis.known, false_alarm=self.rules.false_alarm)

    def _asks(self, observed: Observed, far: float, fresh: bool, now: float) -> bool:
        """Whether a search is due and a re-plan allowed; `far` is the law's distance from the planned one."""
        grown = not self._basis.planned and observed.size >= 2 * self._basis.size
        far = far if self._basis is self._planned else self._far(observed, self._basis)
        differs = grown or far > 1
        self._agreeing = self._agreeing + fresh if differs else 0  # Only a renewed law counts.
        enough = observed.size >= self.rules.least_for_search
        return enough and self._agreeing >= self.rules.looks and now - self._dwells_from >= self.rules.dwell

    def _search(
        self, observed: Observed, problem: Problem, kept: Estimate | None, share: float | None, now: float
    ) -> Proposal | None:
        self._agreeing = 0
        self._basis = _Basis(observed.known, observed.size, planned=False)
        slowdown = self._slow = self._slowdown(problem, kept)
        try:
            best = best_plan(
                problem,
                observed,
                self.plan,
                policies=self.policies,
                confidence=self.rules.confidence,
                slowdown=slowdown,
            )
        except InputError as refusal:
            self._best_gain, self._missed, self._verdict = None, None, f"no other plan: {refusal}"
            return None
        found = best.plan
        new = together([problem.at(found.placement).estimate(found.schedule)], [found.num_replicas])
        self._best_gain = new.throughput / kept.throughput - 1 if kept else math.inf
        self._missed = best.missed if best.missed > 1 else None
        cost = moving_seconds(problem, self.plan, found)
        lasts = max(now - observed.since, self.rules.dwell)
        real = None if share is None else share * slowdown
        if self._is_active(found, problem):
            reason, self._verdict = "", self._unkept(problem) or "the active plan is the best there is"
        elif self._missed:
            reason = self._lower_latency(problem, real, _share(problem, new) * slowdown, cost=cost, lasts=lasts)
        else:
            reason = self._reason(real, kept, new, cost=cost, lasts=lasts)
        if not reason:
            return None
        self._verdict = reason
        found = with_headroom(found, [problem.at(found.placement)])
        found = replace(found, estimate=new, workload_fingerprint=problem.workload.fingerprint)
        return Proposal(
            plan=found,
            workload=problem.workload,
            size=observed.known.size,
            old=kept,
            new=new,
            reason=reason,
            moving_seconds=cost,
            basis=self._basis,
            missed=self._missed,
        )

    def _is_active(self, found: Plan, problem: Problem) -> bool:
        """Whether it is the active plan, with no larger KV cache than that says or its engine has.

        Our engine takes the memory that there is on GPUs, whatever a plan says: another size changes nothing there.
        """
        if (found.schedule, found.placement) != (self.plan.schedule, self.plan.placement):
            return False
        profile = problem.profile
        if profile.device.kind != "cpu" and not profile.engine:
            return True
        planned = engine_blocks(self.plan, profile.model) * BLOCK_SIZE
        return (found.kv_cache_tokens or 0) <= max(cache_tokens(problem, self.plan, self.num_blocks), planned)

    def _unkept(self, problem: Problem) -> str:
        """That no plan keeps the bounds, and the tightest ones that a plan keeps; empty where one keeps them."""
        if not self._missed:
            return ""
        wider = scaled(problem.bounds, [self._missed] * len(problem.bounds))
        asked, kept = (", ".join(map(str, bounds)) for bounds in (problem.bounds, wider))
        return f"no plan keeps {asked} under the observed lengths; the tightest that a plan keeps is {kept}"

    def _lower_latency(self, problem: Problem, share: float | None, least: float, *, cost: float, lasts: float) -> str:
        """Why to move where no plan keeps the bound; `share` and `least` are its utilization with the active plan and
        with the lowest-latency one."""
        active = "does not sustain the rate" if share is None else f"uses {100 * share:.0f} %"
        asked = "the asked bounds" if len(targets_of(problem.bounds)) > 1 else "the asked bound"
        lowest = f"The lowest-latency plan uses {100 * least:.0f} % of {asked}"
        reason = f"{self._unkept(problem)}. {lowest}, the active one {active}"
        if share is not None and share <= least * (1 + max(self.rules.gain, STEP)):
            self._verdict = f"{reason}, which is {'hardly more' if share > least else 'no worse'}"
            return ""
        if cost >= lasts:
            self._verdict = f"{reason}; moving takes {cost:.3g} s, the law may last {lasts:.3g} s"
            return ""
        return reason

    def _reason(self, share: float | None, kept: Estimate | None, new: Estimate, *, cost: float, lasts: float) -> str:
        """Why to move; empty where it does not pay, which the verdict states. `share` is the bound's utilization."""
        gain = self._best_gain or 0.0
        if share is None or share > 1:
            if cost >= lasts:
                self._verdict = f"moving takes {cost:.3g} s, the law may last {lasts:.3g} s"
                return ""
            full = (
                "the rate is not sustained"
                if share is None
                else f"the active plan would use {100 * share:.0f} % of the bound"
            )
            return f"{full} under the observed lengths"
        if gain <= self.rules.gain:
            self._verdict = f"the best other plan gains {100 * gain:+.1f} %, less than the threshold"
            return ""
        assert kept is not None
        if (new.throughput - kept.throughput) * (lasts - cost) <= kept.throughput * cost:
            self._verdict = f"moving takes {cost:.3g} s, which a gain of {100 * gain:+.1f} % does not recover"
            return ""
        return f"another plan gains {100 * gain:+.1f} % in throughput under the observed lengths"

    def _more_than_planned(self, fresh: bool, since: float) -> float | None:
        """Requests/s of one replica, where at consecutive looks more started since then than was planned."""
        planned = None if self._trace_times else self._problem.arrivals
        if planned is None:
            return None
        starts, count = self.monitor.starts(since)[-_MOST_STARTS:], self.plan.num_replicas
        if not come_faster(starts, planned.rate * count, false_alarm=self.rules.false_alarm):
            self._faster_looks = 0
            return None
        self._faster_looks += fresh  # Only renewed traffic counts.
        if self._faster_looks < self.rules.looks:
            return None
        recent = starts[-_MOST_TIMED:]  # What is timed is of these.
        return max(planned.rate, (len(recent) - 1) / max(float(recent[-1] - recent[0]), 1e-9) / count)

    def _slowdown(self, problem: Problem, kept: Estimate | None) -> float:
        """Time of the longest requests from their start over the plan's prediction for them; at least 1.

        At a rate they are predicted the pace of its batches, by `kept`, and the prefill of full ones; where more came
        than planned, the pace at that rate, as batches are fuller then. Summed, not by ratios of single requests: their
        jitter hardly moves a percentile of the latency.
        """
        since = math.inf if self._active_from is None else self._active_from
        rows = [seen for seen in self.monitor.recent() if seen.complete and seen.seconds > 0 and seen.start >= since]
        rows = rows[-_MOST_TIMED:]
        if len(rows) < _SLOWDOWN_REQUESTS:
            return 1.0
        if problem.arrivals and self._rate:
            faster = replace(problem, arrivals=replace(problem.arrivals, rate=self._rate))
            kept, _ = _consequence(faster, self.plan, self.num_blocks)  # None: batches are full.
        steady = steady_state(self.plan.schedule, problem.workload, problem.cost)
        pace = kept.tpot / steady.tpot if kept and steady.tpot else 1.0
        times = steady.latency(np.array([float(seen.output_tokens) for seen in rows]))
        predicted = np.sort(steady.ttft + pace * (times - steady.ttft))
        took = np.sort([seen.seconds for seen in rows])
        first = len(rows) - len(rows) // _LONGEST
        return float(np.clip(took[first:].sum() / max(predicted[first:].sum(), 1e-9), 1.0, _MOST_SLOWDOWN))


def _policies(problem: Problem, plan: Plan) -> tuple[str, ...]:
    """The policies of `auto`, and the plan's own where it is from outside the package or an engine's.

    On a fixed placement with separate stages, those that need separate stages.
    """
    name = plan.schedule.policy
    own = () if name in policy_names() and not engine_of(name) else (name,)
    if problem.cluster is None and any(stage.phase for stage in problem.cost.placement):
        return (*own, *(name for name in policy_names() if load_policy(name).SEPARATE_STAGES))
    return (*own, *resolve_policies("auto", problem.cluster, deadlines=problem.workload.deadlines is not None))


def _consequence(problem: Problem, plan: Plan, num_blocks: int | None = None) -> tuple[Estimate | None, float | None]:
    """The estimate of all the plan's replicas, which are equal, and the utilization of its binding bound; None where
    they cannot sustain the rate. `num_blocks` as of `cache_tokens`."""
    try:
        kept = together([served(problem, plan, num_blocks)], [plan.num_replicas])
    except Infeasible:
        return None, None
    return kept, _share(problem, kept)


def _share(problem: Problem, estimate: Estimate) -> float:
    """The utilization of the binding bound; 0 without bounds."""
    full = binding(problem.bounds, estimate)
    return full[1] if full else 0.0


def _in_context(workload: Workload, problem: Problem) -> Workload:
    """Lengths cut to the context: a running request may be known to be longer than all that ended."""
    return workload.fit_context(problem.profile.model.max_context, scale=False)


def _without_trace(problem: Problem) -> Problem:
    """The problem with arrivals at the rate of the plan's trace, as the trace itself is past."""
    if problem.arrivals is None or not problem.arrivals.of_trace:
        return problem
    return replace(problem, arrivals=replace(problem.arrivals, of_trace=False))
