"""Static batching: prefill a batch padded to its longest prompt, decode until its longest output; then the next one.

Source: FasterTransformer as ExeGPT section 2 describes it: batch sizes are fixed and nobody leaves early, so a finished
request's row is computed until the whole batch is done. A request's own tokens are delivered as they come.
"""

import numpy as np

from exeplan.plan import Schedule
from exeplan.policies import Cycle, Floats, Knob, require
from exeplan.scheduling import Batch, Scheduler
from exeplan.workload import Workload

KEEPS_FINISHED_ROWS = True


def check(schedule: Schedule) -> None:
    require(schedule, "batch_size")


def knobs(workload: Workload, max_seqs: int) -> tuple[Knob, ...]:
    """A larger batch raises throughput and latency."""
    return (Knob("batch_size", tuple(range(1, max_seqs + 1))),)


def cycle(schedule: Schedule, workload: Workload) -> Cycle:
    """The prefill, then as many decode iterations as the longest of B outputs needs (order statistics)."""
    batch = schedule["batch_size"]
    law = workload.decode_law()
    still_going = law.max_survival(batch)
    steps = len(still_going)
    # A finished row stays at its own length: its context is the prompt and min(k - 1, D) generated tokens.
    generated = np.concatenate([[0.0], np.cumsum(law.survival)[:-1]])
    context = batch * (workload.mean_input + generated)
    first = np.array([1.0])
    return Cycle(
        completions=float(batch),
        probability=np.concatenate([first, still_going]),
        num_prefill=np.concatenate([first * batch, np.zeros(steps)]),
        num_decode=np.concatenate([first * 0, np.full(steps, float(batch))]),
        context_tokens=np.concatenate([first * 0, context]),
        prompt_law=workload.input_law.longest_of(batch),
        padded=True,
        kv_tokens=batch * (workload.mean_input + workload.mean_output),
        kv_tokens_std=float(np.sqrt(batch) * workload.total_std),
        num_seqs=float(batch),
    )


def latency(schedule: Schedule, cycle: Cycle, pass_seconds: Floats, output_tokens: Floats) -> Floats:
    """The prefill and one decode iteration for every further token."""
    elapsed = np.cumsum(pass_seconds)
    return np.interp(np.asarray(output_tokens, dtype=float) - 1.0, np.arange(len(elapsed)), elapsed)


def next_batch(schedule: Schedule, state: Scheduler) -> Batch | None:
    """The running batch to its end, then the next `batch_size` requests, padded to the longest."""
    if state.running:
        return Batch(decode=tuple(state.running))
    admitted = state.admissible(schedule["batch_size"], reserve=True)
    if not admitted:
        return None
    return Batch(prefill=admitted, pad_to=max(s.num_tokens for s in admitted))
