"""A second, slow replay of every policy on a pipeline, written from the policies' description alone, as a reference.

It shares no line with `exeplan.policies` or `exeplan.simulator`, so that a misunderstanding in one of them shows as a
difference. A backlog with memory for all requests: no arrivals, no preemption, no placement, no profile. Keep it plain.

A pass visits the stages of its pipeline in order; a stage runs one pass at a time, first come, first served. That a
request has finished is known when the pass has left the last stage, not before. Times are seconds.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count, cycle
from typing import NamedTuple

StageSeconds = Callable[[int, list[tuple[int, int]], list[int], int], float]
"""(stage, prefills as (new tokens, tokens in the cache before), decode contexts, padded_to) -> seconds. A prompt is
padded to at least `padded_to` tokens: 0 pads nothing. waa numbers its prefill stages first, then its decode stages."""


@dataclass(eq=False)
class Request:
    prompt: int
    output: int
    start: float | None = None
    """When its first prompt token entered stage 0."""
    token_times: list[float] = field(default_factory=list)
    prefilled: int = 0
    decoded: int = 0
    back: float = 0.0
    """When its last pass left the last stage."""

    @property
    def done(self) -> bool:
        return len(self.token_times) == self.output

    @property
    def decoding(self) -> bool:
        return self.prefilled == self.prompt and not self.done


class Visit(NamedTuple):
    stage: int
    begin: float
    end: float


class Pass(NamedTuple):
    prefills: list[tuple[int, int]]
    decodes: list[int]
    padded_to: int
    visits: list[Visit]


class Lived(NamedTuple):
    start: float
    token_times: list[float]


class Replayed(NamedTuple):
    requests: list[Lived]
    passes: list[Pass]
    """In the order in which they entered a pipeline."""


class Pipeline:
    """Stages in a row; `run` takes passes in the order in which they enter."""

    def __init__(
        self, stages: Iterable[int], stage_seconds: StageSeconds, first_token_from_prefill: bool, passes: list[Pass]
    ) -> None:
        self.free = dict.fromkeys(stages, 0.0)
        self.entrance = min(self.free)
        self.stage_seconds, self.first_token_from_prefill, self.passes = stage_seconds, first_token_from_prefill, passes

    def run(
        self,
        earliest: float,
        *,
        prefills: Sequence[tuple[Request, int]] = (),
        decodes: Sequence[Request] = (),
        padded_to: int = 0,
    ) -> float:
        """One pass, in at `earliest` or when stage 0 is free; when it leaves. Prefills are (request, new tokens)."""
        new = [(tokens, request.prefilled) for request, tokens in prefills]
        contexts = [request.prompt + request.decoded for request in decodes]
        visits, now = [], earliest
        for stage, free in self.free.items():
            begin = max(now, free)
            now = self.free[stage] = begin + self.stage_seconds(stage, new, contexts, padded_to)
            visits.append(Visit(stage, begin, now))
        self.passes.append(Pass(new, contexts, padded_to, visits))
        for request, tokens in prefills:
            request.start = visits[0].begin if request.start is None else request.start
            request.prefilled += tokens
            request.back = now
            if self.first_token_from_prefill and request.prefilled == request.prompt:
                request.token_times.append(now)
        for request in decodes:
            request.back = now
            if not request.done:  # A static batch computes finished rows, too; they stay as they are.
                request.decoded += 1
                request.token_times.append(now)
        return now


def static(
    inputs: Sequence[int],
    outputs: Sequence[int],
    *,
    batch_size: int,
    micro_batches: int,
    prefill_micro_batches: int,
    num_stages: int,
    stage_seconds: StageSeconds,
    first_token_from_prefill: bool,
) -> Replayed:
    """One batch after the other: padded prefill, drain, then all rows decode until the longest output is there.

    While that is on its last way through the stages, groups that are back enter once more.
    """
    requests, passes = backlog(inputs, outputs), list[Pass]()
    line = Pipeline(range(num_stages), stage_seconds, first_token_from_prefill, passes)
    waiting, left = deque(requests), 0.0
    while waiting:
        batch, begin = take(waiting, batch_size), left
        for part in cut(batch, prefill_micro_batches):
            left = line.run(begin, prefills=whole(part), padded_to=max(request.prompt for request in batch))
        groups = [group for group in deal(batch, micro_batches) if group]
        back = [left] * len(groups)
        for g in cycle(range(len(groups))):
            entered = max(back[g], line.free[line.entrance])
            if all(request.done and request.token_times[-1] <= entered for request in batch):
                break
            left = back[g] = line.run(entered, decodes=groups[g])
    return replayed(requests, passes)


def rra(
    inputs: Sequence[int],
    outputs: Sequence[int],
    *,
    prefill_batch: int,
    decode_steps: int,
    micro_batches: int,
    num_stages: int,
    stage_seconds: StageSeconds,
    first_token_from_prefill: bool,
) -> Replayed:
    """Cycles of one prefill phase and `decode_steps` decode iterations of groups dealt anew.

    Prefill micro-batches are balanced by tokens, and the one with most tokens enters first. Residents are dealt in the
    order in which they were prefilled, when all are back; then those of this phase fill up the groups, which are of
    nearly equal size: the first ones the first group. A group enters when all its requests are back, and no group
    before the one ahead of it. When no request waits, the last cycle runs to the end.
    """
    requests, passes = backlog(inputs, outputs), list[Pass]()
    line = Pipeline(range(num_stages), stage_seconds, first_token_from_prefill, passes)
    waiting, residents, begin = deque(requests), list[Request](), 0.0
    while waiting or unfinished(residents):
        parts = balanced(take(waiting, prefill_batch), micro_batches)
        for part in parts:
            line.run(begin, prefills=whole(part))
        fresh = [request for part in parts for request in part]
        now = max([line.free[line.entrance], *(request.back for request in residents)])
        residents = unfinished(residents)
        while True:
            # Until the first group enters they are dealt again: those that their prefill has finished have left.
            fresh = [request for request in fresh if not request.done or request.back > now]
            groups = filled(residents, fresh, micro_batches)
            first = next((group for group in groups if group), [])
            if all(request.back <= now for request in first):
                break
            now = min(request.back for request in fresh if request.back > now)
        residents, begin = residents + fresh, now
        for step in count(1):
            if not any(groups) or (waiting and step > decode_steps):
                break
            for g, group in enumerate(groups):
                if group:
                    # That a group has no more requests is known when it is back.
                    now = max([now, *(request.back for request in group)])
                    groups[g] = unfinished(group)
                    if groups[g]:
                        line.run(now, decodes=groups[g])
                        now = line.free[line.entrance]
                    begin = now
    return replayed(requests, passes)


def orca(
    inputs: Sequence[int],
    outputs: Sequence[int],
    *,
    max_num_seqs: int,
    micro_batches: int,
    num_stages: int,
    stage_seconds: StageSeconds,
    first_token_from_prefill: bool,
) -> Replayed:
    """Batches in flight that let finished requests out and waiting ones in at every iteration."""
    return chunked(
        inputs,
        outputs,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=sum(inputs) + max_num_seqs,  # Never cuts a prompt.
        micro_batches=micro_batches,
        num_stages=num_stages,
        stage_seconds=stage_seconds,
        first_token_from_prefill=first_token_from_prefill,
    )


def chunked(
    inputs: Sequence[int],
    outputs: Sequence[int],
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    micro_batches: int,
    num_stages: int,
    stage_seconds: StageSeconds,
    first_token_from_prefill: bool,
) -> Replayed:
    """As orca, with at most `max_num_batched_tokens` tokens a pass: decodes first, then prompts, the last one cut.

    An encoder looks at the whole prompt at once: none is cut, and one that does not fit waits, unless it is the first.
    """
    requests, passes = backlog(inputs, outputs), list[Pass]()
    line = Pipeline(range(num_stages), stage_seconds, first_token_from_prefill, passes)
    slots = shares(max_num_seqs, micro_batches)
    if slots[0] > max_num_batched_tokens:
        raise ValueError(f"{max_num_batched_tokens} tokens a pass, but {slots[0]} rows may decode in one")
    waiting, groups, back = deque(requests), [list[Request]() for _ in slots], [0.0] * len(slots)

    def enters(g: int, now: float) -> bool:
        """Whether the group has something to run."""
        group, held = groups[g], [(len(group), at > now) for group, at in zip(groups, back, strict=True)]
        places = joins(g, held, slots=slots, joining=len(waiting), num_stages=num_stages)
        decodes = [request for request in group if request.decoding]
        unspent = max_num_batched_tokens - len(decodes) - sum(r.prompt - r.prefilled for r in group)
        taken = list[Request]()
        while waiting and len(taken) < places and unspent > 0:  # A slot is taken with the first token.
            if taken and not first_token_from_prefill and waiting[0].prompt > unspent:
                break
            taken += take(waiting, 1)
            group.append(taken[-1])
            unspent -= taken[-1].prompt
        if group:
            cut = chunks(group, max_num_batched_tokens - len(decodes))
            prefills = cut if first_token_from_prefill else whole(taken)
            back[g] = line.run(now, prefills=prefills, decodes=decodes)
        return bool(group)

    turns, now = list(range(len(slots))), 0.0
    while waiting or any(groups):
        groups = [unfinished(group) if at <= now else group for group, at in zip(groups, back, strict=True)]
        even_out(groups, [at > now for at in back], slots=slots, joining=len(waiting), num_stages=num_stages)
        entered = next((g for g in turns if back[g] <= now and enters(g, now)), None)
        if entered is None:
            now = min([at for at in back if at > now], default=now)
            continue
        turns.remove(entered)
        turns.append(entered)
        now = line.free[line.entrance]
    return replayed(requests, passes)


def waa(
    inputs: Sequence[int],
    outputs: Sequence[int],
    *,
    decode_batch: int,
    prefill_batch: int,
    micro_batches: int,
    num_prefill_stages: int,
    num_decode_stages: int,
    kv_transfer: Callable[[list[int]], float],
    stage_seconds: StageSeconds,
    first_token_from_prefill: bool,
) -> Replayed:
    """Two pipelines side by side, the earlier event first. `kv_transfer` maps prompt lengths of a batch to seconds.

    KV transfers of different batches may overlap. A request that ends with the prefill is not transferred. Requests are
    dealt to all groups alike, those in flight included.
    """
    requests, passes = backlog(inputs, outputs), list[Pass]()
    last_stage = num_prefill_stages + num_decode_stages
    first = Pipeline(range(num_prefill_stages), stage_seconds, first_token_from_prefill, passes)
    second = Pipeline(range(num_prefill_stages, last_stage), stage_seconds, first_token_from_prefill, passes)
    limit = (num_prefill_stages + 1) * prefill_batch
    waiting, handed = deque(requests), list[tuple[float, Request]]()
    gone = list[float]()  # When requests of one token have left the stages that prefill.
    slots = shares(decode_batch, micro_batches)
    groups, back, turns, now = [list[Request]() for _ in slots], [0.0] * len(slots), list(range(len(slots))), 0.0

    def may_prefill() -> bool:
        """Whether a batch has room ahead of the decodes: requests that are ready and have a free slot take none."""
        coming = sum(at > now for at in gone) + sum(ready > now for ready, _ in handed)
        here, free = sum(ready <= now for ready, _ in handed), decode_batch - sum(map(len, groups))
        return coming + max(here - free, 0) + min(prefill_batch, len(waiting)) <= limit

    def decodes() -> bool:
        """Whether a group enters now: of those that have something to run the one that was here longest ago."""
        here = [request for ready, request in handed if ready <= now]
        flying = [at > now for at in back]
        even_out(groups, flying, slots=slots, joining=len(here), num_stages=len(slots))
        for g in [g for g in turns if not flying[g]]:
            held = [(len(group), False) for group in groups]
            for request in here[: joins(g, held, slots=slots, joining=len(here), num_stages=len(slots))]:
                handed.remove(next(entry for entry in handed if entry[1] is request))
                groups[g].append(request)
            if groups[g]:
                back[g] = second.run(now, decodes=groups[g])
                turns.remove(g)
                turns.append(g)
                return True
        return False

    def prefills() -> bool:
        """Whether a batch enters the stages that prefill now."""
        if not waiting or first.free[first.entrance] > now or not may_prefill():
            return False
        batch = take(waiting, prefill_batch)
        left = first.run(now, prefills=whole(batch))
        going_on = unfinished(batch)
        gone.extend(left for _ in range(len(batch) - len(going_on)))
        if going_on:
            ready = left + kv_transfer([request.prompt for request in going_on])
            handed.extend((ready, request) for request in going_on)
        return True

    while True:
        for g, at in enumerate(back):
            if at <= now:
                groups[g] = unfinished(groups[g])
        if (second.free[second.entrance] <= now and decodes()) or prefills():
            continue
        entrances = [line.free[line.entrance] for line in (first, second)]
        times = [*entrances, *back, *gone, *(ready for ready, _ in handed)]
        if not any(at > now for at in times):
            return replayed(requests, passes)
        now = min(at for at in times if at > now)


def backlog(inputs: Sequence[int], outputs: Sequence[int]) -> list[Request]:
    return [Request(prompt, output) for prompt, output in zip(inputs, outputs, strict=True)]


def replayed(requests: list[Request], passes: list[Pass]) -> Replayed:
    lived = []
    for request in requests:
        assert request.start is not None
        lived.append(Lived(request.start, request.token_times))
    return Replayed(lived, passes)


def take(waiting: deque[Request], most: int) -> list[Request]:
    return [waiting.popleft() for _ in range(min(most, len(waiting)))]


def unfinished(requests: list[Request]) -> list[Request]:
    return [request for request in requests if not request.done]


def whole(requests: list[Request]) -> list[tuple[Request, int]]:
    return [(request, request.prompt) for request in requests]


def chunks(group: list[Request], budget: int) -> list[tuple[Request, int]]:
    """What a pass prefills: prompts in order of arrival until the budget of tokens is spent."""
    found = []
    for request in group:
        tokens = min(request.prompt - request.prefilled, budget)
        if tokens > 0:
            found.append((request, tokens))
            budget -= tokens
    return found


def joins(g: int, held: list[tuple[int, bool]], *, slots: list[int], joining: int, num_stages: int) -> int:
    """How many join a group where requests are dealt one by one to the smallest group, of equal ones to this one.

    Dealt to the first groups only: as many as hold all requests, and one a stage at least. `held` are the sizes of the
    groups and whether they are in flight, which counts as a half more, rounded down. Where all slots will be taken
    each has its own.
    """
    sizes = [size for size, _ in held]
    if sum(sizes) + joining >= sum(slots):
        return slots[g] - sizes[g]
    used = needed(sum(sizes) + joining, slots, num_stages)
    hands = [size + size // 2 * flying for size, flying in held]
    dealt = 0
    for _ in range(joining if g < used else 0):
        if sizes[g] + dealt == slots[g]:
            break
        smallest = min(range(used), key=lambda other: (hands[other], other != g))
        hands[smallest] += 1
        dealt += smallest == g
    return dealt


def needed(total: int, slots: list[int], num_stages: int) -> int:
    """The first groups that have room for so many requests, and one a stage at least."""
    used = min(num_stages, len(slots))
    while used < len(slots) and sum(slots[:used]) < total:
        used += 1
    return used


def even_out(
    groups: list[list[Request]], flying: list[bool], *, slots: list[int], joining: int, num_stages: int
) -> None:
    """Groups that are back give the requests they have had longest to the smallest, those that are not needed all.

    Groups that are needed give only if nothing joins, and while one is larger by a half and two. A group may not give a
    request that it prefills. Those that are given come first in their group. If all slots will be taken none is given.
    """
    total = sum(map(len, groups)) + joining
    if total >= sum(slots):
        return
    used = needed(total, slots, num_stages)
    for g, group in enumerate(groups):
        while not flying[g] and group and group[0].decoding:
            smallest = min(groups[:used], key=len)
            if g < used and (joining or len(group) < len(smallest) + len(smallest) // 2 + 2):
                break
            smallest.insert(0, group.pop(0))


def shares(count: int, parts: int) -> list[int]:
    """Nearly equal shares, larger ones first: 5 in 3 parts are 2, 2, 1."""
    return [count // parts + (part < count % parts) for part in range(parts)]


def cut(requests: list[Request], parts: int) -> list[list[Request]]:
    """Consecutive runs of nearly equal count, none of them empty."""
    queue = deque(requests)
    return [take(queue, share) for share in shares(len(requests), parts) if share]


def balanced(requests: list[Request], parts: int) -> list[list[Request]]:
    """Shares of nearly equal tokens, none of them empty, the one with most tokens first.

    Longest prompt first, each request joins the emptiest share. Of equal prompts the one that arrived first comes
    first, of equal shares the one that was begun first. Inside a share requests stay in order of arrival.
    """
    piles = [list[Request]() for _ in range(min(parts, len(requests)))]
    for request in sorted(requests, key=lambda request: request.prompt, reverse=True):
        min(piles, key=prompt_tokens).append(request)
    return [sorted(pile, key=requests.index) for pile in sorted(piles, key=prompt_tokens, reverse=True)]


def prompt_tokens(requests: list[Request]) -> int:
    return sum(request.prompt for request in requests)


def filled(dealt: list[Request], in_order: list[Request], parts: int) -> list[list[Request]]:
    """Hands of nearly equal count: some are dealt in turn, then the others fill up one hand after the other."""
    queue, hands = deque(in_order), deal(dealt, parts)
    sizes = shares(len(dealt) + len(in_order), parts)
    return [hand + take(queue, size - len(hand)) for hand, size in zip(hands, sizes, strict=True)]


def deal(requests: list[Request], parts: int) -> list[list[Request]]:
    """Hands of nearly equal count, dealt in turn as one deals cards."""
    return [requests[part::parts] for part in range(parts)]
