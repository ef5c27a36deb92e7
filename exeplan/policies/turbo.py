"""TurboBatching: requests of like lengths are padded to one, and a batch runs to completion.

Source: TurboTransformers (PPoPP 2021) section 5, as TCB (ICPP 2022) measures it. The waiting requests are sorted by
length and cut into batches of at most `batch_size` by dynamic programming, at the least cost: padded tokens, and
`overhead_tokens` for each batch, the cost of its passes apart from its prompts. The batch with the first request of the
schedule's order runs next; the others are cut again after it.

In the steady state under a backlog the lengths that wait are those of the law, so are the batches that they are cut
into, and each of these runs as often as any other. Not here: several micro-batches on a pipeline.
"""

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from exeplan.arrays import Floats
from exeplan.core.batch import Batch, SequenceState
from exeplan.core.control_variables import require
from exeplan.core.schedule import Schedule
from exeplan.policies._together import generated, latency
from exeplan.policies.interface import Clock, Cycle, Knob, PassLimits, Queue, Stateless, Steady
from exeplan.workload.length_law import DecodeLaw, Ints, LengthLaw
from exeplan.workload.workload import Workload

KEEPS_FINISHED_ROWS = True
SEPARATE_STAGES = False
PADS_PROMPTS = True
FOR_DEADLINES = True

_LOOKAHEAD, _MOST_LOOKAHEAD = 8, 1024
"""Waiting requests that are considered: a multiple of the batch size, at most this number, at least one batch."""
_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Batch sizes that the search tries."""
_DECODES = 48
"""Iterations of a batch that are timed; those between are interpolated."""
_OVERHEADS = (512, 8192)
"""Tokens a batch that the search tries."""


def check(schedule: Schedule) -> None:
    require(schedule, "batch_size", optional=("overhead_tokens",))


def knobs(workload: Workload, max_seqs: int) -> tuple[Knob, ...]:
    """A larger batch raises throughput and latency."""
    return (Knob("batch_size", tuple(size for size in _SIZES if size <= max_seqs)),)


def enumerated(num_stages: int) -> tuple[Mapping[str, int], ...]:
    """The cost of a batch apart from its prompts: the best value depends on the device and on the outputs."""
    return tuple({"overhead_tokens": tokens} for tokens in _OVERHEADS)


def schedule(variables: Mapping[str, int], workload: Workload) -> Schedule:
    return Schedule("turbo", variables)


def pass_limits(schedule: Schedule) -> PassLimits:
    return PassLimits(decode_rows=schedule["batch_size"], prompts=schedule["batch_size"])


def starts_together(schedule: Schedule) -> int:
    return schedule["batch_size"]


def steady_state(schedule: Schedule, workload: Workload, clock: Clock) -> Steady:
    """Each of the batches that the lengths of the law are cut into, one after the other."""
    first_tokens = 1 if clock.first_token_from_prefill else 0
    cycles, seconds, times, latencies = [], [], [], []
    groups = _groups(workload, schedule["batch_size"], _overhead(schedule), first_tokens)
    for group in groups:
        steps = len(group.law.survival)
        timed = np.unique(np.linspace(0, steps - 1, min(steps, _DECODES)).astype(int))
        cycles.append(_cycle(group, timed))
        seconds.append(clock.seconds(cycles[-1]))
        prefill, *decodes = seconds[-1].sum(axis=0)
        through = np.interp(np.arange(steps), timed, decodes)
        times.append(float(prefill + group.law.max_survival(group.size) @ through))
        latencies.append(partial(latency, prefill, prefill + np.cumsum(through), first_tokens))
    largest = int(np.argmax([cycle.kv_tokens for cycle in cycles]))
    counts = np.array([group.size for group in groups])
    weights = counts / counts.sum()
    return Steady(
        cycle=cycles[largest],
        seconds=seconds[largest],
        throughput=int(counts.sum()) / sum(times),
        latency=lambda tokens: np.asarray(sum(w * own(tokens) for w, own in zip(weights, latencies, strict=True))),
        admission_interval=float(np.mean(times)),
    )


class _Group(NamedTuple):
    """A batch of requests of like lengths."""

    size: int
    prompts: LengthLaw
    law: DecodeLaw


@lru_cache(maxsize=1024)  # A search asks for the same ones on every placement.
def _groups(workload: Workload, size: int, overhead: int, first_tokens: int) -> tuple[_Group, ...]:
    """What a full queue of the law's lengths is cut into; a length at the border of two is in both."""
    prompts = workload.input_law
    waiting = _lookahead(size)
    ends = _cut(prompts.slice_means(waiting), size, overhead)
    groups = []
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        low, high = begin / waiting, end / waiting
        weights = np.clip(prompts.cdf, low, high) - np.clip(np.append(0.0, prompts.cdf[:-1]), low, high)
        some = np.flatnonzero(weights > 0)
        own = LengthLaw(prompts.tokens[some], weights[some] / weights.sum())
        share = (weights / prompts.weights)[np.searchsorted(prompts.tokens, workload.inputs)] * workload.weights
        here = share > 0
        law = DecodeLaw.of(workload.outputs[here] - first_tokens, workload.inputs[here], share[here] / share.sum())
        groups.append(_Group(int(end - begin), own, law))
    return tuple(groups)


def _cycle(group: _Group, timed: Ints) -> Cycle:
    """The prefill, and some of the decode iterations."""
    count, law, mean_input = group.size, group.law, group.prompts.mean
    first, steps = np.array([1.0]), len(timed)
    return Cycle(
        num_prefill=np.concatenate([first * count, np.zeros(steps)]),
        num_decode=np.concatenate([first * 0, np.full(steps, float(count))]),
        context_tokens=np.concatenate([first * 0, count * (mean_input + generated(law)[timed])]),
        prompt_law=group.prompts.longest_of(count),
        padded=True,
        kv_tokens=count * (mean_input + 1 + law.mean_steps),
        kv_tokens_std=float(np.sqrt(count) * (group.prompts.std + law.std_steps)),
        num_seqs=float(count),
    )


def start(schedule: Schedule, num_groups: int) -> Stateless:
    return Stateless()


def next_batch(schedule: Schedule, queue: Queue, state: Stateless, phase: str) -> Batch | None:
    """The running batch to its end, then the batch with the first request."""
    if queue.running:
        return None if queue.busy else Batch(decode=tuple(queue.running))
    ahead = queue.first_waiting(_lookahead(schedule["batch_size"]))
    if not ahead:
        return None
    alike = queue.fitting(_alike(ahead, schedule), limit=schedule["batch_size"], reserve=True)
    return Batch(prefill=alike, pad_to=max(s.num_prompt_tokens for s in alike))


def _lookahead(size: int) -> int:
    return max(min(_LOOKAHEAD * size, _MOST_LOOKAHEAD), size)


def _overhead(schedule: Schedule) -> int:
    return schedule.variables.get("overhead_tokens", _OVERHEADS[0])


def _alike(ahead: tuple[SequenceState, ...], schedule: Schedule) -> list[SequenceState]:
    """The batch that holds the first, with it in front."""
    by_length = sorted(range(len(ahead)), key=lambda number: (ahead[number].num_prompt_tokens, number))
    lengths = np.array([ahead[number].num_prompt_tokens for number in by_length])
    start = 0
    for end in _cut(lengths, schedule["batch_size"], _overhead(schedule)).tolist():
        if 0 in by_length[start:end]:
            break
        start = end
    return [ahead[number] for number in sorted(by_length[start:end])]


def _cut(lengths: Floats | Ints, size: int, overhead: int) -> Ints:
    """Where the batches end into which these rising lengths are cut at the least cost."""
    cost = np.zeros(len(lengths) + 1)
    begins = np.zeros(len(lengths) + 1, dtype=np.int64)
    for end in range(1, len(lengths) + 1):
        low = max(end - size, 0)
        tried = cost[low:end] + np.arange(end - low, 0, -1) * lengths[end - 1]
        best = int(np.argmin(tried))
        cost[end], begins[end] = tried[best] + overhead, low + best
    ends = [len(lengths)]
    while begins[ends[-1]] > 0:
        ends.append(int(begins[ends[-1]]))
    return np.array(ends[::-1])
