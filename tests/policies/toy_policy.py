"""A policy from outside the package: as orca on one stage, under a control variable with a name of its own."""

from collections.abc import Mapping

from exeplan.core.batch import Batch
from exeplan.core.control_variables import require
from exeplan.core.schedule import Schedule
from exeplan.policies import orca
from exeplan.policies.interface import Clock, Knob, PassLimits, Queue, Stateless, Steady
from exeplan.workload.workload import Workload

KEEPS_FINISHED_ROWS = False
SEPARATE_STAGES = False
PADS_PROMPTS = False
FOR_DEADLINES = False


def check(schedule: Schedule) -> None:
    require(schedule, "seats", optional=())


def knobs(workload: Workload, max_seqs: int) -> tuple[Knob, ...]:
    """More seats raise throughput and latency."""
    return (Knob("seats", tuple(range(1, max_seqs + 1))),)


def enumerated(num_stages: int) -> tuple[Mapping[str, int], ...]:
    return ({},)


def schedule(variables: Mapping[str, int], workload: Workload) -> Schedule:
    return Schedule("toy-policy", variables)


def pass_limits(schedule: Schedule) -> PassLimits:
    return PassLimits(decode_rows=schedule["seats"], prompts=schedule["seats"])


def starts_together(schedule: Schedule) -> int:
    return 1


def steady_state(schedule: Schedule, workload: Workload, clock: Clock) -> Steady:
    return orca.steady_state(Schedule("orca", {"max_num_seqs": schedule["seats"]}), workload, clock)


def start(schedule: Schedule, num_groups: int) -> Stateless:
    return Stateless()


def next_batch(schedule: Schedule, queue: Queue, state: Stateless, phase: str) -> Batch | None:
    """All running requests, and as many waiting ones as have a seat."""
    if queue.busy:
        return None
    admitted = queue.admissible(schedule["seats"] - len(queue.running), reserve=True)
    return Batch(prefill=admitted, decode=tuple(queue.running)) if admitted or queue.running else None
