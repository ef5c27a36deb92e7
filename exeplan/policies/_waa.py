"""Workload-aware allocation: some stages only prefill, the others only decode, both at the same time.

Source: ExeGPT (ASPLOS 2024) sections 4.1, 4.2 and 6. B_E is `prefill_batch`, B_D is `decode_batch`: the rows that
decode, in `micro_batches` groups. A group that is back from the last decode stage takes requests that are ready into
its free slots and runs one decode iteration. At most one prefill batch more than there are prefill stages is in
prefill, handed over or ready, so that neither side runs away from the other.

What waa-c and waa-m share; they differ in how the planner splits the GPUs.
"""

from collections.abc import Mapping

from exeplan.plan import Schedule
from exeplan.policies import Knob, _adjustment, require, slot_share
from exeplan.scheduling import Batch, Scheduler
from exeplan.workload import Workload


def check(schedule: Schedule) -> None:
    require(schedule, "decode_batch", "prefill_batch", optional=("micro_batches", *_adjustment.VARIABLES))
    _adjustment.check(schedule)


def knobs(workload: Workload, max_seqs: int) -> tuple[Knob, ...]:
    """More rows that decode raise throughput and latency.

    From as many on as finish one request an iteration: with fewer, a prefilled request waits long for a free slot, so
    that both get worse.
    """
    least = min(max(1, round(workload.mean_output)), max_seqs)
    return (Knob("decode_batch", tuple(range(least, max_seqs + 1))),)


def completed(variables: Mapping[str, int], workload: Workload) -> dict[str, int]:
    """With the prefill batch, unless it is given, that replaces those who finish in one iteration of all groups."""
    return {"prefill_batch": max(1, round(variables["decode_batch"] / workload.mean_output)), **variables}


def starts_together(schedule: Schedule) -> int:
    return schedule["prefill_batch"]


def next_batch(schedule: Schedule, state: Scheduler, phase: str) -> Batch | None:
    """Prefill while the limit lets a whole batch in; decode with the group that has been back longest."""
    return _prefill(schedule, state) if phase == "prefill" else _decode(schedule, state)


def _prefill(schedule: Schedule, state: Scheduler) -> Batch | None:
    if "adjust_percent" in schedule.variables:
        return _prefill_adjusted(schedule, state)
    size = min(schedule["prefill_batch"], len(state.waiting))
    ahead = state.num_handing_over + len(state.ready)
    if ahead + size > (state.num_prefill_stages + 1) * schedule["prefill_batch"]:
        return None
    admitted = state.admissible(size)
    return Batch(prefill=admitted, phase="prefill") if admitted else None


def _prefill_adjusted(schedule: Schedule, state: Scheduler) -> Batch | None:
    """What is on its way or ready counts as decoding: it soon will."""
    ahead = state.num_handing_over + len(state.ready)
    if ahead and ahead > state.num_prefill_stages * schedule["prefill_batch"]:
        return None
    admitted = state.admissible(_adjustment.adjusted_size(schedule, state, others=len(state.running)))
    return Batch(prefill=admitted, phase="prefill") if admitted else None


def _decode(schedule: Schedule, state: Scheduler) -> Batch | None:
    groups = len(state.groups)
    for number in state.turns:
        if number not in state.busy:
            rows = state.groups[number]
            state.join_ready(number, slot_share(schedule["decode_batch"], groups, number) - len(rows))
            if rows:
                return Batch(decode=tuple(rows), group=number, phase="decode")
    return None
