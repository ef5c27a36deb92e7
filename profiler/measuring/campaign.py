"""Campaign: one run of measuring, until interpolation is good enough or the budget is spent.

First a coarse grid, then rounds: every round visits the points that have not settled, in a new order, because a
machine's speed drifts from minute to minute and the median of rounds does not; then points are added where
interpolation is worst. After every round the file is written, so that an interrupted run resumes.
"""

import datetime
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from exeplan.core.models.layer_costs import share_behind_attention
from exeplan.core.models.model import FP8, ModelSpec
from exeplan.core.profile import COMPUTE_OPS, Measurement, Profile, save_profile
from exeplan.core.runs.machine_speed import MachineSpeed, levelled
from exeplan.profiler.measuring.calibrate import FEW_SLOTS, LATER_REQUESTS, BurstStep, burst, calibrate
from exeplan.profiler.measuring.device import raise_ceilings, versions
from exeplan.profiler.measuring.lint import lint
from exeplan.profiler.measuring.measure import Rig, passes_of_visit
from exeplan.profiler.measuring.memory import peak_bytes, runtime_bytes
from exeplan.profiler.measuring.points import Point, Range, Work, first_rows, order
from exeplan.profiler.measuring.refine import suggest, worst_error
from exeplan.profiler.measuring.samples import resumed
from exeplan.progress import Progress
from exeplan.runner.compute.reference_passes import EVERY_SECONDS, ReferencePasses, canonical_passes
from exeplan.runner.compute.weights.precision import activation_dtype

_GRID_SHARE = 0.6
"""Largest share of the budget for the coarse grid."""
_LEAST_VISITS, _MOST_VISITS = 3, 12
_LONG_SHARE = 1 / 30
"""A visit above this share of the budget counts as long; two of them suffice."""
_ADDING_SHARE = 0.7
"""Share of the budget after which no points are added, so that each is visited a few times."""
_ADDED = 6
"""Gaps filled in a round."""
_BURST_SHARE, _RESTLESS_BURST_SHARE = 1 / 4, 1 / 3
"""Largest share of the time for bursts of real load; on a restless machine each of them tells little."""
_BURST_WATCH_SECONDS = 0.08
"""Between reference passes in a burst, which is short."""
_CACHES_OF_WEIGHTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """When to stop; `started` is on the monotonic clock."""

    started: float
    budget_seconds: float
    target_error: float

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started


class Campaign:
    """One run: what was measured so far, and how much of the budget is left."""

    def __init__(
        self, rig: Rig, work: Work, reach: Range, *, goal: Goal, output: Path, bar: Progress, before: Profile | None
    ) -> None:
        self.rig, self.work, self.reach, self.goal, self.output, self.bar = rig, work, reach, goal, output, bar
        self.device = work.device
        known = before.measurements if before else ()
        own = [m for m in known if m.op in COMPUTE_OPS and m.tensor_parallel_size == 1]
        self.multi_device_rows = tuple(m for m in known if m not in own)
        """Rows of multi-device measurements, kept unchanged."""
        self.samples, self.visits = resumed(own), measured_points(own)
        self.costs: dict[Point, float] = {}
        self.num_visits = 0
        self.num_rounds = 1
        self.bursts: dict[bool, list[list[BurstStep]]] = {False: [], True: []}
        """By whether their rows are kept until all are done."""
        self.reference = _reference(rig)
        """None on a GPU, where a pass would wait for those that are queued."""
        self.resumed_passes = before.reference_passes if before else ()
        self.resumed_spread = before.speed_spread if before else 0.0
        self.burst_seconds = 0.0
        self.weight_bytes = rig.runner.weight_bytes + work.bytes_left_out(rig.copies)
        self.workspace_bytes = before.workspace_bytes if before else 0

    def run(self, *, complete: bool = True) -> Profile:
        """Rounds until settled or out of time; the profile is `complete` unless more is to come."""
        try:
            self._measure()
        except KeyboardInterrupt:
            raise KeyboardInterrupt(self._stopped()) from None
        dtype = self.work.dtype
        self.device = raise_ceilings(self.device, self.rig.place, activation_dtype(dtype), fp8=dtype == FP8)
        profile = self._save(complete=complete)
        self._report(profile)
        return profile

    def _measure(self) -> None:
        self._measure_workspace()
        for row in first_rows(self.reach):
            self._visit_row(row, until=self.goal.budget_seconds * _GRID_SHARE)
        while True:
            self.num_rounds += 1
            unsettled = {point: visits for point, visits in self.visits.items() if not self._settled(point)}
            for point in order(unsettled | self._anchors(), self.num_rounds):
                if self._affords([point], until=self.goal.budget_seconds):
                    self._visit(point)
            self._bursts()
            if self.samples.whole:
                self._save(complete=False)
            gaps = suggest(
                self.samples, self.reach, num_layers=self.work.spec.num_layers, target=self.goal.target_error
            )
            self.bar.round(self._state(gaps[0].error if gaps else None))
            before = self.num_visits
            for suggestion in gaps[:_ADDED]:
                self._visit_row(suggestion.points, until=self.goal.budget_seconds * _ADDING_SHARE)
            left = [point for point in self.visits if not self._settled(point)]
            if self.num_visits == before and not any(self._affords([p], until=self.goal.budget_seconds) for p in left):
                return

    def _bursts(self) -> None:
        """A burst of real load within their share of the time, on a restless machine as many as fill it."""
        before = self._num_bursts
        while self.burst_seconds <= self.goal.elapsed * (_RESTLESS_BURST_SHARE if self._restless else _BURST_SHARE):
            if self._num_bursts > before and not (self._restless and self.goal.elapsed < self.goal.budget_seconds):
                return
            if not self._burst():
                return

    @property
    def _restless(self) -> bool:
        return self.reference is not None and self.reference.restless

    def _burst(self) -> bool:
        """Tells whether it had passes that count: of a short range none may be left."""
        began = time.monotonic()
        watch = partial(self._watch_speed, _BURST_WATCH_SECONDS)
        keeps_rows = self._num_bursts % 3 == 2
        steps = burst(
            self.rig,
            seed=self._num_bursts,
            longest=self.reach.max_context,
            num_slots=self._burst_slots(),
            keeps_rows=keeps_rows,
            between=watch,
        )
        self.bursts[keeps_rows].append(steps)
        self.burst_seconds += time.monotonic() - began
        return bool(steps)

    @property
    def _num_bursts(self) -> int:
        return sum(len(bursts) for bursts in self.bursts.values())

    def _burst_slots(self) -> int:
        """Few and as many as are measured, in turn; few where many would take too long."""
        few, many = min(FEW_SLOTS, self.reach.max_seqs), self.reach.max_seqs
        if self._num_bursts % 2 == 0:
            return few
        forecast = self.burst_seconds / self._num_bursts * (many + LATER_REQUESTS) / (few + LATER_REQUESTS)
        return many if forecast < self.goal.budget_seconds * _BURST_SHARE / 2 else few

    def _watch_speed(self, every: float = EVERY_SECONDS) -> None:
        if self.reference:
            self.reference.repeat_if_due(every)

    @property
    def speed(self) -> MachineSpeed | None:
        """Against the reference passes of a profile that is resumed, whose rows are at that speed, else this run's."""
        if not self.reference:
            return None
        found = self.reference.speed
        return replace(found, passes=self.resumed_passes or levelled(found.passes, found.samples))

    @property
    def _speed_spread(self) -> float:
        """Of all parts of a profile that is resumed, the most: some of its rows were measured in each."""
        return max(self.resumed_spread, self.speed.spread if self.speed else 0.0)

    def _anchors(self) -> dict[Point, int]:
        """Points that every round visits, so that its slowness is known: three short ones of each kind."""
        found = {}
        for kind in ("prefill", "decode", "engine"):
            points = sorted((p for p in self.costs if p.kind == kind), key=lambda point: self.costs[point])
            for sixth in (1, 2, 3) if points else ():
                point = points[len(points) * sixth // 6]
                found[point] = self.visits[point]
        return found

    def _measure_workspace(self) -> None:
        """Activations of the largest prefill, which runs first."""
        if self.workspace_bytes:
            return
        point = Point("prefill", self.reach.max_prefill_seqs, self.reach.max_prompt)
        self.rig.probe.use_layers(1)
        with self.rig.placed(point) as forward:
            self.workspace_bytes = max(1, peak_bytes(forward, self.rig.place))

    def _visit_row(self, row: Iterable[Point], *, until: float) -> None:
        new = [point for point in row if point not in self.visits]
        if self._affords(new, until=until) or not self.samples.whole:
            for point in new:
                self._visit(point)

    def _visit(self, point: Point) -> None:
        began = time.perf_counter()
        visit = self.rig.visit(point, self.work)
        middle = (began + time.perf_counter()) / 2
        self.samples.add(visit.values, self.num_rounds, time=middle if self.reference else None)
        self._watch_speed()
        self.visits[point] = self.visits.get(point, 0) + 1
        self.costs[point] = visit.seconds
        self.num_visits += 1
        self.bar.update(
            self.goal.elapsed / self.goal.budget_seconds, self.goal.budget_seconds - self.goal.elapsed, self._state()
        )

    def _affords(self, points: Iterable[Point], *, until: float) -> bool:
        return self.goal.elapsed + sum(self._cost(point) for point in points) < until

    def _cost(self, point: Point) -> float:
        """Seconds of a visit: as the last one, or as forecast."""
        return self.costs.get(point) or visit_seconds(self.work, point, self.rig.copies)

    def _settled(self, point: Point) -> bool:
        """Visited often enough, and its medians known to a third of the target error."""
        visits, least = self.visits[point], _LEAST_VISITS
        if self.costs.get(point, 0.0) > self.goal.budget_seconds * _LONG_SHARE:
            least = 2
        if visits < least or visits >= _MOST_VISITS:
            return visits >= _MOST_VISITS
        phase, tokens = point.kind, point.total_tokens
        if point.kind == "engine":
            return True
        sizes = (tokens, 0) if point.kind == "prefill" else (0, tokens)
        return self.samples.uncertainty(("layer", phase, point.num_seqs, *sizes)) <= self.goal.target_error / 3

    def _state(self, error: float | None = None) -> str:
        text = f"round {self.num_rounds}, {len(self.visits)} points"
        return text if error is None else f"{text}, interpolation may miss {error:.1%}"

    def _save(self, *, complete: bool) -> Profile:
        speed = self.speed
        if speed:
            self.samples.pair_with(speed)
        profile = Profile(
            model=self.work.spec,
            dtype=self.work.dtype,
            kv_dtype=self.work.kv_dtype,
            device=self.device,
            weight_bytes=self.weight_bytes,
            layer_weight_bytes=self.work.layer_bytes if self.work.spec.quantization else None,
            workspace_bytes=self.workspace_bytes,
            runtime_bytes=runtime_bytes(self.rig.place),
            measurements=(*self.samples.measurements(), *self.multi_device_rows),
            versions=versions(),
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            complete=complete,
            reference_passes=speed.passes if speed else (),
            speed_spread=round(self._speed_spread, 4),
            last_layer_saving=_last_layer_saving(self.work.spec),
        )
        if self.samples.whole:
            found = calibrate(
                self.bursts[False], profile, num_layers=self.rig.copies, speed=speed, kept=self.bursts[True]
            )
            profile = replace(
                profile,
                calibration=round(found.factor, 4),
                prefill_calibration=round(found.prefill_factor, 4),
                kept_rows_calibration=None if found.kept_rows_factor is None else round(found.kept_rows_factor, 4),
                pass_seconds=float(f"{found.pass_seconds:.4g}"),
                calibration_error=round(self._with_parts(found.error), 4),
                kept_rows_error=round(self._with_parts(found.kept_rows_error), 4),
            )
        save_profile(profile, self.output)
        return profile

    def _with_parts(self, error: float) -> float:
        """With that of the parts between which a pass lies: bursts correct what all of them have in common. 0 stays."""
        return error and math.hypot(error, self.samples.error("decode"))

    def _stopped(self) -> str:
        if not self.samples.whole:
            return "stopped before there was anything to keep"
        profile = self._save(complete=False)
        kept = len(profile.measurements)
        return f"stopped; {self.output} keeps {kept} measurements, and the same command resumes from there"

    def _whole_steps(self, profile: Profile) -> str:
        if not any(self.bursts[False]):
            return "no burst of real load had passes to count, so whole steps count as the sum of their parts"
        sure = _sure(profile.calibration_error)
        return f"whole steps take {profile.calibration:.3f} times the sum of their parts ({sure})"

    def _report(self, profile: Profile) -> None:
        error = worst_error(self.samples, self.reach, num_layers=self.work.spec.num_layers)
        kept = profile.kept_rows_calibration
        self.bar.note(
            f"{len(profile.measurements)} measurements from {self.num_visits} visits in {self.goal.elapsed:.0f} s; "
            f"interpolation between them may miss a layer by {error:.1%}; "
            + self._whole_steps(profile)
            + (f", prefills {profile.prefill_calibration:.3f} times" if profile.prefill_calibration != 1 else "")
            + (f", batches that keep their rows {kept:.3f} times ({_sure(profile.kept_rows_error)})" if kept else "")
            + (f", and {1e3 * profile.pass_seconds:.2f} ms a pass before that" if profile.pass_seconds else "")
        )
        if self.speed and self.speed.samples:
            self.bar.note(
                f"the machine's speed moved by +-{self.speed.spread:.1%} meanwhile, by {len(self.speed.samples)} "
                f"reference passes that took {self.speed.cost / self.goal.elapsed:.1%} of the time"
            )
        for finding in lint(replace(profile, measurements=self.samples.measurements())):
            self.bar.note(f"lint: {finding}")


def _last_layer_saving(spec: ModelSpec) -> float:
    """An encoder-decoder model's decoder has no prompts."""
    return 0.0 if spec.is_encoder_decoder else round(share_behind_attention(spec), 4)


def _reference(rig: Rig) -> ReferencePasses | None:
    if rig.place.type != "cpu":
        return None
    passes = canonical_passes(num_layers=rig.copies, longest=rig.longest)
    return ReferencePasses(rig.runner, passes, model=rig.probe.model)


def visit_seconds(work: Work, point: Point, copies: int) -> float:
    """Seconds of a first visit, roughly."""
    forecast = work.pass_seconds(point, copies)
    return min(passes_of_visit(work.device) * forecast, 0.2 + 2 * forecast)


def num_copies(work: Work) -> int:
    """Layers over which passes rotate, so that caches are as cold as in the whole model; all where they differ."""
    if work.spec.layers_differ:
        return work.spec.num_layers
    cold = -(-_CACHES_OF_WEIGHTS * work.device.cache_bytes // work.layer_bytes)
    return min(work.spec.num_layers, max(2, cold))


def measured_points(rows: Iterable[Measurement]) -> dict[Point, int]:
    """The points behind a profile's rows, and how often each was visited."""
    points: dict[Point, int] = {}
    for m in rows:
        if m.op == "attention":
            points[Point(m.phase, m.num_seqs, (m.num_tokens or m.context_tokens) // m.num_seqs)] = m.repeats
        elif m.op == "overhead" and m.phase == "prefill":
            points[Point("engine", m.num_seqs, m.num_tokens // m.num_seqs)] = m.repeats
    return points


def _sure(error: float) -> str:
    """The error of a factor that bursts gave."""
    return f"+-{error:.1%}" if error else "of one burst, which tells no error"
