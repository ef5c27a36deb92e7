"""Round-robin allocation: prefill `prefill_batch` requests once, then run `decode_steps` decode iterations; repeat.

Source: ExeGPT (ASPLOS 2024) sections 4.1 and 6. B_E is `prefill_batch`, N_D is `decode_steps`; `micro_batches` m of
equal size keep S pipeline stages busy. The steady state is the survival comb (`exeplan.workload.length_law`), exact
for any length law, not the paper's P_D(U), which forgets that long requests stay longer.

    t(s)       seconds of one micro-batch on stage s
    prefill    m max_s t(s) + the time of the largest micro-batch on all other stages: they are balanced by tokens, as
               far as the longest prompt lets them
    iteration  max(m max_s t(s), sum_s t(s)); in the first one a group enters when its own prefills have left the last
               stage, the others of them still in the pipeline; the last one lasts only until its last micro-batch has
               left the first stage, behind which the next prefills enter

An engine may prefill in passes of at most `max_num_batched_tokens` tokens (optional): as many passes as that takes,
each of whole prompts, one at least. So it does where a device has no memory to prefill all of them at once. With
decode_steps=1 prompts go first and decodes pause for them, as in SGLang.

A cycle whose batch runs empty before its last decode iteration starts the next prefill at once; the closed form
therefore weights every decode iteration with the probability that a request is still decoding.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from exeplan.arrays import Floats
from exeplan.core.batch import Batch, SequenceState, balanced_part, within
from exeplan.core.control_variables import micro_batchings, require
from exeplan.core.schedule import Schedule
from exeplan.policies.interface import Clock, Cycle, Knob, PassLimits, PrefillBetween, Queue, Steady
from exeplan.policies.shared import adjustment as _adjustment
from exeplan.policies.shared import rounds as _rounds
from exeplan.policies.shared.rounds import Rounds
from exeplan.workload.length_law import Comb, DecodeLaw, LengthLaw
from exeplan.workload.workload import Workload

KEEPS_FINISHED_ROWS = False
SEPARATE_STAGES = False
PADS_PROMPTS = False
FOR_DEADLINES = False

_OPTIONAL = ("micro_batches", "max_num_batched_tokens", "decode_batch")
_DRAWS = 256
"""Batches of prompts over which the number of their passes is averaged."""

enumerated = micro_batchings
start = _rounds.start


def check(schedule: Schedule) -> None:
    require(schedule, "prefill_batch", "decode_steps", optional=(*_OPTIONAL, *_adjustment.VARIABLES))
    _adjustment.check(schedule)


def knobs(workload: Workload, max_seqs: int) -> tuple[Knob, ...]:
    """More requests a prefill, and fewer decode iterations between prefills, raise throughput and latency."""
    longest = max(1, workload.max_output - 1)
    return (
        Knob("prefill_batch", tuple(range(1, max_seqs + 1))),
        Knob("decode_steps", tuple(range(longest, 0, -1))),
    )


def schedule(variables: Mapping[str, int], workload: Workload) -> Schedule:
    return Schedule("rra", variables)


def enlarged(schedule: Schedule, workload: Workload, factor: float) -> tuple[Schedule, ...]:
    """Prefills as often, and as much less often as they are larger."""
    batch, steps = (max(round(factor * schedule[name]), 1) for name in ("prefill_batch", "decode_steps"))
    pairs = dict.fromkeys(((batch, schedule["decode_steps"]), (batch, steps)))
    return tuple(
        replace(schedule, variables={**schedule.variables, "prefill_batch": batch, "decode_steps": steps})
        for batch, steps in pairs
    )


def pass_limits(schedule: Schedule) -> PassLimits:
    """Requests stay for as many cycles as their outputs take: only a planned `decode_batch` says how many decode.

    A prompt longer than `max_num_batched_tokens` is prefilled whole, so that no pass is sure to keep to it.
    """
    rows = schedule.variables.get("decode_batch")
    return PassLimits(decode_rows=rows, prompts=_adjustment.most_prompts(schedule))


def prefill_between_tokens(schedule: Schedule) -> PrefillBetween:
    """All prefills of a cycle, before a decode iteration."""
    most, limit = _adjustment.most_prompts(schedule), schedule.variables.get("max_num_batched_tokens")
    return PrefillBetween(prompts=most, tokens=limit, passes=min(schedule.num_micro_batches, most), apart=True)


def starts_together(schedule: Schedule) -> int:
    return schedule["prefill_batch"]


def steady_state(schedule: Schedule, workload: Workload, clock: Clock) -> Steady:
    """One prefill of B_E requests, then N_D decode iterations over the survivors of this and all earlier cycles.

    The passes: the mean and the largest prefill, the N_D iterations, and the same N_D as a resident request observes
    them, for latency only.
    """
    batch, steps, groups = schedule["prefill_batch"], schedule["decode_steps"], schedule.num_micro_batches
    shares = _shares(workload.decode_law(first_token_from_prefill=clock.first_token_from_prefill), steps)
    comb = shares.comb
    occurs = -np.expm1(batch * comb.log_empty)
    # A pass that never occurs has an irrelevant size, which must be finite.
    given = np.where(occurs > 0, batch * comb.active / np.maximum(occurs, 1e-300), 0.0)
    rows = np.concatenate([given, batch * comb.active + 1.0 - shares.own])
    counts = np.concatenate([[min(batch, groups)], _running(rows.reshape(2, steps), groups).ravel()])
    largest = _largest_share(workload.input_law, batch, counts[0])
    if limit := schedule.variables.get("max_num_batched_tokens"):
        limited = _limited_passes(workload.input_law, batch, limit)
        if limited.num_passes > counts[0]:
            counts[0], largest = limited
    in_cache = batch * (comb.context + comb.active)
    peak = int(np.argmax(in_cache))
    share = batch / counts[0]
    cycle = Cycle(
        num_prefill=np.concatenate([[share, share * largest], 0 * rows]),
        num_decode=np.concatenate([[0.0, 0.0], rows / counts[1:]]),
        context_tokens=np.concatenate([[0.0, 0.0], rows / counts[1:] * shares.per_row]),
        prompt_law=workload.input_law,
        kv_tokens=float(max(in_cache[peak], batch * workload.mean_input)),
        kv_tokens_std=float(np.sqrt(batch * comb.kv_var[peak])),
        num_seqs=float(max(batch, batch * comb.active[0])),
    )
    seconds = clock.seconds(cycle)
    timeline = _timeline(seconds, counts, steps)
    first = 1.0 if clock.first_token_from_prefill else 0.0
    return Steady(
        cycle=cycle,
        seconds=seconds,
        throughput=batch / (timeline.prefill + float(occurs @ timeline.rounds[:steps])),
        latency=partial(_latency, timeline, first),
    )


@dataclass(frozen=True, slots=True)
class _Shares:
    """Of one request in the iterations of a cycle."""

    comb: Comb
    own: Floats
    """Correction for a request that is certainly resident: its own share of the comb is known."""
    per_row: Floats
    """Tokens in the cache for each row that decodes; those of the cycle twice."""


@lru_cache(maxsize=1024)  # A search asks for the same cycles with every batch and on every placement.
def _shares(law: DecodeLaw, steps: int) -> _Shares:
    comb = law.comb(steps)
    own = np.where(comb.active > 0, 1.0 - comb.active_var / np.maximum(comb.active, 1e-300), 0.0)
    return _Shares(comb, own, np.tile(comb.context / np.maximum(comb.active, 1e-300), 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timeline:
    """Seconds; arrays over the N_D iterations of the cycle and then over the N_D that a resident request observes."""

    prefill: float
    """From the first prefill's start until the last has left the last stage."""
    own_prefill: float
    """From the start of a request's own prefill to its end, and until decoding starts: means over the micro-batches."""
    until_decode: float
    rounds: Floats
    """What an iteration adds to the cycle."""
    ends: Floats
    """From the start of decoding to the end of the iterations that a resident request observes, mean over the
    groups."""


def _timeline(seconds: Floats, counts: Floats, steps: int) -> _Timeline:
    through, slowest, entry = seconds.sum(axis=0), seconds.max(axis=0), seconds[0]
    behind = through[1] - slowest[1]
    middle = (counts - 1) / 2  # Micro-batches start one after the other; the mean one is in the middle.
    prefill = float(counts[0] * slowest[0] + behind)
    own_prefill = float(slowest[0] + behind + middle[0] * (slowest[0] - entry[0]))
    until_decode = float(prefill - middle[0] * entry[0])
    parts = _Parts(float(counts[0]), float(slowest[0]), seconds[:, 0], prefill)
    decodes = seconds[:, 2:]
    through, slowest, entry, counts, middle = through[2:], slowest[2:], entry[2:], counts[1:], middle[1:]
    rounds = np.maximum(counts * slowest, through)
    for last in (steps - 1, -1):
        rounds[last] = min(rounds[last], entry[last] + (counts[last] - 1) * slowest[last])
    ends = (middle * slowest + through)[steps:]
    for first in (0, steps):
        one = parts.first_iteration(decodes[:, first], float(counts[first]))
        rounds[first] = one.entered if steps == 1 else one.round
        ends[0] = one.end
    begins = np.concatenate([[0.0], np.cumsum(rounds[steps:])[:-1]])
    return _Timeline(
        prefill=prefill,
        own_prefill=own_prefill,
        until_decode=until_decode,
        rounds=rounds,
        ends=begins + ends,
    )


class _First(NamedTuple):
    """Of the first iteration, in seconds since the last prefill has left the last stage."""

    entered: float
    """When the last group has left the first stage."""
    round: float
    """When the first group may enter again."""
    end: float
    """When a group has left the last stage: mean over the groups."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """The prefills of a cycle."""

    count: float
    slowest: float
    seconds: Floats
    """Of one, by stage."""
    end: float
    """When the last one has left the last stage."""

    def first_iteration(self, decode: Floats, groups: float) -> _First:
        """Groups enter as their prefills leave, behind those that are still in the pipeline, stage after stage."""
        through = float(self.seconds.sum())
        behind = self.end - np.append(np.cumsum(self.seconds[:0:-1])[::-1], 0.0)  # When each stage is free.
        free, seconds = behind.tolist(), decode.tolist()
        entries, lefts = [], []
        for number in range(math.ceil(groups)):
            part = max(self.count * (number + 1) / max(groups, number + 1.0) - 1.0, 0.0)
            now = min(through + part * self.slowest, self.end)
            for stage, taken in enumerate(seconds):
                now = free[stage] = max(now, free[stage]) + taken
                if stage == 0:
                    entries.append(now - self.end)
            lefts.append(now - self.end)
        at = np.arange(len(lefts))
        entered = float(np.interp(groups - 1.0, at, entries))
        return _First(entered, max(lefts[0], entered), float(np.interp((groups - 1.0) / 2, at, lefts)))


def _running(rows: Floats, groups: int) -> Floats:
    """Groups that have a row left, [cycles, iterations]: rows are dealt out once a cycle, and leave by chance."""
    if groups == 1:
        return np.ones_like(rows)
    dealt = np.maximum(rows[:, :1], 1.0)
    begun = np.minimum(dealt, groups)
    left = 1.0 - np.minimum(rows / dealt, 1.0)
    return np.maximum(begun * (1.0 - left ** (dealt / begun)), 1.0)


class _Limited(NamedTuple):
    """Passes with a limit on their tokens that prefill a batch, in the mean."""

    num_passes: float
    largest_share: float
    """Tokens of the largest over the mean of all."""


@lru_cache(maxsize=1024)
def _limited_passes(prompts: LengthLaw, batch: int, limit: int) -> _Limited:
    """Of so many whole prompts in their order, one a pass at least: over draws, the same ones for every batch."""
    lengths = prompts.quantiles(np.random.default_rng(0).random((batch, _DRAWS)))
    count, held, largest = np.zeros(_DRAWS), np.full(_DRAWS, math.inf), np.zeros(_DRAWS)
    for tokens in lengths:
        begins = held + tokens > limit
        held = np.where(begins, tokens, held + tokens)
        largest = np.maximum(largest, held)
        count += begins
    return _Limited(float(count.mean()), float(largest.mean() * count.mean() / lengths.sum(axis=0).mean()))


def _largest_share(prompts: LengthLaw, batch: int, parts: float) -> float:
    """Tokens of the largest of `parts` balanced micro-batches over the mean: no less than the longest prompt's."""
    if parts == 1:
        return 1.0
    longest = prompts.longest_of(batch)
    even = (longest.tokens + (batch - 1) * prompts.mean) / parts
    return float(longest.weights @ np.maximum(even, longest.tokens)) / float(longest.weights @ even)


def _latency(timeline: _Timeline, first_tokens: float, output_tokens: Floats) -> Floats:
    """Whole cycles for as long as the request lasts, then the rest of its last one."""
    steps = len(timeline.ends)
    decodes = np.asarray(output_tokens, dtype=float) - first_tokens
    full = np.maximum(np.ceil(decodes / steps) - 1.0, 0.0)
    rest = np.interp(decodes - full * steps, np.arange(1, steps + 1), timeline.ends)
    cycle = timeline.prefill + float(timeline.rounds[steps:].sum())
    return np.where(decodes > 0, timeline.until_decode + full * cycle + rest, timeline.own_prefill)


def next_batch(schedule: Schedule, queue: Queue, state: Rounds, phase: str) -> Batch | None:
    """Prefill when every group has begun its N_D decode iterations, or when no request is left to decode.

    The first prefilled requests join the first group, and so on: a group decodes as soon as its own are there.
    """
    limit = schedule.variables.get("max_num_batched_tokens")
    if queue.waiting and _prefills_now(schedule, queue, state):
        several = limit is not None or queue.pass_tokens is not None
        parts = max(schedule.num_micro_batches - state.consecutive_prefills, int(several))
        if parts > 0 and (admitted := _admitted(schedule, queue, state)):
            part = balanced_part(admitted, min(parts, len(admitted)))
            return Batch(prefill=within(part, limit) if limit else part, dealt_later=True)
    if state.consecutive_prefills:
        if queue.busy:
            return None
        queue.rebalance(state.prefilled)
    group = state.next_group(queue)
    if group is None or group in queue.busy or _in_prefill(queue, group):
        return None
    return Batch(decode=tuple(queue.groups[group]), group=group)


def _in_prefill(queue: Queue, group: int) -> bool:
    return bool(queue.num_prefills_in_flight) and any(row.in_flight for row in queue.groups[group])


def repeats(schedule: Schedule, queue: Queue, state: Rounds) -> float:
    """Until the next prefill phase."""
    return schedule["decode_steps"] - state.iterations_since_prefill[0]


def _prefills_now(schedule: Schedule, queue: Queue, state: Rounds) -> bool:
    group = state.next_group(queue)
    if state.consecutive_prefills or group is None:
        return True
    return state.iterations_since_prefill[group] >= schedule["decode_steps"]


def _admitted(schedule: Schedule, queue: Queue, state: Rounds) -> tuple[SequenceState, ...]:
    """The requests still to be prefilled before decoding resumes."""
    size = schedule["prefill_batch"]
    if "adjust_percent" in schedule.variables:
        if state.phase_size is None:
            state.phase_size = _adjustment.adjusted_size(schedule, queue, others=len(queue.running))
        size = state.phase_size
    elif queue.pass_tokens is not None and "max_num_batched_tokens" not in schedule.variables:
        size = state.phase_size = _size_on_device(schedule, queue, state)
    return queue.admissible(size - state.num_admitted)


def _size_on_device(schedule: Schedule, queue: Queue, state: Rounds) -> int:
    """As many as the planned passes would prefill; in the further ones, where the device's memory makes more of them,
    none that came meanwhile."""
    if state.phase_size is not None and state.consecutive_prefills >= schedule.num_micro_batches:
        return state.phase_size
    return min(schedule["prefill_batch"], state.num_admitted + len(queue.waiting))
