"""Workload-aware allocation: some stages only prefill, the others only decode, both at the same time.

Source: ExeGPT (ASPLOS 2024) sections 4.1, 4.2 and 6. B_E is `prefill_batch`, B_D is `decode_batch`: the rows that
decode, in `micro_batches` groups. A group that is back from the last decode stage takes requests that are ready into
its free slots, as many as keep all groups alike, and runs one decode iteration. At most one prefill batch more than
there are prefill stages is in prefill, in KV transfer or ready without a free slot (the last one may be adjusted), so
that neither side runs ahead of the other.

Shared by waa-c and waa-m, which differ in how the planner splits the GPUs.
"""

from collections.abc import Mapping
from dataclasses import replace

from exeplan.core.batch import Batch
from exeplan.core.control_variables import require
from exeplan.core.schedule import Schedule
from exeplan.policies.interface import Knob, PassLimits, PrefillBetween, Queue, Stateless
from exeplan.policies.shared import adjustment as _adjustment
from exeplan.policies.shared.spread import even_out, free_places
from exeplan.workload.workload import Workload


def check(schedule: Schedule) -> None:
    require(schedule, "decode_batch", "prefill_batch", optional=("micro_batches", *_adjustment.VARIABLES))
    _adjustment.check(schedule)


def knobs(workload: Workload, max_seqs: int) -> tuple[Knob, ...]:
    """More rows that decode raise throughput and latency.

    From as many on as finish one request an iteration: with fewer an iteration is shorter, but a prefilled request
    waits for a free slot, at last longer than that saves.
    """
    first = min(max(1, round(workload.mean_output)), max_seqs) - 1
    return (Knob("decode_batch", tuple(range(1, max_seqs + 1)), first=first),)


def completed(variables: Mapping[str, int], workload: Workload) -> dict[str, int]:
    """Adds the prefill batch, unless given, that replaces the requests finished in one iteration of all groups."""
    return {"prefill_batch": max(1, round(variables["decode_batch"] / workload.mean_output)), **variables}


def enlarged(schedule: Schedule, workload: Workload, factor: float) -> tuple[Schedule, ...]:
    """Both batches."""
    variables = {**schedule.variables, "decode_batch": round(factor * schedule["decode_batch"])}
    del variables["prefill_batch"]
    return (replace(schedule, variables=completed(variables, workload)),)


def pass_limits(schedule: Schedule) -> PassLimits:
    return PassLimits(decode_rows=schedule["decode_batch"], prompts=_adjustment.most_prompts(schedule))


def prefill_between_tokens(schedule: Schedule) -> PrefillBetween:
    """Nothing: other stages prefill."""
    return PrefillBetween(prompts=0)


def most_ahead(schedule: Schedule, num_prefill_stages: int) -> int:
    """Requests in prefill, in KV transfer or ready without a free slot, at most."""
    return num_prefill_stages * schedule["prefill_batch"] + _adjustment.most_prompts(schedule)


def starts_together(schedule: Schedule) -> int:
    return schedule["prefill_batch"]


def start(schedule: Schedule, num_groups: int) -> Stateless:
    return Stateless()


def next_batch(schedule: Schedule, queue: Queue, state: Stateless, phase: str) -> Batch | None:
    """Prefill while the limit lets a whole batch in; decode with the group that has been back longest."""
    return _prefill(schedule, queue) if phase == "prefill" else _decode(schedule, queue)


def _prefill(schedule: Schedule, queue: Queue) -> Batch | None:
    if "adjust_percent" in schedule.variables:
        return _prefill_adjusted(schedule, queue)
    size = min(schedule["prefill_batch"], len(queue.waiting))
    if _ahead(schedule, queue) + size > most_ahead(schedule, queue.num_prefill_stages):
        return None
    admitted = queue.admissible(size)
    return Batch(prefill=admitted, phase="prefill") if admitted else None


def _ahead(schedule: Schedule, queue: Queue) -> int:
    """Requests in prefill, in KV transfer, or ready without a free slot."""
    free = max(schedule["decode_batch"] - sum(map(len, queue.groups)), 0)
    return queue.num_in_transfer + max(len(queue.ready) - free, 0)


def _prefill_adjusted(schedule: Schedule, queue: Queue) -> Batch | None:
    """Requests in KV transfer and ready ones count as decoding: they soon will."""
    if _ahead(schedule, queue) > queue.num_prefill_stages * schedule["prefill_batch"]:
        return None
    admitted = queue.admissible(_adjustment.adjusted_size(schedule, queue, others=len(queue.running)))
    return Batch(prefill=admitted, phase="prefill") if admitted else None


def _decode(schedule: Schedule, queue: Queue) -> Batch | None:
    slots = schedule["decode_batch"]
    joining = min(len(queue.ready), slots - sum(map(len, queue.groups)))
    even_out(queue, slots=slots, joining=joining, alike=True)
    for number in queue.group_order:
        if number not in queue.busy:
            rows = queue.groups[number]
            queue.add_ready_to_group(number, free_places(queue, number, slots=slots, joining=joining, alike=True))
            if rows:
                return Batch(decode=tuple(rows), group=number, phase="decode")
    return None
