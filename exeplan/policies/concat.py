"""ConcatBatching: prompts share rows, a batch runs to completion, and the order chooses the requests of the next one.

Source: TCB (ICPP 2022) sections 4 and 5; B is `rows`, L `row_tokens`, z `slot_tokens`. Without slots a row is one
(pure ConcatBatching), and a batch keeps its memory until all of it is done; with slots each leaves when its requests
are done, and attention computes the squares of the slots instead of those of the rows. The order `slotted-das` cuts
slots by each batch (Algorithm 2).

No request is too long: if the most urgent one, that of the earliest deadline (with `fcfs` the oldest), fits no slot,
the batch uses pure rows, and if it fits no row it runs alone in a row of its own. A batch computes
no more rows, and none longer, than its requests need. Not here: early loading of the next batch; the engine's weights
stay on the device.

In the steady state under a backlog requests are taken as they come, whatever the order: one that prefers short ones
has none as long as there are long ones left over. How many a batch holds, in how many slots of what length, and which
prompts share one is counted on draws of the length law, packed as real ones (best fit, until one fits nowhere; then
like lengths together). n of them decode until the longest is done. A slot is still there in iteration k with
probability 1 - prod (1 - F(k)) over its requests, F that of outputs to prompts of like lengths: slots of short prompts
may leave much earlier than others.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np

from exeplan.arrays import Bools, Floats
from exeplan.core.batch import Batch, Packing
from exeplan.core.control_variables import require
from exeplan.core.queue_order import (
    ORDER_VARIABLES,
    ORDERS,
    SLOTTED_DAS,
    Das,
    Packed,
    Pick,
    QueueArrays,
    das_of,
    in_rows,
    in_slots,
    in_slots_of_their_own,
    queue_of,
)
from exeplan.core.schedule import Schedule
from exeplan.errors import InputError
from exeplan.policies.interface import Clock, Cycle, Knob, PassLimits, PrefillBetween, Queue, Stateless, Steady
from exeplan.policies.shared.together import generated, latency
from exeplan.workload.length_law import DecodeLaw, Ints, LengthLaw
from exeplan.workload.workload import Workload

KEEPS_FINISHED_ROWS = True
SEPARATE_STAGES = False
PADS_PROMPTS = False
FOR_DEADLINES = True
RESERVES = True

_SLOTS = (1, 4)
"""Slots a row that the search tries: pure rows, and rows that are cut."""
_SLOT_PROMPTS = (1, 2, 4)
"""How many of the longest prompts a slot holds, in the search."""
_FINE = 64
"""Batch sizes in the search from a power of two to the next."""
_FALLS = 0.6
"""On 2,000 lines of 60 batch sizes, over random length laws, throughput fell by at most 0.54 and latency by 0.45."""
_COUNTED_SLOTS, _COUNTED_REQUESTS = 32, 512
"""Slots in which, and draws with which, it is counted how many requests a batch holds."""
_PACKED_SLOTS = 256
"""Slots of a batch that are packed with draws."""
_CLASSES = 8
"""Lengths of prompts that are told apart in the slots."""


def check(schedule: Schedule) -> None:
    optional = ("slot_tokens", "max_num_seqs")
    require(schedule, "rows", "row_tokens", optional=optional, orders=(*ORDERS, SLOTTED_DAS))
    if schedule.order == SLOTTED_DAS and "slot_tokens" in schedule.variables:
        raise InputError(f"concat: order {SLOTTED_DAS} chooses slot_tokens itself; leave it out, or take order das")
    if _slot_tokens(schedule) > schedule["row_tokens"]:
        raise InputError(
            f"concat: slot_tokens={_slot_tokens(schedule)} is more than row_tokens={schedule['row_tokens']}"
        )


def knobs(workload: Workload, max_seqs: int) -> tuple[Knob, ...]:
    """More requests a batch raise throughput and latency; they get the rows that they need.

    That is in the large: one request more may need another row, and one row more may leave shorter rows. So the search
    tries nearly all values that may win, and there are few of the large ones.
    """
    return (Knob("max_num_seqs", tuple(_sizes(max_seqs)), falls=_FALLS),)


def _sizes(most: int) -> Iterator[int]:
    """All numbers up to twice `_FINE`, then `_FINE` from each power of two to the next, and the last one."""
    size = 1
    while size < most:
        yield size
        size += max(1, 2 ** (size.bit_length() - 1) // _FINE)
    yield most


def enumerated(num_stages: int) -> tuple[Mapping[str, int], ...]:
    """The slots of a row: the best size depends on the lengths, not on the bound alone."""
    return tuple({"slots": slots, "slot_prompts": prompts} for slots in _SLOTS for prompts in _SLOT_PROMPTS)


def schedule(variables: Mapping[str, int], workload: Workload) -> Schedule:
    """`slots` in a row, each for `slot_prompts` of the longest prompts, and rows for all `max_num_seqs`."""
    given = dict(variables)
    slots, prompts = given.pop("slots", None), given.pop("slot_prompts", 1)
    if slots is not None:
        slot = prompts * workload.max_input
        given |= {"row_tokens": slots * slot} | ({"slot_tokens": slot} if slots > 1 else {})
    if "max_num_seqs" in given:
        row, slot = given["row_tokens"], given.get("slot_tokens", given["row_tokens"])
        given["rows"] = math.ceil(given["max_num_seqs"] / _capacity(workload.input_law, 1, row, slot))
    names = ("max_num_seqs", "rows", "row_tokens", "slot_tokens", *ORDER_VARIABLES)
    return Schedule("concat", {name: given[name] for name in names if name in given})


def pass_limits(schedule: Schedule) -> PassLimits:
    """Rows limit tokens, not requests, and a request longer than a row runs alone."""
    most = schedule.variables.get("max_num_seqs")
    return PassLimits(decode_rows=most, prompts=most)


def prefill_between_tokens(schedule: Schedule) -> PrefillBetween:
    """Nothing: a batch runs to its end."""
    return PrefillBetween(prompts=0)


def starts_together(schedule: Schedule) -> int:
    """At least one request a slot, up to `max_num_seqs`."""
    slots = schedule["rows"] * (schedule["row_tokens"] // _slot_tokens(schedule))
    return min(slots, schedule.variables.get("max_num_seqs", slots))


def steady_state(schedule: Schedule, workload: Workload, clock: Clock) -> Steady:
    """The prefill of all rows, then as many decode iterations as the longest output of the batch needs.

    Prompts longer than a row have batches of their own, one each, in turn with those of all others.
    """
    fits = workload.inputs <= schedule["row_tokens"]
    if fits.all():
        return _batches(schedule, workload, clock)
    alone = _one_by_one(workload.only(~fits), clock)
    if not fits.any():
        return alone
    batches, share = _batches(schedule, workload.only(fits), clock), float(workload.weights[fits].sum())
    throughput = 1.0 / (share / batches.throughput + (1.0 - share) / alone.throughput)
    return replace(
        max(batches, alone, key=lambda one: one.cycle.kv_tokens),
        throughput=throughput,
        latency=_of_both(workload, fits, batches, alone),
        admission_interval=batches.cycle.num_seqs / share / throughput,
    )


def _of_both(workload: Workload, fits: Bools, batches: Steady, alone: Steady) -> Callable[[Floats], Floats]:
    """Of requests with at least so many tokens, those in batches and those alone."""
    first = np.searchsorted(workload.outputs, np.arange(workload.max_output + 1))
    fitting, every = (weights[::-1].cumsum()[::-1][first] for weights in (workload.weights * fits, workload.weights))
    tokens = np.arange(workload.max_output + 1.0)

    def latency(output_tokens: Floats) -> Floats:
        share = np.interp(output_tokens, tokens, fitting / every)
        return share * batches.latency(output_tokens) + (1.0 - share) * alone.latency(output_tokens)

    return latency


def _one_by_one(workload: Workload, clock: Clock) -> Steady:
    """Each in a batch and a row of its own."""
    row = Schedule("concat", {"max_num_seqs": 1, "rows": 1, "row_tokens": workload.max_input})
    return _batches(row, workload, clock)


def _batches(schedule: Schedule, workload: Workload, clock: Clock) -> Steady:
    """Of prompts none of which is longer than a row."""
    prompts, slot, row = workload.input_law, _slot_tokens(schedule), schedule["row_tokens"]
    counted = min(schedule["rows"], max(_COUNTED_SLOTS * slot // row, 1))
    # Beyond this number of rows each further one is like the others.
    room = _capacity(prompts, counted, row, slot) * schedule["rows"] / counted
    batch = min(room, schedule.variables.get("max_num_seqs", room))
    held = _held(workload.input_law, batch, schedule["rows"], row, slot)
    law = workload.decode_law(first_token_from_prefill=clock.first_token_from_prefill)
    still_going = law.max_survival(batch)
    first_tokens = 1 if clock.first_token_from_prefill else 0
    if slot < row:
        decoding, context = _kept(workload, first_tokens, held, batch)
    else:
        decoding, context = np.full(len(still_going), batch), batch * (workload.mean_input + generated(law))
    first, steps = np.array([1.0]), len(still_going)
    cycle = Cycle(
        num_prefill=np.concatenate([first * batch, np.zeros(steps)]),
        num_decode=np.concatenate([first * 0, decoding]),
        context_tokens=np.concatenate([first * 0, context]),
        prompt_law=held.slot_law,
        padded=True,
        packed_slots=held.num_slots,
        kv_tokens=batch * (workload.mean_input + workload.mean_output),
        kv_tokens_std=float(np.sqrt(batch) * workload.total_std),
        num_seqs=batch,
    )
    seconds = clock.seconds(cycle)
    through = seconds.sum(axis=0)
    throughput = batch / float(through[0] + still_going @ through[1:])
    return Steady(
        cycle=cycle,
        seconds=seconds,
        throughput=throughput,
        latency=partial(latency, through[0], np.cumsum(through)[1:], first_tokens),
        admission_interval=batch / throughput,
    )


@lru_cache(maxsize=1024)
def _capacity(prompts: LengthLaw, rows: int, row_tokens: int, slot_tokens: int) -> float:
    """Requests that rows hold, in the mean: counted on draws that come one after the other, as with a backlog."""
    tokens = np.minimum(_drawn(prompts, _COUNTED_REQUESTS), slot_tokens)
    tokens = np.random.default_rng(0).permutation(tokens)
    at = batches = 0
    while at < _COUNTED_REQUESTS:
        # The draws once more, should a batch hold more than are left of them.
        coming = np.roll(tokens, -at)
        coming = np.resize(coming, rows * row_tokens // int(coming.mean()) * 2 + 1)
        coming = coming[: int(np.searchsorted(np.cumsum(coming), rows * row_tokens)) + 1]
        queue = QueueArrays(coming, np.zeros(len(coming)), np.ones(len(coming)))
        at += len(in_slots("fcfs", queue, rows=rows, row_tokens=row_tokens, slot_tokens=slot_tokens, das=Das()).picks)
        batches += 1
    return at / batches


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """What slots hold."""

    num_slots: float
    """Of a batch, empty ones included."""
    slot_law: LengthLaw
    """Tokens of a batch's slots, all as long as the largest."""
    contents: Floats
    """[kinds of slots, _CLASSES]: how many prompts of each class a slot holds."""
    shares: Floats
    """Slots of each kind, of one batch in the mean."""


@lru_cache(maxsize=4096)
def _held(prompts: LengthLaw, batch: float, rows: int, row_tokens: int, slot_tokens: int) -> _Held:
    """The slots of a batch, counted on draws that are packed; on a part of the rows where there are many."""
    part = min(rows, max(_PACKED_SLOTS * slot_tokens // row_tokens, 1))
    count = max(round(batch * part / rows), 1)
    repeats = max(_COUNTED_REQUESTS // (2 * count), 1)
    packings = [
        _packing(tokens, part, row_tokens, slot_tokens)
        for tokens in np.random.default_rng(0).permutation(_drawn(prompts, count * repeats)).reshape(repeats, count)
    ]
    sizes = np.sort([packing.slot_tokens for packing, _ in packings])
    law = LengthLaw(sizes, np.full(repeats, 1.0 / repeats))
    if repeats == 1:
        longest = prompts.longest_of(batch)
        law = LengthLaw(np.maximum(longest.tokens, sizes[0]), longest.weights)
    contents, times = np.unique(
        np.concatenate([_contents(prompts, *found) for found in packings]), axis=0, return_counts=True
    )
    one_batch = batch / (count * repeats)
    num_slots = float(sum(packing.num_slots for packing, _ in packings)) * one_batch
    return _Held(num_slots, law, contents, times.astype(np.float64) * one_batch)


def _packing(tokens: Ints, rows: int, row_tokens: int, slot_tokens: int) -> tuple[Packing, Ints]:
    """How these prompts lie, and the tokens of those that fit."""
    queue = QueueArrays(np.minimum(tokens, slot_tokens), np.zeros(len(tokens)), np.ones(len(tokens)))
    packed = in_slots("fcfs", queue, rows=rows, row_tokens=row_tokens, slot_tokens=slot_tokens, das=Das())
    return packed.packing(queue), tokens[[pick.request for pick in packed.picks]]


def _contents(prompts: LengthLaw, packing: Packing, tokens: Ints) -> Floats:
    """[slots that are used, _CLASSES]: prompts in them; classes are slices of the law of equal probability."""
    at = np.searchsorted(prompts.tokens, tokens)
    middle = (np.append(0.0, prompts.cdf)[at] + prompts.cdf[at]) / 2
    slots = np.array(packing.slots) if packing.slot_tokens < packing.row_tokens else np.zeros(len(tokens), dtype=int)
    found = np.zeros((int(slots.max()) + 1, _CLASSES))
    np.add.at(found, (slots, np.minimum(middle * _CLASSES, _CLASSES - 1).astype(int)), 1.0)
    return found[found.sum(axis=1) > 0]


def _drawn(prompts: LengthLaw, count: int) -> Ints:
    """`count` lengths, evenly over the law."""
    shares = (np.arange(count) + 0.5) / count
    return prompts.tokens[np.searchsorted(prompts.cdf, shares).clip(max=len(prompts.tokens) - 1)]


@lru_cache(maxsize=64)
def _classes(workload: Workload, first_tokens: int) -> tuple[Floats, Floats, Floats]:
    """By slices of the prompts' law, [_CLASSES, iterations]: Pr(D < k); tokens of a request before iteration k, and
    those times that it is done, E[(I + D); D < k]."""
    order = np.argsort(workload.inputs, kind="stable")
    inputs, decodes, weights = workload.inputs[order], workload.outputs[order] - first_tokens, workload.weights[order]
    end = np.cumsum(weights) / weights.sum()
    edges = np.linspace(0.0, 1.0, _CLASSES + 1)
    found = np.zeros((3, _CLASSES, max(int(decodes.max()), 1)))
    k = np.arange(1, found.shape[2] + 1)
    for number in range(_CLASSES):
        share = np.diff(np.clip(np.append(0.0, end), edges[number], edges[number + 1]))
        here = share > 0
        share, own_inputs = share[here] / share.sum(), inputs[here]
        law = DecodeLaw.of(decodes[here], own_inputs, share)
        more = found.shape[2] - len(law.survival)
        survival, input_sum = np.pad(law.survival, (0, more)), np.pad(law.input_sum, (0, more))
        decoded, mean_input = np.append(0.0, np.cumsum(survival)[:-1]), float(share @ own_inputs)
        found[:, number] = (
            1.0 - survival,
            mean_input + decoded,
            mean_input - input_sum + decoded - (k - 1) * survival,
        )
    return found[0], found[1], found[2]


@lru_cache(maxsize=1024)
def _kept(workload: Workload, first_tokens: int, held: _Held, batch: float) -> tuple[Floats, Floats]:
    """Rows that decode in each iteration, given that it occurs, and their context."""
    done, tokens, of_done = _classes(workload, first_tokens)
    law = workload.decode_law(first_token_from_prefill=first_tokens > 0)
    number = held.contents.sum(axis=1)
    all_done = np.exp(held.contents @ np.log(np.maximum(done, 1e-300)))
    occurs = np.maximum(law.max_survival(batch), 1e-300)
    rows = (held.shares * number) @ (1.0 - all_done) / occurs
    everything = (held.shares @ held.contents) @ tokens
    # Of a slot that is done: E[I + D | D < k] of each class, times its requests in such slots.
    of_each = of_done / np.maximum(done, 1e-300)
    context = (everything - (of_each * ((held.shares[:, None] * held.contents).T @ all_done)).sum(axis=0)) / occurs
    return np.minimum(rows, batch), np.minimum(context, everything)


def start(schedule: Schedule, num_groups: int) -> Stateless:
    return Stateless()


def next_batch(schedule: Schedule, queue: Queue, state: Stateless, phase: str) -> Batch | None:
    """The running batch to its end, then the requests that the order packs into the rows."""
    if queue.running:
        return None if queue.busy else Batch(decode=tuple(queue.running))
    if not queue.waiting:
        return None
    waiting = list(queue.waiting)
    arrays = queue_of(waiting)
    packed = _packed(schedule, arrays)
    chosen = [waiting[pick.request] for pick in packed.picks]
    limit = schedule.variables.get("max_num_seqs", len(chosen))
    admitted = queue.fitting(chosen, limit=limit, reserve=True)
    if not admitted:
        return None
    packing = packed.packing(arrays, len(admitted))
    while queue.pass_tokens is not None and packing.num_tokens > queue.pass_tokens and len(admitted) > 1:
        admitted = admitted[: len(admitted) * queue.pass_tokens // packing.num_tokens or 1]
        packing = packed.packing(arrays, len(admitted))
    return Batch(prefill=admitted, packing=packing)


def _packed(schedule: Schedule, queue: QueueArrays) -> Packed:
    rows, row, slot, das = schedule["rows"], schedule["row_tokens"], _slot_tokens(schedule), das_of(schedule)
    pressing = 0 if schedule.order == "fcfs" else int(np.argmin(queue.deadlines))
    if queue.tokens[pressing] > row:
        return Packed([Pick(pressing, 0, 0)])
    own_slots = schedule.order == SLOTTED_DAS
    if queue.tokens[pressing] > slot:
        slot = row
    fits = np.flatnonzero(queue.tokens <= slot)
    some = QueueArrays(queue.tokens[fits], queue.deadlines[fits], queue.utilities[fits])
    if own_slots:
        packed = in_slots_of_their_own(some, rows=rows, row_tokens=row, das=das)
    elif slot < row:
        packed = in_slots(schedule.order, some, rows=rows, row_tokens=row, slot_tokens=slot, das=das)
    else:
        packed = in_rows(schedule.order, some, rows=rows, row_tokens=row, das=das)
    return Packed([pick._replace(request=int(fits[pick.request])) for pick in packed.picks], packed.bins_a_row)


def _slot_tokens(schedule: Schedule) -> int:
    return schedule.variables.get("slot_tokens", schedule["row_tokens"])
