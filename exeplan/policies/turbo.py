"""TurboBatching: requests of like lengths are padded to one, and a batch runs to completion.

Source: TurboTransformers (PPoPP 2021) section 5, as TCB (ICPP 2022) measures it. The waiting requests are sorted by
length and cut into batches of at most `batch_size` by dynamic programming, at the least cost: padded tokens, and
`overhead_tokens` for each batch, the cost of its passes apart from its prompts. The batch with the first request of the
schedule's order runs next; the others are cut again after it.

In the steady state under a backlog K batches take turns: the next one is that of the oldest request, so that its
lengths have waited longest. Of the A requests that come in a turn of all, lengths that were served j batches ago have
the share j / K waiting; W requests wait in all, hence

    A = 2 W K / (K + 1)

and a batch is as large as if the lengths of A requests were cut, not of W: nearly twice as many. Not here: several
micro-batches on a pipeline.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
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
_DECODES = 24
"""Iterations of a batch that are timed; those between are interpolated."""
_POINTS, _TURNS = 24, 4
"""Lengths of the largest batch that are told apart, and tries for the number of batches."""
_SAMPLES, _KINDS = 6, 12
"""Draws of the requests of a turn, and most kinds of batches that are timed."""
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
    """Each of the batches that the lengths of a turn are cut into, one after the other.

    A token k comes in one of the batches by their requests that get so far.
    """
    first_tokens = 1 if clock.first_token_from_prefill else 0
    groups = _groups(workload, schedule["batch_size"], _overhead(schedule), first_tokens)
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
    """Such batches in a turn."""
    prompts: LengthLaw
    longest: LengthLaw
    law: DecodeLaw

    @property
    def tokens(self) -> float:
        """Mean tokens of a request that is done."""
        return self.prompts.mean + 1 + self.law.mean_steps


@lru_cache(maxsize=1024)  # A search asks for the same ones on every placement.
def _groups(workload: Workload, size: int, overhead: int, first_tokens: int) -> tuple[_Group, ...]:
    """What the requests of a turn are cut into, batches of like lengths taken together."""
    prompts = workload.input_law
    cut = _cut_turns(prompts, size, overhead)
    kinds = min(max(round(len(cut) / _SAMPLES), 1), _KINDS)
    groups = []
    parts = np.array_split(cut[np.argsort(cut[:, 1])], kinds)
    # The shares of the kinds are laid end to end, so that every length is in one.
    ends = np.cumsum([part[:, 0].sum() for part in parts]) / cut[:, 0].sum()
    for part, begin, end in zip(parts, [0.0, *ends[:-1]], ends, strict=True):
        weights = np.clip(prompts.cdf, begin, end) - np.clip(np.append(0.0, prompts.cdf[:-1]), begin, end)
        some = np.flatnonzero(weights > 0)
        own = LengthLaw(prompts.tokens[some], weights[some] / weights.sum())
        share = (weights / prompts.weights)[np.searchsorted(prompts.tokens, workload.inputs)] * workload.weights
        here = share > 0
        law = DecodeLaw.of(workload.outputs[here] - first_tokens, workload.inputs[here], share[here] / share.sum())
        longest = LengthLaw(np.sort(part[:, 2]).astype(np.int64), np.full(len(part), 1.0 / len(part)))
        groups.append(_Group(float(part[:, 0].mean()), len(part) / _SAMPLES, own, longest, law))
    return tuple(groups)


def _cut_turns(prompts: LengthLaw, size: int, overhead: int) -> Floats:
    """The batches of random draws of A requests, [batches, 3]: requests, the share of the law in their middle, and the
    longest prompt.

    Draws, not even lengths: a batch ends where chance leaves a gap, and is padded to a length that chance makes longer.
    All draws together are even, so that their mean is the law's.
    """
    turn = _turn(prompts, size, overhead)
    of_batch = min(size, _POINTS)
    each, found = size / of_batch, []
    for draws in np.random.default_rng(0).permutation(turn * _SAMPLES).reshape(_SAMPLES, turn):
        shares = np.sort(draws + 0.5) / (turn * _SAMPLES)
        lengths = prompts.quantiles(shares)
        last = np.rint(np.arange(1, round(turn / each) + 1) * each).astype(int) - 1
        ends = last[_cut(lengths[last], of_batch, overhead / each) - 1] + 1
        begins = np.concatenate([[0], ends[:-1]])
        found.append(np.stack([ends - begins, (shares[begins] + shares[ends - 1]) / 2, lengths[ends - 1]], axis=1))
    return np.concatenate(found)


def _turn(prompts: LengthLaw, size: int, overhead: int) -> int:
    """A, as whole batches: where their size binds, all are full."""
    waiting, of_batch = _lookahead(size), min(size, _POINTS)
    turn, count = 0, np.inf
    for _ in range(_TURNS):
        turn = max(round(2.0 * waiting * (1.0 - 1.0 / (count + 1.0)) / size), 1) * size
        points = turn // size * of_batch
        ends = _cut(prompts.slice_means(points), of_batch, overhead * of_batch / size)
        if len(ends) == count:
            break
        count = len(ends)
    return turn


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


def _cut(lengths: Floats | Ints, size: int, overhead: float) -> Ints:
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
