"""Chunked prefill: as `orca`, but a pass carries no more than `max_num_batched_tokens` tokens, decodes first.

Source: Sarathi-Serve (OSDI 2024) section 4.2, and vLLM's scheduler. Every row that decodes takes one token of the pass;
prompts take the rest in order of arrival, the last of them is cut and continues in the group's next pass. A request
takes a slot, and KV blocks for its whole prompt, with its first token; where blocks run out the youngest is preempted
and computed again. Engines may also limit the prompts of a pass (`max_num_prefills`, optional): one of them may wait
for a pass that has tokens left. The closed form counts such a limit as tokens of mean prompts.

In the steady state under a backlog (`shared/chunk_passes.py`) either slots bind, and a pass carries what they ask for,
or tokens do, and every pass is full; a group completes `completed` prompts a pass. With m groups in flight a round
takes as long as in `orca`. A request first goes through (I + what is before it) / room passes, then one a token. An
encoder-decoder model's prompts are not cut: one that does not fit waits for the next pass, where it comes first and may
exceed the budget (`shared/whole_passes.py`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from exeplan.arrays import Floats
from exeplan.core.batch import Batch, cut_prompts
from exeplan.core.control_variables import check_token_limit, micro_batchings, require
from exeplan.core.schedule import Schedule
from exeplan.policies.interface import Clock, Cycle, Knob, PassLimits, PrefillBetween, Queue, Stateless, Steady
from exeplan.policies.shared.chunk_passes import SPREAD, ChunkPasses, chunk_passes, most_resident
from exeplan.policies.shared.groups import resident_tokens, round_seconds
from exeplan.policies.shared.spread import even_out, free_places, groups_for, num_joining
from exeplan.policies.shared.whole_steady import whole_steady
from exeplan.workload.length_law import LengthLaw
from exeplan.workload.workload import Workload

KEEPS_FINISHED_ROWS = False
SEPARATE_STAGES = False
PADS_PROMPTS = False
FOR_DEADLINES = False

_BUDGETS = (128, 256, 512, 1024, 2048, 4096, 8192)
_LENGTHS = 16
"""Lengths of one's own prompt at which the passes of its prefill are counted."""


def check(schedule: Schedule) -> None:
    optional = ("micro_batches", "max_num_prefills")
    require(schedule, "max_num_seqs", "max_num_batched_tokens", optional=optional)
    check_token_limit(schedule)


def knobs(workload: Workload, max_seqs: int) -> tuple[Knob, ...]:
    """More residents raise throughput and latency."""
    return (Knob("max_num_seqs", tuple(range(1, max_seqs + 1))),)


def enumerated(num_stages: int) -> tuple[Mapping[str, int], ...]:
    """Micro-batches, and tokens a pass: the best number depends on the device, not on the bound alone."""
    return tuple(
        {**values, "max_num_batched_tokens": budget} for values in micro_batchings(num_stages) for budget in _BUDGETS
    )


def schedule(variables: Mapping[str, int], workload: Workload) -> Schedule:
    """No more slots than a pass has tokens, nor than its tokens keep taken: others would stay empty."""
    budget = variables["max_num_batched_tokens"]
    each = min(budget, most_resident(workload.input_law, workload.mean_output + 1, budget))
    most = each * variables.get("micro_batches", 1)
    return Schedule("chunked", {**variables, "max_num_seqs": min(variables["max_num_seqs"], most)})


def pass_limits(schedule: Schedule) -> PassLimits:
    return PassLimits(
        decode_rows=schedule["max_num_seqs"],
        prompts=schedule["max_num_seqs"],
        tokens=schedule["max_num_batched_tokens"],
    )


def prefill_between_tokens(schedule: Schedule) -> PrefillBetween:
    """Full passes of all micro-batches."""
    return PrefillBetween(
        prompts=schedule["max_num_seqs"] - 1,
        tokens=schedule["max_num_batched_tokens"],
        cuts=True,
        passes=schedule.num_micro_batches,
    )


def starts_together(schedule: Schedule) -> int:
    return 1


def steady_state(schedule: Schedule, workload: Workload, clock: Clock) -> Steady:
    """One pass, split by its prompt tokens.

    The passes: those of a group, by the attention time of their prompts; those that a resident request observes, its
    own row decoding along with the other slots; and two of its own prefill, a full one and one that finds no prompt
    tokens left over.
    """
    shift = 1.0 if clock.first_token_from_prefill else 0.0
    steps = workload.mean_output + 1.0 - shift
    groups = min(schedule.num_micro_batches, schedule["max_num_seqs"])
    slots, budget = schedule["max_num_seqs"] / groups, float(schedule["max_num_batched_tokens"])
    if cap := schedule.variables.get("max_num_prefills"):
        budget = min(budget, slots + cap * workload.mean_input)
    if not clock.first_token_from_prefill:  # An encoder attends to all of a prompt at once.
        return whole_steady(steps, groups, slots, budget, workload, clock)
    own = chunk_passes(workload.input_law, steps, slots, budget)
    seen = chunk_passes(workload.input_law, steps, slots - 1, budget - 1)
    prefill = _own_prefill(seen, budget, workload.input_law)
    cycle = _cycle(own, seen, prefill, groups, workload, clock)
    seconds = clock.seconds(cycle)
    through = seconds.sum(axis=0)
    count, kinds = len(own.rows), len(own.rows) * len(SPREAD)
    shape = (len(SPREAD), count)
    spread = seconds[:, :kinds].reshape(-1, *shape).swapaxes(1, 2)
    round_ = round_seconds(spread, own.probability, groups)
    mean = float(own.probability @ through[:kinds].reshape(shape).mean(axis=0))
    observed = float(seen.probability @ through[kinds:-2])
    full, fresh = through[-2:]
    last, each = seen.left_over * full + (1 - seen.left_over) * fresh, max(round_ + full - mean, full)
    first = last + (prefill.passes - 1) * each
    later = max(round_ + observed - mean, observed)
    return Steady(
        cycle=cycle,
        seconds=seconds,
        throughput=own.completed * groups / round_,
        latency=lambda output_tokens: first + (np.asarray(output_tokens, dtype=float) - shift) * later,
        admission_interval=round_ / groups,
        first=partial(_first_token, seen, budget, prefill, (full, fresh, each)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _OwnPrefill:
    """What a request goes through until its first token."""

    passes: float
    """From the first that computes something of its prompt to the last."""
    room: float
    """Prompt tokens of a full pass."""
    last_tokens: float
    """Prompt tokens of its last pass, if no others' are left over."""
    others: float
    """Other prompts in it."""


def _own_prefill(seen: ChunkPasses, budget: float, prompts: LengthLaw) -> _OwnPrefill:
    """Where others' prompt tokens are left over its own begin anywhere in a pass, else after half of the new ones."""
    length = prompts.slice_means(_LENGTHS)
    fresh_room, before = max(budget - seen.fresh_rows, 1.0), seen.fresh_tokens / 2
    last = np.clip(2 * before + length - (_alone(seen, budget, length) - 1) * fresh_room, 1.0, fresh_room)
    return _OwnPrefill(
        passes=float(np.mean(_passes(seen, budget, length))),
        room=max(budget - seen.crowded_rows, 1.0),
        last_tokens=float(last.mean()),
        others=seen.fresh_tokens / prompts.mean,
    )


def _passes(seen: ChunkPasses, budget: float, length: Floats) -> Floats:
    """Passes of prompts of these lengths, from the first that computes something of one to its last."""
    crowded = 1 + (length - 1) / max(budget - seen.crowded_rows, 1.0)
    return np.asarray(seen.left_over * crowded + (1 - seen.left_over) * _alone(seen, budget, length))


def _first_token(
    seen: ChunkPasses,
    budget: float,
    prefill: _OwnPrefill,
    seconds: tuple[float, float, float],
    inputs: Floats,
    chance: Floats,
) -> Floats:
    """Seconds to the first token, by what a request meets.

    `seconds` are of the last pass, with others' prompt tokens left over and without, and of each pass before. Where
    none are left over, those of new requests in its pass are taken to be exponential, half of them before its own.
    """
    full, fresh, each = seconds
    length, crowded = np.asarray(inputs, dtype=float), chance < seen.left_over
    begun = chance / max(seen.left_over, 1e-12)  # Share of the first pass that is taken.
    passes = np.ceil(begun + length / prefill.room)
    room = max(budget - seen.fresh_rows, 1.0)
    others = -seen.fresh_tokens * np.log((1.0 - chance) / max(1.0 - seen.left_over, 1e-12) + 1e-12)
    before = np.maximum(others, 0.0) / 2
    alone = np.ceil((before + length) / room) - np.floor(before / room)
    tokens = np.clip(2 * before + length - (alone - 1) * room, 1.0, room)
    a_token = max(full - fresh, 0.0) / max(prefill.room - prefill.last_tokens, 1.0)
    last = np.maximum(fresh + a_token * (tokens - prefill.last_tokens), 0.01 * fresh)
    return np.asarray(np.where(crowded, full + (passes - 1) * each, last + (alone - 1) * each))


def _alone(seen: ChunkPasses, budget: float, length: Floats) -> Floats:
    """The same where no prompt tokens of others are left over."""
    room, before = max(budget - seen.fresh_rows, 1.0), seen.fresh_tokens / 2
    return np.asarray(np.ceil((before + length) / room) - np.floor(before / room))


def _cycle(
    own: ChunkPasses, seen: ChunkPasses, prefill: _OwnPrefill, groups: int, workload: Workload, clock: Clock
) -> Cycle:
    law = workload.input_law
    comb = workload.decode_law(first_token_from_prefill=clock.first_token_from_prefill).comb(1)
    per_row = comb.context[0] / comb.active[0] if comb.active[0] > 0 else 0.0
    rows = np.concatenate([*[own.rows] * len(SPREAD), seen.rows + 1, [seen.crowded_rows, seen.fresh_rows]])
    prompts = [1 + prefill.room / law.mean, 1 + prefill.others]
    held, square = resident_tokens(workload)
    serving = own.completed * (comb.active[0] + 1.0)  # Slots with their prefill done, or in its last pass.
    cut = law.mean + law.std**2 / law.mean  # Tokens of the prompt that is cut: long ones are cut more often.
    spread = serving * max(square - held**2, 0.0) + (held * own.waiting_std) ** 2
    return Cycle(
        num_prefill=np.concatenate([*[own.num_prompts] * len(SPREAD), seen.num_prompts, prompts]),
        num_decode=rows,
        context_tokens=rows * per_row,
        prompt_law=law,
        prompt_tokens=np.concatenate(
            [*[own.prompt_tokens] * len(SPREAD), seen.prompt_tokens, [prefill.room, prefill.last_tokens]]
        ),
        prompt_attention=np.concatenate([_attention(own.prompt_tokens, law), np.ones(len(seen.rows) + 2)]),
        kv_tokens=groups * (serving * held + own.left_over * cut),
        kv_tokens_std=float(np.sqrt(groups * spread)),
        num_seqs=groups * (serving + own.left_over),
    )


def _attention(tokens: Floats, prompts: LengthLaw) -> Floats:
    """Attention of passes with `tokens` prompt tokens over its mean, at the points of its spread.

    A token's attention rises with its place s in its prompt: over s in prompts of length I its variance is
    4/3 E[I^3] / E[I] over the square of its mean a = E[I^2] / E[I], less 1. A pass of many prompts evens it out, down
    to the variance of I^2 - a I.
    """
    one, many = _attention_variances(prompts)
    deviation = np.sqrt(1 / (1 / one + tokens / (many + one * prompts.mean / 4)))
    return np.maximum(1 + np.outer(SPREAD, deviation), 0.0).ravel()


@lru_cache(maxsize=256)
def _attention_variances(prompts: LengthLaw) -> tuple[float, float]:
    """Of a token's attention over its mean, and of the attention of many prompts, for each of their tokens."""
    length, weight = prompts.tokens.astype(float), prompts.weights
    mean_of_token = float(length**2 @ weight) / prompts.mean
    one = 4 / 3 * float(length**3 @ weight) / prompts.mean / mean_of_token**2 - 1
    many = float((length**2 - mean_of_token * length) ** 2 @ weight) / prompts.mean / mean_of_token**2
    return one, many


def start(schedule: Schedule, num_groups: int) -> Stateless:
    return Stateless()


def next_batch(schedule: Schedule, queue: Queue, state: Stateless, phase: str) -> Batch | None:
    """The next group that is back: all its decodes, then prompt tokens until the pass is full."""
    joining = num_joining(queue, schedule["max_num_seqs"])
    even_out(queue, slots=schedule["max_num_seqs"], joining=joining)
    for number in queue.group_order:
        if number not in queue.busy and (batch := _pass_of(schedule, queue, number, joining)):
            return batch
    return None


def _pass_of(schedule: Schedule, queue: Queue, number: int, joining: int) -> Batch | None:
    running = queue.groups[number]
    # Only the youngest may have been cut: others are admitted after it in a pass that completes it.
    begun = tuple(running[-1:]) if running and running[-1].num_computed_tokens else ()
    decode = tuple(running[: len(running) - len(begun)])
    room = schedule["max_num_batched_tokens"] - len(decode)
    free = free_places(queue, number, slots=schedule["max_num_seqs"], joining=joining)
    if cap := schedule.variables.get("max_num_prefills"):
        free = min(free, cap - len(begun))
    to_fill = room - sum(row.num_tokens - row.num_computed_tokens for row in begun)
    prefill = begun + queue.admissible(free, max_tokens=to_fill)
    chunks = cut_prompts(prefill, room, whole=queue.whole_prompts)
    prefill = prefill[: len(chunks)]
    return Batch(prefill=prefill, decode=decode, chunks=chunks, group=number) if running or prefill else None


def groups_used(schedule: Schedule, num_requests: int, num_stages: int) -> int:
    return groups_for(
        num_requests, slots=schedule["max_num_seqs"], groups=schedule.num_micro_batches, stages=num_stages
    )


def repeats(schedule: Schedule, queue: Queue, state: Stateless) -> float:
    """For as long as every slot is taken."""
    return math.inf if len(queue.running) == schedule["max_num_seqs"] else 0
