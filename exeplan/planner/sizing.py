"""Sizing: the fewest GPUs of a cluster that meet the bounds and the rate, and what more GPUs gain where none do.

Parts of a cluster are some GPUs of one node, or whole nodes. Sizes are doubled until one suffices, then the sizes since
the last failure are tried one by one: three or five GPUs are not always better than two or four. Not here: how a part
is used (`optimize.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from exeplan.core.cluster import Cluster
from exeplan.errors import Infeasible
from exeplan.planner.explain import larger
from exeplan.planner.optimize import Optimum
from exeplan.planner.tables import table
from exeplan.units import show_seconds

_SCANNED = 8
"""Number of remaining sizes from which all are tried; of more, half is ruled out at a time."""

Solve = Callable[[Cluster], Optimum]
"""The best plan on some GPUs; raises Infeasible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A number of GPUs, and its plan or why it has none."""

    num_gpus: int
    optimum: Optimum | None
    refusal: str = ""


def sizes(cluster: Cluster) -> list[int]:
    """Numbers of GPUs that are part of a node, or whole nodes; rising."""
    nodes = range(2, cluster.num_nodes + 1)
    return [*range(1, cluster.gpus_per_node + 1), *(n * cluster.gpus_per_node for n in nodes)]


def fewest_gpus(whole: Cluster, solve: Solve) -> tuple[Tried, tuple[Tried, ...]]:
    """The smallest size with a plan, and all tried sizes, rising. Raises Infeasible when all GPUs do not suffice."""
    known: dict[int, Tried] = {}
    steps = sizes(whole)

    def works(index: int) -> bool:
        if index not in known:
            known[index] = _tried(whole.part(steps[index]), solve)
        return known[index].optimum is not None

    fails, works_at = -1, 0
    while not works(works_at):
        if works_at == len(steps) - 1:
            refusal = known[works_at].refusal
            raise Infeasible(f"all {whole.num_gpus} GPUs of cluster {whole.name} do not suffice: {refusal}")
        fails, works_at = works_at, _doubled(steps, works_at)
    while works_at - fails > _SCANNED:
        middle = (fails + works_at) // 2
        fails, works_at = (fails, middle) if works(middle) else (middle, works_at)
    works_at = next(index for index in range(fails + 1, works_at + 1) if works(index))
    return known[works_at], tuple(known[index] for index in sorted(known))


def with_more_gpus(error: Infeasible, cluster: Cluster, whole: Cluster, solve: Solve) -> Infeasible:
    """The refusal, completed by what one more GPU (or node) of the cluster and twice as many would achieve."""
    sizes_of = {size.num_gpus: size for size in (larger(whole, cluster.num_gpus), _twice(whole, cluster.num_gpus))}
    gains = []
    for number, size in sizes_of.items():
        tried = _tried(size, solve)
        if tried.optimum is None:
            gains.append(f"with {number} GPUs {tried.refusal}")
            continue
        plan = tried.optimum.plan
        rate = f" at {plan.estimate.throughput:.3g} requests/s" if plan.estimate else ""
        gains.append(f"{number} GPUs suffice, by {plan.schedule}{rate}")
        break
    return Infeasible("; ".join([str(error), *gains]), nearest=error.nearest)


def _doubled(steps: list[int], index: int) -> int:
    """The index of the first size with at least twice as many GPUs, or of the last."""
    return next((i for i, size in enumerate(steps) if size >= 2 * steps[index]), len(steps) - 1)


def _twice(whole: Cluster, num_gpus: int) -> Cluster:
    """Twice as many GPUs: part of a node, or whole nodes, possibly more than the cluster has."""
    if 2 * num_gpus <= whole.gpus_per_node:
        return whole.part(2 * num_gpus)
    return replace(whole, num_nodes=-(-2 * num_gpus // whole.gpus_per_node))


def sizes_table(tried: tuple[Tried, ...]) -> str:
    """One row for each tried size."""
    rows = []
    for size in tried:
        if size.optimum is None or size.optimum.plan.estimate is None:
            rows.append((str(size.num_gpus), size.refusal, "-", "-"))
            continue
        plan, estimate = size.optimum.plan, size.optimum.plan.estimate
        rows.append(
            (str(size.num_gpus), str(plan.schedule), f"{estimate.throughput:.3g}", show_seconds(estimate.latency))
        )
    return table(("GPUs", "best schedule", "req/s", "latency"), rows)


def _tried(cluster: Cluster, solve: Solve) -> Tried:
    try:
        return Tried(num_gpus=cluster.num_gpus, optimum=solve(cluster))
    except Infeasible as error:
        return Tried(num_gpus=cluster.num_gpus, optimum=None, refusal=error.nearest or str(error))
