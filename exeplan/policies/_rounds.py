"""Alternating prefill phases and decode rounds: the state that static and rra share.

A prefill phase is one batch with prefills or several consecutive ones; it ends with the first batch without. The groups
then decode in rounds, the one with the fewest iterations first.

Not here: when a prefill phase begins, and how large it is.
"""

from dataclasses import dataclass

from exeplan.core.batch import Batch
from exeplan.core.schedule import Schedule
from exeplan.policies.interface import Queue


@dataclass(slots=True)
class Rounds:
    """Counts since the last batch with prefills, and in the current prefill phase."""

    iterations_since_prefill: list[int]
    """Decode iterations that each group has begun."""
    consecutive_prefills: int = 0
    """Batches with prefills since the last one without."""
    num_admitted: int = 0
    """Requests in them."""
    phase_size: int | None = None
    """Requests that the phase is to prefill, where the policy has decided that when it began."""

    def began(self, batch: Batch, times: int) -> None:
        if batch.prefill:
            self.consecutive_prefills += 1
            self.num_admitted += len(batch.prefill)
            self.iterations_since_prefill = [0] * len(self.iterations_since_prefill)
        else:
            self._end_phase()
            self.iterations_since_prefill[batch.group] += times

    def drained(self) -> None:
        self._end_phase()

    def next_group(self, queue: Queue) -> int | None:
        """The group that has begun the fewest decode iterations; None when no group has requests."""
        begun = [(count, number) for number, count in enumerate(self.iterations_since_prefill) if queue.groups[number]]
        return min(begun)[1] if begun else None

    def _end_phase(self) -> None:
        self.consecutive_prefills = self.num_admitted = 0
        self.phase_size = None


def start(schedule: Schedule, num_groups: int) -> Rounds:
    """Nothing prefilled, nothing decoded."""
    return Rounds([0] * num_groups)
