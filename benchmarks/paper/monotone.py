"""Table 5 of ExeGPT: the share of points at which throughput or latency fall although a control variable rises.

One variable is swept while the others stay, over all their combinations. Batches and steps are thinned out evenly over
the logarithm of their size. B_E counts the requests of one micro-batch, and there is one for each decode stage:
otherwise tensor parallelism, which takes stages away, would make fewer and larger micro-batches and raise throughput.
For WAA B_D = B_E x mean output, as in the paper, and the number of micro-batches is swept too, from half as many as
stages to twice as many. A point breaks monotonicity if it lies below an earlier one of its sweep by more than the
tolerance: of the bound that 70 % of FasterTransformer's latencies keep, or of the sweep's highest throughput. Points
that the memory cannot hold are left out.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.paper.claims import Claim, Part
from benchmarks.paper.setting import GPT3_39B, Settings, problem_of
from benchmarks.paper.systems import bounds, on_whole_machines, static_points
from exeplan.arrays import Floats
from exeplan.core.schedule import Schedule
from exeplan.planner.problems.balance_stages import Balance
from exeplan.planner.problems.layouts import Layout, layouts
from exeplan.planner.problems.problem import Problem
from exeplan.policies import load_policy
from exeplan.search.search import Outcome

_TOLERANCES = (0.02, 0.05, 0.1)
_PAPER = {
    ("S", "rra"): {"prefill_batch": ("0.6, 2.3", "0.6, 0.3", "0.3, 0.0"), "decode_steps": ("0.0, 0.0",) * 3},
    ("S", "waa-c"): {
        "prefill_batch": ("0.0, 0.0",) * 3,
        "TP": ("0.0, 0.0",) * 3,
        "micro_batches": ("0.8, 0.0", "0.5, 0.0", "0.4, 0.0"),
    },
    ("T", "rra"): {"prefill_batch": ("0.2, 0.1", "0.2, 0.0", "0.2, 0.0"), "decode_steps": ("0.0, 0.0",) * 3},
    ("T", "waa-c"): {
        "prefill_batch": ("0.1, 0.0", "0.0, 0.0", "0.0, 0.0"),
        "TP": ("1.2, 0.0", "0.8, 0.0", "0.4, 0.0"),
        "micro_batches": ("10.9, 0.0", "10.6, 0.0", "10.4, 0.0"),
    },
}
"""(task, policy): variable: latency, throughput at each tolerance."""

_MOST_SEQS = 128
"""Of a micro-batch."""
_PER_STAGE = (0.5, 1.0, 1.5, 2.0)
"""WAA's micro-batches for each decode stage."""

Point = tuple[int, ...]
"""A position on every axis."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A control variable, its values in the order in which throughput and latency should rise."""

    name: str
    values: Sequence[Any]


def table_5(settings: Settings) -> Part:
    """Tasks S and T of GPT-3 39B; shares in percent."""
    rows: list[tuple[object, ...]] = []
    at_5_percent: list[tuple[int, int, int]] = []
    for task, policy in itertools.product(("S", "T"), (p for p in ("rra", "waa-c") if p in settings.exegpt)):
        problem = problem_of(GPT3_39B, task, settings.profiles)
        bound = bounds(static_points(on_whole_machines(problem)))[2]
        axes = _axes(problem, policy, number=8 if settings.quick else 20)
        outcomes = _outcomes(problem, policy, axes)
        for number, axis in enumerate(axes):
            paper = _PAPER[task, policy].get(axis.name, ("-",) * 3)
            for tolerance, printed in zip(_TOLERANCES, paper, strict=True):
                found = [_broken(sweep, tolerance, bound) for sweep in _sweeps(axes, number, outcomes)]
                latency, throughput, points = (sum(counts) for counts in zip(*found, strict=True))
                shares = 100 * latency / points, 100 * throughput / points
                rows.append((task, policy, axis.name, f"{tolerance:.0%}", *shares, printed, points))
                at_5_percent += [(latency, throughput, points)] if tolerance == 0.05 else []
    latency, throughput, points = (sum(counts) for counts in zip(*at_5_percent, strict=True))
    return Part(
        title="Table 5: non-monotonic points of GPT-3 39B, percent",
        header=("task", "policy", "variable", "tolerance", "latency", "throughput", "paper", "points"),
        rows=rows,
        claims=[
            Claim(what="points monotone in throughput at 5 %, percent", paper=97, ours=100 * (1 - throughput / points)),
            Claim(what="points monotone in latency at 5 %, percent", paper=96, ours=100 * (1 - latency / points)),
        ],
        notes=(__doc__.partition("\n\n")[2].strip().replace("\n", " "),),
    )


def _axes(problem: Problem, policy: str, *, number: int) -> list[Axis]:
    """The paper's variables: B_E, and N_D, or GPUs with tensor parallelism of degree 2 and micro-batches."""
    assert problem.cluster is not None
    module = load_policy(policy)
    batches = Axis("prefill_batch", _thinned(range(1, _MOST_SEQS + 1), number))
    if module.SEPARATE_STAGES:
        parallel = [layout for layout in layouts(problem.cluster, problem.profile.model, (1, 2)) if layout.size <= 2]
        by_width = sorted(parallel, key=lambda layout: -layout.num_parallel)
        return [batches, Axis("TP", by_width), Axis("micro_batches", _PER_STAGE)]
    steps = next(knob for knob in module.knobs(problem.workload, _MOST_SEQS) if knob.name == "decode_steps")
    return [batches, Axis("decode_steps", _thinned(steps.values, number))]


def _thinned(values: Sequence[int], number: int) -> list[int]:
    wanted = np.geomspace(min(values), max(values), number)
    near = {min(values, key=lambda value: abs(value - target)) for target in wanted}
    return [value for value in values if value in near]


def _outcomes(problem: Problem, policy: str, axes: Sequence[Axis]) -> dict[Point, Outcome]:
    """Every point that fits the memory."""
    outcomes = {}
    layouts_tried = next((axis.values for axis in axes if axis.name == "TP"), [Layout()])
    placements = {layout: _placed(problem, policy, layout) for layout in layouts_tried}
    for point in itertools.product(*(range(len(axis.values)) for axis in axes)):
        values = {axis.name: axis.values[i] for axis, i in zip(axes, point, strict=True)}
        placed = placements[values.pop("TP", Layout())]
        if placed is None:
            continue
        groups = max(1, round(values.get("micro_batches", 1.0) * len(placed.cost.decode_stages)))
        variables = {**values, "micro_batches": groups, "prefill_batch": values["prefill_batch"] * groups}
        if load_policy(policy).SEPARATE_STAGES:
            variables["decode_batch"] = round(variables["prefill_batch"] * problem.workload.mean_output)
        outcome = placed.evaluate(Schedule(policy, variables))
        if outcome.memory <= 1:
            outcomes[point] = outcome
    return outcomes


def _placed(problem: Problem, policy: str, layout: Layout) -> Problem | None:
    """The problem on this layout; None when the memory cannot hold the layers."""
    assert problem.cluster is not None
    module = load_policy(policy)
    balance = Balance(problem.cost.timings, problem.cluster, problem.workload, problem.memory)
    if not module.SEPARATE_STAGES:
        placement = balance.placement(layout)
    else:
        numbers = balance.prefill_gpus(module.SPLIT_BY)
        placement = balance.split_placement(replace(layout, num_prefill=numbers[len(numbers) // 2]))
    return problem.at(placement) if placement else None


def _sweeps(axes: Sequence[Axis], number: int, outcomes: dict[Point, Outcome]) -> list[list[Outcome]]:
    """The outcomes along one axis, for every combination of the others."""
    lines: dict[Point, list[Outcome]] = {}
    for point in sorted(outcomes):
        lines.setdefault((*point[:number], *point[number + 1 :]), []).append(outcomes[point])
    return [line for line in lines.values() if len(line) > 1]


def _broken(sweep: Sequence[Outcome], tolerance: float, bound: float) -> tuple[int, int, int]:
    """Points below an earlier one in latency, and in throughput, and points in all."""
    latency = np.array([outcome.latency for outcome in sweep])
    throughput = np.array([outcome.throughput for outcome in sweep])
    return _falls(latency, tolerance * bound), _falls(throughput, tolerance * float(throughput.max())), len(sweep)


def _falls(values: Floats, tolerance: float) -> int:
    return int(np.count_nonzero(values < np.maximum.accumulate(values) - tolerance))
