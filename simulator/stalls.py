"""The longest stall of a stream: the most time that the passes of a schedule can take between two tokens of a request.

    mixed     passes of the other micro-batches, then one's own, each with the largest prefill that is admitted to slots
              of which one decodes; of prompts under a limit few long ones or many short ones
    apart     all prefills of a phase, one micro-batch behind the other, then one decode iteration; with a limit on the
              tokens of a pass as many passes as that makes of them
    n prompts together have at most n times the longest one's tokens, and at most what 4 standard deviations more than
              their mean are; one alone is the longest

It is what happens when as many requests arrive at once as there is room for; the steady state seldom comes near it.
Not here: how long a request waits that was preempted, or that was prefilled elsewhere and has no place to decode yet.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from exeplan.core.batch import Batch, Chunk, SequenceState
from exeplan.policies import load_policy, prefill_between_tokens
from exeplan.policies.interface import PrefillBetween
from exeplan.simulator.closed_form import SteadyState
from exeplan.simulator.cost import CostModel
from exeplan.workload.length_law import LengthLaw
from exeplan.workload.workload import Workload

_SIGMAS = 4.0
"""Standard deviations of the tokens of several prompts."""
_KINDS = 16
"""Passes with parts of prompts that are timed, at most: they differ in where their first prompt was cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """The longest time between two tokens, and what is prefilled in it."""

    seconds: float
    num_prompts: int
    num_tokens: int
    """Of these prompts that are computed meanwhile."""


def longest_stall(steady: SteadyState, cost: CostModel) -> Stall:
    """Of a schedule on the placement of the cost model."""
    schedule, workload = steady.schedule, steady.workload
    policy, groups, residents = load_policy(schedule.policy), schedule.num_micro_batches, steady.cycle.num_seqs
    most, limits = prefill_between_tokens(schedule), policy.pass_limits(schedule)
    clock = _Clock(
        cost.for_policy(policy),
        "decode" if policy.SEPARATE_STAGES else "",
        workload,
        math.ceil(steady.kv_tokens / residents),
    )
    rows = math.ceil((limits.decode_rows or residents + _SIGMAS * math.sqrt(residents)) / groups)
    if most.prompts < 1:
        return Stall(seconds=clock.seconds(Batch(decode=clock.rows(rows)), groups), num_prompts=0, num_tokens=0)
    cut = most.cuts and not cost.spec.is_encoder_decoder
    if most.apart:
        passes = clock.phase_passes(most, padded=policy.PADS_PROMPTS, cut=cut)
        seconds = clock.phase_seconds(passes, groups if most.in_turn else None)
        of_each = passes[0][0].pad_to or passes[0][0].prefill[0].num_tokens
        seconds += clock.seconds(Batch(decode=clock.rows(rows)), groups)
        return Stall(seconds=seconds, num_prompts=most.prompts, num_tokens=most.prompts * of_each)
    batches = clock.mixed(most, rows, cut=cut)
    seconds, longest = max(((clock.seconds(batch, groups), batch) for batch in batches), key=lambda pair: pair[0])
    tokens = sum(end - start for start, end in longest.spans)
    return Stall(seconds=seconds, num_prompts=groups * len(longest.prefill), num_tokens=groups * tokens)


@dataclass(frozen=True, slots=True)
class _Clock:
    """Batches of the workload's requests, and what they take."""

    cost: CostModel
    phase: str
    workload: Workload
    context: int
    """Tokens of a row that decodes, of as many as are hardly ever exceeded."""

    def phase_passes(self, most: PrefillBetween, *, padded: bool, cut: bool) -> list[tuple[Batch, int]]:
        """The passes that prefill all of them, each with how often it comes; where groups take turns, of the one with
        the most prompts.

        The prompts have the same tokens: with a limit on those of a pass as many as all prompts have together, without
        one as many as those of the largest pass.
        """
        law, one_each = self.workload.input_law, math.ceil(most.prompts / most.passes)
        number = one_each if most.in_turn else most.prompts
        lengths = prompt_tokens(law, one_each if most.tokens is None else number)
        if most.tokens is not None and cut:
            return self._cut_passes(lengths[0], sum(lengths), most.tokens)
        passes = 1 if most.in_turn else most.passes
        if most.tokens is not None:
            passes = max(passes, most_whole_passes(law, lengths, most.tokens))
        each, larger = divmod(number, passes)
        sizes = [(each + 1, larger), (each, passes - larger)]
        pad_to = law.max if padded else 0
        return [
            (Batch(prefill=self._prompts([lengths[0]] * size), pad_to=pad_to), count) for size, count in sizes if count
        ]

    def _cut_passes(self, length: int, total: int, room: int) -> list[tuple[Batch, int]]:
        """Of prompts of that length, one behind the other; one pass stands for others that begin at a like place."""
        *full, last = range(0, total, room)
        full.sort(key=lambda begin: begin % length)
        parts = min(len(full), _KINDS)
        borders = [number * len(full) // parts for number in range(parts + 1)] if parts else [0]
        kinds = [(full[(low + high) // 2], high - low) for low, high in itertools.pairwise(borders)]
        return [
            *((self._cut(length, begin, begin + room), count) for begin, count in kinds),
            (self._cut(length, last, total), 1),
        ]

    def _cut(self, length: int, begin: int, end: int) -> Batch:
        """Tokens `begin` to `end` of prompts of that length."""
        chunks = []
        while begin < end:
            start = begin % length
            stop = min(start + end - begin, length)
            chunks.append(Chunk(start, stop, last=stop == length))
            begin += stop - start
        return Batch(prefill=self._prompts([length] * len(chunks)), chunks=tuple(chunks))

    def phase_seconds(self, passes: Sequence[tuple[Batch, int]], taking_turns: int | None) -> float:
        """Until the last has left the last stage; with groups that take turns, where each has these passes."""
        stages = [(self._stages(batch), count) for batch, count in passes]
        if taking_turns:
            return sum(count * max(sum(seconds), taking_turns * max(seconds)) for seconds, count in stages)
        behind = max(sum(seconds) - max(seconds) for seconds, _ in stages)
        return sum(count * max(seconds) for seconds, count in stages) + behind

    def mixed(self, most: PrefillBetween, slots: int, *, cut: bool) -> list[Batch]:
        """Passes that may be the longest ones, with so many slots, of which a row that decodes has one."""
        law, places = self.workload.input_law, max(min(math.ceil(most.prompts / most.passes), slots - 1), 0)
        if not places:
            return [Batch(decode=self.rows(slots))]
        if most.tokens is None:
            return [self._whole(prompt_tokens(law, places), slots)]
        room = most.tokens - 1
        if not cut:
            of_each = (law.mean, float(law.min))
            return [self._whole(prompt_tokens(law, places, limit=room, each=each), slots) for each in of_each]
        many = min(places, max(room // law.min, 1))
        short = self._whole([max(min(room // many, law.max), 1)] * many, min(slots, many + 1))
        rows = sorted({1, max(min(slots - 1, most.tokens - 1), 1)})
        return [*(self._chunks(most.tokens - number, places, number) for number in rows), short]

    def _whole(self, lengths: Sequence[int], slots: int) -> Batch:
        return Batch(prefill=self._prompts(lengths), decode=self.rows(max(slots - len(lengths), 1)))

    def _chunks(self, room: int, places: int, rows: int) -> Batch:
        """Whole prompts and the end of one more, all of the longest, or so many as there are places for."""
        longest = self.workload.input_law.max
        whole, left = divmod(max(room, 1), longest)
        spans = [Chunk(0, longest, last=True)] * min(whole, places)
        spans += [Chunk(longest - left, longest, last=True)] if left and whole < places else []
        return Batch(prefill=self._prompts([longest] * len(spans)), decode=self.rows(rows), chunks=tuple(spans))

    def rows(self, number: int) -> tuple[SequenceState, ...]:
        """Requests that decode."""
        return self._prompts([self.context] * number)

    def _prompts(self, lengths: Sequence[int]) -> tuple[SequenceState, ...]:
        ranks = self.cost.num_ranks
        return tuple(
            SequenceState(request_id="", num_prompt_tokens=tokens, max_output_tokens=1, rank=number % ranks)
            for number, tokens in enumerate(lengths)
        )

    def seconds(self, batch: Batch, passes: int) -> float:
        """Until the last of so many such passes has left the last stage."""
        seconds = self._stages(batch)
        return sum(seconds) + (passes - 1) * max(seconds)

    def _stages(self, batch: Batch) -> list[float]:
        """Of one server's stages."""
        if not self.phase:
            return self.cost.stage_seconds(batch)
        batch = Batch(decode=batch.decode, phase=self.phase)
        return self.cost.stage_seconds(batch)[: len(self.cost.servers[self.phase][0])]


def prompt_tokens(law: LengthLaw, prompts: int, *, limit: int | None = None, each: float | None = None) -> list[int]:
    """Tokens of the most that so many prompts have together, evenly; with a `limit` of as many as it lets in, at least
    one, that have `each` so many."""
    spread = _SIGMAS * law.std * math.sqrt(prompts)
    total = min(prompts * law.max, max(float(law.max), prompts * law.mean + spread))
    if limit is not None and total > limit:
        prompts = max(1, min(prompts, int(limit / (each or law.mean)))) if limit > law.max else 1
        total = float(max(limit, law.max))
    return [math.ceil(total / prompts)] * prompts


def most_whole_passes(law: LengthLaw, lengths: Sequence[int], limit: int) -> int:
    """Passes of these prompts at most, whole ones in their order: two passes in a row have more tokens than one may."""
    each = max(limit // law.max, 1)
    return min(math.ceil(len(lengths) / each), 2 * math.ceil(sum(lengths) / limit) - 1)
