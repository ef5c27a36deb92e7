"""Threads of a process: a request is planned with every number that was profiled, and the best plan is taken.

The cores are those of the devices that were asked for, each of as many threads as the profile's first number. With t
threads a process there are as many devices as have room on them: two cores are one process of two threads, or two of
one, as replicas, a tensor-parallel group or a pipeline, whichever is fastest by the times that were measured.

Not here: how the devices are used (`solution.py`), and clusters of a file, whose devices have the first number.
"""

from collections.abc import Sequence
from dataclasses import replace

from exeplan.core.schedule import num_devices
from exeplan.errors import Infeasible, InputError
from exeplan.planner.load_problem import profiled_host
from exeplan.planner.plan_request import PlanRequest
from exeplan.planner.reports.thread_table import ThreadsTried
from exeplan.planner.solution import Solution, solve
from exeplan.progress import SILENT, Told


def solve_by_threads(request: PlanRequest, *, told: Told = SILENT) -> Solution:
    """The best plan of all numbers of threads, with what was tried where there are several.

    Where none has a plan, raises what the first number's raises: InputError for wrong input, or Infeasible.
    """
    counts = request.profile.thread_counts
    if len(counts) == 1 or request.whole is not None:
        only = solve(replace(request, profile=request.profile.with_threads(counts[0])), told=told)
        return only if len(counts) == 1 else replace(only, threads=_not_tried(only, counts))
    found: dict[int, Solution] = {}
    errors: list[Infeasible | InputError] = []
    tried = []
    for number, count in enumerate(counts):
        part = told.part(number / len(counts), (number + 1) / len(counts), f"threads {count}")
        devices, plan, refusal = num_processes(request, count), None, ""
        try:
            found[count] = solve(_with(request, count, devices), told=part)
            plan = found[count].plan
        except (Infeasible, InputError) as error:
            refusal = str(error)
            errors.append(error)
        tried.append(ThreadsTried(num_threads=count, num_devices=devices, plan=plan, refusal=refusal))
    if not found:
        raise errors[0]
    best = max(tried, key=lambda one: one.score)
    return replace(found[best.num_threads], threads=tuple(tried))


def _not_tried(only: Solution, counts: Sequence[int]) -> tuple[ThreadsTried, ...]:
    """On a cluster: the plan with the first number of threads, and that the others were left out."""
    refusal = f"not tried: devices of a cluster have the profile's first number, {counts[0]}"
    processes = sum(group.num_replicas * num_devices(group.placement) for group in only.plan.groups)
    first = ThreadsTried(num_threads=counts[0], num_devices=processes, plan=only.plan)
    return (
        first,
        *(ThreadsTried(num_threads=count, num_devices=0, plan=None, refusal=refusal) for count in counts[1:]),
    )


def num_processes(request: PlanRequest, num_threads: int) -> int:
    """Processes of so many threads on the cores that were asked for: one where none were."""
    if request.cluster is None:
        return 1
    return request.cluster.num_gpus * request.profile.device.num_threads // num_threads


def _with(request: PlanRequest, num_threads: int, devices: int) -> PlanRequest:
    """Raises InputError where there is no room for a process, or no links were timed between several."""
    if devices < 1:
        raise InputError(f"a process of {num_threads} threads has no room on the cores that were given")
    profile = request.profile.with_threads(num_threads)
    return replace(request, profile=profile, cluster=profiled_host(profile, devices) if devices > 1 else None)
