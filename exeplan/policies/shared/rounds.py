"""Alternating prefill phases and decode rounds: the state that static and rra share.

A prefill phase is one batch with prefills or several consecutive ones; it ends with the first batch without. The groups
then decode in rounds, the one with the fewest iterations first.

Not here: when a prefill phase begins, and how large it is.
"""

from dataclasses import dataclass, field

from exeplan.core.batch import Batch, SequenceState
from exeplan.core.schedule import Schedule
from exeplan.policies.interface import Queue


@dataclass(slots=True)
class Rounds:
    """Counts since the last batch with prefills, and in the current prefill phase."""

    iterations_since_prefill: list[int]
    """Decode iterations that each group has begun."""
    consecutive_prefills: int = 0
    """Batches with prefills since the last one without."""
    prefilled: list[SequenceState] = field(default_factory=list)
    """Requests in them, in their order."""
    phase_size: int | None = None
    """Requests that the phase is to prefill, where the policy has decided that when it began."""

    def began(self, batch: Batch, times: int) -> None:
        if batch.prefill:
            self.consecutive_prefills += 1
            self.prefilled += batch.prefill
            self.iterations_since_prefill = [0] * len(self.iterations_since_prefill)
        else:
            self._end_phase()
            self.iterations_since_prefill[batch.group] += times

    def drained(self) -> None:
        self._end_phase()

    @property
    def num_admitted(self) -> int:
        """Requests in the current prefill phase."""
        return len(self.prefilled)

    def next_group(self, queue: Queue) -> int | None:
        """The group that has begun the fewest decode iterations; None when no group has requests."""
        begun = [(count, number) for number, count in enumerate(self.iterations_since_prefill) if queue.groups[number]]
        return min(begun)[1] if begun else None

    def _end_phase(self) -> None:
        self.consecutive_prefills, self.phase_size = 0, None
        self.prefilled = []


def start(schedule: Schedule, num_groups: int) -> Rounds:
    """Nothing prefilled, nothing decoded."""
    return Rounds([0] * num_groups)
