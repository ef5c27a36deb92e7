"""Section 4.1 of ExeGPT: how many GPUs should prefill? WAA-C's and WAA-M's splits next to every split.

GPT-3 39B on sixteen A40 and GPT-3 101B on sixteen A100, under the bounds of figure 6. Throughputs are of the closed
form. `few`: WAA-M on the fewest GPUs that hold the weights, or a quarter more. `every` searches all variables on every
split, with any degree of partial tensor parallelism; no layers are moved between stages afterwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.paper.claims import Claim, Part
from benchmarks.paper.setting import FIGURES, GPT3_39B, GPT3_101B, Scenario, Settings, bounded, problem_of
from benchmarks.paper.systems import bounds, on_whole_machines, static_points
from exeplan.core.schedule import Placement
from exeplan.planner.choice.search_space import Variant, search_variants
from exeplan.planner.problems.balance_stages import Balance
from exeplan.planner.problems.layouts import layouts
from exeplan.planner.problems.problem import Problem
from exeplan.policies import load_policy
from exeplan.search.grid import Limits
from exeplan.search.search import search_grid

_BOTTOM = ("10 %", "30 %", "70 %", "none")


@dataclass(frozen=True, slots=True)
class Split:
    """The most throughput that was found, and how many GPUs prefill; None and 0 where no schedule keeps the bound."""

    throughput: float | None
    gpus: int

    def __str__(self) -> str:
        return f"{self.throughput:.3g} on {self.gpus}" if self.throughput else "-"


def part(settings: Settings) -> Part:
    """Quick: the tightest bound and none."""
    rows, gained = [], []
    for scenario in [s for s in FIGURES["fig6"] if s.deployment in (GPT3_39B, GPT3_101B)]:
        problem = problem_of(scenario.deployment, scenario.task, settings.profiles)
        limits = bounds(static_points(on_whole_machines(problem)))
        for number in (0, 3) if settings.quick else range(4):
            few, time, memory, every = found = _compared(bounded(problem, limits[number]))
            rows.append((*_case(scenario, number), *map(str, found)))
            print(*rows[-1], sep=" | ", flush=True)
            ours = max(time.throughput or 0.0, memory.throughput or 0.0)
            gained.append((ours, max(time.throughput or 0.0, few.throughput or 0.0), every.throughput or 0.0))
    return Part(
        title="Section 4.1: requests/s, and how many of sixteen GPUs prefill",
        header=("scenario", "bound", "few", "WAA-C", "WAA-M", "every split"),
        rows=rows,
        claims=_claims(gained),
        notes=((__doc__ or "").partition("\n\n")[2].strip().replace("\n", " "),),
    )


def _case(scenario: Scenario, number: int) -> tuple[str, str]:
    return str(scenario), _BOTTOM[number]


def _claims(gained: Sequence[tuple[float, float, float]]) -> list[Claim]:
    kept = [(ours, few, every) for ours, few, every in gained if ours]
    gains = [100 * (ours / few - 1) for ours, few, _ in kept if few]
    found = {
        "cases of figure 6 on 16 GPUs that WAA serves": float(len(kept)),
        "of these, cases in which the splits searched serve over 1 % more than with few GPUs for WAA-M": float(
            sum(gain > 1.0 for gain in gains) + len(kept) - len(gains)
        ),
        "largest gain by them, %": max(gains, default=None),
        "most that every split would serve beyond that, %": max(
            (100 * (every / ours - 1) for ours, _, every in kept), default=None
        ),
    }
    return [Claim(what=what, paper=None, ours=ours, reason=_SPLITS) for what, ours in found.items()]


def _compared(problem: Problem) -> tuple[Split, Split, Split, Split]:
    assert problem.cluster is not None
    time, memory = _searched(problem, "waa-c"), _searched(problem, "waa-m")
    few = _on_splits(problem, _balance(problem).prefill_gpus("memory")[:2])
    # The promising ones first, so that the others are soon done.
    every = sorted(range(1, problem.cluster.num_gpus), key=lambda number: number not in (time.gpus, memory.gpus))
    return few, time, memory, _on_splits(problem, every)


def _balance(problem: Problem) -> Balance:
    assert problem.cluster is not None
    return Balance(problem.cost.timings, problem.cluster, problem.workload, problem.memory)


def _searched(problem: Problem, policy: str) -> Split:
    """As it is planned."""
    found = search_variants(problem, policy, method="branch-and-bound", bound=problem.limit)
    if found is None or found[0].best is None:
        return Split(None, 0)
    return Split(found[0].best.outcome.throughput, _num_prefill(found[1]))


def _on_splits(problem: Problem, numbers: Sequence[int]) -> Split:
    """The best on these numbers of GPUs for prefills."""
    assert problem.cluster is not None
    module, balance, best = load_policy("waa-c"), _balance(problem), Split(None, 0)
    knobs = module.knobs(problem.workload, problem.max_seqs)
    shapes = layouts(problem.cluster, problem.profile.model, problem.profile.tensor_parallel_sizes)
    placements = [balance.split_placement(replace(shape, num_prefill=n)) for n in numbers for shape in shapes]
    for placement in dict.fromkeys(p for p in placements if p is not None):
        placed = problem.at(placement)
        for values in module.enumerated(len(placed.cost.decode_stages)):
            grid = Variant(problem=placed, enumerated=values).grid(module, knobs, Limits(problem.limit, 1.0))
            grid.at_least = best.throughput or 0.0
            found = search_grid(grid).best
            if found and found.outcome.throughput > grid.at_least:
                best = Split(found.outcome.throughput, _num_prefill(placement))
    return best


def _num_prefill(placement: Placement) -> int:
    return sum(len(stage.devices) for stage in placement if stage.phase == "prefill")


_SPLITS = (
    "the paper gives one split for each policy and batch; the search tries splits from as few GPUs as hold the weights "
    "to an even share of them, around the proportion of the work, and between those next to the best"
)
