"""PlanRequest: everything that is asked of the planner, parsed once; the command line, Python and drift fill it.

Not here: reading text and files (`exeplan.api`, `load_problem.py`), and the answer (`solution.py`).
"""

import math
from dataclasses import dataclass, replace

from exeplan.core.bounds import Bound, check_together
from exeplan.core.cluster import Cluster
from exeplan.core.pass_memory import MEMORY_UTILIZATION
from exeplan.core.plan import Plan
from exeplan.core.profile import Profile
from exeplan.core.schedule import Placement
from exeplan.planner.choice.optimize import resolve_policies
from exeplan.planner.margins.margins import Risk
from exeplan.planner.problems.problem import Problem, check_placement_memory, make_problem
from exeplan.workload.arrivals import Arrivals
from exeplan.workload.deadlines import Deadlines
from exeplan.workload.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """One planning problem and how to search it."""

    profile: Profile
    workload: Workload
    """As given: neither fitted to the context nor with deadlines."""
    fit_context: bool = False
    """Scale the lengths to the model's context."""
    bounds: tuple[Bound, ...]
    """The first one on latency or deadlines, infinite where there is none."""
    deadlines: Deadlines | None = None
    arrivals: Arrivals | None = None
    """None for a backlog."""
    min_throughput: float = 0.0
    """Requests/s that are required under a backlog."""
    cluster: Cluster | None = None
    """The GPUs to plan for; None for one device."""
    whole: Cluster | None = None
    """The cluster that these GPUs are a part of."""
    fewest_gpus: bool = False
    """Find the smallest part of the whole cluster that meets the bounds and the rate."""
    across_nodes: bool = False
    """A tensor-parallel group may span nodes."""
    one_pipeline: bool = False
    """All GPUs are one pipeline, without replicas."""
    policy: str = "auto"
    engine_policies: tuple[str, ...] = ()
    """What `auto` keeps to; () for an engine that runs all."""
    whole_servers: bool = False
    """The engine divides prefill and decode among servers that each hold the whole model."""
    method: str = "branch-and-bound"
    order: str = "fcfs"
    risk: Risk | None = None
    memory: float | None = None
    """Bytes for weights, KV cache and workspace on each device."""
    gpu_memory_utilization: float | None = None
    """The same as a share of each GPU."""
    max_num_seqs: int | None = None

    def __post_init__(self) -> None:
        # Of what is asked for: the planner scales single bounds, which then need not go together.
        check_together(self.bounds)

    @property
    def requests(self) -> Workload:
        """The workload as the model takes it, with its deadlines."""
        lengths = self.workload
        if self.fit_context:
            lengths = lengths.fit_context(self.profile.model.max_context)
        return replace(lengths, deadlines=self.deadlines) if self.deadlines else lengths

    def policies(self, cluster: Cluster | None) -> tuple[str, ...]:
        """The policies to search on these GPUs."""
        deadlines = self.deadlines is not None
        return resolve_policies(self.policy, cluster, deadlines=deadlines, engine=self.engine_policies)

    def problem(self, cluster: Cluster | None, *, memory: float | None = None) -> Problem:
        """The problem on these GPUs; `memory` is what is there on each, instead of what was asked for.

        Raises InputError for a request longer than the context, Infeasible when the model or a request does not fit.
        """
        problem = make_problem(
            self.profile,
            self.requests,
            self.bounds[0],
            cluster=cluster,
            memory=memory or self.memory,
            utilization=self.gpu_memory_utilization,
            max_seqs=self.max_num_seqs,
        )
        return replace(
            problem,
            across_nodes=self.across_nodes,
            one_pipeline=self.one_pipeline,
            whole_servers=self.whole_servers,
            order=self.order,
            more_bounds=self.bounds[1:],
            arrivals=self.arrivals,
            min_throughput=self.min_throughput,
        )

    def problem_at(self, placement: Placement) -> Problem:
        """The problem on this placement alone. Raises Infeasible when its memory does not suffice."""
        if len(placement) == 1 and self.cluster is None and placement[0].num_devices == 1:
            return self.problem(None)
        device = self.cluster.memory_bytes if self.cluster else self.profile.device.memory_bytes
        memory = device * (self.gpu_memory_utilization or MEMORY_UTILIZATION)
        # Whether the model fits one device or could fit the cluster says nothing about this placement.
        problem = replace(self.problem(self.cluster, memory=math.inf), memory=memory).at(placement)
        check_placement_memory(problem)
        return problem

    def named(self, plan: Plan) -> Plan:
        """The plan with the names of this request's inputs, where they have any."""
        gpus = self.whole or self.cluster
        return replace(
            plan,
            workload=self.workload.reference,
            profile=self.profile.reference,
            engine=(self.profile.engine or None) if self.profile.reference is None else None,
            cluster=gpus.reference if gpus else None,
            fit_context=self.fit_context,
        )
