"""Dynamic workload adjustment: prefill batches of like work, and a decode batch that stays near the planned one.

Source: ExeGPT (ASPLOS 2024) section 5.2. With `adjust_percent` in a schedule the number of requests that are prefilled
together follows two rules. Those that decode afterwards shall be the planned `decode_batch` within that threshold: if
they are fewer, more go in, and fewer if they are more. And their prompts shall be the planned `prefill_tokens` within
it: fewer of long ones, more of short ones. At least one request goes in, so that nothing waits for ever.

What rra, waa-c and waa-m share. The closed form plans the mean and knows nothing of it; replay and engine do it.
"""

from exeplan.core.schedule import Schedule
from exeplan.errors import InputError
from exeplan.policies.interface import Queue

VARIABLES = ("adjust_percent", "prefill_tokens")
_AHEAD = 4
"""So many times the planned batch is looked at in the queue."""


def check(schedule: Schedule) -> None:
    """Raises InputError where a threshold stands without the loads that it is about."""
    given = schedule.variables
    if "adjust_percent" in given and not {"prefill_tokens", "decode_batch"} <= set(given):
        raise InputError(f"{schedule.policy}: adjust_percent needs prefill_tokens and decode_batch, the planned loads")


def adjusted_size(schedule: Schedule, queue: Queue, *, others: int) -> int:
    """How many of the waiting are to be prefilled now, while `others` are already there."""
    batch, share = schedule["prefill_batch"], schedule["adjust_percent"] / 100
    low, high = (round(schedule["decode_batch"] * (1 + sign * share)) - others for sign in (-1, 1))
    size = max(min(max(batch, low), high), 1)
    load = schedule["prefill_tokens"] * size / batch
    count = tokens = 0
    for sequence in queue.admissible(_AHEAD * size):
        enough = count >= size and tokens >= load * (1 - share)
        if count and (enough or tokens + sequence.num_tokens > load * (1 + share)):
            break
        count += 1
        tokens += sequence.num_tokens
    return count
