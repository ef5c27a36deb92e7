"""Iteration-level scheduling: every iteration, finished requests leave and waiting ones take their slots.

Source: ORCA (OSDI 2022) section 4.2, Algorithm 1: first come first served, at most `max_num_seqs` requests in all,
`micro_batches` batches in flight (its n_workers), KV slots reserved by max_tokens at admission, so that no request is
preempted and no deadlock is possible. The prefill of a new request rides in the same pass as the decodes of the others
(selective batching).

With `max_num_batched_tokens` (optional) a pass takes waiting prompts, whole ones, only while they and its decodes have
no more tokens than that, one at least: what arrives at once then does not stall all streams behind a single prefill.
Its steady state is that of `shared/whole_passes.py`, of which what follows is the limit of ever more tokens.

In the steady state under a backlog a batch is always full: each of its b slots starts a new request with probability
1/mu an iteration (renewal), so an iteration carries k ~ Binomial(b, 1/mu) prefills and b - k decodes, and takes a time
on each stage by the number and the lengths of its prompts. With m batches in flight the one that takes longest holds up
those behind it (`shared/groups.py`).
"""

import math
from collections.abc import Mapping

import numpy as np

from exeplan.arrays import Floats
from exeplan.core.batch import Batch, within
from exeplan.core.control_variables import check_token_limit, micro_batchings, require
from exeplan.core.schedule import Schedule
from exeplan.policies.interface import Clock, Cycle, Knob, PassLimits, PrefillBetween, Queue, Stateless, Steady
from exeplan.policies.shared.groups import resident_tokens, round_seconds
from exeplan.policies.shared.spread import even_out, free_places, groups_for, num_joining
from exeplan.policies.shared.whole_steady import whole_steady
from exeplan.workload.workload import Workload

KEEPS_FINISHED_ROWS = False
SEPARATE_STAGES = False
PADS_PROMPTS = False
FOR_DEADLINES = False
RESERVES = True

_POINTS = 9
"""Points of the prompt-length law at which the time of a pass is spread."""

_LIMIT = "max_num_batched_tokens"
_TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192)

enumerated = micro_batchings


def check(schedule: Schedule) -> None:
    require(schedule, "max_num_seqs", optional=("micro_batches", _LIMIT))
    check_token_limit(schedule)


def knobs(workload: Workload, max_seqs: int) -> tuple[Knob, ...]:
    """A larger batch raises throughput and latency."""
    return (Knob("max_num_seqs", tuple(range(1, max_seqs + 1))),)


def schedule(variables: Mapping[str, int], workload: Workload) -> Schedule:
    """No more slots than a pass has tokens, where those are limited."""
    limit = variables.get(_LIMIT)
    if limit is None:
        return Schedule("orca", variables)
    most = limit * variables.get("micro_batches", 1)
    return Schedule("orca", {**variables, "max_num_seqs": min(variables["max_num_seqs"], most)})


def token_limits() -> tuple[int, ...]:
    return _TOKENS


def pass_limits(schedule: Schedule) -> PassLimits:
    return PassLimits(decode_rows=schedule["max_num_seqs"], prompts=schedule["max_num_seqs"])


def prefill_between_tokens(schedule: Schedule) -> PrefillBetween:
    """All slots but one become free, and are taken at once."""
    return PrefillBetween(
        prompts=schedule["max_num_seqs"] - 1,
        tokens=schedule.variables.get(_LIMIT),
        passes=schedule.num_micro_batches,
    )


def starts_together(schedule: Schedule) -> int:
    return 1


def steady_state(schedule: Schedule, workload: Workload, clock: Clock) -> Steady:
    """One iteration, split by how many of its rows are prefills.

    The passes: those iterations, and the ones that a resident request observes: its own row, which first prefills and
    then decodes, along with k ~ Binomial(b - 1, 1/mu) prefills of the others.
    """
    steps = workload.mean_output + (0.0 if clock.first_token_from_prefill else 1.0)  # Iterations of a request.
    groups = min(schedule.num_micro_batches, schedule["max_num_seqs"])
    slots = schedule["max_num_seqs"] / groups
    if limit := schedule.variables.get(_LIMIT):
        return whole_steady(steps, groups, slots, float(limit), workload, clock)
    prefills, probability = _binomial(slots, 1.0 / steps)
    others, seen = _binomial(slots - 1, 1.0 / steps)
    num_prefill = np.concatenate([prefills, others + 1, others])
    num_decode = np.maximum(slots - num_prefill, 0.0)
    law = workload.decode_law(first_token_from_prefill=clock.first_token_from_prefill)
    comb = law.comb(1)
    per_decode = comb.context[0] / comb.active[0] if comb.active[0] > 0 else 0.0
    tokens, square = resident_tokens(workload)
    cycle = Cycle(
        num_prefill=num_prefill,
        num_decode=num_decode,
        context_tokens=num_decode * per_decode,
        prompt_law=workload.input_law,
        kv_tokens=slots * groups * tokens,
        kv_tokens_std=float(np.sqrt(slots * groups * max(square - tokens**2, 0.0))),
        num_seqs=float(slots * groups),
    )
    seconds = clock.seconds(cycle)
    through = seconds.sum(axis=0)
    own_prefill, own_decode = (slice(len(prefills) + i * len(others), None) for i in (0, 1))
    round_ = round_seconds(_spread(seconds, prefills, workload), probability, groups)
    first = float(seen @ through[own_prefill][: len(others)])
    # Time that the request's own row adds to an average iteration of its group.
    own_share = float(seen @ through[own_decode] - probability @ through[: len(prefills)])
    later = max(round_ + own_share, float(seen @ through[own_decode]))
    shift = 1.0 if clock.first_token_from_prefill else 0.0
    return Steady(
        cycle=cycle,
        seconds=seconds,
        throughput=slots * groups / (steps * round_),
        latency=lambda output_tokens: first + (np.asarray(output_tokens, dtype=float) - shift) * later,
        admission_interval=round_ / groups,
    )


def _spread(seconds: Floats, prefills: Floats, workload: Workload) -> Floats:
    """Times of passes with k prefills, [stages, passes, points]: a sum of k prompts spreads like one prompt times
    sqrt(k)."""
    seconds = seconds[:, : len(prefills)]
    if len(prefills) == 1:
        return np.repeat(seconds[:, :, None], _POINTS, axis=2)
    one_prompt = np.gradient(seconds, prefills, axis=1)
    points = workload.input_law.slice_means(_POINTS) / workload.mean_input - 1.0
    return np.asarray(seconds[:, :, None] + (np.sqrt(prefills) * one_prompt)[:, :, None] * points)


def start(schedule: Schedule, num_groups: int) -> Stateless:
    return Stateless()


def next_batch(schedule: Schedule, queue: Queue, state: Stateless, phase: str) -> Batch | None:
    """The next group that is not in flight: its places filled from the queue, all of its requests run."""
    slots = schedule["max_num_seqs"]
    joining = num_joining(queue, slots, reserve=True)
    even_out(queue, slots=slots, joining=joining)
    for number in queue.group_order:
        if number in queue.busy:
            continue
        running = queue.groups[number]
        free = free_places(queue, number, slots=slots, joining=joining)
        admitted = queue.admissible(free, reserve=True)
        if limit := schedule.variables.get(_LIMIT):
            admitted = within(admitted, limit - len(running))
        if admitted or running:
            return Batch(prefill=admitted, decode=tuple(running), group=number)
    return None


def groups_used(schedule: Schedule, num_requests: int, num_stages: int) -> int:
    return groups_for(
        num_requests, slots=schedule["max_num_seqs"], groups=schedule.num_micro_batches, stages=num_stages
    )


def repeats(schedule: Schedule, queue: Queue, state: Stateless) -> float:
    """For as long as every slot is taken."""
    return math.inf if len(queue.running) == schedule["max_num_seqs"] else 0


def _binomial(trials: float, chance: float) -> tuple[Floats, Floats]:
    """Values and probabilities of Binomial(trials, chance), the negligible ones left out.

    Between two whole numbers of trials, the mixture of both that has the right mean.
    """
    low = int(np.floor(trials + 1e-9))
    share = max(trials - low, 0.0)
    k, probability = _whole_binomial(low, chance)
    if share < 1e-9:
        return k, probability
    more, likely = _whole_binomial(low + 1, chance)
    both = np.union1d(k, more)
    mixed = np.zeros(len(both))
    mixed[np.searchsorted(both, k)] += (1 - share) * probability
    mixed[np.searchsorted(both, more)] += share * likely
    return both, mixed


def _whole_binomial(trials: int, chance: float) -> tuple[Floats, Floats]:
    """Equals `scipy.stats.binom.pmf` to 1e-12; importing scipy.stats takes as long as a search on one device."""
    k = np.arange(trials + 1, dtype=float)
    if chance >= 1.0:
        return k[-1:], np.ones(1)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(k[1:]))])
    log_choose = log_factorial[-1] - log_factorial - log_factorial[::-1]
    probability = np.exp(log_choose + k * np.log(chance) + (trials - k) * np.log1p(-chance))
    kept = probability > 1e-9
    return k[kept], probability[kept] / probability[kept].sum()
