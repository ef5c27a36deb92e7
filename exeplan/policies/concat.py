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
has none as long as there are long ones left over. How many a batch holds is counted on draws of the length law (best
fit, until one fits nowhere); n of them decode until the longest is done. A slot of m requests is still there in
iteration k with probability 1 - (1 - F(k))^m.
"""

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from exeplan.arrays import Floats
from exeplan.core.batch import Batch
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
    evenly_spread,
    in_rows,
    in_slots,
    in_slots_of_their_own,
    queue_of,
)
from exeplan.core.schedule import Schedule
from exeplan.errors import InputError
from exeplan.policies._together import generated, latency
from exeplan.policies.interface import Clock, Cycle, Knob, PassLimits, Queue, Stateless, Steady
from exeplan.workload.length_law import DecodeLaw, Ints, LengthLaw
from exeplan.workload.workload import Workload

KEEPS_FINISHED_ROWS = True
SEPARATE_STAGES = False
PADS_PROMPTS = False
FOR_DEADLINES = True

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


def starts_together(schedule: Schedule) -> int:
    """At least one request a slot, up to `max_num_seqs`."""
    slots = schedule["rows"] * (schedule["row_tokens"] // _slot_tokens(schedule))
    return min(slots, schedule.variables.get("max_num_seqs", slots))


def steady_state(schedule: Schedule, workload: Workload, clock: Clock) -> Steady:
    """The prefill of all rows, then as many decode iterations as the longest output of the batch needs."""
    prompts, slot, row = workload.input_law, _slot_tokens(schedule), schedule["row_tokens"]
    slots = schedule["rows"] * (row // slot)
    counted = min(schedule["rows"], max(_COUNTED_SLOTS * slot // row, 1))
    # Beyond this number of rows each further one is like the others.
    room = _capacity(prompts, counted, row, slot) * schedule["rows"] / counted
    batch = min(room, schedule.variables.get("max_num_seqs", room))
    used = slots * batch / room
    used = math.ceil(used) if used <= row // slot else math.ceil(used * slot / row - 0.1) * (row // slot)
    held = _held(prompts, batch, min(used, slots))
    law = workload.decode_law(first_token_from_prefill=clock.first_token_from_prefill)
    still_going = law.max_survival(batch)
    decoding, context = _kept(law, workload.mean_input, held if slot < row else None, batch)
    first, steps = np.array([1.0]), len(still_going)
    cycle = Cycle(
        num_prefill=np.concatenate([first * batch, np.zeros(steps)]),
        num_decode=np.concatenate([first * 0, decoding]),
        context_tokens=np.concatenate([first * 0, context]),
        prompt_law=held.slot_law,
        padded=True,
        packed_slots=float(min(used, slots)),
        kv_tokens=batch * (workload.mean_input + workload.mean_output),
        kv_tokens_std=float(np.sqrt(batch) * workload.total_std),
        num_seqs=batch,
    )
    seconds = clock.seconds(cycle)
    through = seconds.sum(axis=0)
    throughput = batch / float(through[0] + still_going @ through[1:])
    first_tokens = 1.0 if clock.first_token_from_prefill else 0.0
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


class _Held(NamedTuple):
    """What slots hold."""

    slot_law: LengthLaw
    """Tokens of a batch's slots, all as long as the largest."""
    requests: Floats
    """Requests in a slot; `shares` is the share of the slots that hold as many."""
    shares: Floats


@lru_cache(maxsize=4096)
def _held(prompts: LengthLaw, batch: float, slots: int) -> _Held:
    """The contents of the slots for a batch of even draws; counted on a part of the slots where there are many."""
    some = min(slots, _COUNTED_SLOTS)
    tokens = _drawn(prompts, max(round(batch * some / slots), 1))
    where = evenly_spread(tokens.tolist(), some)
    largest = max(offset + length for (_, offset), length in zip(where, tokens.tolist(), strict=True))
    longest = prompts.longest_of(batch)
    counts, times = np.unique(np.bincount([slot for slot, _ in where], minlength=some), return_counts=True)
    return _Held(
        slot_law=LengthLaw(np.maximum(longest.tokens, largest), longest.weights),
        requests=counts.astype(float),
        shares=times / times.sum(),
    )


def _drawn(prompts: LengthLaw, count: int) -> Ints:
    """`count` lengths, evenly over the law."""
    shares = (np.arange(count) + 0.5) / count
    return prompts.tokens[np.searchsorted(prompts.cdf, shares).clip(max=len(prompts.tokens) - 1)]


def _kept(law: DecodeLaw, mean_input: float, held: _Held | None, batch: float) -> tuple[Floats, Floats]:
    """Rows that decode in each iteration, given that it occurs, and their context; all of the batch without slots."""
    tokens = mean_input + generated(law)
    if held is None:
        return np.full(len(tokens), batch), batch * tokens
    done, k = 1.0 - law.survival, np.arange(1, len(law.survival) + 1)
    # Tokens of the finished requests: E[(I + D); D < k].
    of_done = mean_input - law.input_sum + generated(law) - (k - 1) * law.survival
    weights = held.requests * held.shares / float(held.requests @ held.shares)
    all_done = done[:, None] ** held.requests
    others_done = done[:, None] ** np.maximum(held.requests - 1, 0)
    occurs = np.maximum(law.max_survival(batch), 1e-300)
    rows = batch * ((1 - all_done) @ weights) / occurs
    context = batch * (tokens - of_done * (others_done @ weights)) / occurs
    return np.minimum(rows, batch), np.minimum(context, batch * tokens)


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
