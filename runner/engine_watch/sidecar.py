"""Sidecar: the watch of the plan that a server of another engine runs, by its metrics.

Each reading becomes requests (`drift/length_draws.py`), and the same rules as in `exeplan serve` say whether another
plan is better (`drift/watch.py`). What a better plan leads to:

    plug-in     the server has exeplan's scheduler: the plan's file is replaced, which the scheduler reads again. The
                placement stays, and the policy too
    otherwise   the new plan is written beside the old one and is proposed until the server runs it

Either way the command line of the new plan is written. Pure but for these files: times and readings are arguments.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from exeplan.core.bounds import Bound
from exeplan.core.models.model import ModelSpec
from exeplan.core.plan import Plan, save_plan
from exeplan.drift.group_watch import GroupWatch
from exeplan.drift.length_draws import LengthDraws
from exeplan.drift.save_proposal import remove_lengths, save_proposal, was_saved
from exeplan.drift.state import DriftState, Rules
from exeplan.drift.watch import Proposal, Watch
from exeplan.errors import InputError
from exeplan.export import engine_model, load_exporter
from exeplan.export.forms import as_command
from exeplan.export.interface import Export
from exeplan.files import write_text
from exeplan.planner.load_problem import plan_problems, with_relative_references
from exeplan.planner.problems.problem import Problem
from exeplan.runner.engine_watch.readings import Reading, Readings
from exeplan.units import show_seconds

_WINDOW_SECONDS = 300.0
"""Of the observed figures; more where two readings are further apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """What runs the plan."""

    engine: str
    model: str
    """What it loads."""
    plug_in: bool
    """It has exeplan's scheduler."""
    file: Path
    """The plan."""
    output: Path
    """Of another plan."""

    def export(self, plan: Plan, spec: ModelSpec) -> Export:
        """How it is started with a plan. Raises InputError for one that it cannot run."""
        if self.plug_in:
            from exeplan.export import vllm

            return vllm.export_with_plug_in(plan, spec, model=self.model, file=self.file)
        return load_exporter(self.engine).export(plan, spec, model=self.model)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What the server did in the last minutes, by the definitions of an Estimate; None where nothing was seen."""

    num_requests: int = 0
    throughput: float | None = None
    token_throughput: float | None = None
    ttft: float | None = None
    tpot: float | None = None
    latency: float | None = None
    """Mean ttft and mean gaps of an output of the planned 99th-percentile length."""
    num_running: int = 0
    num_waiting: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What is known after a reading."""

    state: DriftState
    observed: Observed
    remarks: tuple[str, ...] = ()
    """For people; new ones only."""


@dataclass(slots=True)
class _Told:
    """What people were told last."""

    verdict: str = ""
    proposed: Plan | None = field(default=None)
    """The plan that was written last, where the server does not follow it by itself."""
    saved: Sequence[Plan] = ()
    """Plans that were written, while their lengths are there."""


class Sidecar:
    """`take` a reading at intervals."""

    def __init__(self, plan: Plan, server: Server, spec: ModelSpec, *, rules: Rules, policies: tuple[str, ...]) -> None:
        """`policies` are those of another plan.

        Raises InputError where the plan's files cannot be read, or the engine cannot run it.
        """
        self.server, self.rules, self._spec = server, rules, spec
        self._started = server.export(plan, spec)
        self._with_queue = bool(plan.arrival_rate or plan.trace_arrivals)
        problems = _problems(plan, fixed=server.plug_in)
        self._watch: Watch | GroupWatch
        if len(problems) == 1:
            self._watch = Watch(plan, problems[0], rules=rules, policies=policies)
        else:
            self._watch = GroupWatch(plan, problems, rules=rules, policies=policies)
        self._draws = LengthDraws(self._watch.planned, max_context=spec.max_context)
        self._longest = self._watch.planned.output_quantile(0.99)
        self._readings: deque[tuple[float, Readings]] = deque()
        self._told = _Told()
        self.num_replans = 0

    @property
    def plan(self) -> Plan:
        """The one that the server runs, as far as is known."""
        return self._watch.plan

    def take(self, now: float, reading: Readings) -> Look:
        """Of all requests since the last reading; `now` in seconds on one clock."""
        remarks: list[str] = []
        if self._readings:
            before, last = self._readings[-1]
            between = reading.since(last)
            if between is None:
                self._readings.clear()
                remarks.append(self._begun_anew())
            else:
                self._note(between, (before, now))
        self._readings.append((now, reading))
        while len(self._readings) > 2 and self._readings[0][0] < now - _WINDOW_SECONDS:
            self._readings.popleft()
        state, proposal = self._watch.look(now)
        remarks += self._propose(proposal, now) if proposal else ()
        if state.verdict != self._told.verdict and not proposal:
            remarks.append(state.verdict)
        self._told.verdict = state.verdict
        return Look(state=state, observed=self._observed(), remarks=tuple(remarks))

    def _note(self, between: Reading, times: tuple[float, float]) -> None:
        prefill, gap = max(between.prefill.mean or 0.0, 0.0), between.gaps.mean or 0.0
        drawn = self._draws.requests(between.inputs, between.outputs, ended=times, prefill=prefill, gap=gap)
        self._watch.note(drawn, ())

    def _first(self, seen: Reading) -> float | None:
        """Mean time to the first token, as the plan counts it: from the arrival where requests come at a rate."""
        return (seen.ttft if self._with_queue else seen.prefill).mean

    def _observed(self) -> Observed:
        (begin, first), (end, last) = self._readings[0], self._readings[-1]
        now = last.together
        running = Observed(num_running=now.num_running, num_waiting=now.num_waiting)
        seen = last.since(first)
        if seen is None or not seen.outputs.size:
            return running
        ttft, tpot = self._first(seen), seen.gaps.mean
        bound = self.plan.bound or Bound(seconds=float("inf"))
        whole = None
        if ttft is not None and tpot is not None and bound.metric == "p99-length":
            whole = ttft + tpot * (self._longest - 1)
        return replace(
            running,
            num_requests=seen.outputs.size,
            throughput=seen.outputs.size / (end - begin),
            token_throughput=seen.outputs.total / (end - begin),
            ttft=ttft,
            tpot=tpot,
            latency=whole,
        )

    def _begun_anew(self) -> str:
        text = "a server has begun anew"
        if self._told.proposed:
            text += f"; if it runs {self.server.output} now, watch it with that plan"
        return text

    def _propose(self, proposal: Proposal, now: float) -> Iterator[str]:
        """Writes the new plan and its command line; sentences on both."""
        if (earlier := self._told.proposed) and self._watch.is_no_better(proposal, earlier):
            self._watch.dwell(now=now)
            return
        try:
            exported = self.server.export(proposal.plan, self._spec)
        except InputError as error:
            self._watch.vetoed(now=now)
            yield f"{proposal.reason}; but the plan found is not for this server: {error}"
            return
        yield f"{proposal.reason}: {_change(self.plan, proposal)}"
        if self.server.plug_in:
            yield from self._put(proposal, exported, now)
        else:
            self._watch.dwell(now=now)
            saved = save_proposal(proposal, self.server.output)
            yield f"wrote {self.server.output} and, to start the server with it, {self._write_command(exported)}"
            cleared = remove_lengths([*self._told.saved, saved], [saved, self.plan], self.server.output)
            self._told.saved = cleared.left
            for file in cleared.removed:
                yield f"removed {file}, the lengths of a plan that was written before and replaced"
            self._told.proposed = proposal.plan

    def _put(self, proposal: Proposal, exported: Export, now: float) -> Iterator[str]:
        """In the place of the plan that the server reads."""
        file = self.server.file
        kept = file.with_name(f"{file.stem}-before{file.suffix}")
        of_an_earlier_watch = was_saved(self.plan, file) and kept.exists()
        if not self.num_replans and not of_an_earlier_watch:
            save_plan(with_relative_references(self.plan, kept), kept)
        save_proposal(proposal, file)
        self._watch.adopted(proposal, now=now)
        self._draws = LengthDraws(proposal.workload, max_context=self._spec.max_context, seed=self.num_replans + 1)
        self._longest = proposal.workload.output_quantile(0.99)
        self.num_replans += 1
        yield f"wrote {file}, which the server follows; the first plan is {kept}"
        if changed := _changed_options(self._started, exported):
            yield (
                f"the rest needs a start of the server with {self._write_command(exported)}, because its options are "
                f"others: {changed}"
            )

    def _write_command(self, exported: Export) -> Path:
        path = self.server.output.with_suffix(".sh")
        write_text(path, as_command(exported))
        return path


def model_of(plan: Plan, model: str | None) -> str:
    """What the engine loads: as said, or as the plan says."""
    return model or engine_model(plan.model)


def _problems(plan: Plan, *, fixed: bool) -> Sequence[Problem]:
    found = plan_problems(plan)
    return tuple(replace(one, cluster=None) for one in found) if fixed else found


def _change(plan: Plan, proposal: Proposal) -> str:
    old, new = proposal.old, proposal.new
    latency = [show_seconds(one.latency) if one and one.latency else "-" for one in (old, new)]
    throughput = [f"{one.throughput:.3g}" if one else "-" for one in (old, new)]
    return (
        f"{plan.schedule} -> {proposal.plan.schedule}, predicted {throughput[0]} -> {throughput[1]} requests/s, "
        f"latency {latency[0]} -> {latency[1]}"
    )


def _changed_options(one: Export, other: Export) -> str:
    """Options with other values, of the first instance."""
    before, after = (_options(export.instances[0].options) for export in (one, other))
    names = dict.fromkeys([*before, *after])
    return ", ".join(
        f"{name} {before.get(name, 'unset')} -> {after.get(name, 'unset')}"
        for name in names
        if before.get(name) != after.get(name)
    )


def _options(words: Sequence[str]) -> dict[str, str]:
    found, name = {}, ""
    for word in words:
        if word.startswith("--"):
            name, found[word] = word, ""
        elif name:
            found[name] = f"{found[name]} {word}".strip()
    return found
