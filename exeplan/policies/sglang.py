"""SGLang's own order of work: prompts first, decodes whenever none can be prefilled.

Source: `sglang/srt/managers/scheduler.py`, `schedule_policy.py` and `scheduler_components/new_token_ratio_tracker.py`
of 0.5.23, without prefix cache, priorities and mixed chunks.

    max_num_seqs              --max-running-requests, divided among the micro-batches
    max_num_batched_tokens    --chunked-prefill-size: prompt tokens of a pass; the last prompt is cut and goes on first
    conservativeness_percent  --schedule-conservativeness (optional, 100)

A request is admitted if the KV cache has room for its prompt and all that it may yet generate, beside a share of what
the running ones may yet generate. That share falls from 0.7 to a seventh of it over 600 decodes, and is estimated anew
where requests had to be preempted. Once one was refused none is admitted before another has left.

In the steady state under a backlog the slots b of a group that become free in an iteration, k ~ Binomial(b, 1/D) for D
decodes of a request that decodes, are refilled by as many passes as their tokens take, and then all b rows decode once.
Where a share q of the requests ends with its prefill, their slots are refilled again before that: by k q, k q^2, ...
prompts one after the other, or with the rest of k / (1 - q) where one pass does not take all k.

Not here: --prefill-decode-interval, which is `rra`, and mixed chunks, which are `chunked`. On a pipeline SGLang may
begin the rest of a cut prompt while its first part is in flight; and it retracts by the length of outputs, where the
youngest is preempted here.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from exeplan.arrays import Floats
from exeplan.core.batch import BLOCK_SIZE, Batch, SequenceState, cut_prompts
from exeplan.core.control_variables import micro_batchings, require, slot_share
from exeplan.core.schedule import Schedule
from exeplan.policies.interface import Clock, Cycle, Knob, PassLimits, PrefillBetween, Queue, Steady
from exeplan.policies.shared.chunk_passes import binomials
from exeplan.policies.shared.groups import resident_tokens, round_seconds
from exeplan.workload.length_law import DecodeLaw
from exeplan.workload.workload import Workload

KEEPS_FINISHED_ROWS = False
SEPARATE_STAGES = False
PADS_PROMPTS = False
FOR_DEADLINES = False
ENGINE = "sglang"

_BUDGETS = (2048, 4096, 8192, 16384)
_FIRST_RATIO, _LEAST_SHARE, _DECAY_STEPS = 0.7, 0.14, 600
"""SGLANG_INIT_NEW_TOKEN_RATIO, SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR, SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS."""
_AHEAD = 20
"""SGLANG_RETRACT_DECODE_STEPS: tokens a request that are expected after a preemption."""
_MOST_NEW = 4096
"""SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION: tokens that a request is taken to generate at most."""
_POINTS = 9
"""Values of the sum of several prompts."""
_ROUNDS = 12
"""Sizes of passes that refill what their own kind left free."""
_SELDOM = 0.02
"""Of a slot: so few are not refilled again."""


def check(schedule: Schedule) -> None:
    optional = ("micro_batches", "conservativeness_percent")
    require(schedule, "max_num_seqs", "max_num_batched_tokens", optional=optional)


def knobs(workload: Workload, max_seqs: int) -> tuple[Knob, ...]:
    """More residents raise throughput and latency."""
    return (Knob("max_num_seqs", tuple(range(1, max_seqs + 1))),)


def enumerated(num_stages: int) -> tuple[Mapping[str, int], ...]:
    """Micro-batches, as SGLang has them one a stage, and tokens a pass."""
    stages = micro_batchings(1) if num_stages == 1 else ({"micro_batches": num_stages},)
    return tuple({**values, "max_num_batched_tokens": budget} for values in stages for budget in _BUDGETS)


def schedule(variables: Mapping[str, int], workload: Workload) -> Schedule:
    return Schedule("sglang", variables)


def pass_limits(schedule: Schedule) -> PassLimits:
    slots, budget = schedule["max_num_seqs"], schedule["max_num_batched_tokens"]
    return PassLimits(decode_rows=slots, prompts=min(slots, budget), tokens=max(slots, budget))


def prefill_between_tokens(schedule: Schedule) -> PrefillBetween:
    """Prompts for all slots of each group may come first, pass after pass, and the rest of one that was cut."""
    groups = min(schedule.num_micro_batches, schedule["max_num_seqs"])
    return PrefillBetween(
        prompts=schedule["max_num_seqs"] + groups,
        tokens=schedule["max_num_batched_tokens"],
        cuts=True,
        passes=groups,
        apart=True,
        in_turn=True,
    )


def starts_together(schedule: Schedule) -> int:
    return 1


def steady_state(schedule: Schedule, workload: Workload, clock: Clock) -> Steady:
    """One decode of all rows, and the passes that refill what became free before it.

    The passes: the decode, a full pass of prompts, and the last pass of each number and length of prompts.
    """
    shift = 1.0 if clock.first_token_from_prefill else 0.0
    law = workload.decode_law(first_token_from_prefill=clock.first_token_from_prefill)
    groups = min(schedule.num_micro_batches, schedule["max_num_seqs"])
    slots, budget = schedule["max_num_seqs"] / groups, float(schedule["max_num_batched_tokens"])
    own, others = (_refill(count, law, workload, budget) for count in (slots, max(slots - 1.0, 0.0)))
    cycle = _cycle(slots, groups, (own, others), workload, clock, budget)
    seconds = clock.seconds(cycle)
    through = seconds.sum(axis=0)
    kinds = slice(0, 2 + len(own.last))
    passes = np.concatenate([[float(law.survival[0] > 0), own.full], own.chance])
    round_ = round_seconds(seconds[:, kinds, None], passes / passes.sum(), groups)
    pace = round_ * passes.sum() / float(passes @ through[kinds])  # How much longer than alone, on a pipeline.
    decode, full = float(through[0]), float(through[1])
    last_of_others = through[2 + len(own.last) :]
    pause = pace * (others.full * full + float(others.chance @ last_of_others))
    first = float(own.ending @ through[kinds][2:]) + full * (own.ending_full + pace * own.cut)
    rest = pace * (full * own.behind_full + float(own.behind @ through[kinds][2:]))

    def latency(output_tokens: Floats) -> Floats:
        count = np.asarray(output_tokens, dtype=float) - shift
        return np.where(count > 0, first + rest + count * (pace * decode + pause) - pause, first)

    whole = float(passes.sum()) * round_
    return Steady(
        cycle=cycle,
        seconds=seconds,
        throughput=own.mean * groups / whole,
        latency=latency,
        admission_interval=whole / groups,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refill:
    """What fills the free slots of a group; arrays over kinds of last passes."""

    mean: float
    """Prompts."""
    full: float
    """Full passes before the last one."""
    last: Floats
    """Tokens of the last pass."""
    prompts: Floats
    """Of which it computes something."""
    chance: Floats
    """How many of each kind there are before a decode; of those that refill the free slots first they add up to the
    probability that there is one."""
    ending: Floats
    """Shares of the prompts that end with each kind of last pass."""
    ending_full: float
    """The share that ends with a full pass."""
    cut: float
    """Full passes of a prompt before the one with which it ends: each of a refill cuts one prompt."""
    behind: Floats
    """Of each kind, how many come between the end of a prompt and its first decode."""
    behind_full: float
    """Full passes between them."""


def _refill(slots: float, decodes: DecodeLaw, workload: Workload, budget: float) -> _Refill:
    """Of slots that each become free with the probability that a request that decodes ends."""
    law, going_on = workload.input_law, float(decodes.survival[0])
    free, chance = np.array([slots]), np.ones(1)  # Where none decodes all are free after each pass.
    if going_on > 0:
        free, likely = binomials(np.array([slots]), min(going_on / decodes.mean_steps, 1.0))
        chance = likely[0]
    stay = going_on or 1.0
    one_by_one = (free * law.mean <= budget) & (free.max() * (1.0 - stay) >= _SELDOM * stay)
    again = _again(free, np.where(one_by_one, chance, 0.0), stay) if one_by_one.any() else _NONE
    count = np.concatenate([np.where(one_by_one, free, free / stay), again.count])
    chance = np.concatenate([chance, again.chance])
    lengths = law.slice_means(_POINTS)
    sums = np.maximum(count[:, None] * law.mean + np.sqrt(count)[:, None] * (lengths - law.mean), count[:, None])
    weights = np.repeat(chance[:, None] / _POINTS, _POINTS, axis=1)
    full = np.maximum(np.ceil(sums / budget) - 1.0, 0.0)
    some = count > 0
    full, number, weights = full[some], count[some][:, None], weights[some]
    last = np.maximum(sums[some] - full * budget, 1.0)
    prompts = np.clip(np.minimum(number, last / law.mean + 0.5), 1.0, None)
    ending = np.where(full > 0, np.minimum(prompts, number), number)
    # Those that end with full passes do so evenly over these.
    early = weights * (number - ending)
    mean = float(chance @ count)
    total = max(mean, 1e-300)
    behind = np.concatenate([0.0 * free, again.behind / total])[some]
    return _Refill(
        mean=mean,
        full=float((weights * full).sum()),
        last=last.ravel(),
        prompts=prompts.ravel(),
        chance=weights.ravel(),
        ending=(weights * ending / total).ravel(),
        ending_full=float(early.sum() / total),
        cut=float((weights * full).sum() / total),
        behind=(behind[:, None] / _POINTS + early / total).ravel(),
        behind_full=float((early * np.maximum(full - 1, 0.0)).sum() / 2 / total),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Again:
    """Passes that refill slots whose requests ended with their prefill; arrays over sizes, each of one pass or of
    several that come one after the other."""

    count: Floats
    """Prompts of a pass."""
    chance: Floats
    """How many such passes there are before a decode."""
    behind: Floats
    """How many come behind the pass of a request, summed over the requests between two decodes."""


_NONE = _Again(np.zeros(0), np.zeros(0), np.zeros(0))


def _again(free: Floats, chance: Floats, going_on: float) -> _Again:
    """Of so many free slots with these probabilities, until requests that decode have all of them."""
    ends = 1.0 - going_on
    rounds = np.arange(1, math.ceil(math.log(_SELDOM * going_on / float(free.max())) / math.log(ends)) + 1)
    left = ends ** rounds[:, None]
    occurs = (1.0 - (1.0 - left) ** free) @ chance
    # The slot of a request that decodes is not among those that are refilled behind it.
    after = (1.0 - left) / going_on * (1.0 - (1.0 - left) ** np.maximum(free - 1.0, 0.0)) @ (chance * free)
    first = np.unique(np.geomspace(1, len(rounds), _ROUNDS).astype(int)) - 1
    occurs_of, after_of, prompts = (np.add.reduceat(x, first) for x in (occurs, after, left[:, 0] * (chance @ free)))
    return _Again(prompts / np.maximum(occurs_of, 1e-300), occurs_of, after_of)


def _cycle(
    rows: float, groups: int, refills: tuple[_Refill, _Refill], workload: Workload, clock: Clock, budget: float
) -> Cycle:
    law, (own, others) = workload.input_law, refills
    comb = workload.decode_law(first_token_from_prefill=clock.first_token_from_prefill).comb(1)
    context = comb.context[0] / comb.active[0] if comb.active[0] > 0 else 0.0
    held, square = resident_tokens(workload)
    none = np.zeros(1 + len(own.last) + len(others.last))
    tokens = np.concatenate([[0.0, budget], own.last, others.last])
    return Cycle(
        num_prefill=np.concatenate([[0.0, max(budget / law.mean, 1.0)], own.prompts, others.prompts]),
        num_decode=np.concatenate([[rows], none]),
        context_tokens=np.concatenate([[rows * context], none]),
        prompt_law=law,
        prompt_tokens=tokens,
        kv_tokens=groups * rows * max(context + 1.0, held),
        kv_tokens_std=float(np.sqrt(groups * rows * max(square - held**2, 0.0))),
        num_seqs=groups * rows,
    )


@dataclass(slots=True)
class _Admission:
    """What SGLang's scheduler remembers between two passes."""

    first_ratio: float
    ratio: float
    """The share of what running requests may yet generate that is kept free for them."""
    full_with: int | None = None
    """Running requests when one was refused; None where none was."""
    preempted: tuple[str, int] = ("", 0)
    """The last one seen to have been preempted, and how often."""

    def began(self, batch: Batch, times: int) -> None:
        if batch.prefill:
            return
        least = self.first_ratio * _LEAST_SHARE
        self.ratio = max(self.ratio - times * (self.first_ratio - least) / _DECAY_STEPS, least)

    def drained(self) -> None:
        self.ratio, self.full_with = self.first_ratio, None

    def look(self, queue: Queue) -> None:
        """Whether one was preempted since, by the head of the queue; whether one has left that was in the way."""
        head = next(iter(queue.waiting), None)
        if head is not None and head.preemptions and self.preempted != (head.request_id, head.preemptions):
            self.preempted = (head.request_id, head.preemptions)
            known = (*queue.running, head)
            expected = sum(row.num_output_tokens + _AHEAD for row in known)
            self.ratio = min(expected / (sum(row.max_output_tokens for row in known) + 1), 1.0)
        if self.full_with is not None and len(queue.running) < self.full_with:
            self.full_with = None


def start(schedule: Schedule, num_groups: int) -> _Admission:
    first = min(_FIRST_RATIO * schedule.variables.get("conservativeness_percent", 100) / 100, 1.0)
    return _Admission(first_ratio=first, ratio=first)


def next_batch(schedule: Schedule, queue: Queue, state: _Admission, phase: str) -> Batch | None:
    """Of the first group that is back: its prompts, else its decodes."""
    state.look(queue)
    for number in queue.group_order:
        if number not in queue.busy and (batch := _pass_of(schedule, queue, state, number)):
            return batch
    return None


def _pass_of(schedule: Schedule, queue: Queue, state: _Admission, number: int) -> Batch | None:
    rows = queue.groups[number]
    # Only the youngest may have been cut.
    begun = tuple(rows[-1:]) if rows and rows[-1].num_computed_tokens else ()
    if batch := _prefill(schedule, queue, state, number, begun):
        return batch
    decoding = tuple(rows[: len(rows) - len(begun)])
    return Batch(decode=decoding, group=number) if decoding else None


def _prefill(
    schedule: Schedule, queue: Queue, state: _Admission, number: int, begun: tuple[SequenceState, ...]
) -> Batch | None:
    room, slots = schedule["max_num_batched_tokens"], schedule["max_num_seqs"]
    free = slot_share(slots, len(queue.groups), number) - len(queue.groups[number])
    to_fill = room - sum(row.num_tokens - row.num_computed_tokens for row in begun)
    fresh = _admitted(queue, state, free, to_fill) if queue.waiting and state.full_with is None else ()
    chunks = cut_prompts(begun + fresh, room, whole=queue.whole_prompts)
    prefill = (begun + fresh)[: len(chunks)]
    return Batch(prefill=prefill, chunks=chunks, group=number) if prefill else None


def _admitted(queue: Queue, state: _Admission, limit: int, max_tokens: int) -> tuple[SequenceState, ...]:
    """Those whose prompt and answer fit beside the share that is kept for others; one at least where none runs."""
    candidates = queue.admissible(limit, max_tokens=max_tokens)
    room = queue.free_blocks * BLOCK_SIZE - state.ratio * sum(_left(row) for row in queue.running)
    count = 0
    for row in candidates:
        needed = row.num_tokens + _left(row)
        if needed + 1 > room and (queue.running or count):
            state.full_with = len(queue.running) + count
            break
        room -= needed
        count += 1
    return candidates[:count]


def _left(row: SequenceState) -> int:
    """Tokens that it may yet generate."""
    return min(row.max_output_tokens - row.num_output_tokens, _MOST_NEW)


def repeats(schedule: Schedule, queue: Queue, state: _Admission) -> float:
    """For as long as every slot is taken, or one was refused and none has left since."""
    full = len(queue.running) == schedule["max_num_seqs"] or state.full_with is not None
    return math.inf if full else 0
