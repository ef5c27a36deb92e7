"""Prefill first: a free slot and a waiting request mean a prefill pass; otherwise all running requests decode.

The order of work of servers before chunked prefill. One control variable: `max_num_seqs`.

    exeplan optimize --profile p.json --workload alpaca --latency-bound 3s --policy ./prefill_first.py -o plan.yaml

In the steady state a batch of b requests finishes b / D of them in a decode iteration, D being the mean number of
decode iterations of a request. With probability p at least one slot is free then, and a prefill pass fills it. Not
here: micro-batches; on a pipeline one batch is in flight.
"""

from collections.abc import Mapping

import numpy as np

from exeplan.core.batch import Batch
from exeplan.core.control_variables import require
from exeplan.core.schedule import Schedule
from exeplan.policies.interface import Clock, Cycle, Knob, PassLimits, Queue, Stateless, Steady
from exeplan.workload.workload import Workload

KEEPS_FINISHED_ROWS = False
SEPARATE_STAGES = False
PADS_PROMPTS = False
FOR_DEADLINES = False


def check(schedule: Schedule) -> None:
    """Raises InputError unless `max_num_seqs` is a positive integer and the only variable."""
    require(schedule, "max_num_seqs", optional=())


def knobs(workload: Workload, max_seqs: int) -> tuple[Knob, ...]:
    """A larger batch raises throughput and latency."""
    return (Knob("max_num_seqs", tuple(range(1, max_seqs + 1))),)


def enumerated(num_stages: int) -> tuple[Mapping[str, int], ...]:
    """Nothing else is tried."""
    return ({},)


def schedule(variables: Mapping[str, int], workload: Workload) -> Schedule:
    return Schedule("prefill-first", variables)


def pass_limits(schedule: Schedule) -> PassLimits:
    return PassLimits(decode_rows=schedule["max_num_seqs"], prompts=schedule["max_num_seqs"])


def starts_together(schedule: Schedule) -> int:
    return 1


def steady_state(schedule: Schedule, workload: Workload, clock: Clock) -> Steady:
    """Two passes: the mean prefill and the decode of a full batch."""
    batch = float(schedule["max_num_seqs"])
    first = 1.0 if clock.first_token_from_prefill else 0.0
    steps = max(workload.mean_output - first, 1.0)
    finished = batch / steps
    prefill_share = min(-np.expm1(batch * np.log1p(-1.0 / max(steps, 1.0 + 1e-9))), 1.0)
    comb = workload.decode_law(first_token_from_prefill=clock.first_token_from_prefill).comb(1)
    context = comb.context[0] / comb.active[0] if comb.active[0] > 0 else 0.0
    cycle = Cycle(
        num_prefill=np.array([finished / prefill_share, 0.0]),
        num_decode=np.array([0.0, batch]),
        context_tokens=np.array([0.0, batch * context]),
        prompt_law=workload.input_law,
        kv_tokens=batch * (context + 1.0),
        kv_tokens_std=float(np.sqrt(batch)) * workload.total_std,
        num_seqs=batch,
    )
    seconds = clock.seconds(cycle)
    prefill, decode = seconds.sum(axis=0)
    iteration = decode + prefill_share * prefill
    return Steady(
        cycle=cycle,
        seconds=seconds,
        throughput=float(finished / iteration),
        latency=lambda output_tokens: prefill + (np.asarray(output_tokens, dtype=float) - first) * iteration,
        admission_interval=float(iteration),
    )


def start(schedule: Schedule, num_groups: int) -> Stateless:
    return Stateless()


def next_batch(schedule: Schedule, queue: Queue, state: Stateless, phase: str) -> Batch | None:
    """Waiting requests into the free slots; if there are none, one decode iteration."""
    if queue.busy:
        return None
    admitted = queue.admissible(schedule["max_num_seqs"] - len(queue.running))
    if admitted:
        return Batch(prefill=admitted)
    return Batch(decode=tuple(queue.running)) if queue.running else None
