"""TurboBatching: requests of like lengths are padded to one, and a batch runs to completion.

Source: TurboTransformers (PPoPP 2021) section 5, as TCB (ICPP 2022) measures it. The waiting requests are sorted by
length and cut into batches of at most `batch_size` by dynamic programming, at the least cost: padded tokens, and
`overhead_tokens` for each batch, the cost of its passes apart from its prompts. The batch with the first request of the
schedule's order runs next; the others are cut again after it.

In the steady state under a backlog the next batch is that of the oldest request, so that its lengths have waited
longest, and those next to them were served at different times: neither the lengths of the law nor those of a turn of
all batches are what waits. The closed form serves a few queues of random requests side by side and takes the batches
that it sees. Not here: several micro-batches on a pipeline.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from exeplan.arrays import Floats
from exeplan.core.batch import Batch, SequenceState
from exeplan.core.control_variables import require
from exeplan.core.schedule import Schedule
from exeplan.policies.interface import Clock, Cycle, Knob, PassLimits, PrefillBetween, Queue, Stateless, Steady
from exeplan.policies.shared.alike_at_rate import Cutting, served
from exeplan.policies.shared.cutting import around, best_begins
from exeplan.policies.shared.together import generated, latency
from exeplan.workload.length_law import DecodeLaw, Ints, LengthLaw
from exeplan.workload.workload import Workload

KEEPS_FINISHED_ROWS = True
SEPARATE_STAGES = False
PADS_PROMPTS = True
FOR_DEADLINES = True
RESERVES = True
ALIKE_TOGETHER = True

_LOOKAHEAD, _MOST_LOOKAHEAD = 8, 1024
"""Waiting requests that are considered: a multiple of the batch size, at most this number, at least one batch."""
_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Batch sizes that the search tries."""
_DECODES = 24
"""Iterations of a batch that are timed; those between are interpolated."""
_TOLD_APART = 384
"""Waiting requests that are told apart; each stands for several of more."""
_QUEUES, _SETTLING, _SEEN = 16, 15, 24
"""Queues that are served side by side at least, and their batches: until they have settled, and those that count."""
_TOGETHER = 6144
"""Requests that wait in all queues together, at least: what batches of a few differ by, one with another, is large."""
_KINDS = 24
"""Most kinds of batches that are timed."""
_OF_A_BIN = 50
"""Requests by which a share of the length law is known."""
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


def prefill_between_tokens(schedule: Schedule) -> PrefillBetween:
    """Nothing: a batch runs to its end."""
    return PrefillBetween(prompts=0)


def starts_together(schedule: Schedule) -> int:
    return schedule["batch_size"]


def steady_state(schedule: Schedule, workload: Workload, clock: Clock) -> Steady:
    """That of a backlog; where requests come at a rate, queues of them are served side by side."""
    size = schedule["batch_size"]
    cutting = Cutting(size=size, overhead=_overhead(schedule), lookahead=_lookahead(size))
    backlog = _steady(schedule, workload, clock, cutting.lookahead)
    interval = backlog.admission_interval
    assert interval is not None
    law = partial(served, workload, clock, cutting)  # type: ignore[arg-type]  # Hashed by identity.
    return replace(backlog, served=partial(law, backlog.throughput * interval, interval))


def _steady(schedule: Schedule, workload: Workload, clock: Clock, waiting: int) -> Steady:
    """Each of the batches that so many waiting requests are cut into, one after the other.

    A token k comes in one of the batches by their requests that get so far.
    """
    first_tokens = 1 if clock.first_token_from_prefill else 0
    groups = _groups(workload, schedule["batch_size"], _overhead(schedule), waiting, first_tokens)
    points = [np.unique(np.linspace(0, len(g.law.survival) - 1, _DECODES).astype(int)) for g in groups]
    largest = max(range(len(groups)), key=lambda number: groups[number].size * groups[number].tokens)
    cycle = _cycle(groups[largest], points[largest])
    prefills, decodes = _times(groups, points, cycle, clock)
    sizes = np.array([group.size * group.times for group in groups])
    steps = max(len(group.law.survival) for group in groups)
    times, there, waited, begun = 0.0, np.zeros(steps), np.zeros(steps), 0
    started = np.zeros(steps)
    for group, prefill, timed in zip(groups, prefills, points, strict=True):
        own, begun = len(group.law.survival), begun + len(timed)
        through = np.interp(np.arange(own), timed, decodes[begun - len(timed) : begun])
        times += group.times * float(prefill + group.law.max_survival(group.size) @ through)
        there[:own] += group.size * group.times * group.law.survival
        waited[:own] += group.size * group.times * group.law.survival * through
        started[:own] += group.size * group.times * group.law.survival * prefill
    own_prefill = float(sizes @ prefills) / float(sizes.sum())
    ends = started / np.maximum(there, 1e-300) + np.cumsum(waited / np.maximum(there, 1e-300))
    return Steady(
        cycle=cycle,
        seconds=clock.seconds(cycle),
        throughput=float(sizes.sum()) / times,
        latency=partial(latency, own_prefill, ends, first_tokens),
        admission_interval=times / sum(group.times for group in groups),
    )


def _times(groups: "Sequence[_Group]", points: Sequence[Ints], cycle: Cycle, clock: Clock) -> tuple[Floats, Floats]:
    """Seconds of the prefill of each batch, and of the decode iterations that are timed of all of them."""
    prefills = []
    for group in groups:
        one = replace(
            cycle,
            num_prefill=np.array([group.size]),
            num_decode=np.zeros(1),
            context_tokens=np.zeros(1),
            prompt_law=group.longest,
        )
        prefills.append(float(clock.seconds(one).sum()))
    rows = np.repeat([group.size for group in groups], [len(timed) for timed in points])
    held = [group.prompts.mean + generated(group.law)[timed] for group, timed in zip(groups, points, strict=True)]
    all_decodes = replace(cycle, num_prefill=0.0 * rows, num_decode=rows, context_tokens=rows * np.concatenate(held))
    return np.array(prefills), clock.seconds(all_decodes).sum(axis=0)


class _Group(NamedTuple):
    """A batch of requests of like lengths; its size is a mean."""

    size: float
    times: float
    """Such batches for each request."""
    prompts: LengthLaw
    longest: LengthLaw
    law: DecodeLaw

    @property
    def tokens(self) -> float:
        """Mean tokens of a request that is done."""
        return self.prompts.mean + 1 + self.law.mean_steps


@lru_cache(maxsize=1024)  # A search asks for the same ones on every placement.
def _groups(workload: Workload, size: int, overhead: int, waiting: int, first_tokens: int) -> tuple[_Group, ...]:
    """What the waiting requests are cut into, batches of like lengths taken together."""
    prompts = workload.input_law
    seen = _batches_seen(_told_apart(prompts, size, waiting), size, overhead, waiting)
    edges = np.append(0.0, prompts.cdf)
    groups = []
    for part, reached in _kinds(seen):
        weights = np.diff(np.interp(edges, np.linspace(0.0, 1.0, len(reached)), reached))
        some = np.flatnonzero(weights > 0)
        own = LengthLaw(prompts.tokens[some], weights[some] / weights.sum())
        share = (weights / prompts.weights)[np.searchsorted(prompts.tokens, workload.inputs)] * workload.weights
        here = share > 0
        law = DecodeLaw.of(workload.outputs[here] - first_tokens, workload.inputs[here], share[here] / share.sum())
        longest = LengthLaw(np.sort(np.rint(seen.longest[part]).astype(np.int64)), np.full(len(part), 1.0 / len(part)))
        mean = float(seen.sizes[part].mean())
        groups.append(_Group(mean, float(reached[-1]) / mean, own, longest, law))
    return tuple(groups)


class _Seen(NamedTuple):
    """Batches: their requests, the longest prompt, and of each request that is told apart the share of the law below
    it and the batch."""

    sizes: Floats
    longest: Ints
    shares: Floats
    batches: Ints


def _kinds(seen: _Seen) -> list[tuple[Ints, Floats]]:
    """Batches whose requests lie side by side in the law; how much of it up to each of some even shares is in them.

    All kinds together are the law, whatever part of a turn has been seen.
    """
    middles = np.bincount(seen.batches, seen.shares) / np.bincount(seen.batches)
    parts = np.array_split(np.argsort(middles, kind="stable"), _KINDS)
    kind = np.empty(len(middles), dtype=np.int64)
    for number, part in enumerate(parts):
        kind[part] = number
    bins = max(min(len(seen.shares) // _OF_A_BIN, 8 * _KINDS), 1)
    where = np.minimum((seen.shares * bins).astype(np.int64), bins - 1)
    counts = np.bincount(kind[seen.batches] * bins + where, minlength=_KINDS * bins).reshape(_KINDS, bins)
    held = counts / np.maximum(counts.sum(axis=0), 1) / bins
    return [(part, np.append(0.0, np.cumsum(own))) for part, own in zip(parts, held, strict=True)]


def _queues(size: int, queue: int) -> tuple[int, int, int]:
    """How many queues are looked at, how many wait in each of them, and how many of those make a batch."""
    waiting = min(queue, _TOLD_APART)
    return max(_TOGETHER // waiting, _QUEUES), waiting, min(max(round(size * waiting / queue), 1), waiting)


def _requests(size: int, queue: int) -> tuple[int, int]:
    """The queues, and how many requests come in each until all batches have been seen."""
    queues, waiting, of_batch = _queues(size, queue)
    return queues, waiting + (_SETTLING + _SEEN) * of_batch


def _told_apart(prompts: LengthLaw, size: int, queue: int) -> tuple[tuple[int, int], ...]:
    """The prompts' lengths, and how many of the requests in all queues have each; all of them together are the law."""
    total = math.prod(_requests(size, queue))
    lengths, counts = np.unique(prompts.quantiles((np.arange(total) + 0.5) / total), return_counts=True)
    return tuple(zip(lengths.tolist(), counts.tolist(), strict=True))


@lru_cache(maxsize=64)  # Where answers get longer, prompts stay as they are.
def _batches_seen(prompts: tuple[tuple[int, int], ...], size: int, overhead: int, queue: int) -> _Seen:
    """What next_batch runs of queues of so many random requests; `prompts` as told apart."""
    queues, waiting, of_batch = _queues(size, queue)
    each = queue / waiting
    drawn = np.random.default_rng(0).permutation(math.prod(_requests(size, queue))).reshape(queues, -1)
    shares = (drawn + 0.5) / drawn.size
    lengths = np.repeat(*np.transpose(prompts))[drawn]
    # In order of arrival, which decides between equal lengths.
    numbers = np.tile(np.arange(waiting), (queues, 1))
    following = np.full((queues, 1), waiting)
    sizes, longest, members = [], [], []
    for turn in range(_SETTLING + _SEEN):
        order = np.argsort(np.take_along_axis(lengths, numbers, axis=1), axis=1, kind="stable")
        numbers = np.take_along_axis(numbers, order, axis=1)
        rising = np.take_along_axis(lengths, numbers, axis=1)
        # The longest that a request stands for is nearly as long as the next one.
        longer = rising + (1 - 1 / each) / 2 * np.diff(rising, axis=1, append=rising[:, -1:])
        begins, ends = around(best_begins(longer, of_batch, overhead / each), numbers.argmin(axis=1), waiting)
        taken = (np.arange(waiting) >= begins[:, None]) & (np.arange(waiting) < ends[:, None])
        if turn >= _SETTLING:
            sizes.append((ends - begins) * each)
            longest.append(np.take_along_axis(longer, ends[:, None] - 1, axis=1)[:, 0])
            members.append(np.take_along_axis(shares, numbers, axis=1)[taken])
        numbers = np.sort(np.where(taken, following + np.cumsum(taken, axis=1) - 1, numbers), axis=1)
        following = following + taken.sum(axis=1, keepdims=True)
    sizes_of_all = np.concatenate(sizes)
    batches = np.repeat(np.arange(len(sizes_of_all)), np.rint(sizes_of_all / each).astype(np.int64))
    return _Seen(sizes_of_all, np.concatenate(longest), np.concatenate(members), batches)


def _cycle(group: _Group, timed: Ints) -> Cycle:
    """The prefill, and some of the decode iterations."""
    count, law, mean_input = group.size, group.law, group.prompts.mean
    first, steps = np.array([1.0]), len(timed)
    return Cycle(
        num_prefill=np.concatenate([first * count, np.zeros(steps)]),
        num_decode=np.concatenate([first * 0, np.full(steps, count)]),
        context_tokens=np.concatenate([first * 0, count * (mean_input + generated(law)[timed])]),
        prompt_law=group.longest,
        padded=True,
        kv_tokens=count * group.tokens,
        kv_tokens_std=float(np.sqrt(count) * (group.prompts.std + law.std_steps)),
        num_seqs=count,
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
    return Batch(prefill=alike, pad_to=max(s.num_tokens for s in alike))


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


def _cut(lengths: Ints, size: int, overhead: float) -> Ints:
    """Where the batches end into which these rising lengths are cut at the least cost."""
    begins = best_begins(lengths[None, :], size, overhead)[0].tolist()
    ends = [len(lengths)]
    while begins[ends[-1]] > 0:
        ends.append(begins[ends[-1]])
    return np.array(ends[::-1])
