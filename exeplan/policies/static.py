"""Static batching: prefill a batch padded to its longest prompt, decode until its longest output; then the next one.

Source: FasterTransformer as ExeGPT section 2 describes it: batch sizes are fixed and no request leaves early, so a
finished request's row is computed until the whole batch is done. Tokens are delivered as they are computed. On a
pipeline the batch is cut into `micro_batches` to decode and `prefill_micro_batches` to prefill; FasterTransformer has
as many of both, DeepSpeed's hybrid schedule more of the latter.
"""

from collections.abc import Mapping
from functools import partial

import numpy as np

from exeplan.core.batch import Batch
from exeplan.core.control_variables import micro_batch_counts, require
from exeplan.core.schedule import Schedule
from exeplan.policies.interface import Clock, Cycle, Knob, PassLimits, PrefillBetween, Queue, Steady
from exeplan.policies.shared import rounds as _rounds
from exeplan.policies.shared.rounds import Rounds
from exeplan.policies.shared.together import generated, latency
from exeplan.workload.workload import Workload

KEEPS_FINISHED_ROWS = True
SEPARATE_STAGES = False
PADS_PROMPTS = True
FOR_DEADLINES = False
RESERVES = True

start = _rounds.start


def check(schedule: Schedule) -> None:
    require(schedule, "batch_size", optional=("micro_batches", "prefill_micro_batches"))


def knobs(workload: Workload, max_seqs: int) -> tuple[Knob, ...]:
    """A larger batch raises throughput and latency."""
    return (Knob("batch_size", tuple(range(1, max_seqs + 1))),)


def enumerated(num_stages: int) -> tuple[Mapping[str, int], ...]:
    """As many micro-batches of both kinds, or two or four times as many to prefill."""
    if num_stages == 1:
        return ({},)
    counts = micro_batch_counts(num_stages)
    return tuple(
        {"micro_batches": count, "prefill_micro_batches": more * count} for count in counts for more in (1, 2, 4)
    )


def schedule(variables: Mapping[str, int], workload: Workload) -> Schedule:
    return Schedule("static", variables)


def pass_limits(schedule: Schedule) -> PassLimits:
    return PassLimits(decode_rows=schedule["batch_size"], prompts=schedule["batch_size"])


def prefill_between_tokens(schedule: Schedule) -> PrefillBetween:
    """Between its first token and its second, a request of the first micro-batch waits for the prefills of others."""
    parts = min(_prefill_micro_batches(schedule), schedule["batch_size"])
    each = -(-schedule["batch_size"] // parts)
    return PrefillBetween(prompts=(parts - 1) * each, passes=max(parts - 1, 1), apart=True)


def starts_together(schedule: Schedule) -> int:
    return schedule["batch_size"]


def steady_state(schedule: Schedule, workload: Workload, clock: Clock) -> Steady:
    """The prefill, then as many decode iterations as the longest of B outputs needs (order statistics)."""
    batch = schedule["batch_size"]
    prefills, groups = min(_prefill_micro_batches(schedule), batch), min(schedule.num_micro_batches, batch)
    law = workload.decode_law(first_token_from_prefill=clock.first_token_from_prefill)
    still_going = law.max_survival(batch)
    steps = len(still_going)
    first = np.array([1.0])
    cycle = Cycle(
        num_prefill=np.concatenate([first * batch / prefills, np.zeros(steps)]),
        num_decode=np.concatenate([first * 0, np.full(steps, batch / groups)]),
        context_tokens=np.concatenate([first * 0, batch / groups * (workload.mean_input + generated(law))]),
        prompt_law=workload.input_law.longest_of(batch),
        padded=True,
        kv_tokens=batch * (workload.mean_input + workload.mean_output),
        kv_tokens_std=float(np.sqrt(batch) * workload.total_std),
        num_seqs=float(batch),
    )
    seconds = clock.seconds(cycle)
    through, slowest, entry = seconds.sum(axis=0), seconds.max(axis=0), seconds[0]
    drained = through[0] + (prefills - 1) * slowest[0]
    rounds = np.maximum(groups * slowest, through)[1:]
    # The longest output is in any group. When it is there, the last pass that has begun drains before the next batch.
    tail = (2 * through + ((groups - 1) / 2 - 1) * slowest)[1:] - rounds if groups > 1 else 0.0 * rounds
    last = still_going - np.append(still_going[1:], 0.0)
    # Micro-batches start one after the other; the mean one is in the middle.
    own = through[0] + (prefills - 1) / 2 * (slowest - entry)[0]
    until_decode = drained - (prefills - 1) / 2 * entry[0]
    ends = until_decode + np.cumsum(rounds) - rounds + (through + (groups - 1) / 2 * slowest)[1:]
    return Steady(
        cycle=cycle,
        seconds=seconds,
        throughput=batch / float(drained + still_going @ rounds + last @ tail),
        latency=partial(latency, own, ends, 1.0 if clock.first_token_from_prefill else 0.0),
    )


def next_batch(schedule: Schedule, queue: Queue, state: Rounds, phase: str) -> Batch | None:
    """The running batch to its end, then the next `batch_size` requests, padded to the longest."""
    parts = _prefill_micro_batches(schedule) - state.consecutive_prefills
    begun = state.consecutive_prefills > 0
    if (begun or not queue.running) and parts > 0:
        whole = queue.admissible(schedule["batch_size"] - state.num_admitted, reserve=True)
        admitted = whole[: -(-len(whole) // parts)]
        if admitted:
            # Rows that run have been prefilled, and may have begun to generate.
            longest = max([*(s.num_tokens for s in whole), *(s.num_prompt_tokens for s in queue.running)])
            if queue.pass_tokens is not None:  # What is admissible counts no padding to rows that run.
                admitted = admitted[: max(queue.pass_tokens // longest, 1)]
            return Batch(prefill=admitted, pad_to=longest)
    if queue.num_prefills_in_flight:
        return None  # The pipeline drains before decoding starts.
    if begun:
        queue.rebalance()
    group = state.next_group(queue)
    if group is None or group in queue.busy or all(s.finished for s in queue.running):
        return None
    return Batch(decode=tuple(queue.groups[group]), group=group)


def _prefill_micro_batches(schedule: Schedule) -> int:
    return schedule.variables.get("prefill_micro_batches", schedule.num_micro_batches)
