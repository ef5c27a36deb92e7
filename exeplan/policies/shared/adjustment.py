"""Dynamic workload adjustment: prefill batches of like work, and a decode batch that stays near the planned one.

Source: ExeGPT (ASPLOS 2024) section 5.2. With `adjust_percent` in a schedule the number of requests that are prefilled
together follows two rules. The requests that decode afterwards stay within that threshold of the planned
`decode_batch`: where they are fewer, more are prefilled, and the reverse. The prompt tokens of a prefill stay within it
of the planned `prefill_tokens`: fewer long prompts, more short ones. At least one request is prefilled, so that none
waits forever, and at most twice the planned ones, so that stalls and memory are bounded: far from the planned
`decode_batch` it takes several prefills to return.

Shared by rra, waa-c and waa-m; replay and engine apply it. The closed form plans the mean, and knows of it that the
prompts of a prefill differ less (`simulator/rates/request_times.py`). Not here: when a plan has it
(`planner/choice/adjusting.py`).
"""

from exeplan.core.schedule import Schedule
from exeplan.errors import InputError
from exeplan.policies.interface import Queue

VARIABLES = ("adjust_percent", "prefill_tokens")
_LOOKAHEAD = 4
"""Waiting requests that are considered, as a multiple of the planned batch."""
_LARGEST = 2
"""Requests of the largest prefill, as a multiple of the planned batch."""


def check(schedule: Schedule) -> None:
    """Raises InputError for a threshold without the loads that it applies to."""
    given = schedule.variables
    if "adjust_percent" in given and not {"prefill_tokens", "decode_batch"} <= set(given):
        raise InputError(f"{schedule.policy}: adjust_percent needs prefill_tokens and decode_batch, the planned loads")


def most_prompts(schedule: Schedule) -> int:
    """Requests that are prefilled together at most: `prefill_batch`, or more where it is adjusted."""
    return schedule["prefill_batch"] * (_LARGEST if "adjust_percent" in schedule.variables else 1)


def adjusted_size(schedule: Schedule, queue: Queue, *, others: int) -> int:
    """How many waiting requests to prefill now, while `others` decode already."""
    batch, share = schedule["prefill_batch"], schedule["adjust_percent"] / 100
    low, high = (round(schedule["decode_batch"] * (1 + sign * share)) - others for sign in (-1, 1))
    most = most_prompts(schedule)
    size = max(min(max(batch, low), high, most), 1)
    load = schedule["prefill_tokens"] * size / batch
    count = tokens = 0
    for sequence in queue.first_waiting(min(_LOOKAHEAD * size, most)):  # A device may prefill fewer at once.
        enough = count >= size and tokens >= load * (1 - share)
        if count and (enough or tokens + sequence.num_tokens > load * (1 + share)):
            break
        count += 1
        tokens += sequence.num_tokens
    return count
