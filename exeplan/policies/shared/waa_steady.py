"""The steady state of separate prefill and decode stages: two lines that wait for each other.

With N residents in m groups of b rows, on the stages that decode

    round       R(N) = max(m max_s t(s, b), sum_s t(s, b))
    throughput  N / (mu R(N)), mu the mean decode steps

and the stages that prefill bring at most B_E / max_s t_E(s), less where prompts are uneven or places few. Which of the
two holds the other up changes with chance. The state is one number: requests that are ready, falling to none as the
prefills lag behind, then free slots, rising. It moves by what prefills bring less what decodes finish, and jitters with
the variance of both; the density of such a diffusion is proportional to exp(integral of 2 drift / variance) / variance.

    variance    2 v X; v = [sum_k F (1 - F) + c^2 sum_k F^2] / mu is the variance of N over its mean when requests are
                admitted evenly (c = 0) or by chance (c = 1) and R does not change

Where prefills are the slower side, a batch of B_E goes through many decode iterations before the next one comes: rows
come in pulses, and a token sees more of them than the mean over time. With n iterations between two batches they are
those of the survival comb, as in `rra.py`, and n is such that these take as long as a prefill. Where the transfers of
several batches overlap they come by chance instead.

Residents are spread evenly over all groups. With free slots nothing holds a batch of prefills up: its place is free
again when its keys and values have been transferred, and a request that is ready waits half a round in the mean until
the group that has room for it is back.
"""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from exeplan.arrays import Floats
from exeplan.core.schedule import Schedule
from exeplan.policies.interface import Clock, Cycle, Steady
from exeplan.policies.shared.circulation import Prefills, prefills
from exeplan.policies.shared.waa import most_ahead
from exeplan.workload.arrivals import residents
from exeplan.workload.length_law import DecodeLaw
from exeplan.workload.workload import Workload

_SIZES = 16
"""Group sizes that are timed."""
_STATES = 128
"""States on either side of the one with full groups and no request ready."""
_LEAST_SPREAD = 0.02
"""Even requests of one length do not keep step for ever."""
_BATCHES = 8
"""Sizes of prefill batches that are timed where requests come at a rate."""
_PULSE = 0.5
"""Of the residents that a prefilled batch must be for them to come in pulses."""
_SIGMAS = 3.0
"""Standard deviations of the prompts' tokens for which stages that prefill have room."""


def steady_state(schedule: Schedule, workload: Workload, clock: Clock) -> Steady:
    """The density of the states, and what follows from it."""
    batch, places = schedule["prefill_batch"], len(clock.prefill_stages) + 1
    law = workload.decode_law(first_token_from_prefill=clock.first_token_from_prefill)
    cycle = _passes(schedule, workload, law, places)
    seconds = clock.seconds(cycle)
    line = prefills(clock, workload.input_law, batch, places)  # type: ignore[arg-type]  # Hashed by identity.
    going_on = float(law.survival[0])
    if going_on == 0.0:
        done = partial(np.full_like, fill_value=float(line.inside[-1]), dtype=float)
        throughput = batch * float(line.rate[-1])
        held = _only_prefills(cycle, throughput * float(line.inside[-1]), workload)
        return Steady(cycle=held, seconds=seconds, throughput=throughput, latency=done)
    decodes = _Decodes.of(schedule, law, cycle.num_decode[1:], seconds[list(clock.decode_stages), 1:])
    transfer = clock.kv_transfer_seconds(batch * going_on * workload.mean_input)
    states = _states(line, decodes, batch, places, transfer, going_on)
    evenly = float(law.comb(1).active_var[0]) / decodes.steps
    density = states.density(going_on, evenly + (1.0 - evenly) * min(batch * line.variation, 1.0))
    flow = _Flow.of(states, density, going_on)
    round_ = flow.residents / (decodes.steps * flow.throughput)  # Little's law on the residents.
    last = decodes.pass_seconds(flow.residents, round_)
    first_tokens = 1.0 if clock.first_token_from_prefill else 0.0
    latency = partial(_latency, flow, round_, last, first_tokens)
    every = batch / flow.throughput
    if batch >= _PULSE * flow.residents and every >= max(round_, transfer):
        pulses = _pulses(decodes, law, batch, every)
        residents = flow.throughput * float(law.survival @ np.resize(pulses, len(law.survival)))  # Little's law.
        flow = replace(flow, residents=min(residents, decodes.slots))
        latency = partial(_pulsed_latency, flow, pulses, first_tokens)
    return Steady(
        cycle=_filled(cycle, flow, law, workload),
        seconds=seconds,
        throughput=flow.throughput,
        latency=latency,
        arriving=partial(_arriving, schedule, workload, clock, decodes, cycle),
    )


def _arriving(
    schedule: Schedule, workload: Workload, clock: Clock, decodes: "_Decodes", cycle: Cycle, rate: float
) -> tuple[tuple[Schedule, Steady], ...]:
    """With prefill batches of as many as have come, and the residents that the rate makes.

    The residents are a birth-and-death chain, as at_rate.py has it; a prefill begins when the stage before is free and
    the places allow it.
    """
    batch, shift = schedule["prefill_batch"], 1.0 if clock.first_token_from_prefill else 0.0
    law = workload.decode_law(first_token_from_prefill=clock.first_token_from_prefill)
    going_on, places = float(law.survival[0]), len(clock.prefill_stages) + 1
    sizes = np.unique(np.geomspace(1, batch, _BATCHES).astype(int))
    none = 0.0 * sizes
    prefill = replace(cycle, num_prefill=sizes + none, num_decode=none, context_tokens=none)
    seconds = clock.seconds(prefill)[list(clock.prefill_stages)]
    through, slowest = seconds.sum(axis=0), seconds.max(axis=0)
    transfer = np.array([clock.kv_transfer_seconds(k * going_on * workload.mean_input) for k in sizes])
    behind = _Behind.of(decodes, rate, going_on)
    line = prefills(clock, workload.input_law, batch, places)  # type: ignore[arg-type]  # Hashed by identity.
    held = 1.0 / line.held_up(places, float(transfer[-1])).rate
    shut = np.maximum(slowest, sizes * (through + transfer) / (places * batch))
    shut = shut * max(held / float(shut[-1]), 1.0)
    found = []
    for k, first, taken, moved in zip(sizes.tolist(), through, shut, transfer, strict=True):
        waits = replace(behind, until_decode=float(first + moved) + behind.until_decode)
        own = Steady(
            cycle=cycle,
            seconds=seconds,
            throughput=k / float(taken),
            latency=partial(waits.latency, float(first), shift),
        )
        found.append((replace(schedule, variables={**schedule.variables, "prefill_batch": k}), own))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Behind:
    """Stages that decode what comes to them at a rate."""

    until_decode: float
    """Seconds until a group takes a request that is ready."""
    queue: float
    """Of these, until there is a free slot."""
    pace: float
    """Seconds a decode iteration, mean over those that decode."""
    last: float
    """Seconds from the start of the last iteration to its token."""

    @classmethod
    def of(cls, decodes: "_Decodes", rate: float, going_on: float) -> "_Behind":
        """`rate` requests a second, of which a share `going_on` decodes; it is above 0."""
        grid = 1.0 + (decodes.slots - 1.0) * np.linspace(0.0, 1.0, _STATES) ** 2 if decodes.slots > 1 else np.ones(1)
        finished = np.maximum.accumulate(decodes.finished(grid))
        finished[-1] = max(float(finished[-1]), rate * (1 + 1e-3))
        chance = residents(rate, grid, finished)
        number = np.arange(len(chance), dtype=float)
        served = np.minimum(number, decodes.slots)
        round_, _ = decodes.timing(grid)
        counts = decodes.counts(grid)
        queue = float(chance @ (number - served)) / (rate * going_on)  # Little's law on those that wait.
        turn = float(chance[1:] @ np.interp(served[1:], grid, round_ / counts)) / 2
        pace = float(chance @ served) / (rate * decodes.steps)
        mean = float(chance @ served)
        return cls(until_decode=queue + turn, queue=queue, pace=pace, last=decodes.pass_seconds(mean, pace))

    def latency(self, first: float, first_tokens: float, output_tokens: Floats) -> Floats:
        """A round for every token behind the prefill's."""
        decodes = np.asarray(output_tokens, dtype=float) - first_tokens
        return np.where(decodes > 0, self.until_decode + (decodes - 1.0) * self.pace + self.last, first)


def _passes(schedule: Schedule, workload: Workload, law: DecodeLaw, places: int) -> Cycle:
    """One prefill, and decode iterations of groups from one row to as many as there are slots."""
    batch, slots, comb = schedule["prefill_batch"], schedule["decode_batch"], law.comb(1)
    rows = 1.0 + (slots / min(schedule.num_micro_batches, slots) - 1.0) * np.linspace(0.0, 1.0, _SIZES) ** 2
    return Cycle(
        num_prefill=np.concatenate([[batch], 0.0 * rows]),
        num_decode=np.concatenate([[0.0], rows]),
        context_tokens=np.concatenate([[0.0], rows * comb.context[0] / max(comb.active[0], 1e-300)]),
        prompt_law=workload.input_law,
        kv_tokens=0.0,
        kv_tokens_std=0.0,
        num_seqs=0.0,
        prefill_kv_tokens=_prefill_tokens(most_ahead(schedule, places - 1), workload),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decodes:
    """The stages that decode; times are given over the rows of a group."""

    slots: int
    groups: int
    steps: float
    """Mean decode iterations of a request."""
    rows: Floats
    slowest: Floats
    """Seconds on the slowest stage."""
    through: Floats
    """Seconds on all stages."""
    entry: Floats
    """Seconds on the first stage."""

    @classmethod
    def of(cls, schedule: Schedule, law: DecodeLaw, rows: Floats, seconds: Floats) -> "_Decodes":
        slots = schedule["decode_batch"]
        return cls(
            slots=slots,
            groups=min(schedule.num_micro_batches, slots),
            steps=law.mean_steps,
            rows=rows,
            slowest=seconds.max(axis=0),
            through=seconds.sum(axis=0),
            entry=seconds[0],
        )

    def timing(self, residents: Floats) -> tuple[Floats, Floats]:
        """Seconds of a round, and from the entry of one group to that of the next behind it."""
        counts = self.counts(residents)
        rows = np.maximum(residents, 1.0) / counts
        gap = self._at(rows, self.slowest)
        # A number that groups do not divide leaves some a row more: the others wait for these.
        largest = rows + (counts - 1) / (2 * counts)
        return np.maximum(counts * gap, self._at(largest, self.through)), gap

    def counts(self, residents: Floats) -> Floats:
        """Groups that have rows."""
        return np.clip(residents, 1.0, self.groups)

    def _at(self, rows: Floats, seconds: Floats) -> Floats:
        return np.interp(rows, self.rows, seconds)

    def finished(self, residents: Floats) -> Floats:
        """Requests a second."""
        return residents / (self.steps * self.timing(residents)[0])

    def pass_seconds(self, residents: float, round_: float) -> float:
        """Of one group through all stages: without what it waits for the first, but with what it waits for others."""
        rows = np.array(max(residents, 1.0)) / self.counts(np.array(residents))
        through, slowest, entry = (float(self._at(rows, x)) for x in (self.through, self.slowest, self.entry))
        return max(through, round_) if entry < slowest else through


@dataclass(frozen=True, slots=True, kw_only=True)
class _States:
    """One array entry a state: from everything ready and all slots taken to nothing ready and all slots free."""

    ready: Floats
    residents: Floats
    brought: Floats
    """Requests a second that complete a prefill, including those that it finishes."""
    finished: Floats
    """Requests a second that decodes finish, in all."""
    inside: Floats
    """Seconds in the stages that prefill."""
    outside: Floats
    """Seconds from then until a group could take it, but for the queue of those ready before it."""

    def density(self, going_on: float, spread: float) -> Floats:
        """How likely each state is; `spread` is the variance of the residents over their mean."""
        position = self.ready[0] - self.ready + self.residents[0] - self.residents
        drift = going_on * (self.finished - self.brought)
        variance = 2.0 * max(spread, _LEAST_SPREAD) * going_on * np.maximum(self.finished, 1e-9 * self.finished[0])
        slope = 2.0 * drift / variance
        steps = (slope[1:] + slope[:-1]) / 2.0 * np.diff(position)
        log_density = np.concatenate([[0.0], np.cumsum(steps)]) - np.log(variance)
        density = np.exp(log_density - log_density.max()) * np.gradient(position)
        return np.asarray(density / density.sum())


def _states(line: Prefills, decodes: _Decodes, batch: int, places: int, transfer: float, going_on: float) -> _States:
    slots = decodes.slots
    ready = places * batch * (1.0 - np.arange(_STATES) / _STATES)
    # Places in use in prefill and transfer: a batch begins when there is room for all of it.
    used = np.maximum(places - ready / batch - (batch - 1) / (2 * batch), 0.0)
    with_transfer = line.places + line.rate * going_on * transfer
    residents = slots * np.linspace(1.0, 0.0, _STATES) ** 2
    finished = decodes.finished(residents)
    alone = line.held_up(places, transfer)
    return _States(
        ready=np.concatenate([ready, 0.0 * residents]),
        residents=np.concatenate([np.full(_STATES, float(slots)), residents]),
        brought=batch * np.concatenate([np.interp(used, with_transfer, line.rate), np.full(_STATES, alone.rate)]),
        finished=np.concatenate([np.full(_STATES, finished[0]), finished]),
        inside=np.concatenate([np.interp(used, with_transfer, line.inside), np.full(_STATES, alone.inside)]),
        outside=transfer + np.concatenate([np.zeros(_STATES), decodes.timing(residents)[0] / 2.0]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flow:
    """Means over the states; seconds and rates as requests see them."""

    throughput: float
    residents: float
    residents_std: float
    prefill: float
    """Seconds in the stages that prefill."""
    until_decode: float
    """Seconds from the start of the prefill to the first decode iteration."""

    @classmethod
    def of(cls, states: _States, density: Floats, going_on: float) -> "_Flow":
        throughput, residents = float(density @ states.finished), float(density @ states.residents)
        seen = density * states.brought / float(density @ states.brought)
        prefill = float(seen @ states.inside)
        return cls(
            throughput=throughput,
            residents=residents,
            residents_std=float(np.sqrt(density @ np.square(states.residents - residents))),
            prefill=prefill,
            # Little's law on those that are ready.
            until_decode=prefill
            + float(seen @ states.outside)
            + float(density @ states.ready) / (throughput * going_on),
        )


def _latency(flow: _Flow, round_: float, last: float, first_tokens: float, output_tokens: Floats) -> Floats:
    """A round for every token; the last one is there when its pass has left the last stage."""
    decodes = np.asarray(output_tokens, dtype=float) - first_tokens
    return np.where(decodes > 0, flow.until_decode + (decodes - 1.0) * round_ + last, flow.prefill)


def _pulses(decodes: _Decodes, law: DecodeLaw, batch: int, every: float) -> Floats:
    """Seconds of the decode iterations from one prefilled batch to the next, `every` seconds later; as many as that
    takes, at most as many as the longest request has."""
    low, high = 1, len(law.survival)
    while low < high:
        middle = (low + high + 1) // 2
        if float(_rounds(decodes, law, batch, middle).sum()) <= every:
            low = middle
        else:
            high = middle - 1
    return _rounds(decodes, law, batch, low)


def _rounds(decodes: _Decodes, law: DecodeLaw, batch: int, count: int) -> Floats:
    """As a request that is there observes them, which is sure to be there itself."""
    comb = law.comb(count)
    others = batch * comb.active - (1.0 - comb.active_var / np.maximum(comb.active, 1e-300))
    return decodes.timing(np.clip(others + 1.0, 1.0, decodes.slots))[0]


def _pulsed_latency(flow: _Flow, rounds: Floats, first_tokens: float, output_tokens: Floats) -> Floats:
    """The rounds from its own batch on, over and over."""
    decodes = np.asarray(output_tokens, dtype=float) - first_tokens
    ends = np.concatenate([[0.0], np.cumsum(rounds)])
    whole = np.maximum(np.floor(decodes / len(rounds)), 0.0)
    took = whole * ends[-1] + np.interp(decodes - whole * len(rounds), np.arange(len(ends)), ends)
    return np.where(decodes > 0, flow.until_decode + took, flow.prefill)


def _filled(cycle: Cycle, flow: _Flow, law: DecodeLaw, workload: Workload) -> Cycle:
    """With the tokens that it holds: blocks are taken before a prefill begins, on the stages that will decode."""
    k = np.arange(1, len(law.survival) + 1)
    tokens = float((law.input_sum + k * law.survival).sum()) / law.mean_steps
    square = float((law.input_square + 2 * k * law.input_sum + k**2 * law.survival).sum()) / law.mean_steps
    ahead = flow.throughput * flow.until_decode
    variance = flow.residents * max(square - tokens**2, 0.0) + (flow.residents_std * tokens) ** 2
    return replace(
        cycle,
        kv_tokens=flow.residents * tokens + ahead * workload.mean_input,
        kv_tokens_std=float(np.sqrt(variance + ahead * workload.input_law.std**2)),
        num_seqs=flow.residents + ahead,
    )


def _only_prefills(cycle: Cycle, num_seqs: float, workload: Workload) -> Cycle:
    """With so many requests in prefill, and their blocks on the stages that would decode them."""
    law = workload.input_law
    return replace(
        cycle, kv_tokens=num_seqs * law.mean, kv_tokens_std=float(np.sqrt(num_seqs)) * law.std, num_seqs=num_seqs
    )


def _prefill_tokens(num_seqs: int, workload: Workload) -> float:
    """Tokens of the prompts that may be in prefill or KV transfer, and a margin for their spread."""
    law = workload.input_law
    return float(num_seqs * law.mean + _SIGMAS * np.sqrt(num_seqs) * law.std)
