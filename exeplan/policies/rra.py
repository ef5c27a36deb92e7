"""Round-robin allocation: prefill `prefill_batch` requests once, then run `decode_steps` decode iterations; repeat.

Source: ExeGPT (ASPLOS 2024) sections 4.1 and 6. B_E is `prefill_batch`, N_D is `decode_steps`. The steady state is the
survival comb (`exeplan.length_law`), exact for any length law, not the paper's P_D(U), which forgets that long requests
stay longer.

A cycle whose batch runs empty before its last decode iteration goes on to the next prefill at once; the closed form
therefore weighs every decode iteration with the probability that somebody is still there.
"""

import numpy as np

from exeplan.plan import Schedule
from exeplan.policies import Cycle, Floats, Knob, require
from exeplan.scheduling import Batch, Scheduler
from exeplan.workload import Workload

KEEPS_FINISHED_ROWS = False


def check(schedule: Schedule) -> None:
    require(schedule, "prefill_batch", "decode_steps")


def knobs(workload: Workload, max_seqs: int) -> tuple[Knob, ...]:
    """More requests a prefill, and fewer decode iterations between prefills, raise throughput and latency."""
    longest = max(1, workload.max_output - 1)
    return (
        Knob("prefill_batch", tuple(range(1, max_seqs + 1))),
        Knob("decode_steps", tuple(range(longest, 0, -1))),
    )


def cycle(schedule: Schedule, workload: Workload) -> Cycle:
    """One prefill of B_E requests, then N_D decode iterations over the survivors of this and all earlier cycles.

    After those come the same N_D iterations as a request on board sees them, for `latency` only.
    """
    batch, steps = schedule["prefill_batch"], schedule["decode_steps"]
    comb = workload.decode_law().comb(steps)
    somebody = -np.expm1(batch * comb.log_empty)
    # Where nobody can be there the pass never occurs; its size is then irrelevant but must be finite.
    given = np.where(somebody > 0, batch / np.maximum(somebody, 1e-300), 0.0)
    # A request that is there sees the others and itself: its own expected share of the comb becomes certainty.
    own = np.where(comb.active > 0, 1.0 - comb.active_var / np.maximum(comb.active, 1e-300), 0.0)
    seen = batch * comb.active + 1.0 - own
    per_row = comb.context / np.maximum(comb.active, 1e-300)
    in_cache = batch * (comb.context + comb.active)
    peak = int(np.argmax(in_cache))
    first, none = np.array([1.0]), np.zeros(steps)
    return Cycle(
        completions=float(batch),
        probability=np.concatenate([first, somebody, none]),
        num_prefill=np.concatenate([first * batch, none, none]),
        num_decode=np.concatenate([first * 0, comb.active * given, seen]),
        context_tokens=np.concatenate([first * 0, comb.context * given, seen * per_row]),
        prompt_law=workload.input_law,
        kv_tokens=float(max(in_cache[peak], batch * workload.mean_input)),
        kv_tokens_std=float(np.sqrt(batch * comb.kv_var[peak])),
        num_seqs=float(max(batch, batch * comb.active[0])),
    )


def latency(schedule: Schedule, cycle: Cycle, pass_seconds: Floats, output_tokens: Floats) -> Floats:
    """Whole cycles while the request lives through them, then the rest of its last one."""
    steps = schedule["decode_steps"]
    within = np.concatenate([[0.0], np.cumsum(pass_seconds[1 + steps :])])
    decodes = np.maximum(np.asarray(output_tokens, dtype=float) - 1.0, 0.0)
    full = np.maximum(np.ceil(decodes / steps) - 1.0, 0.0)
    rest = np.interp(decodes - full * steps, np.arange(steps + 1), within)
    return full * (pass_seconds[0] + within[-1]) + pass_seconds[0] + rest


def next_batch(schedule: Schedule, state: Scheduler) -> Batch | None:
    """Prefill when N_D decode iterations have passed, or when nobody is left to decode."""
    if state.waiting and (not state.running or state.steps_since_prefill >= schedule["decode_steps"]):
        admitted = state.admissible(schedule["prefill_batch"])
        if admitted:
            return Batch(prefill=admitted)
    return Batch(decode=tuple(state.running)) if state.running else None
