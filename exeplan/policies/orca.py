"""Iteration-level scheduling: every iteration, finished requests leave and waiting ones take their slots.

Source: ORCA (OSDI 2022) section 4.2, Algorithm 1: first come first served, at most `max_num_seqs` requests in a batch,
KV slots reserved by max_tokens at admission, so that nobody is preempted and nothing can deadlock. The prefill of a new
request rides in the same pass as the decodes of the others (selective batching).

In the steady state under a backlog the batch is always full: each of its B slots starts a new request with probability
1/mu an iteration (renewal), so an iteration carries k ~ Binomial(B, 1/mu) prefills and B - k decodes.
"""

import numpy as np

from exeplan.plan import Schedule
from exeplan.policies import Cycle, Floats, Knob, require
from exeplan.scheduling import Batch, Scheduler
from exeplan.workload import Workload

KEEPS_FINISHED_ROWS = False


def check(schedule: Schedule) -> None:
    require(schedule, "max_num_seqs")


def knobs(workload: Workload, max_seqs: int) -> tuple[Knob, ...]:
    """A larger batch raises throughput and latency."""
    return (Knob("max_num_seqs", tuple(range(1, max_seqs + 1))),)


def cycle(schedule: Schedule, workload: Workload) -> Cycle:
    """One iteration, split by how many of its rows are prefills.

    After that come, for `latency` only, the iterations that a request on board sees: its own row, which first prefills
    and then decodes, beside k ~ Binomial(B - 1, 1/mu) prefills of the others.
    """
    slots, mu = schedule["max_num_seqs"], workload.mean_output
    prefills, probability = _binomial(slots, 1.0 / mu)
    others, _ = _binomial(slots - 1, 1.0 / mu)
    num_prefill = np.concatenate([prefills, others + 1, others])
    num_decode = slots - num_prefill
    comb = workload.decode_law().comb(1)
    per_decode = comb.context[0] / comb.active[0] if comb.active[0] > 0 else 0.0
    tokens, square = _resident_tokens(workload)
    return Cycle(
        completions=slots / mu,
        probability=np.concatenate([probability, np.zeros(2 * len(others))]),
        num_prefill=num_prefill,
        num_decode=num_decode,
        context_tokens=num_decode * per_decode,
        prompt_law=workload.input_law,
        kv_tokens=slots * tokens,
        kv_tokens_std=float(np.sqrt(slots * max(square - tokens**2, 0.0))),
        num_seqs=float(slots),
    )


def latency(schedule: Schedule, cycle: Cycle, pass_seconds: Floats, output_tokens: Floats) -> Floats:
    """The iteration of its own prefill, then an average iteration for every further token."""
    others, probability = _binomial(schedule["max_num_seqs"] - 1, _renewal_chance(schedule, cycle))
    own_prefill, own_decode = pass_seconds[-2 * len(others) :].reshape(2, -1)
    first, later = float(probability @ own_prefill), float(probability @ own_decode)
    return first + (np.asarray(output_tokens, dtype=float) - 1.0) * later


def _renewal_chance(schedule: Schedule, cycle: Cycle) -> float:
    return cycle.completions / schedule["max_num_seqs"]


def next_batch(schedule: Schedule, state: Scheduler) -> Batch | None:
    """Fill the free slots from the queue and run everybody."""
    free = schedule["max_num_seqs"] - len(state.running)
    admitted = state.admissible(free, reserve=True)
    if not admitted and not state.running:
        return None
    return Batch(prefill=admitted, decode=tuple(state.running))


def _resident_tokens(workload: Workload) -> tuple[float, float]:
    """Mean and mean square of the tokens that one slot holds after an iteration; its ages are uniform over a life."""
    law = workload.decode_law()
    k = np.arange(1, len(law.survival) + 1)
    tokens = workload.mean_input + float(law.input_sum.sum() + (k * law.survival).sum())
    square = workload.input_law.std**2 + workload.mean_input**2
    square += float((law.input_square + 2 * k * law.input_sum + k**2 * law.survival).sum())
    return tokens / workload.mean_output, square / workload.mean_output


def _binomial(trials: int, chance: float) -> tuple[Floats, Floats]:
    """Values and probabilities of Binomial(trials, chance), the negligible ones left out."""
    k = np.arange(trials + 1, dtype=float)
    if chance >= 1.0:
        return k[-1:], np.ones(1)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(k[1:]))])
    log_choose = log_factorial[-1] - log_factorial - log_factorial[::-1]
    probability = np.exp(log_choose + k * np.log(chance) + (trials - k) * np.log1p(-chance))
    kept = probability > 1e-9
    return k[kept], probability[kept] / probability[kept].sum()
